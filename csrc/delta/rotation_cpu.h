// Rotations of residuals, and RoPE, on float rows.
#pragma once
#include "delta/codes.h"
#include "delta/delta.h"
#include "slicing/rotation_cpu.h"
#include "slicing/sketch_cpu.h"

namespace sic::cpu::SIC_ISA {

// The keys' rotation, its own inverse: a normalised Hadamard transform of the R channels d, d + D/R, d + 2 D/R, ...
inline void rotate_strided(float* x, int D, int R) {
  if (R == 1) return;
  const int stride = D / R;
  if (stride == 1) {
    butterfly(x, D);
  } else if (stride % W == 0) {
    butterfly_far(x, stride, D);
  } else {
    for (int h = stride; h < D; h *= 2)
      for (int i = 0; i < D; i += 2 * h) {
        for (int j = i; j < i + h; ++j) {
          const float a = x[j], b = x[j + h];
          x[j] = a + b, x[j + h] = a - b;
        }
      }
  }
  const float c = slicing::rotation_norm(R);
  for (int i = 0; i < D; ++i) x[i] *= c;
}

// The rows of cosines and sines of one position.
struct RopeAngles {
  const float *lo, *hi, *undo;  // cosines; sines follow
  int half;
  bool interleaved;

  RopeAngles(const delta::Rope& rope, int64_t position)
      : half(static_cast<int>(rope.lo.shape[2])), interleaved(rope.interleaved) {
    const int64_t block = position / delta::kRopeBlock * 2 * half;
    lo = rope.lo.as<const float>() + position % delta::kRopeBlock * 2 * half;
    hi = rope.hi.as<const float>() + block;
    undo = rope.undo.as<const float>() + block;
  }
};

// Pairs (a, b) of a row turned by their angles: (a + i b) (c + i s), or back.
template <bool kBack>
inline void turn(float* a, float* b, const float* angles, int half, int step) {
  const float *c = angles, *s = angles + half;
  int i = 0;
  for (; step == 1 && i + W <= half; i += W) {
    const vf x = load(a + i), y = load(b + i), ci = load(c + i), si = load(s + i);
    store(a + i, kBack ? x * ci + y * si : x * ci - y * si);
    store(b + i, kBack ? y * ci - x * si : x * si + y * ci);
  }
  for (; i < half; ++i) {
    const float x = a[i * step], y = b[i * step];
    a[i * step] = kBack ? x * c[i] + y * s[i] : x * c[i] - y * s[i];
    b[i * step] = kBack ? y * c[i] - x * s[i] : x * s[i] + y * c[i];
  }
}

// A key without its position.
inline void undo_rope(float* x, const RopeAngles& r) {
  float* second = r.interleaved ? x + 1 : x + r.half;
  const int step = r.interleaved ? 2 : 1;
  turn<true>(x, second, r.undo, r.half, step);
  turn<true>(x, second, r.lo, r.half, step);
}

}  // namespace sic::cpu::SIC_ISA
