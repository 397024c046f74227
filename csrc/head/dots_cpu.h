// Dot products of rows of hidden states with rows of weights, in tiles whose sums stay in registers.
//
// Every product is summed lane by lane along D, then across the lanes by halves, in whatever tile it lies.
#pragma once
#include <algorithm>

#include "core/simd.h"

#if defined(__AVX512BW__)
#define SIC_BF16_TARGET __attribute__((target("avx512bf16")))
#endif

namespace sic::cpu::SIC_ISA {

constexpr int kMostRows = W / 4;  // of a tile; its sums are W: one vector in the end

// Whether products of bf16 have instructions of their own on this machine.
SIC_INLINE bool multiplies_bf16() {
#if defined(__AVX512BW__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Brings the weights that are read next to the second-level cache while a tile of kColumns rows of them is worked on:
// some bytes ahead within long rows; where rows are short, in their own order, which the hardware can follow.
template <int kColumns>
struct Ahead {
  static constexpr int64_t kInRow = 4096, kInOrder = 8192;
  const char* at[kColumns];
  int64_t step, wrap, jump;  // bytes on for a byte of a row; behind byte `wrap` of a row so much further

  SIC_MEMBER_INLINE Ahead(const char* first, int64_t stride, int64_t row) {
    const bool long_rows = row > kInRow;
    for (int v = 0; v < kColumns; ++v) at[v] = first + (long_rows ? v * stride + kInRow : kInOrder + 64 * v);
    step = long_rows ? 1 : kColumns;
    wrap = long_rows ? row - kInRow : row;
    jump = kColumns * stride - row;
  }
  SIC_MEMBER_INLINE void operator()(int64_t byte) const {
    const int64_t from = byte * step + (byte < wrap ? 0 : jump);
    SIC_UNROLL
    for (int v = 0; v < kColumns; ++v) __builtin_prefetch(at[v] + from, 0, 2);
  }
};

// kRows rows of hidden (filled up with zeros behind D) times W / kRows rows of weights: sums[b * kColumns + v].
template <int kRows, class H, class T>
struct Tile {
  static constexpr int kColumns = W / kRows;

  static void sums(const H* hidden, int64_t Dp, const T* weights, int64_t stride, int64_t D, bool fetch, float* out) {
    const Ahead<kColumns> ahead(reinterpret_cast<const char*>(weights), stride * sizeof(T), D * sizeof(T));
    vf total[W] = {};
    int64_t i = 0;
    for (; i + W <= D; i += W) {
      if (fetch) ahead(i * static_cast<int64_t>(sizeof(T)));
      add(hidden + i, Dp, total, [&](int v) { return load(weights + v * stride + i); });
    }
    if (i < D)
      add(hidden + i, Dp, total, [&](int v) { return load_first(weights + v * stride + i, static_cast<int>(D - i)); });
    store(out, transpose_add(total));
  }

 private:
  template <class Weights>
  SIC_INLINE void add(const H* hidden, int64_t Dp, vf* total, Weights weights) {
    vf h[kRows];
    SIC_UNROLL
    for (int b = 0; b < kRows; ++b) h[b] = load(hidden + b * Dp);
    SIC_UNROLL
    for (int v = 0; v < kColumns; ++v) {
      const vf w = weights(v);
      SIC_UNROLL
      for (int b = 0; b < kRows; ++b) total[b * kColumns + v] = fma(h[b], w, total[b * kColumns + v]);
    }
  }
};

#if defined(__AVX512BW__)
template <int kRows>
struct Tile<kRows, bf16_t, bf16_t> {
  static constexpr int kColumns = W / kRows;

  SIC_BF16_TARGET static void sums(const bf16_t* hidden, int64_t Dp, const bf16_t* weights, int64_t stride, int64_t D,
                                   bool fetch, float* out) {
    __m512 total[W];
    if constexpr (kRows == 1) {  // memory decides: row after row, as the hardware likes it best
      for (int v = 0; v < kColumns; ++v) {
        __m512 sum = _mm512_setzero_ps();
        along(D, [&](int64_t i, __mmask32 live) SIC_BF16_TARGET {
          sum = _mm512_dpbf16_ps(sum, take(hidden + i), take(weights + v * stride + i, live));
        });
        total[v] = sum;
      }
    } else {
      const Ahead<kColumns> ahead(reinterpret_cast<const char*>(weights), stride * 2, D * 2);
      SIC_UNROLL
      for (int j = 0; j < W; ++j) total[j] = _mm512_setzero_ps();
      along(D, [&](int64_t i, __mmask32 live) SIC_BF16_TARGET {
        if (fetch) ahead(i * 2);
        __m512bh h[kRows];
        SIC_UNROLL
        for (int b = 0; b < kRows; ++b) h[b] = take(hidden + b * Dp + i);
        SIC_UNROLL
        for (int v = 0; v < kColumns; ++v) {
          const __m512bh w = take(weights + v * stride + i, live);
          SIC_UNROLL
          for (int b = 0; b < kRows; ++b) total[b * kColumns + v] = _mm512_dpbf16_ps(total[b * kColumns + v], h[b], w);
        }
      });
    }
    vf lanes[W];
    SIC_UNROLL
    for (int j = 0; j < W; ++j) lanes[j] = total[j];
    store(out, transpose_add(lanes));
  }

 private:
  template <class Step>
  SIC_BF16_TARGET SIC_INLINE void along(int64_t D, Step step) {
    int64_t i = 0;
    for (; i + 2 * W <= D; i += 2 * W) step(i, ~__mmask32{0});
    if (i < D) step(i, (__mmask32{1} << (D - i)) - 1);
  }
  SIC_BF16_TARGET SIC_INLINE __m512bh take(const bf16_t* p, __mmask32 live = ~__mmask32{0}) {
    return __m512bh(_mm512_maskz_loadu_epi16(live, p));
  }
};
#endif

// z[b][v] of kRows rows and n <= W columns.
template <int kRows, class H, class T>
SIC_INLINE void tile_rows(const H* hidden, int64_t Dp, const T* weights, int64_t stride, int64_t n, int64_t D,
                          bool fetch, float* z, int64_t z_stride) {
  using OneTile = Tile<kRows, H, T>;
  constexpr int kColumns = OneTile::kColumns;
  for (int64_t v = 0; v < n; v += kColumns) {
    const int64_t live = std::min<int64_t>(kColumns, n - v);
    float sums[W];
    if (live == kColumns) {
      OneTile::sums(hidden, Dp, weights + v * stride, stride, D, fetch, sums);
    } else {  // the last columns one by one: there is nothing to read behind them
      for (int b = 0; b < kRows; ++b)
        for (int64_t j = 0; j < live; ++j) {
          float one[W];
          Tile<1, H, T>::sums(hidden + b * Dp, Dp, weights + (v + j) * stride, 0, D, false, one);
          sums[b * kColumns + j] = one[0];
        }
    }
    for (int b = 0; b < kRows; ++b) std::memcpy(z + b * z_stride + v, sums + b * kColumns, live * sizeof(float));
  }
}

// z[b][v] = hidden[b] . weights[v] for rows x n; hidden rows of Dp elements, zeros from D on.
template <class H, class T>
SIC_INLINE void dots(const H* hidden, int64_t Dp, int64_t rows, const T* weights, int64_t stride, int64_t n, int64_t D,
                     float* z, int64_t z_stride) {
  for (int64_t v = 0; v < n; v += W) {
    for (int64_t b = 0; b < rows;) {
      const auto tile = [&](auto count) {
        tile_rows<count>(hidden + b * Dp, Dp, weights + v * stride, stride, std::min<int64_t>(W, n - v), D, b == 0,
                         z + b * z_stride + v, z_stride);
        b += count;
      };
      if (rows - b >= kMostRows)
        tile(std::integral_constant<int, kMostRows>{});
      else if (kMostRows > 2 && rows - b >= 2)
        tile(std::integral_constant<int, 2>{});
      else
        tile(std::integral_constant<int, 1>{});
    }
  }
}

}  // namespace sic::cpu::SIC_ISA
