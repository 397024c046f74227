// One call of an op from Python: checks, allocation of what was not given, the kernel without the GIL.
#pragma once
#include <optional>
#include <type_traits>

#include "bind/tensor_arg.h"
#include "core/op.h"

namespace sic::bind {

// The last argument of every op: check and allocate only, or run; kSize with a device asks for its bytes of workspace.
enum Code { kCheck = 0, kCpu = 1, kCuda = 2, kSize = 4 };

// Thrown in place of a result when the bytes of workspace are asked for.
struct WorkspaceSize {
  int64_t bytes;
};

// As m.def(), but an integer is an integer: pybind11 would cut off what is behind the point of NumPy's numbers, of
// fractions and of tensors. An int is still taken for a double.
template <class T>
constexpr bool kIsWhole = std::is_integral_v<T> || std::is_same_v<T, std::optional<int64_t>>;
template <class Result, class... A>
void define(py::module_& m, const char* name, Result (*function)(A...)) {
  m.def(name, function, py::arg().noconvert(kIsWhole<A>)...);
}

class Call {
 public:
  Call(Args& in, py::handle first, const TensorView& view, py::handle workspace, int code)
      : in_(in), first_(first), workspace_(workspace), size_only_(code & kSize) {
    const int device = code & ~kSize;
    exec_.device = device == kCheck ? view.device : device == kCuda ? Device::cuda : Device::cpu;
    exec_.device_id = view.device_id;
    exec_.run = device != kCheck;
    exec_.device_values = device_checks();
  }

  const Exec& exec() const { return exec_; }

  // `allocate` makes the missing outputs, from inputs that are right.
  template <class A, class Allocate>
  void run(const Op<A>& op, A& args, bool outputs_given, Allocate allocate) {
    if (exec_.device == Device::cuda) exec_.stream = in_.stream(first_, exec_.device_id);
    if (exec_.device == Device::cuda && exec_.run && !size_only_) in_.wait_for_arrays(exec_.stream, exec_.device_id);
    if (!outputs_given || size_only_) {
      Exec inputs = exec_;
      inputs.outputs = inputs.run = false;
      op(args, inputs);
      if (size_only_) throw WorkspaceSize{exec_.run ? op.workspace(args, exec_) : 0};
      allocate();
      exec_.inputs = false;
    }
    if (exec_.device == Device::cpu) exec_.workspace = in_.workspace(workspace_);
    if (exec_.run && exec_.device == Device::cuda) {  // what has been checked has a size
      Exec outputs = exec_;
      outputs.run = false;
      op(args, outputs);
      exec_.inputs = exec_.outputs = false;
      take_workspace(op.workspace(args, exec_));
    }
    py::gil_scoped_release release;
    op(args, exec_);
  }

 private:
  void take_workspace(int64_t bytes) {
    if (workspace_.is_none() && bytes > 0) own_ = aligned_bytes(bytes);
    exec_.workspace = in_.workspace(own_ ? py::handle(own_) : workspace_);
  }

  // torch aligns to less on some devices.
  py::object aligned_bytes(int64_t bytes) {
    const py::object room = output({}, first_, {bytes + kWorkspaceAlignment}, DType::u8);
    const auto skew = room.attr("data_ptr")().cast<uintptr_t>() % kWorkspaceAlignment;
    return room.attr("narrow")(0, skew ? kWorkspaceAlignment - skew : 0, bytes);
  }

  Args& in_;
  py::handle first_, workspace_;
  bool size_only_;
  py::object own_;
  Exec exec_;
};

}  // namespace sic::bind
