// Hadamard transforms of float rows.
#pragma once
#include "core/simd.h"
#include "slicing/sketch.h"

namespace sic::cpu::SIC_ISA {

// ---- in registers: x[i], lane l is channel W i + l ----

template <int H>
SIC_INLINE vf butterfly_step(vf v) {
  vi partner;
  vf sign;
  for (int i = 0; i < W; ++i) partner[i] = i ^ H, sign[i] = i & H ? -1.0f : 1.0f;
  return fma(v, sign, __builtin_shuffle(v, partner));  // v * sign is exact
}

// Steps of a butterfly between channels of one vector, distances `first` and up; `first` is a power of two.
SIC_INLINE vf rotate_within(vf x, int first) {
  if (first <= 1) x = butterfly_step<1>(x);
  if (first <= 2) x = butterfly_step<2>(x);
  if constexpr (W >= 8)
    if (first <= 4) x = butterfly_step<4>(x);
  if constexpr (W >= 16)
    if (first <= 8) x = butterfly_step<8>(x);
  return x;
}

// The steps between vectors, of distances `first` and up.
template <int kDistance, int kVectors>
SIC_INLINE void rotate_groups(vf* x, int first) {
  if constexpr (kDistance < kVectors && kVectors % (2 * kDistance) == 0) {
    if (first <= kDistance) {
      SIC_UNROLL for (int i = 0; i < kVectors; ++i) {
        if (i & kDistance) continue;
        const vf a = x[i], b = x[i + kDistance];
        x[i] = a + b, x[i + kDistance] = a - b;
      }
    }
    rotate_groups<2 * kDistance, kVectors>(x, first);
  }
}

// ---- in memory ----

// The transform of each block of kVectors vectors.
template <int kVectors>
SIC_INLINE void butterfly_blocks(float* x, int n) {
  for (; n > 0; n -= kVectors * W, x += kVectors * W) {
    vf v[kVectors];
    SIC_UNROLL for (int i = 0; i < kVectors; ++i) v[i] = rotate_within(load(x + W * i), 1);
    rotate_groups<1, kVectors>(v, 1);
    SIC_UNROLL for (int i = 0; i < kVectors; ++i) store(x + W * i, v[i]);
  }
}

// The steps of distances h and up, h a multiple of W, of n channels.
SIC_INLINE void butterfly_far(float* x, int h, int n) {
  for (; h < n; h *= 2)
    for (int i = 0; i < n; i += 2 * h)
      for (int j = i; j < i + h; j += W) {
        const vf a = load(x + j), b = load(x + j + h);
        store(x + j, a + b), store(x + j + h, a - b);
      }
}

// Unnormalised transform of n channels, a power of two.
inline void butterfly(float* x, int n) {
  if (n >= 8 * W) {
    butterfly_blocks<8>(x, n);
    return butterfly_far(x, 8 * W, n);
  }
  if (n == 4 * W) return butterfly_blocks<4>(x, n);
  if (n == 2 * W) return butterfly_blocks<2>(x, n);
  if (n == W) return butterfly_blocks<1>(x, n);
  for (int h = 1; h < n; h *= 2)
    for (int i = 0; i < n; i += 2 * h)
      for (int j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b, x[j + h] = a - b;
      }
}

// The same as rotate() for one block of kVectors vectors.
template <int kVectors>
SIC_INLINE void rotate_block(float* x) {
  const float* signs = slicing::sketch_signs();
  const vf c = splat(slicing::rotation_norm(kVectors * W));
  vf v[kVectors];
  SIC_UNROLL for (int i = 0; i < kVectors; ++i) v[i] = rotate_within(load(x + W * i) * load(signs + W * i), 1);
  rotate_groups<1, kVectors>(v, 1);
  SIC_UNROLL for (int i = 0; i < kVectors; ++i) store(x + W * i, v[i] * c);
}

// x <- normalised rotation of signs * x, block by block.
inline void rotate(float* x, int D) {
  if (D == 8 * W) return rotate_block<8>(x);
  if (D == 4 * W) return rotate_block<4>(x);
  const float* signs = slicing::sketch_signs();
  for (int d = 0; d < D; ++d) x[d] *= signs[d];
  for (int at = 0, n; at < D; at += n) {
    n = slicing::rotation_block(D - at);
    butterfly(x + at, n);
    const float c = slicing::rotation_norm(n);
    for (int i = at; i < at + n; ++i) x[i] *= c;
  }
}

}  // namespace sic::cpu::SIC_ISA
