// Argument checks and the one error format:
//   op: argument: got float64[8,3,16,64], expected float32|float16|bfloat16 of rank 4
#pragma once
#include <initializer_list>
#include <stdexcept>
#include <string>

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

std::string describe(const TensorView& v);  // float32[2,3]
std::string describe(DTypeSet types);       // float32|float16

// Checks the arguments of one op; every failure throws ArgumentError and nothing has been touched.
class Check {
 public:
  explicit Check(const char* op, Device device = Device::cpu) : op_(op), device_(device) {}

  [[noreturn]] void fail(const char* arg, const std::string& got, const std::string& expected) const;
  void require(bool ok, const char* arg, const std::string& got, const std::string& expected) const {
    if (!ok) fail(arg, got, expected);
  }
  // A number in place of a tensor: got 7, expected <text>.
  void value(bool ok, const char* arg, double got, const char* expected) const;

  // Element type, rank and device; the last dimension must be contiguous.
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
  // Every dimension contiguous.
  void contiguous(const char* arg, const TensorView& v) const;

  const char* op() const { return op_; }

 private:
  const char* op_;
  Device device_;
};

}  // namespace sic
