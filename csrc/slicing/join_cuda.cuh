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

}  // namespace sic::gpu
