// The softmax mass that a selection leaves unread, estimated on the device: log of the sum of exp(estimated logit) over
// the visible units that are not listed, for every query head.
#pragma once
#include "core/gpu.cuh"
#include "slicing/device_views.cuh"
#include "slicing/sketch.h"
#include "slicing/slicing.h"

namespace sic::gpu {

// What either estimate needs.
struct UnreadTask {
  Rows3 q;  // [B,T,Hq,D]
  DType q_type = DType::f32;
  DeviceSelection list;
  SeqLens seq_lens;
  int32_t B = 0, T = 1, Hkv = 1, G = 1, D = 0;
  int64_t positions = 0, window = 0;
  float scale = 0, softcap = 0;
  const float* bias = nullptr;  // [B,S]
  int64_t bias_stride = 0;
  float* out = nullptr;  // [B,T,Hq], in elements of out_stride
  int64_t out_stride[3] = {};

  static UnreadTask of(const slicing::AttendArgs&);
  SIC_HD int64_t rows() const { return int64_t{B} * T * Hkv; }
};

// From plane-0 scores: [B,T,Hq][stride], 1/256 nat, as the scan leaves them.
struct UnreadScores {
  const int16_t* scores = nullptr;
  int64_t stride = 0;
  const float* centre = nullptr;  // [Hkv,D]
  int64_t centre_stride = 0;
};
// From page summaries: every position of an unread page is taken to have the page's centre for its key.
struct UnreadPages {
  Rows3 summary;
  DType type = DType::f32;
  PageMap pages;
};

int64_t unread_scratch(const UnreadTask&, int64_t units);  // units: the most of a row
void launch_unread_tokens(const UnreadTask&, const UnreadScores&, void* scratch, void* stream);
void launch_unread_pages(const UnreadTask&, const UnreadPages&, void* scratch, void* stream);

// ---- device ----

constexpr float kNothing = -INFINITY;

struct UnreadRow {
  int32_t b, t, h;
  int64_t row, visible;

  __device__ UnreadRow(const UnreadTask& a, int64_t row_) : row(row_) {
    b = static_cast<int32_t>(row / a.Hkv / a.T), t = static_cast<int32_t>(row / a.Hkv % a.T);
    h = static_cast<int32_t>(row % a.Hkv);
    visible = a.seq_lens.visible(b, a.T, t, a.positions);
  }
  // Positions before it are outside the sliding window.
  __device__ __forceinline__ int64_t begin(const UnreadTask& a) const {
    return a.window > 0 && visible > a.window ? visible - a.window : 0;
  }
};

__device__ __forceinline__ float load_query(const UnreadTask& a, const UnreadRow& r, int g, int d) {
  const char* q = a.q.at(r.b, r.t, int64_t{r.h} * a.G + g);
  if (a.q_type == DType::f32) return reinterpret_cast<const float*>(q)[d];
  if (a.q_type == DType::f16) return to_float(reinterpret_cast<const f16_t*>(q)[d]);
  return to_float(reinterpret_cast<const bf16_t*>(q)[d]);
}

// Sets the bits of entries [from, to) of a list of units, counted from first. bits: zero, in shared memory. All
// threads.
__device__ __forceinline__ void set_listed(const int32_t* list, int32_t from, int32_t to, int64_t first,
                                           uint32_t* bits) {
  for (int32_t i = from + static_cast<int32_t>(threadIdx.x); i < to; i += static_cast<int32_t>(blockDim.x)) {
    const uint32_t unit = static_cast<uint32_t>(list[i] - first);
    atomicOr(bits + unit / 32, 1u << unit % 32);
  }
}

// The logit as attention would make it of a scaled dot product.
__device__ __forceinline__ float finish_logit(const UnreadTask& a, float logit, float bias) {
  if (a.softcap > 0) logit = a.softcap * tanhf(logit / a.softcap);
  return logit + bias;
}

// What the scores leave out: the centre's share of every logit, for keep(head, logit). Warp w does heads w, w + the
// block's warps, ..
template <class Keep>
__device__ __forceinline__ void centre_logits(const UnreadTask& a, const UnreadScores& u, const UnreadRow& r,
                                              Keep keep) {
  for (int g = warp_id(); g < a.G; g += block_warps()) {
    float dot = 0;
    for (int d = lane_id(); d < a.D; d += 32) dot += load_query(a, r, g, d) * u.centre[r.h * u.centre_stride + d];
    dot = warp_reduce_add(dot);
    if (lane_id() == 0) keep(g, dot * a.scale);
  }
}

constexpr int kUnreadEach = 8;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLogitOfScore = slicing::kUnreadShrink / slicing::kScoreSteps;

// Scores of 8 positions of head g; those of unread ones are right.
__device__ __forceinline__ void unread_scores(const UnreadTask& a, const UnreadScores& u, const UnreadRow& r, int g,
                                              int64_t first, uint32_t unread, float (&s)[kUnreadEach]) {
  const int16_t* scores = u.scores + (r.row * a.G + g) * u.stride + first;
  if (first + kUnreadEach <= r.visible) {  // defined up to the visible positions; rows are whole vectors
    const uint4 v = load_cached16(scores);
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kUnreadEach; ++i) s[i] = static_cast<float>(static_cast<int16_t>(word[i / 2] >> 16 * (i & 1)));
  } else {
#pragma unroll
    for (int i = 0; i < kUnreadEach; ++i) s[i] = unread >> i & 1 ? static_cast<float>(scores[i]) : 0.0f;
  }
}
// Their logits, from their scores; kNothing for all but the unread ones.
__device__ __forceinline__ void to_logits(const UnreadTask& a, const UnreadRow& r, int64_t first, uint32_t unread,
                                          float centre, float (&x)[kUnreadEach]) {
#pragma unroll
  for (int i = 0; i < kUnreadEach; ++i) {
    const float bias = a.bias && unread >> i & 1 ? a.bias[r.b * a.bias_stride + first + i] : 0.0f;
    const float logit = finish_logit(a, kLogitOfScore * x[i] + centre, bias);
    x[i] = unread >> i & 1 ? logit : kNothing;
  }
}
// Bit i: position first + i is visible and in the window.
__device__ __forceinline__ uint32_t unread_range(const UnreadTask& a, const UnreadRow& r, int64_t first) {
  const auto clip = [first](int64_t end) {
    const int64_t n = end - first;
    return n <= 0 ? 0 : n < kUnreadEach ? static_cast<int>(n) : kUnreadEach;
  };
  return (1u << clip(r.visible)) - (1u << clip(r.begin(a)));
}

// exp(x - top), 1 where both are infinite.
__device__ __forceinline__ float weight_below(float x, float top) { return x == top ? 1.0f : expf(x - top); }

// Largest value, and sum of exp(value - largest). A NaN stays.
struct UnreadSum {
  float top = kNothing, sum = 0;

  __device__ __forceinline__ void merge(float other_top, float other_sum) {
    if (other_sum == 0) return;
    const float both = larger(top, other_top);
    sum = sum * weight_below(top, both) + other_sum * weight_below(other_top, both);
    top = both;
  }
  __device__ __forceinline__ void add(const float (&x)[kUnreadEach]) {
    float both = top;
#pragma unroll
    for (int i = 0; i < kUnreadEach; ++i) both = larger(both, x[i]);
    if (both == kNothing) return;
    sum *= weight_below(top, both), top = both;
#pragma unroll
    for (int i = 0; i < kUnreadEach; ++i) sum += x[i] == both ? 1.0f : ex2(fmaf(x[i], kLog2e, -kLog2e * both));
  }
  // The same where logits are scores and no more: top is not below any, and stays.
  __device__ __forceinline__ void add_scores(const float (&s)[kUnreadEach], uint32_t unread, float top_score) {
#pragma unroll
    for (int i = 0; i < kUnreadEach; ++i) {
      const float weight = ex2(fmaf(s[i], kLogitOfScore * kLog2e, -kLogitOfScore * kLog2e * top_score));
      if (unread >> i & 1) sum += weight;
    }
  }
  __device__ __forceinline__ float log() const { return sum == 0 ? kNothing : top + logf(sum); }
};

__device__ __forceinline__ float& unread_out(const UnreadTask& a, const UnreadRow& r, int g) {
  const int64_t head = int64_t{r.h} * a.G + g;
  return a.out[r.b * a.out_stride[0] + r.t * a.out_stride[1] + head * a.out_stride[2]];
}

}  // namespace sic::gpu
