// What kernels of every family take by value for small arguments. Made on the host from TensorViews.
#pragma once
#include "core/gpu.cuh"
#include "core/tensor_view.h"

namespace sic::gpu {

// A vector of int32 or int64.
struct IntVector {
  const void* data = nullptr;  // nullptr: not given
  int64_t stride = 0;          // elements
  bool wide = false;

  static IntVector of(const TensorView& v) {
    IntVector r;
    if (!v.given()) return r;
    r.data = v.data, r.stride = v.stride[0], r.wide = v.dtype == DType::i64;
    return r;
  }
  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride]
                : static_cast<int64_t>(static_cast<const int32_t*>(data)[i * stride]);
  }
};

// A vector of floats: in device memory, or one number for all.
struct FloatVector {
  const float* data = nullptr;
  int64_t stride = 0;
  float number = 1;

  static FloatVector of(const TensorView& v) {
    FloatVector s;
    if (!v.given()) return s;
    if (v.device == Device::cpu)
      s.number = *v.as<const float>();
    else
      s.data = v.as<const float>(), s.stride = v.rank == 0 ? 0 : v.stride[0];
    return s;
  }
  __device__ __forceinline__ float operator[](int64_t i) const { return data ? data[i * stride] : number; }
};

}  // namespace sic::gpu
