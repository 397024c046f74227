// Estimates of the unread mass. Blocks take fixed spans of a row's units and leave, for each query head, the largest
// logit and the sum of exponentials over the unread ones; a last kernel adds the spans in their order.
//
// Floor: tokens, 2 G bytes a position (scores that the scan wrote, mostly in L2); pages, the centres of the unread
// ones.
#include <algorithm>

#include "slicing/unread_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokenSpan = kThreads * kUnreadEach, kPageSpan = 256;

struct Spans {
  int32_t units, count;  // units of a span; spans of the longest row
  float2* parts;         // [B,T,Hq][count]
};

// First entry of an ascending list that is not below unit.
__device__ int32_t lower_bound(const int32_t* list, int32_t count, int64_t unit) {
  int32_t low = 0;
  while (low < count) {
    const int32_t middle = low + (count - low) / 2;
    if (list[middle] < unit)
      low = middle + 1;
    else
      count = middle;
  }
  return low;
}

// Bits of the span's units that are listed. All threads; a barrier follows.
template <int kSpan>
__device__ void mark_listed(const UnreadTask& a, const UnreadRow& r, int64_t first, uint32_t (&bits)[kSpan / 32]) {
  const int32_t* list = a.list.row(r.b, r.t, r.h);
  const int32_t count = a.list.count(r.b, r.t, r.h);
  for (int i = static_cast<int>(threadIdx.x); i < kSpan / 32; i += kThreads) bits[i] = 0;
  __syncthreads();
  set_listed(list, lower_bound(list, count, first), lower_bound(list, count, first + kSpan), first, bits);
  __syncthreads();
}

// Largest value and sum of exp(value - largest) over the block, in an order that depends on its threads alone.
__device__ __forceinline__ float2 block_sum(const float (&x)[kUnreadEach], float* shared) {
  float top = kNothing;
#pragma unroll
  for (int i = 0; i < kUnreadEach; ++i) top = larger(top, x[i]);
  top = block_reduce(top, shared, Larger{});
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kUnreadEach; ++i) sum += x[i] == kNothing ? 0.0f : weight_below(x[i], top);
  return make_float2(top, block_reduce_add(sum, shared));
}

// ---- tokens ----

__global__ void __launch_bounds__(kThreads) unread_tokens(UnreadTask a, UnreadScores u, Spans spans) {
  SIC_DYNAMIC_SHARED(float, centre);  // [G]
  __shared__ uint32_t listed[kTokenSpan / 32];
  __shared__ float reduce[32];
  const UnreadRow r(a, blockIdx.x / spans.count);
  const int32_t span = static_cast<int32_t>(blockIdx.x % spans.count);
  const int64_t first = int64_t{span} * kTokenSpan, mine = first + threadIdx.x * kUnreadEach;
  if (first >= r.visible) return;
  centre_logits(a, u, r, [&](int g, float logit) { centre[g] = logit; });
  mark_listed<kTokenSpan>(a, r, first, listed);
  const uint32_t read = listed[threadIdx.x * kUnreadEach / 32] >> (threadIdx.x * kUnreadEach % 32);
  const uint32_t unread = unread_range(a, r, mine) & ~read;
  for (int g = 0; g < a.G; ++g) {
    float x[kUnreadEach];
    unread_scores(a, u, r, g, mine, unread, x);
    to_logits(a, r, mine, unread, centre[g], x);
    const float2 part = block_sum(x, reduce);
    if (threadIdx.x == 0) spans.parts[(r.row * a.G + g) * spans.count + span] = part;
  }
}

// ---- pages ----

// Positions of a page that the row sees, and the largest bias among them.
struct PagePart {
  int32_t live;
  float bias;

  __device__ PagePart(const UnreadTask& a, const UnreadRow& r, int64_t page, int64_t m) : bias(0) {
    const int64_t from = m * page, to = from + page < r.visible ? from + page : r.visible;
    live = to <= r.begin(a) ? 0 : static_cast<int32_t>(to - from);
    if (!a.bias) return;
    bias = kNothing;
    for (int64_t i = from + lane_id(); i < to; i += 32) bias = larger(bias, a.bias[r.b * a.bias_stride + i]);
    bias = warp_reduce(bias, Larger{});
  }
};

// Warp w takes pages w, w + kWarps, .. of the span; lane g keeps the running state of heads g, g + 32, .. in turn.
template <class S>
__global__ void __launch_bounds__(kThreads) unread_pages(UnreadTask a, UnreadPages u, Spans spans) {
  SIC_DYNAMIC_SHARED(float, q);  // [D], of one head
  __shared__ uint32_t listed[kPageSpan / 32];
  __shared__ float logits[kPageSpan];
  __shared__ float reduce[32];
  const UnreadRow r(a, blockIdx.x / spans.count);
  const int32_t span = static_cast<int32_t>(blockIdx.x % spans.count), page = static_cast<int32_t>(u.pages.split.page);
  const int64_t first = int64_t{span} * kPageSpan, pages = (r.visible + page - 1) / page;
  if (first >= pages) return;
  mark_listed<kPageSpan>(a, r, first, listed);
  for (int g = 0; g < a.G; ++g) {
    for (int d = static_cast<int>(threadIdx.x); d < a.D; d += kThreads) q[d] = load_query(a, r, g, d) * a.scale;
    __syncthreads();
    for (int i = warp_id(); i < kPageSpan; i += kWarps) {
      const int64_t m = first + i;
      float logit = kNothing, weight = 0;
      if (m < pages && !(listed[i / 32] >> i % 32 & 1)) {
        const S* centre = u.summary.as<const S>(u.pages.id(r.b, static_cast<uint32_t>(m)), r.h, 0);
        float dot = 0;
        for (int d = lane_id(); d < a.D; d += 32) dot += q[d] * to_float(centre[d]);
        const PagePart part(a, r, page, m);
        logit = finish_logit(a, warp_reduce_add(dot), part.bias), weight = static_cast<float>(part.live);
      }
      if (lane_id() == 0) logits[i] = weight > 0 ? logit + logf(weight) : kNothing;
    }
    __syncthreads();
    float x[kUnreadEach] = {};
#pragma unroll
    for (int i = 0; i < kUnreadEach; ++i) x[i] = kNothing;
    x[0] = threadIdx.x < kPageSpan ? logits[threadIdx.x] : kNothing;
    const float2 part = block_sum(x, reduce);
    if (threadIdx.x == 0) spans.parts[(r.row * a.G + g) * spans.count + span] = part;
  }
}

// ---- the sum over spans: a thread a query head ----

__global__ void __launch_bounds__(kThreads) unread_total(UnreadTask a, Spans spans, int32_t unit) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.rows() * a.G) return;
  const UnreadRow r(a, i / a.G);
  const int64_t live = (r.visible + int64_t{unit} * spans.units - 1) / (int64_t{unit} * spans.units);
  UnreadSum total;
  for (int64_t s = 0; s < live; ++s)
    total.merge(spans.parts[i * spans.count + s].x, spans.parts[i * spans.count + s].y);
  unread_out(a, r, static_cast<int>(i % a.G)) = total.log();
}

// ---- host side ----

Spans make_spans(int64_t units, int span, void* scratch) {
  return {span, static_cast<int32_t>(slicing::ceil_div(std::max<int64_t>(units, 1), span)),
          static_cast<float2*>(scratch)};
}

void launch_total(const UnreadTask& a, const Spans& spans, int32_t unit, void* stream) {
  const int64_t heads = a.rows() * a.G;
  launch(unread_total, dim3(grid_blocks(slicing::ceil_div(heads, kThreads))), dim3(kThreads), 0, stream, a, spans,
         unit);
}

dim3 span_grid(const UnreadTask& a, const Spans& spans) { return dim3(grid_blocks(a.rows() * spans.count)); }

}  // namespace

UnreadTask UnreadTask::of(const slicing::AttendArgs& args) {
  const slicing::AttentionArgs& a = args.attention;
  UnreadTask u;
  u.q = Rows3::of(a.q), u.q_type = a.q.dtype;
  u.list = DeviceSelection::of(args.indices, args.counts);
  u.seq_lens = SeqLens::of(a.kv.seq_lens);
  u.B = static_cast<int32_t>(a.q.shape[0]), u.T = static_cast<int32_t>(a.q.shape[1]);
  u.Hkv = static_cast<int32_t>(a.kv.k_cache.shape[1]), u.G = static_cast<int32_t>(a.q.shape[2]) / u.Hkv;
  u.D = static_cast<int32_t>(a.q.shape[3]);
  u.positions = a.max_seq_len, u.window = a.window, u.scale = a.scale, u.softcap = a.softcap;
  if (a.key_bias.given()) u.bias = a.key_bias.as<const float>(), u.bias_stride = a.key_bias.stride[0];
  if (!args.omitted_mass.given()) return u;
  u.out = args.omitted_mass.as<float>();
  for (int i = 0; i < 3; ++i) u.out_stride[i] = args.omitted_mass.stride[i];
  return u;
}

int64_t unread_scratch(const UnreadTask& a, int64_t units) {
  return a.rows() * a.G * make_spans(units, kPageSpan, nullptr).count * static_cast<int64_t>(sizeof(float2));
}

void launch_unread_tokens(const UnreadTask& a, const UnreadScores& u, void* scratch, void* stream) {
  const Spans spans = make_spans(a.positions, kTokenSpan, scratch);
  launch(unread_tokens, span_grid(a, spans), dim3(kThreads), sizeof(float) * static_cast<size_t>(a.G), stream, a, u,
         spans);
  launch_total(a, spans, 1, stream);
}

void launch_unread_pages(const UnreadTask& a, const UnreadPages& u, void* scratch, void* stream) {
  const auto page = static_cast<int32_t>(u.pages.split.page);
  const Spans spans = make_spans(slicing::ceil_div(a.positions, page), kPageSpan, scratch);
  with_float_type(u.type, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>)
      launch(unread_pages<decltype(type)>, span_grid(a, spans), dim3(kThreads),
             sizeof(float) * static_cast<size_t>(a.D), stream, a, u, spans);
  });
  launch_total(a, spans, page, stream);
}

}  // namespace sic::gpu
