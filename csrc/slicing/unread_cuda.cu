// Estimates of the unread mass. Blocks take fixed spans of a row's units and leave, for each query head, the largest
// logit and the sum of exponentials over the unread ones; a last kernel adds the spans in their order.
//
// Floor: tokens, 2 G bytes a position (scores that the scan wrote, mostly in L2); pages, the centres of the unread
// ones.
#include <algorithm>

#include "slicing/sketch.h"
#include "slicing/unread_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = 8;
constexpr int kTokenSpan = kThreads * kEach, kPageSpan = 256;
constexpr float kNothing = -INFINITY;

struct Spans {
  int32_t units, count;  // units of a span; spans of the longest row
  float2* parts;         // [B,T,Hq][count]
};

struct RowAt {
  int32_t b, t, h;
  int64_t row, visible;

  __device__ RowAt(const UnreadTask& a, int64_t row_) : row(row_) {
    b = static_cast<int32_t>(row / a.Hkv / a.T), t = static_cast<int32_t>(row / a.Hkv % a.T);
    h = static_cast<int32_t>(row % a.Hkv);
    visible = a.seq_lens.visible(b, a.T, t, a.positions);
  }
  // Positions before it are outside the sliding window.
  __device__ __forceinline__ int64_t begin(const UnreadTask& a) const {
    return a.window > 0 && visible > a.window ? visible - a.window : 0;
  }
};

__device__ __forceinline__ float load_query(const UnreadTask& a, const RowAt& r, int g, int d) {
  const char* q = a.q.at(r.b, r.t, int64_t{r.h} * a.G + g);
  if (a.q_type == DType::f32) return reinterpret_cast<const float*>(q)[d];
  if (a.q_type == DType::f16) return to_float(reinterpret_cast<const f16_t*>(q)[d]);
  return to_float(reinterpret_cast<const bf16_t*>(q)[d]);
}

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
__device__ void mark_listed(const UnreadTask& a, const RowAt& r, int64_t first, uint32_t (&bits)[kSpan / 32]) {
  const int32_t* list = a.list.row(r.b, r.t, r.h);
  const int32_t count = a.list.count(r.b, r.t, r.h);
  for (int i = static_cast<int>(threadIdx.x); i < kSpan / 32; i += kThreads) bits[i] = 0;
  __syncthreads();
  const int32_t end = lower_bound(list, count, first + kSpan);
  for (int32_t i = lower_bound(list, count, first) + static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    const uint32_t unit = static_cast<uint32_t>(list[i] - first);
    atomicOr(bits + unit / 32, 1u << unit % 32);
  }
  __syncthreads();
}

// The logit as attention would make it of a scaled dot product.
__device__ __forceinline__ float finish_logit(const UnreadTask& a, float logit, float bias) {
  if (a.softcap > 0) logit = a.softcap * tanhf(logit / a.softcap);
  return logit + bias;
}

// Largest value and sum of exp(value - largest) over the block, in an order that depends on its threads alone.
__device__ __forceinline__ float2 block_sum(const float (&x)[kEach], float* shared) {
  float top = kNothing;
#pragma unroll
  for (int i = 0; i < kEach; ++i) top = fmaxf(top, x[i]);
  top = block_reduce_max(top, shared);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += x[i] == kNothing ? 0.0f : expf(x[i] - top);
  return make_float2(top, block_reduce_add(sum, shared));
}

// ---- tokens ----

// What the scores leave out: the centre's share of every logit. Warp w does heads w, w + kWarps, ..
__device__ void centre_logits(const UnreadTask& a, const UnreadScores& u, const RowAt& r, float* logits) {
  for (int g = warp_id(); g < a.G; g += kWarps) {
    float dot = 0;
    for (int d = lane_id(); d < a.D; d += 32) dot += load_query(a, r, g, d) * u.centre[r.h * u.centre_stride + d];
    dot = warp_reduce_add(dot);
    if (lane_id() == 0) logits[g] = dot * a.scale;
  }
}

__global__ void __launch_bounds__(kThreads) unread_tokens(UnreadTask a, UnreadScores u, Spans spans) {
  SIC_DYNAMIC_SHARED(float, centre);  // [G]
  __shared__ uint32_t listed[kTokenSpan / 32];
  __shared__ float reduce[32];
  const RowAt r(a, blockIdx.x / spans.count);
  const int32_t span = static_cast<int32_t>(blockIdx.x % spans.count);
  const int64_t first = int64_t{span} * kTokenSpan, mine = first + threadIdx.x * kEach;
  if (first >= r.visible) return;
  centre_logits(a, u, r, centre);
  mark_listed<kTokenSpan>(a, r, first, listed);
  uint32_t unread = 0;
  const int64_t begin = r.begin(a);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (mine + i < r.visible && mine + i >= begin) unread |= 1u << i;
  unread &= ~(listed[threadIdx.x * kEach / 32] >> (threadIdx.x * kEach % 32));
  for (int g = 0; g < a.G; ++g) {
    const int64_t head = r.row * a.G + g;
    float x[kEach];
    // Scores are defined up to the visible positions, rows are whole vectors.
    uint4 v = make_uint4(0, 0, 0, 0);
    if (mine + kEach <= r.visible) v = load_cached16(u.scores + head * u.stride + mine);
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float s = static_cast<float>(static_cast<int16_t>(word[i / 2] >> 16 * (i & 1)));
      if (mine + kEach > r.visible && unread >> i & 1) s = u.scores[head * u.stride + mine + i];
      const float bias = a.bias && unread >> i & 1 ? a.bias[r.b * a.bias_stride + mine + i] : 0.0f;
      const float logit = finish_logit(a, slicing::kUnreadShrink / slicing::kScoreSteps * s + centre[g], bias);
      x[i] = unread >> i & 1 ? logit : kNothing;
    }
    const float2 part = block_sum(x, reduce);
    if (threadIdx.x == 0) spans.parts[head * spans.count + span] = part;
  }
}

// ---- pages ----

// Positions of a page that the row sees, and the largest bias among them.
struct PagePart {
  int32_t live;
  float bias;

  __device__ PagePart(const UnreadTask& a, const RowAt& r, int64_t page, int64_t m) : bias(0) {
    const int64_t from = m * page, to = from + page < r.visible ? from + page : r.visible;
    live = to <= r.begin(a) ? 0 : static_cast<int32_t>(to - from);
    if (!a.bias) return;
    bias = kNothing;
    for (int64_t i = from + lane_id(); i < to; i += 32) bias = fmaxf(bias, a.bias[r.b * a.bias_stride + i]);
    bias = warp_reduce_max(bias);
  }
};

// Warp w takes pages w, w + kWarps, .. of the span; lane g keeps the running state of heads g, g + 32, .. in turn.
template <class S>
__global__ void __launch_bounds__(kThreads) unread_pages(UnreadTask a, UnreadPages u, Spans spans) {
  SIC_DYNAMIC_SHARED(float, q);  // [G][D]
  __shared__ uint32_t listed[kPageSpan / 32];
  __shared__ float logits[kPageSpan];
  __shared__ float reduce[32];
  const RowAt r(a, blockIdx.x / spans.count);
  const int32_t span = static_cast<int32_t>(blockIdx.x % spans.count), page = static_cast<int32_t>(u.pages.split.page);
  const int64_t first = int64_t{span} * kPageSpan, pages = (r.visible + page - 1) / page;
  if (first >= pages) return;
  for (int i = static_cast<int>(threadIdx.x); i < a.G * a.D; i += kThreads)
    q[i] = load_query(a, r, i / a.D, i % a.D) * a.scale;
  mark_listed<kPageSpan>(a, r, first, listed);
  for (int g = 0; g < a.G; ++g) {
    for (int i = warp_id(); i < kPageSpan; i += kWarps) {
      const int64_t m = first + i;
      float logit = kNothing, weight = 0;
      if (m < pages && !(listed[i / 32] >> i % 32 & 1)) {
        const S* centre = u.summary.as<const S>(u.pages.id(r.b, static_cast<uint32_t>(m)), r.h, 0);
        float dot = 0;
        for (int d = lane_id(); d < a.D; d += 32) dot += q[g * a.D + d] * to_float(centre[d]);
        const PagePart part(a, r, page, m);
        logit = finish_logit(a, warp_reduce_add(dot), part.bias), weight = static_cast<float>(part.live);
      }
      if (lane_id() == 0) logits[i] = weight > 0 ? logit + logf(weight) : kNothing;
    }
    __syncthreads();
    float x[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = kNothing;
    x[0] = threadIdx.x < kPageSpan ? logits[threadIdx.x] : kNothing;
    const float2 part = block_sum(x, reduce);
    if (threadIdx.x == 0) spans.parts[(r.row * a.G + g) * spans.count + span] = part;
  }
}

// ---- the sum over spans: a thread a query head ----

__global__ void __launch_bounds__(kThreads) unread_total(UnreadTask a, Spans spans, int32_t unit) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.rows() * a.G) return;
  const RowAt r(a, i / a.G);
  const int64_t live = (r.visible + int64_t{unit} * spans.units - 1) / (int64_t{unit} * spans.units);
  float top = kNothing, sum = 0;
  for (int64_t s = 0; s < live; ++s) {
    const float2 part = spans.parts[i * spans.count + s];
    if (part.x == kNothing) continue;
    const float both = fmaxf(top, part.x);
    sum = sum * expf(top - both) + part.y * expf(part.x - both);
    top = both;
  }
  const int64_t head = int64_t{r.h} * a.G + i % a.G;
  a.out[r.b * a.out_stride[0] + r.t * a.out_stride[1] + head * a.out_stride[2]] = sum > 0 ? top + logf(sum) : kNothing;
}

// ---- host side ----

Spans make_spans(int64_t units, int span, void* scratch) {
  return {span, static_cast<int32_t>(slicing::ceil_div(std::max<int64_t>(units, 1), span)),
          static_cast<float2*>(scratch)};
}

void launch_total(const UnreadTask& a, const Spans& spans, int32_t unit, void* stream) {
  const int64_t heads = a.rows() * a.G;
  launch(unread_total, dim3(static_cast<unsigned>(slicing::ceil_div(heads, kThreads))), dim3(kThreads), 0, stream, a,
         spans, unit);
}

dim3 span_grid(const UnreadTask& a, const Spans& spans) { return dim3(static_cast<unsigned>(a.rows() * spans.count)); }

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
  with_storage_type(u.type, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>)
      launch(unread_pages<decltype(type)>, span_grid(a, spans), dim3(kThreads),
             sizeof(float) * static_cast<size_t>(a.G) * static_cast<size_t>(a.D), stream, a, u, spans);
  });
  launch_total(a, spans, page, stream);
}

}  // namespace sic::gpu
