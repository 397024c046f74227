#include "core/check.h"

#include <sstream>

namespace sic {

std::string describe(const TensorView& v) {
  if (!v.given()) return "None";
  std::ostringstream s;
  s << name(v.dtype) << '[';
  for (int i = 0; i < v.rank; ++i) s << (i ? "," : "") << v.shape[i];
  s << ']';
  return s.str();
}

std::string describe(DTypeSet types) {
  std::string s;
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto t = static_cast<DType>(i);
    if (types.contains(t)) s += (s.empty() ? "" : "|") + std::string(name(t));
  }
  return s;
}

void Check::fail(const char* arg, const std::string& got, const std::string& expected) const {
  throw ArgumentError(std::string(op_) + ": " + arg + ": got " + got + ", expected " + expected);
}

void Check::value(bool ok, const char* arg, double got, const char* expected) const {
  if (ok) return;
  std::ostringstream s;
  s << got;
  fail(arg, s.str(), expected);
}

void Check::tensor(const char* arg, const TensorView& v, DTypeSet types, int rank) const {
  if (!v.given() || v.rank != rank || !types.contains(v.dtype))
    fail(arg, describe(v), describe(types) + " of rank " + std::to_string(rank));
  if (v.device != device_)
    fail(arg, describe(v) + (v.device == Device::cpu ? " on cpu" : " on cuda"),
         device_ == Device::cpu ? "a tensor on cpu" : "a tensor on cuda");
  if (rank > 0 && v.shape[rank - 1] > 1 && v.stride[rank - 1] != 1)
    fail(arg, describe(v) + " with stride " + std::to_string(v.stride[rank - 1]) + " in the last dimension",
         "a contiguous last dimension");
  if (v.data == nullptr && v.size() > 0) fail(arg, describe(v) + " without memory", "a tensor that has its data");
}

void Check::shape(const char* arg, const TensorView& v, std::initializer_list<int64_t> expected) const {
  int i = 0;
  bool ok = v.rank == static_cast<int>(expected.size());
  for (int64_t n : expected) ok = ok && (n < 0 || v.shape[i] == n), ++i;
  if (ok) return;
  std::string text = "shape [";
  i = 0;
  for (int64_t n : expected) text += (i++ ? "," : "") + (n < 0 ? std::string("*") : std::to_string(n));
  fail(arg, describe(v), text + "]");
}

void Check::output(const char* arg, const TensorView& v, DTypeSet types,
                   std::initializer_list<int64_t> expected) const {
  tensor(arg, v, types, expected);
  for (int i = 0; i < v.rank; ++i)
    if (v.shape[i] > 1 && v.stride[i] == 0)
      fail(arg, describe(v) + " with stride 0", "an output whose elements are distinct");
}

void Check::contiguous(const char* arg, const TensorView& v) const {
  int64_t stride = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    if (v.shape[i] > 1 && v.stride[i] != stride)
      fail(arg, describe(v) + " with gaps between its rows", "a contiguous tensor");
    stride *= v.shape[i];
  }
}

}  // namespace sic
