// Joining the scores of a group's heads, and softmax weights of integer scores: the arithmetic of sketch_join_cpu.h,
// bit for bit.
#pragma once
#include "core/gpu.cuh"
#include "slicing/device_views.cuh"
#include "slicing/sketch.h"
#include "slicing/slicing.h"

namespace sic::gpu {

// ---- interface ----

// Scores of the heads of a group, made one row for each (sequence, query token, KV head).
struct JoinTask {
  const int16_t* scores = nullptr;  // [B,T,Hkv,G][stride]; stride a multiple of 8, 16-byte aligned
  int64_t stride = 0;
  int32_t* top = nullptr;                // [B,T,Hkv,G]: each head's maximum
  unsigned long long* weight = nullptr;  // [B,T,Hkv,G]: zero; sums of weights, for pool softmax
  int32_t B = 0, T = 1, Hkv = 1, G = 1;
  slicing::Pool pool = slicing::Pool::max;
  SeqLens seq_lens;
  DeviceSelection list;  // where given, its counts are the rows' lengths in place of the visible positions
  int64_t width = 0;     // of out; behind the row's length it is kInvisible
  int16_t* out = nullptr;
  int64_t out_stride[3] = {};  // elements
  // For attend. Positions without a mark are left out of maxima and sums, and kInvisible in out.
  const uint8_t* marks = nullptr;  // [B,T,Hkv,width]
  const float* bias = nullptr;     // [B,width], added to the joined score
  int64_t bias_stride = 0;
  int64_t window = 0;  // of positions before the last that are kept, 0: all; others are kInvisible

  SIC_HD int64_t rows() const { return int64_t{B} * T * Hkv; }
};

// One launch, or two for softmax. top must be known.
void launch_join(const JoinTask&, void* stream);
// Fills top (which must hold INT32_MIN or less than any score) with the maxima over marked positions.
void launch_join_tops(const JoinTask&, void* stream);

// ---- device ----

constexpr float kRoundingMagic = 12582912.0f;  // x + it - it rounds |x| < 2^22 to nearest even
constexpr int32_t kRoundingMagicBits = 0x4B400000;
constexpr int16_t kInvisible = INT16_MIN;

__device__ __forceinline__ int32_t round_to_int(float x) {
  return static_cast<int32_t>(detail::bits_of(add_rn(x, kRoundingMagic))) - kRoundingMagicBits;
}
// |x| < 2^22.
__device__ __forceinline__ float exact_float(int32_t x) {
  return sub_rn(detail::float_of(static_cast<uint32_t>(x + kRoundingMagicBits)), kRoundingMagic);
}

// 2^24 * exp(d / 256) for d <= 0, truncated.
__device__ __forceinline__ int32_t exp_weight(int32_t d) {
  const float x = mul_rn(exact_float(d), 1.4426950408889634f / slicing::kScoreSteps);
  const int32_t n = round_to_int(x > -128.0f ? x : -128.0f);
  const float f = sub_rn(x, exact_float(n));
  float p = 1.535336188319500e-4f;
  p = add_rn(mul_rn(p, f), 1.339887440266574e-3f);
  p = add_rn(mul_rn(p, f), 9.618437357674640e-3f);
  p = add_rn(mul_rn(p, f), 5.550332471162809e-2f);
  p = add_rn(mul_rn(p, f), 2.402264791363012e-1f);
  p = add_rn(mul_rn(p, f), 6.931472028550421e-1f);
  p = add_rn(mul_rn(p, f), 1.0f);
  if (!(x >= -24.0f)) return 0;
  return static_cast<int32_t>(detail::float_of(detail::bits_of(p) + (static_cast<uint32_t>(n + 24) << 23)));
}

// log of a positive weight in 1/256 nat, within 0.01 nat and monotonic.
__device__ __forceinline__ int32_t log_steps(float p) {
  const int32_t bits = static_cast<int32_t>(detail::bits_of(p));
  const float e = exact_float((bits >> 23) - 127);
  const float m = mul_rn(static_cast<float>(bits & 0x7fffff), 0x1p-23f);
  const float l = add_rn(e, add_rn(m, mul_rn(0.34375f, mul_rn(m, sub_rn(1.0f, m)))));
  const int32_t j = round_to_int(mul_rn(l, slicing::kScoreSteps * 0.6931471805599453f));
  return p > 0.0f && j > slicing::kScoreMin ? j : slicing::kScoreMin;
}

// ---- rows of scores, 8 positions at a time ----

constexpr int kJoinEach = 8;

struct JoinRow {
  int32_t b, t, h;
  int64_t row, length;  // of the row; how many positions it has

  __device__ JoinRow(const JoinTask& a, int64_t row_) : row(row_) {
    b = static_cast<int32_t>(row / a.Hkv / a.T), t = static_cast<int32_t>(row / a.Hkv % a.T);
    h = static_cast<int32_t>(row % a.Hkv);
    length = a.list.counts ? a.list.count(b, t, h) : a.seq_lens.visible(b, a.T, t, a.width);
  }

  // Bit i: position first + i takes part.
  __device__ __forceinline__ uint32_t present(const JoinTask& a, int64_t first) const {
    const int64_t left = length - first;
    uint32_t bits = left >= kJoinEach ? 0xff : left > 0 ? (1u << left) - 1 : 0;
    if (a.marks) {
#pragma unroll
      for (int i = 0; i < kJoinEach; ++i)
        if (bits >> i & 1 && !a.marks[row * a.width + first + i]) bits &= ~(1u << i);
    }
    return bits;
  }
};

// 8 scores of head g; only those in range are read.
__device__ __forceinline__ void load_scores(const JoinTask& a, const JoinRow& r, int g, int64_t first,
                                            int32_t (&s)[kJoinEach]) {
  const int16_t* from = a.scores + (r.row * a.G + g) * a.stride + first;
  if (first + kJoinEach <= r.length) {
    const uint4 v = load_cached16(from);
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i) s[i] = static_cast<int16_t>(word[i / 2] >> 16 * (i & 1));
  } else {
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i) s[i] = first + i < r.length ? from[i] : 0;
  }
}

// Sum of the weights of 8 scores, of those present.
__device__ __forceinline__ uint32_t sum_weights(const int32_t (&s)[kJoinEach], uint32_t present, int32_t top) {
  uint32_t sum = 0;  // of 8 weights of at most 2^24
#pragma unroll
  for (int i = 0; i < kJoinEach; ++i)
    if (present >> i & 1) sum += static_cast<uint32_t>(exp_weight(s[i] - top));
  return sum;
}

// What a head's scores are measured against: the largest, and (softmax) 1 / the sum of all weights.
struct HeadReference {
  int32_t top;
  float inverse;
};
__device__ __forceinline__ float inverse_weight(unsigned long long sum) {
  return div_rn(1.0f, static_cast<float>(sum));
}

// Positions of a group, head by head in their order.
template <bool kSoftmax, int kN>
struct Joined {
  float p[kN];       // softmax: the heads' shares of weight
  int32_t best[kN];  // maximum

  __device__ __forceinline__ Joined() {
#pragma unroll
    for (int i = 0; i < kN; ++i) p[i] = 0, best[i] = slicing::kScoreMin;
  }
  // What add() takes of a score: its weight, or how far it is below the head's best.
  __device__ static __forceinline__ int32_t value(int32_t score, int32_t top) {
    return kSoftmax ? exp_weight(score - top) : score - top;
  }
  __device__ __forceinline__ void add(int i, int32_t value, float inverse) {
    if constexpr (kSoftmax)
      p[i] = add_rn(p[i], mul_rn(static_cast<float>(value), inverse));
    else
      best[i] = value > best[i] ? value : best[i];
  }
  __device__ __forceinline__ int32_t score(int i) const { return kSoftmax ? log_steps(p[i]) : best[i]; }
};

// The joined score with the position's bias, as attend ranks it.
__device__ __forceinline__ int32_t biased(int32_t score, float bias) {
  const float limit = 1048576.0f, x = mul_rn(bias, slicing::kScoreSteps);
  const float steps = x > -limit ? x < limit ? exact_float(round_to_int(x)) : limit : -limit;
  const float moved = add_rn(static_cast<float>(score), steps);
  const float low = static_cast<float>(slicing::kScoreMin);
  return static_cast<int32_t>(moved < low ? low : moved > -low ? -low : moved);
}

// Joined scores of 8 positions; kInvisible for those that are not present or outside the window. reference(g): of head
// g.
template <bool kSoftmax, class Reference>
__device__ __forceinline__ void join_eight(const JoinTask& a, const JoinRow& r, int64_t first, Reference reference,
                                           int32_t (&out)[kJoinEach]) {
  const uint32_t present = r.present(a, first);
  Joined<kSoftmax, kJoinEach> joined;
  for (int g = 0; present && g < a.G; ++g) {
    int32_t s[kJoinEach];
    load_scores(a, r, g, first, s);
    const HeadReference head = reference(g);
#pragma unroll
    for (int i = 0; i < kJoinEach; ++i) joined.add(i, joined.value(s[i], head.top), head.inverse);
  }
  const int64_t window_begin = a.window > 0 && r.length > a.window ? r.length - a.window : 0;
#pragma unroll
  for (int i = 0; i < kJoinEach; ++i) out[i] = joined.score(i);
  if (present == (1u << kJoinEach) - 1 && !a.bias && first >= window_begin) return;
#pragma unroll
  for (int i = 0; i < kJoinEach; ++i) {
    const int64_t pos = first + i;
    if (a.bias && present >> i & 1) out[i] = biased(out[i], a.bias[r.b * a.bias_stride + pos]);
    if (!(present >> i & 1) || pos < window_begin) out[i] = kInvisible;
  }
}

__device__ __forceinline__ uint4 pack_scores(const int32_t (&s)[kJoinEach]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    word[i] = byte_perm(static_cast<uint32_t>(s[2 * i]), static_cast<uint32_t>(s[2 * i + 1]), 0x5410);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace sic::gpu
