// Rows in groups of 8 consecutive elements: how a lane holds its part of a key, a query or a summary.
#pragma once
#include "core/gpu.cuh"
#include "core/tensor_view.h"

namespace sic::gpu {

constexpr int kGroup = 8;

// 8 elements of type T as they lie in memory; those beyond the row's end are 0.
template <class T>
struct Group {
  static constexpr int kWords = kGroup * static_cast<int>(sizeof(T)) / 4;
  uint32_t word[kWords];

  // c must be known to the compiler.
  __device__ __forceinline__ T element(int c) const {
    T x;
    if constexpr (sizeof(T) == 4) {
      x = __uint_as_float(word[c]);
    } else if constexpr (sizeof(T) == 2) {
      x.bits = static_cast<uint16_t>(word[c / 2] >> (c % 2 * 16));
    } else {
      x.bits = static_cast<uint8_t>(word[c / 4] >> (c % 4 * 8));
    }
    return x;
  }
  // The element must be 0 before.
  __device__ __forceinline__ void put(int c, T x) {
    if constexpr (sizeof(T) == 4) {
      word[c] = __float_as_uint(x);
    } else if constexpr (sizeof(T) == 2) {
      word[c / 2] |= static_cast<uint32_t>(x.bits) << (c % 2 * 16);
    } else {
      word[c / 4] |= static_cast<uint32_t>(x.bits) << (c % 4 * 8);
    }
  }
};

// Elements of group j that lie in a row of D.
__device__ __forceinline__ int group_size(int D, int j) {
  const int n = D - j * kGroup;
  return n < 0 ? 0 : n < kGroup ? n : kGroup;
}

// The first n elements at p. wide: p is aligned to min(16, 8 * sizeof(T)) bytes. Rows may be overwritten in place, so
// the loads are ordinary ones.
template <class T>
__device__ __forceinline__ Group<T> load_group(const T* p, int n, bool wide) {
  Group<T> g = {};
  if (wide && n == kGroup) {
    if constexpr (sizeof(T) == 1) {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      g.word[0] = v.x, g.word[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < Group<T>::kWords; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(p) + i);
        g.word[i] = v.x, g.word[i + 1] = v.y, g.word[i + 2] = v.z, g.word[i + 3] = v.w;
      }
    }
    return g;
  }
#pragma unroll
  for (int c = 0; c < kGroup; ++c)
    if (c < n) g.put(c, p[c]);
  return g;
}

template <class T>
__device__ __forceinline__ void store_group(T* p, const Group<T>& g, int n, bool wide) {
  if (wide && n == kGroup) {
    if constexpr (sizeof(T) == 1) {
      *reinterpret_cast<uint2*>(p) = make_uint2(g.word[0], g.word[1]);
    } else {
#pragma unroll
      for (int i = 0; i < Group<T>::kWords; i += 4)
        store16(reinterpret_cast<uint32_t*>(p) + i, make_uint4(g.word[i], g.word[i + 1], g.word[i + 2], g.word[i + 3]));
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < kGroup; ++c)
    if (c < n) p[c] = g.element(c);
}

// Lanes that share a row of D elements, a group each (further groups follow in rounds): a power of two, 2 to 32.
inline int lanes_per_row(int64_t D) {
  int lanes = 2;
  while (lanes < 32 && lanes * kGroup < D) lanes *= 2;
  return lanes;
}

// Whether every group of every row of v can be loaded whole.
inline bool groups_aligned(const TensorView& v) {
  const uint64_t bytes = itemsize(v.dtype) == 1 ? 8 : 16;
  uint64_t any = reinterpret_cast<uintptr_t>(v.data);
  for (int i = 0; i + 1 < v.rank; ++i)
    if (v.shape[i] > 1) any |= static_cast<uint64_t>(v.stride_bytes(i));
  return any % bytes == 0;
}

}  // namespace sic::gpu
