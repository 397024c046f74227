// Rows of any storage type, in and out of float buffers.
#pragma once
#include "core/simd.h"
#include "core/tensor_view.h"

namespace sic::cpu::SIC_ISA {

template <class T>
SIC_INLINE void load_row(const T* p, int64_t n, float factor, float* out) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(p + i) * splat(factor));
  for (; i < n; ++i) out[i] = to_float(p[i]) * factor;
}
SIC_INLINE void load_row(const TensorView& v, int64_t offset, int64_t n, float factor, float* out) {
  with_float_type(v.dtype, [&](auto t) { load_row(v.as<const decltype(t)>() + offset, n, factor, out); });
}
SIC_INLINE void store_row(const TensorView& v, int64_t offset, int64_t n, const float* row, float factor) {
  with_float_type(v.dtype, [&](auto t) {
    auto* p = v.as<decltype(t)>() + offset;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(p + i, load(row + i) * splat(factor));
    for (; i < n; ++i) from_float(row[i] * factor, p[i]);
  });
}

// q . row, the row widened to float.
template <class T>
SIC_INLINE float dot_row(const float* q, const T* row, int64_t n) {
  vf sum = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) sum = fma(load(q + i), load(row + i), sum);
  if (i < n) sum = fma(load_first(q + i, static_cast<int>(n - i)), load_first(row + i, static_cast<int>(n - i)), sum);
  return reduce_add(sum);
}

}  // namespace sic::cpu::SIC_ISA
