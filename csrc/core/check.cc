#include "core/check.h"

#include <algorithm>
#include <sstream>

#include "core/device.h"

namespace sic {
namespace {

bool same_memory(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i)
    if (a.shape[i] != b.shape[i] || a.stride[i] != b.stride[i]) return false;
  return true;
}

}  // namespace

Extent::Extent(const TensorView& v) : data(v.as<const char>()), first(data), last(data) {
  const int64_t size = v.size();
  if (size == 0) return;
  for (int i = 0; i < v.rank; ++i) (v.stride[i] < 0 ? first : last) += (v.shape[i] - 1) * v.stride_bytes(i);
  last += itemsize(v.dtype);
  dense = last - first <= size * itemsize(v.dtype);
}

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
  if (v.device != Device::cpu && device_id_ >= 0 && v.device_id != device_id_)
    fail(arg, describe(v) + " on cuda:" + std::to_string(v.device_id),
         "a tensor on cuda:" + std::to_string(device_id_));
  if (rank > 0 && v.shape[rank - 1] > 1 && v.stride[rank - 1] != 1)
    fail(arg, describe(v) + " with stride " + std::to_string(v.stride[rank - 1]) + " in the last dimension",
         "a contiguous last dimension");
  if (v.data == nullptr && v.size() > 0) fail(arg, describe(v) + " without memory", "a tensor that has its data");
  const auto skew = reinterpret_cast<uintptr_t>(v.data) % static_cast<uintptr_t>(itemsize(v.dtype));
  if (skew && v.size() > 0)
    fail(arg, describe(v) + " at " + std::to_string(skew) + " bytes past its alignment",
         "an address that is a multiple of " + std::to_string(itemsize(v.dtype)));
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

#if defined(SIC_SIMT)
void (*Check::on_output)(const TensorView&) = nullptr;
#endif

void Check::output(const char* arg, const TensorView& v, DTypeSet types,
                   std::initializer_list<int64_t> expected) const {
  tensor(arg, v, types, expected);
  for (int i = 0; i < v.rank; ++i)
    if (v.shape[i] > 1 && v.stride[i] == 0 && v.size() > 0)
      fail(arg, describe(v) + " with stride 0", "an output whose elements are distinct");
#if defined(SIC_SIMT)
  if (on_output) on_output(v);
#endif
}

void Check::apart(std::initializer_list<Output> outputs, std::initializer_list<const TensorView*> inputs) const {
  constexpr size_t kMostOutputs = 12;
  Extent extents[kMostOutputs];
  size_t known = 0;
  const auto compare = [&](const Extent& e, const char* whose) {
    for (size_t i = 0; i < known; ++i) {
      const Output& out = outputs.begin()[i];
      if (extents[i].shares(e)) fail(out.arg, describe(out.view) + " in the memory of " + whose, "memory of its own");
    }
  };
  for (const Output& out : outputs) {
    const Extent e(out.view);
    compare(e, out.arg);
    if (known == kMostOutputs) throw Error(std::string(op_) + ": too many outputs to compare");
    extents[known++] = e;
  }
  for (const TensorView* input : inputs)
    if (input->given()) compare(Extent(*input), "an input");
}

void Check::workspace(const TensorView& workspace, int64_t bytes, int64_t alignment) const {
  if (bytes == 0 && !workspace.given()) return;
  tensor("workspace", workspace, DType::u8, 1);
  if (workspace.shape[0] < bytes)
    fail("workspace", std::to_string(workspace.shape[0]), "at least " + std::to_string(bytes) + " bytes");
  const auto skew = static_cast<int64_t>(reinterpret_cast<uintptr_t>(workspace.data) % alignment);
  if (skew) fail("workspace", std::to_string(skew), "an address that is a multiple of " + std::to_string(alignment));
#if defined(SIC_SIMT)
  if (on_output) on_output(workspace);
#endif
}

void Check::built(bool ok, const char* kernels) const {
  if (!ok) throw Error(std::string(op_) + ": this build has no " + kernels + " kernels");
}

TensorView Check::host(const TensorView& v, bool always) const {
  if (!v.given() || v.device == Device::cpu) return v;
  if (!(always || device_values_)) return {};
  const Extent e(v);
  // Checks of one call ask for the same lengths and lists again.
  auto known = std::find_if(copies_.begin(), copies_.end(), [&](const HostCopy& c) { return same_memory(c.of, v); });
  if (known == copies_.end()) {
    known = copies_.insert(known, {v, std::unique_ptr<char[]>(new char[e.last - e.first])});
    copy_to_host(known->bytes.get(), e.first, e.last - e.first, stream_);
  }
  TensorView copy = v;
  copy.data = known->bytes.get() + (v.as<const char>() - e.first);
  copy.device = Device::cpu;
  return copy;
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
