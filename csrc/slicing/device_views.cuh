// What kernels of the slicing family take by value: pointers and strides, no more. Made on the host from TensorViews.
#pragma once
#include "core/gpu_views.cuh"
#include "slicing/slicing.h"

namespace sic::gpu {

// Division of a position by the page size: one wide product, exact below 2^31.
struct PageSplit {
  uint32_t page = 1, multiplier = 0;
  int shift = 0;

  static PageSplit of(int64_t page_size) {
    PageSplit s;
    s.page = static_cast<uint32_t>(page_size > 1 ? page_size : 1);
    s.shift = 31;
    while (uint64_t{1} << (s.shift - 31) < s.page) ++s.shift;
    // Rounded up, it is below 2^32 because page > 2^(shift - 32).
    s.multiplier = static_cast<uint32_t>(((uint64_t{1} << s.shift) + s.page - 1) / s.page);
    return s;
  }
  __device__ __forceinline__ uint32_t index(uint32_t pos) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(pos) * multiplier >> shift);
  }
};

struct alignas(16) Place {
  int64_t page_id;
  uint32_t offset;
};

// Where the positions of each sequence lie. Without a table, page b is sequence b itself.
struct PageMap {
  const void* table = nullptr;
  int64_t stride = 0;  // elements, from one sequence to the next
  PageSplit split;
  bool wide = false;

  static PageMap of(const TensorView& block_table, int64_t page) {
    PageMap m;
    m.split = PageSplit::of(page);
    if (!block_table.given()) return m;
    m.table = block_table.data, m.stride = block_table.stride[0], m.wide = block_table.dtype == DType::i64;
    return m;
  }
  __device__ __forceinline__ int64_t id(int64_t b, uint32_t page_number) const {
    if (!table) return b;
    const int64_t at = b * stride + page_number;
    return wide ? static_cast<const int64_t*>(table)[at] : static_cast<int64_t>(static_cast<const int32_t*>(table)[at]);
  }
  __device__ __forceinline__ Place place(int64_t b, uint32_t pos) const {
    const uint32_t n = split.index(pos);
    return {id(b, n), pos - n * split.page};
  }
};

// Lengths, and how many positions query token t of T sees.
struct SeqLens {
  IntVector lens;

  static SeqLens of(const TensorView& v) { return {IntVector::of(v)}; }
  __device__ __forceinline__ int64_t operator[](int64_t b) const { return lens[b]; }
  __device__ __forceinline__ int64_t visible(int64_t b, int64_t T, int64_t t, int64_t limit) const {
    const int64_t n = lens[b] - T + t + 1;
    return n < 0 ? 0 : n < limit ? n : limit;
  }
};

// Rows addressed by up to three outer axes, for example a cache [P, Hkv, page, D] or q [B, T, Hq, D]; strides in bytes.
struct Rows3 {
  char* data = nullptr;
  int64_t stride[3] = {};

  // The first axes of v; axes that v lacks have stride 0.
  static Rows3 of(const TensorView& v) {
    Rows3 r;
    if (!v.given()) return r;
    r.data = static_cast<char*>(v.data);
    for (int i = 0; i < 3 && i < v.rank; ++i) r.stride[i] = v.stride_bytes(i);
    return r;
  }
  __device__ __forceinline__ char* at(int64_t i, int64_t j, int64_t k) const {
    return data + i * stride[0] + j * stride[1] + k * stride[2];
  }
  template <class T>
  __device__ __forceinline__ T* as(int64_t i, int64_t j, int64_t k) const {
    return reinterpret_cast<T*>(at(i, j, k));
  }
};

// f8 scale of each head.
using HeadScale = FloatVector;

// Keys and values of all sequences.
struct DeviceKv {
  Rows3 k, v;  // by (page id, head, offset in the page)
  PageMap pages;
  SeqLens seq_lens;
  HeadScale k_scale, v_scale;

  static DeviceKv of(const slicing::PagedKv& kv) {
    return {Rows3::of(kv.k_cache),    Rows3::of(kv.v_cache),     PageMap::of(kv.block_table, kv.k_cache.shape[2]),
            SeqLens::of(kv.seq_lens), HeadScale::of(kv.k_scale), HeadScale::of(kv.v_scale)};
  }
};

// Sketch arrays, by (page id, head); strides in elements.
struct DeviceSketch {
  uint8_t* bits = nullptr;
  bf16_t* norm = nullptr;
  int64_t bits_stride[2] = {}, norm_stride[2] = {};

  static DeviceSketch of(const TensorView& bits, const TensorView& norm) {
    DeviceSketch s;
    if (!bits.given()) return s;
    s.bits = bits.as<uint8_t>(), s.norm = norm.as<bf16_t>();
    for (int i = 0; i < 2; ++i) s.bits_stride[i] = bits.stride[i], s.norm_stride[i] = norm.stride[i];
    return s;
  }
  __device__ __forceinline__ uint8_t* page_bits(int64_t id, int64_t h) const {
    return bits + id * bits_stride[0] + h * bits_stride[1];
  }
  __device__ __forceinline__ bf16_t* page_norm(int64_t id, int64_t h) const {
    return norm + id * norm_stride[0] + h * norm_stride[1];
  }
};

// A selection's rows, by (sequence, query token, KV head); strides in elements.
struct DeviceSelection {
  int32_t* indices = nullptr;
  int32_t* counts = nullptr;
  int64_t indices_stride[3] = {}, counts_stride[3] = {};

  static DeviceSelection of(const TensorView& indices, const TensorView& counts) {
    DeviceSelection s;
    if (!indices.given()) return s;
    s.indices = indices.as<int32_t>(), s.counts = counts.as<int32_t>();
    for (int i = 0; i < 3; ++i) s.indices_stride[i] = indices.stride[i], s.counts_stride[i] = counts.stride[i];
    return s;
  }
  __device__ __forceinline__ int32_t* row(int64_t b, int64_t t, int64_t h) const {
    return indices + b * indices_stride[0] + t * indices_stride[1] + h * indices_stride[2];
  }
  __device__ __forceinline__ int32_t& count(int64_t b, int64_t t, int64_t h) const {
    return counts[b * counts_stride[0] + t * counts_stride[1] + h * counts_stride[2]];
  }
};

// ---- host side ----

// The widest access, in bytes (a power of two up to 16), to which every row of v is aligned and a whole multiple.
inline int row_access_bytes(const TensorView& v) {
  uint64_t any = reinterpret_cast<uintptr_t>(v.data) | static_cast<uint64_t>(v.shape[v.rank - 1]) * itemsize(v.dtype);
  for (int i = 0; i + 1 < v.rank; ++i)
    if (v.shape[i] > 1) any |= static_cast<uint64_t>(v.stride_bytes(i));
  int bytes = 16;
  while (any & (bytes - 1)) bytes /= 2;
  return bytes;
}

}  // namespace sic::gpu
