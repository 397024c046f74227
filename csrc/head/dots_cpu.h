// Dot products of rows of hidden states with rows of weights, in tiles that stay in registers.
#pragma once
#include <algorithm>

#include "core/simd.h"

#if defined(__AVX512BW__)
#define SIC_BF16_TARGET __attribute__((target("avx512bf16")))
#endif

namespace sic::cpu::SIC_ISA {

constexpr int kTileColumns = 4, kTileRows = W / kTileColumns;  // W sums, turned into one vector at the end

// Whether products of bf16 have instructions of their own on this machine.
SIC_INLINE bool multiplies_bf16() {
#if defined(__AVX512BW__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// A tile of z: rows b of hidden (kRows <= kTileRows), columns v of the weights.
template <int kRows, class H, class T>
struct Tile {
  const H* hidden;
  int64_t hidden_stride;
  const T* weights[kTileColumns];
  int64_t ahead;  // from a weight to the one that is wanted next at its place

  // sums[b * kTileColumns + v], one lane each
  SIC_MEMBER_INLINE vf sums(int64_t D) const {
    vf total[W] = {};
    int64_t i = 0;
    for (; i + W <= D; i += W) {
      vf w[kTileColumns];
      SIC_UNROLL
      for (int v = 0; v < kTileColumns; ++v) {
        w[v] = load(weights[v] + i);
        prefetch(weights[v] + i + ahead);
      }
      SIC_UNROLL
      for (int b = 0; b < kRows; ++b) {
        const vf h = load(hidden + b * hidden_stride + i);
        SIC_UNROLL
        for (int v = 0; v < kTileColumns; ++v) total[b * kTileColumns + v] = fma(h, w[v], total[b * kTileColumns + v]);
      }
    }
    if (i < D) {
      for (int v = 0; v < kTileColumns; ++v) {
        const vf w = load_first(weights[v] + i, static_cast<int>(D - i));
        for (int b = 0; b < kRows; ++b)  // hidden is filled up with zeros
          total[b * kTileColumns + v] = fma(load(hidden + b * hidden_stride + i), w, total[b * kTileColumns + v]);
      }
    }
    return transpose_add(total);
  }
};

#if defined(__AVX512BW__)
template <int kRows>
struct Tile<kRows, bf16_t, bf16_t> {
  const bf16_t* hidden;
  int64_t hidden_stride;
  const bf16_t* weights[kTileColumns];
  int64_t ahead;

  SIC_BF16_TARGET inline vf sums(int64_t D) const {
    __m512 total[W];
    SIC_UNROLL
    for (int i = 0; i < W; ++i) total[i] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 2 * W <= D; i += 2 * W) add(i, ~__mmask32{0}, total);
    if (i < D) add(i, (__mmask32{1} << (D - i)) - 1, total);
    vf lanes[W];
    SIC_UNROLL
    for (int j = 0; j < W; ++j) lanes[j] = total[j];
    return transpose_add(lanes);
  }

 private:
  SIC_BF16_TARGET SIC_MEMBER_INLINE void add(int64_t i, __mmask32 live, __m512* total) const {
    __m512bh w[kTileColumns];
    SIC_UNROLL
    for (int v = 0; v < kTileColumns; ++v) {
      w[v] = __m512bh(_mm512_maskz_loadu_epi16(live, weights[v] + i));
      prefetch(weights[v] + i + ahead);
    }
    SIC_UNROLL
    for (int b = 0; b < kRows; ++b) {
      const auto h = __m512bh(_mm512_loadu_si512(hidden + b * hidden_stride + i));
      SIC_UNROLL
      for (int v = 0; v < kTileColumns; ++v)
        total[b * kTileColumns + v] = _mm512_dpbf16_ps(total[b * kTileColumns + v], h, w[v]);
    }
  }
};
#endif

template <int kRows, class H, class T>
SIC_INLINE void tile_of(const H* hidden, int64_t Dp, const T* const* weights, int64_t ahead, int64_t n, int64_t D,
                        float* z, int64_t z_stride) {
  Tile<kRows, H, T> tile{hidden, Dp, {}, ahead};
  std::copy_n(weights, kTileColumns, tile.weights);
  const vf sums = tile.sums(D);
  for (int b = 0; b < kRows; ++b)
    for (int v = 0; v < n; ++v) z[b * z_stride + v] = sums[b * kTileColumns + v];
}

// z[b][v] = hidden[b] . weights[v] for rows x n; hidden rows of Dp elements, zeros from D on.
template <class H, class T>
SIC_INLINE void dots(const H* hidden, int64_t Dp, int64_t rows, const T* weights, int64_t stride, int64_t n, int64_t D,
                     float* z, int64_t z_stride) {
  for (int64_t v = 0; v < n; v += kTileColumns) {
    const int64_t live = std::min<int64_t>(kTileColumns, n - v);
    const T* at[kTileColumns];
    for (int j = 0; j < kTileColumns; ++j) at[j] = weights + (v + std::min<int64_t>(j, live - 1)) * stride;
    const int64_t ahead = v + 2 * kTileColumns <= n ? kTileColumns * stride : 0;
    int64_t b = 0;
    for (; b + kTileRows <= rows; b += kTileRows)
      tile_of<kTileRows>(hidden + b * Dp, Dp, at, b == 0 ? ahead : 0, live, D, z + b * z_stride + v, z_stride);
    for (; b < rows; ++b)
      tile_of<1>(hidden + b * Dp, Dp, at, b == 0 ? ahead : 0, live, D, z + b * z_stride + v, z_stride);
  }
}

}  // namespace sic::cpu::SIC_ISA
