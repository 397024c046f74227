// Argument checks and the one error format:
//   op: argument: got float64[8,3,16,64], expected float32|float16|bfloat16 of rank 4
#pragma once
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/tensor_view.h"

namespace sic {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ArgumentError : public Error {
 public:
  using Error::Error;
};

// Where the elements of a view lie: first and last byte, last exclusive.
struct Extent {
  const char *data = nullptr, *first = nullptr, *last = nullptr;
  bool dense = true;  // no gaps: the elements cover it

  Extent() = default;
  explicit Extent(const TensorView& v);
  // Whether both surely have a byte in common: views with gaps that are interleaved are taken as meant.
  bool shares(const Extent& other) const {
    const bool meet = first < last && other.first < other.last && first < other.last && other.first < last;
    return meet && (data == other.data || (dense && other.dense) || covers(other.data) || other.covers(data));
  }
  bool covers(const char* element) const { return dense && first <= element && element < last; }
};

std::string describe(const TensorView& v);  // float32[2,3]
std::string describe(DTypeSet types);       // float32|float16

// Checks the arguments of one op; every failure throws ArgumentError and nothing has been touched.
class Check {
 public:
  // device_id -1: any. device_values: whether host() reads tensors back from a CUDA device.
  explicit Check(const char* op, Device device = Device::cpu, int device_id = -1, bool device_values = false,
                 void* stream = nullptr)
      : op_(op), device_(device), device_id_(device_id), device_values_(device_values), stream_(stream) {}

  [[noreturn]] void fail(const char* arg, const std::string& got, const std::string& expected) const;
  void require(bool ok, const char* arg, const std::string& got, const std::string& expected) const {
    if (!ok) fail(arg, got, expected);
  }
  // A number in place of a tensor: got 7, expected <text>.
  void value(bool ok, const char* arg, double got, const char* expected) const;

  // Element type, rank, device and alignment; the last dimension must be contiguous.
  void tensor(const char* arg, const TensorView& v, DTypeSet types, int rank) const;
  void optional(const char* arg, const TensorView& v, DTypeSet types, int rank) const {
    if (v.given()) tensor(arg, v, types, rank);
  }
  // Exact shape; -1 accepts any size.
  void shape(const char* arg, const TensorView& v, std::initializer_list<int64_t> expected) const;
  void tensor(const char* arg, const TensorView& v, DTypeSet types, std::initializer_list<int64_t> expected) const {
    tensor(arg, v, types, static_cast<int>(expected.size()));
    shape(arg, v, expected);
  }
  // Outputs may not alias themselves (stride 0).
  void output(const char* arg, const TensorView& v, DTypeSet types, std::initializer_list<int64_t> expected) const;
#if defined(SIC_SIMT)
  static void (*on_output)(const TensorView&);  // how the emulator learns what kernels may write
#endif
  // An output in the memory of an input would be read after it is written; two outputs in one memory would be written
  // twice.
  struct Output {
    const char* arg;
    const TensorView& view;
  };
  void apart(std::initializer_list<Output> outputs, std::initializer_list<const TensorView*> inputs) const;
  // Enough bytes, aligned.
  void workspace(const TensorView& workspace, int64_t bytes, int64_t alignment) const;
  // Whether the build has kernels for a device; Error if not.
  void built(bool ok, const char* kernels) const;
  // The tensor where its values can be read by the host: itself on the CPU; a copy that lives as long as this object
  // (where device values are to be checked, or `always`); else not given.
  TensorView host(const TensorView& v, bool always = false) const;
  // Every dimension contiguous.
  void contiguous(const char* arg, const TensorView& v) const;

  const char* op() const { return op_; }

 private:
  const char* op_;
  Device device_;
  int device_id_;
  bool device_values_;
  void* stream_;
  struct HostCopy {
    TensorView of;
    std::unique_ptr<char[]> bytes;
  };
  mutable std::vector<HostCopy> copies_;
};

}  // namespace sic
