// A borrowed, typed, strided view of somebody else's memory. The library owns no tensor.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace sic {

enum class Device : uint8_t { cpu, cuda };

constexpr int kMaxRank = 8;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::other;
  Device device = Device::cpu;
  int32_t device_id = 0;
  int32_t rank = -1;  // -1: the argument was not given
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};  // in elements

  bool given() const { return rank >= 0; }
  int64_t size() const {
    int64_t n = rank < 0 ? 0 : 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  int64_t stride_bytes(int axis) const { return stride[axis] * itemsize(dtype); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A contiguous view, for callers from C++.
template <class... Dims>
TensorView view_of(void* data, DType dtype, Dims... dims) {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.rank = sizeof...(dims);
  const int64_t shape[] = {static_cast<int64_t>(dims)..., 0};
  int64_t stride = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    v.shape[i] = shape[i];
    v.stride[i] = stride;
    stride *= shape[i];
  }
  return v;
}

// Reads element i of an int32 or int64 vector (block tables, lengths).
inline int64_t index_at(const TensorView& v, int64_t offset) {
  return v.dtype == DType::i32 ? static_cast<const int32_t*>(v.data)[offset]
                               : static_cast<const int64_t*>(v.data)[offset];
}

}  // namespace sic
