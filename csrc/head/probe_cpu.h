// A probe on one hidden state.
#pragma once
#include <algorithm>
#include <cmath>

#include "core/rows.h"
#include "head/head.h"

namespace sic::cpu::SIC_ISA {

// hidden: D floats.
SIC_INLINE void probe_row(const head::Probe& p, const float* hidden, int64_t b) {
  const int64_t R = p.projection.shape[0], D = p.projection.shape[1], n = p.vector.shape[0];
  float inner[head::kMaxRank];
  with_float_type(p.projection.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t r = 0; r < R; ++r) {
      const float dot = dot_row(hidden, p.projection.as<const T>() + r * p.projection.stride[0], D);
      inner[r] = p.activation == head::Activation::relu && dot < 0 ? 0.0f : dot;
    }
  });
  for (int64_t i = 0; i < n; ++i) {
    const float* vector = p.vector.as<const float>() + i * p.vector.stride[0];
    float score = dot_row(inner, vector, R) + p.bias.as<const float>()[i];
    if (p.link == head::Link::sigmoid) score = 1.0f / (1.0f + std::exp(-score));
    p.score.as<float>()[b * p.score.stride[0] + i] = score;
  }
}

}  // namespace sic::cpu::SIC_ISA
