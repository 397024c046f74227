// Centre and radius of a page's keys, rounded so that centre +- radius contains every key.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/rows.h"
#include "slicing/slicing.h"

namespace sic::cpu::SIC_ISA {

// a - b rounded towards +infinity: the error of the subtraction is recovered exactly (two-sum).
SIC_INLINE float subtract_up(float a, float b) {
  const float d = a - b, v = d - a, error = (a - (d - v)) - (b + v);
  return error > 0 ? std::nextafter(d, std::numeric_limits<float>::infinity()) : d;
}

// The smallest value of the type that is not below x >= 0; NaN and infinity stay.
inline float round_up(float x, DType dtype) {
  float y = x;
  with_float_type(dtype, [&](auto r) {
    from_float(x, r);
    if constexpr (!std::is_same_v<decltype(r), float>) {
      if (to_float(r) < x) ++r.bits;
    }
    y = to_float(r);
  });
  return y;
}

inline float round_to(float x, DType dtype) {
  float y = x;
  with_float_type(dtype, [&](auto r) {
    from_float(x, r);
    y = to_float(r);
  });
  return y;
}

// Summary of the first `live` keys of one page and head; temp: 3 * D floats.
inline void summarise_page(const TensorView& k_cache, const TensorView& summary, int64_t id, int64_t h, int64_t live,
                           float scale, float* temp) {
  const int64_t D = k_cache.shape[3];
  float *low = temp, *high = temp + D, *row = temp + 2 * D;
  for (int64_t i = 0; i < live; ++i) {
    float* x = i == 0 ? low : row;
    load_row(k_cache, id * k_cache.stride[0] + h * k_cache.stride[1] + i * k_cache.stride[2], D, scale, x);
    if (i == 0) std::copy(low, low + D, high);
    for (int64_t d = 0; d < D; ++d) {
      low[d] = x[d] < low[d] || x[d] != x[d] ? x[d] : low[d];
      high[d] = x[d] > high[d] || x[d] != x[d] ? x[d] : high[d];
    }
  }
  for (int64_t d = 0; d < D; ++d) {
    const float centre = round_to(low[d] * 0.5f + high[d] * 0.5f, summary.dtype);
    const float up = subtract_up(high[d], centre), down = subtract_up(centre, low[d]);
    high[d] = round_up(larger(up, down), summary.dtype);
    low[d] = centre;
  }
  const int64_t at = id * summary.stride[0] + h * summary.stride[1];
  store_row(summary, at, D, low, 1.0f);
  store_row(summary, at + summary.stride[2], D, high, 1.0f);
}

}  // namespace sic::cpu::SIC_ISA
