// Joining the scores of a group's heads, and softmax weights of integer scores that are equal bit for bit on every
// backend.
#pragma once
#include "slicing/sketch_cpu.h"

namespace sic::cpu::SIC_ISA {

constexpr float kLog2OfStep = 1.4426950408889634f / slicing::kScoreSteps;

// 2^24 * 2^(rate * d) for d <= 0, truncated; at the default rate exp(d / 256). Products and sums are rounded one by
// one, never fused, on every backend.
SIC_INLINE vi exp_weight(vi d) {
  const vf x = __builtin_convertvector(d, vf) * splat(kLog2OfStep);
  const vi n = round_to_int(max(x, splat(-128.0f)));
  const vf f = x - __builtin_convertvector(n, vf);
  vf p = splat(1.535336188319500e-4f);
  p = p * f + splat(1.339887440266574e-3f);
  p = p * f + splat(9.618437357674640e-3f);
  p = p * f + splat(5.550332471162809e-2f);
  p = p * f + splat(2.402264791363012e-1f);
  p = p * f + splat(6.931472028550421e-1f);
  p = p * f + splat(1.0f);
  const vi visible = x >= splat(-24.0f);
  const vf scaled = bit_cast<vf>((bit_cast<vu>(p) + (bit_cast<vu>(n + 24) << 23)) & bit_cast<vu>(visible));
  return __builtin_convertvector(scaled, vi);
}

// 2^24 * 2^(rate * d) within 1e-4: for sums that are estimates anyway.
SIC_INLINE vi rough_exp_weight(vi d, float rate) {
  const vf x = max(__builtin_convertvector(d, vf) * splat(rate), splat(-100.0f));
  const vf magic = splat(12582912.0f), shifted = x + magic, f = x - (shifted - magic);
  const vf p = fma(fma(fma(splat(5.5503324e-2f), f, splat(2.4022648e-1f)), f, splat(6.9314720e-1f)), f, splat(1.0f));
  return __builtin_convertvector(bit_cast<vf>(bit_cast<vu>(p) + (bit_cast<vu>(shifted + splat(24.0f)) << 23)), vi);
}

SIC_INLINE int32_t exp_weight(int32_t d) { return exp_weight(vi{d})[0]; }

// log of a positive weight in 1/256 nat, within 0.01 nat and monotonic.
SIC_INLINE vi log_steps(vf p) {
  const vi bits = bit_cast<vi>(p);
  const vf e = __builtin_convertvector((bits >> 23) - 127, vf);
  const vf m = __builtin_convertvector(bits & 0x7fffff, vf) * splat(0x1p-23f);
  const vf l = e + (m + splat(0.34375f) * (m * (splat(1.0f) - m)));
  const vi j = round_to_int(l * splat(slicing::kScoreSteps * 0.6931471805599453f));
  const vi low = vi{} + slicing::kScoreMin;
  return p > splat(0.0f) ? (j > low ? j : low) : low;
}

inline int32_t scores_max(const int16_t* s, int64_t n) {
  int16_t top = INT16_MIN;
  for (int64_t i = 0; i < n; ++i) top = s[i] > top ? s[i] : top;
  return top;
}

// Sum of weight(s - top) over n scores; weights are at most 2^24.
template <class Weight>
uint64_t weight_sum(const int16_t* s, int64_t n, int32_t top, Weight weight) {
  constexpr int64_t kChunk = 64 * W;  // 64 of them fit 32 bits
  uint64_t total = 0;
  int64_t i = 0;
  while (i + W <= n) {
    vu sum = {};
    const int64_t end = n - i < kChunk ? i + (n - i) / W * W : i + kChunk;
    for (; i < end; i += W) sum += bit_cast<vu>(weight(load_scores(s + i) - top));
    for (int l = 0; l < W; ++l) total += sum[l];
  }
  for (; i < n; ++i) total += static_cast<uint32_t>(weight(vi{} + (s[i] - top))[0]);
  return total;
}

// What a head's scores are measured against when heads are joined.
struct HeadReference {
  int32_t top = 0;
  uint64_t weights = 0;  // pool softmax
  float inverse = 0;

  void set(const int16_t* s, int64_t n, bool softmax) {
    top = scores_max(s, n);
    if (!softmax) return;
    weights = weight_sum(s, n, top, [](vi d) { return exp_weight(d); });
    inverse = 1.0f / static_cast<float>(weights);
  }
};

// W positions of one head, left of them in range (zeros beyond).
SIC_INLINE vi load_scores(const int16_t* s, int64_t left) {
  if (left >= W) return load_scores(s);
  int16_t buffer[W] = {};
  std::memcpy(buffer, s, 2 * left);
  return load_scores(buffer);
}

// out[i] = joined score of position i; row h of s starts at s + h * stride.
//   max:     max over heads of (s - the head's maximum)
//   softmax: log of the sum over heads of the head's softmax
inline void join_scores(const int16_t* s, int64_t stride, const HeadReference* ref, int heads, bool softmax, int64_t n,
                        int16_t* out) {
  const vi low = vi{} + slicing::kScoreMin;
  for (int64_t i = 0; i < n; i += W) {
    const int64_t left = n - i < W ? n - i : W;
    vi joined = low;
    if (softmax) {
      vf p = {};
      for (int h = 0; h < heads; ++h)
        p = p + __builtin_convertvector(exp_weight(load_scores(s + h * stride + i, left) - ref[h].top), vf) *
                    splat(ref[h].inverse);
      joined = log_steps(p);
    } else {
      for (int h = 0; h < heads; ++h) {
        const vi x = load_scores(s + h * stride + i, left) - ref[h].top;
        joined = x > joined ? x : joined;
      }
    }
    if (left == W) {
      store_scores(out + i, joined);
    } else {
      int16_t buffer[W];
      store_scores(buffer, joined);
      std::memcpy(out + i, buffer, 2 * left);
    }
  }
}

}  // namespace sic::cpu::SIC_ISA
