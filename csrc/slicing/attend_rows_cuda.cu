// A row's selection by one block. Its joined scores stay in shared memory: joined by plane 0 for the shortlist, then by
// both planes for the selection, then bits of what was selected.
//
// Floor: 2 G bytes a position of plane-0 scores, twice (the unread ones need the selection), and of both planes the
// sectors that hold candidates, which are nearly all; from L2. Arithmetic comes close to that: some 20 operations for
// each exponential, of every candidate for the ranking and of every position for the unread mass.
#include "slicing/attend_rows_cuda.cuh"
#include "slicing/select_rows_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kCopies = 32;     // of a digit's count: no two lanes add to the same
constexpr int kWeights = 4260;  // scores so far below the top have no weight (exp_weight)
constexpr int kHeld = 12;       // entries of a shortlist that a thread holds in registers, if that is all of them ...
constexpr int kPart = 4;        // ... else so many at a time

struct alignas(16) RowShared {
  JoinRow row;  // here, not in registers from step to step
  BlockCounts counts;
  uint32_t digits[kDigits * kCopies];  // of a selection; between selections, weights
  unsigned long long sums[kWarps];
  int32_t tops[2][kWarps];
  UnreadSum unread[2][kWarps];

  __device__ __forceinline__ int32_t* weights() { return reinterpret_cast<int32_t*>(digits); }
};
static_assert(sizeof(RowShared::digits) >= kWeights * sizeof(int32_t));

// Behind RowShared: the joined scores, whole vectors of them, then what is known of each head.
__host__ __device__ constexpr int64_t joined_bytes(int64_t width) { return (width + kJoinEach - 1) / kJoinEach * 16; }
static_assert(sizeof(RowShared) % 16 == 0);

// Over the block, one barrier each: the next call but one may use the same room.
__device__ __forceinline__ int32_t block_top(int32_t v, int32_t (&room)[kWarps]) {
  v = warp_reduce_max(v);
  if (lane_id() == 0) room[warp_id()] = v;
  __syncthreads();
  return warp_reduce_max(room[lane_id()]);
}
__device__ __forceinline__ unsigned long long block_total(unsigned long long v, unsigned long long (&room)[kWarps]) {
  v = warp_reduce_add(v);
  if (lane_id() == 0) room[warp_id()] = v;
  __syncthreads();
  return warp_reduce_add(room[lane_id()]);
}

// ---- plane 0 ----

// Tops are the scan's; weights (softmax) are summed here. A barrier follows.
template <bool kSoftmax>
__device__ void find_references(const JoinTask& a, const JoinRow& row, RowShared& s, HeadReference* heads) {
  for (int g = 0; g < a.G; ++g) {
    const int32_t top = a.top[row.row * a.G + g];
    float inverse = 0;
    if constexpr (kSoftmax) {
      unsigned long long sum = 0;
      for (int64_t first = threadIdx.x * kJoinEach; first < row.length; first += kThreads * kJoinEach) {
        int32_t x[kJoinEach];
        load_scores(a, row, g, first, x);
        sum += sum_weights(x, row.present(a, first), top);
      }
      __syncthreads();  // the last head's sums have been read
      inverse = inverse_weight(block_total(sum, s.sums));
    }
    if (threadIdx.x == 0) heads[g] = {top, inverse};
  }
}

template <bool kSoftmax>
__device__ void join_row(const JoinTask& a, const JoinRow& row, const HeadReference* heads, int16_t* joined) {
  for (int64_t first = threadIdx.x * kJoinEach; first < row.length; first += kThreads * kJoinEach) {
    int32_t x[kJoinEach];
    join_eight<kSoftmax>(a, row, first, [&](int g) { return heads[g]; }, x);
    store16(joined + first, pack_scores(x));
  }
}

// ---- the shortlist, by both planes ----

struct Shortlist {
  const int32_t* positions;
  int32_t count;

  // Offsets of 32 bits: half the registers of an address.
  __device__ __forceinline__ uint32_t position(uint32_t entry) const { return positions[entry]; }
};

// Scores of the thread's entries first, first + kThreads, ..; INT32_MIN behind the end.
template <int kN>
__device__ __forceinline__ void load_listed(const int16_t* scores, const Shortlist& list, int32_t first,
                                            int32_t (&x)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const int32_t entry = first + i * kThreads;
    x[i] = entry < list.count ? scores[list.position(entry)] : INT32_MIN;
  }
}
template <int kN>
__device__ __forceinline__ int32_t top_of(const int32_t (&x)[kN], int32_t top) {
#pragma unroll
  for (int i = 0; i < kN; ++i) top = x[i] > top ? x[i] : top;
  return top;
}
// Scores become what is joined of them. weights: of scores 0, 1, .. below the top; all others are 0.
template <bool kSoftmax, int kN>
__device__ __forceinline__ void to_values(int32_t (&x)[kN], int32_t top, const int32_t* weights) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const uint32_t below = static_cast<uint32_t>(top) - static_cast<uint32_t>(x[i]);
    if constexpr (kSoftmax)
      x[i] = below < kWeights ? weights[below] : 0;
    else
      x[i] = x[i] > INT32_MIN ? x[i] - top : INT32_MIN;
  }
}
template <int kN>
__device__ __forceinline__ unsigned long long total_of(const int32_t (&x)[kN]) {
  uint32_t sum = 0;  // of weights of at most 2^24
#pragma unroll
  for (int i = 0; i < kN; ++i) sum += static_cast<uint32_t>(x[i]);
  return sum;
}

// What head g's scores are measured against, where they are too many to be held.
template <bool kSoftmax>
__device__ HeadReference find_reference(const int16_t* scores, const Shortlist& list, RowShared& s) {
  int32_t x[kPart], top = INT32_MIN;
  for (int32_t first = static_cast<int32_t>(threadIdx.x); first < list.count; first += kPart * kThreads) {
    load_listed(scores, list, first, x);
    top = top_of(x, top);
  }
  __syncthreads();  // the last head's have been read
  top = block_top(top, s.tops[0]);
  if constexpr (!kSoftmax) return {top, 0.0f};
  unsigned long long sum = 0;
  for (int32_t first = static_cast<int32_t>(threadIdx.x); first < list.count; first += kPart * kThreads) {
    load_listed(scores, list, first, x);
    to_values<true>(x, top, s.weights());
    sum += total_of(x);
  }
  return {top, inverse_weight(block_total(sum, s.sums))};
}

template <bool kSoftmax, int kN>
__device__ __forceinline__ void store_listed(const RowsTask& a, const JoinRow& row, const Shortlist& list,
                                             int32_t first, const Joined<kSoftmax, kN>& sum, int16_t* joined) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const int32_t entry = first + i * kThreads;
    if (entry >= list.count) continue;
    const uint32_t at = list.position(entry);
    const int32_t score = sum.score(i);
    joined[at] =
        static_cast<int16_t>(a.join.bias ? biased(score, a.join.bias[row.b * a.join.bias_stride + at]) : score);
  }
}

// Shortlists that the block holds: a head's scores are read once.
template <bool kSoftmax>
__device__ void join_held(const RowsTask& a, const JoinRow& row, const Shortlist& list, RowShared& s, int16_t* joined) {
  const int16_t* const scores = a.fine + int64_t{blockIdx.x} * a.join.G * a.join.stride;
  const int32_t first = static_cast<int32_t>(threadIdx.x);
  Joined<kSoftmax, kHeld> sum;
#pragma unroll 1
  for (int g = 0; g < a.join.G; ++g) {
    int32_t x[kHeld];
    load_listed(scores + g * a.join.stride, list, first, x);
    to_values<kSoftmax>(x, block_top(top_of(x, INT32_MIN), s.tops[g & 1]), s.weights());
    const float inverse = kSoftmax ? inverse_weight(block_total(total_of(x), s.sums)) : 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum.add(i, x[i], inverse);
  }
  store_listed(a, row, list, first, sum, joined);
}

// Any: three times.
template <bool kSoftmax>
__device__ void join_any(const RowsTask& a, const JoinRow& row, const Shortlist& list, RowShared& s,
                         HeadReference* heads, int16_t* joined) {
  const int16_t* const scores = a.fine + int64_t{blockIdx.x} * a.join.G * a.join.stride;
#pragma unroll 1
  for (int g = 0; g < a.join.G; ++g) {
    const HeadReference found = find_reference<kSoftmax>(scores + g * a.join.stride, list, s);
    if (threadIdx.x == 0) heads[g] = found;
  }
  __syncthreads();
  for (int32_t first = static_cast<int32_t>(threadIdx.x); first < list.count; first += kPart * kThreads) {
    Joined<kSoftmax, kPart> sum;
#pragma unroll 1
    for (int g = 0; g < a.join.G; ++g) {
      int32_t x[kPart];
      const HeadReference head = heads[g];
      load_listed(scores + g * a.join.stride, list, first, x);
      to_values<kSoftmax>(x, head.top, s.weights());
#pragma unroll
      for (int i = 0; i < kPart; ++i) sum.add(i, x[i], head.inverse);
    }
    store_listed(a, row, list, first, sum, joined);
  }
}

// Joined scores of the shortlist by both planes; kInvisible for all others.
template <bool kSoftmax>
__device__ void rank_shortlist(const RowsTask& a, const JoinRow& row, int32_t count, RowShared& s, HeadReference* heads,
                               int16_t* joined) {
  const Shortlist list{a.shortlist.out.indices + int64_t{blockIdx.x} * a.shortlist.K, count};
  const uint32_t none = static_cast<uint16_t>(kInvisible) * 0x10001u;
  for (int64_t i = threadIdx.x * kJoinEach; i < row.length; i += kThreads * kJoinEach)
    store16(joined + i, make_uint4(none, none, none, none));
  if constexpr (kSoftmax)
    for (int i = static_cast<int>(threadIdx.x); i < kWeights; i += kThreads) s.weights()[i] = exp_weight(-i);
  __syncthreads();
  if (list.count <= kHeld * kThreads) return join_held<kSoftmax>(a, row, list, s, joined);
  join_any<kSoftmax>(a, row, list, s, heads, joined);
}

// ---- selection ----

using SharedRow = SelectRow<int16_t, SharedScores>;

__device__ __forceinline__ SelectRowAt place(const JoinRow& r) { return {r.b, r.t, r.h}; }

// Lists the candidates; how many they are.
__device__ int32_t make_shortlist(const SelectTask& a, const JoinRow& r, const int16_t* joined, RowShared& s) {
  const SharedRow row(a, {}, place(r), joined);
  const SelectCut cut = find_cut(row, {s.digits, kCopies}, s.counts);
  return static_cast<int32_t>(write_chosen(a, row, cut, Rank{0, 0}, place(r), nullptr, s.counts).chosen(cut));
}

__device__ void select_final(const RowsTask& a, const JoinRow& r, const int16_t* joined, RowShared& s) {
  const SharedRow row(a.selection, a.keep, place(r), joined);
  const SelectCut cut = find_cut(row, {s.digits, kCopies}, s.counts);
  const Rank total = write_chosen(a.selection, row, cut, Rank{0, 0}, place(r), nullptr, s.counts);
  finish_row(a.selection, row, cut, total, place(r), 0, 1);
}

// ---- the unread mass ----

// The sum over a warp, in lane 0. Lanes are added in a fixed order.
__device__ __forceinline__ UnreadSum warp_total(UnreadSum x) {
#pragma unroll
  for (int h = 16; h > 0; h /= 2) {
    const float top = __shfl_down_sync(kFullWarp, x.top, h), sum = __shfl_down_sync(kFullWarp, x.sum, h);
    x.merge(top, sum);
  }
  return x;
}

// The thread's part of head g's. bits: of what is read.
__device__ __forceinline__ UnreadSum sum_unread(const RowsTask& a, const UnreadRow& row, int g, float centre,
                                                const uint32_t* bits) {
  const UnreadTask& u = a.unread;
  const bool plain = !u.bias && u.softcap <= 0;
  const float top = static_cast<float>(a.join.top[row.row * u.G + g]);
  UnreadSum sum;
  if (plain) sum.top = kLogitOfScore * top + centre;
  for (int64_t first = threadIdx.x * kUnreadEach; first < row.visible; first += kThreads * kUnreadEach) {
    const uint32_t unread = unread_range(u, row, first) & ~(bits[first / 32] >> first % 32);
    if (!unread) continue;
    float x[kUnreadEach];
    unread_scores(u, a.coarse, row, g, first, unread, x);
    if (plain) {
      sum.add_scores(x, unread, top);
    } else {
      to_logits(u, row, first, unread, centre, x);
      sum.add(x);
    }
  }
  return sum;
}

// bits: room for one of each position.
__device__ void estimate_unread(const RowsTask& a, RowShared& s, float* centre, uint32_t* bits) {
  const UnreadTask& u = a.unread;
  const UnreadRow row(u, blockIdx.x);
  for (int64_t i = threadIdx.x; i * 32 < row.visible; i += kThreads) bits[i] = 0;
  centre_logits(u, a.coarse, row, centre);
  __syncthreads();
  set_listed(u.list.row(row.b, row.t, row.h), 0, u.list.count(row.b, row.t, row.h), 0, bits);
  __syncthreads();
  for (int g = 0; g < u.G; ++g) {
    UnreadSum sum = warp_total(sum_unread(a, row, g, centre[g], bits));
    if (lane_id() == 0) s.unread[g & 1][warp_id()] = sum;
    __syncthreads();
    if (warp_id() != 0) continue;
    sum = warp_total(s.unread[g & 1][lane_id()]);
    if (lane_id() == 0) unread_out(u, row, g) = sum.log();
  }
}

// ---- the kernel ----

// kTwoStage: plane 0 makes a shortlist by maximum, both planes rank it by pool; else plane 0 ranks by pool.
template <bool kSoftmax, bool kTwoStage>
__global__ void __launch_bounds__(kThreads) attend_rows(RowsTask a) {
  SIC_DYNAMIC_SHARED(RowShared, s);
  auto* const joined = reinterpret_cast<int16_t*>(s + 1);
  auto* const heads = reinterpret_cast<HeadReference*>(reinterpret_cast<char*>(joined) + joined_bytes(a.join.width));
  if (threadIdx.x == 0) s->row = JoinRow(a.join, blockIdx.x);
  __syncthreads();
  find_references<kSoftmax && !kTwoStage>(a.join, s->row, *s, heads);
  __syncthreads();
  join_row<kSoftmax && !kTwoStage>(a.join, s->row, heads, joined);
  __syncthreads();
  if constexpr (kTwoStage) {
    const int32_t count = make_shortlist(a.shortlist, s->row, joined, *s);
    __syncthreads();
    rank_shortlist<kSoftmax>(a, s->row, count, *s, heads, joined);
    __syncthreads();
  }
  select_final(a, s->row, joined, *s);
  __syncthreads();
  estimate_unread(a, *s, reinterpret_cast<float*>(heads), reinterpret_cast<uint32_t*>(joined));
}

int64_t shared_bytes(int64_t width, int64_t G) {
  return static_cast<int64_t>(sizeof(RowShared)) + joined_bytes(width) + G * int64_t{sizeof(HeadReference)};
}

}  // namespace

bool rows_fit(int64_t width, int64_t G) {
  int device = 0, most = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  return shared_bytes(width, G) <= most;
}

void launch_rows(const RowsTask& a, void* stream) {
  const dim3 grid(static_cast<unsigned>(a.join.rows())), block(kThreads);
  const auto shared = static_cast<size_t>(shared_bytes(a.join.width, a.join.G));
  const bool softmax = a.pool == slicing::Pool::softmax;
  if (a.fine)
    launch(softmax ? attend_rows<true, true> : attend_rows<false, true>, grid, block, shared, stream, a);
  else
    launch(softmax ? attend_rows<true, false> : attend_rows<false, false>, grid, block, shared, stream, a);
}

}  // namespace sic::gpu
