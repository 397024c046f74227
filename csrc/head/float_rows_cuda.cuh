// Rows of any of the three float types, read as f32: for what is read once or in small amounts.
#pragma once
#include "core/gpu.cuh"
#include "core/tensor_view.h"

namespace sic::gpu {

struct FloatRows {
  const char* data;
  int64_t stride;  // bytes
  DType dtype;
  bool wide;  // rows are 16-byte aligned

  static FloatRows of(const TensorView& v) {
    FloatRows r{};
    if (!v.given()) return r;
    r.data = static_cast<const char*>(v.data), r.stride = v.stride_bytes(0), r.dtype = v.dtype;
    r.wide = (reinterpret_cast<uintptr_t>(v.data) | (v.shape[0] > 1 ? static_cast<uintptr_t>(r.stride) : 0)) % 16 == 0;
    return r;
  }

  __device__ __forceinline__ float operator()(int64_t row, int64_t i) const {
    const char* p = data + row * stride;
    if (dtype == DType::f32) return reinterpret_cast<const float*>(p)[i];
    if (dtype == DType::f16) return to_float(reinterpret_cast<const f16_t*>(p)[i]);
    return to_float(reinterpret_cast<const bf16_t*>(p)[i]);
  }
  // Elements i to i + 8, i a multiple of 8; those from `end` on are 0.
  __device__ __forceinline__ void load8(int64_t row, int64_t i, int64_t end, float (&x)[8]) const {
    if (wide && i + 8 <= end) {
      const char* p = data + row * stride + i * (dtype == DType::f32 ? 4 : 2);
      const uint4 v = load_cached16(p);
      if (dtype == DType::f32) {
        const uint4 w = load_cached16(p + 16);
        const uint32_t words[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = __uint_as_float(words[j]);
        return;
      }
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 f = dtype == DType::f16 ? unpack_f16x2(words[j]) : unpack_bf16x2(words[j]);
        x[2 * j] = f.x, x[2 * j + 1] = f.y;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = i + j < end ? (*this)(row, i + j) : 0.0f;
  }
};

}  // namespace sic::gpu
