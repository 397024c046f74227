// Python objects as tensor views, and outputs made by torch.
#pragma once
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <vector>

#include "core/check.h"
#if defined(SIC_SIMT)
#include "simt/memory.h"
#endif

namespace sic::bind {

namespace py = pybind11;

// Reads tensors of one call: torch, NumPy, CuPy, JAX or anything else with DLPack or `__cuda_array_interface__`. Views
// stay valid while this object lives.
class Args {
 public:
  // workspace: given to the call later on; where the arguments lie is only noted if there is one.
  Args(const char* op, py::handle workspace) : op_(op) {
    if (workspace && !workspace.is_none()) memories_.reserve(24);
  }
  TensorView operator()(const char* arg, py::handle object) { return keep(arg, object, read(arg, object, false)); }
  // One that the op writes to.
  TensorView out(const char* arg, py::handle object) { return keep(arg, object, read(arg, object, true)); }
  // A rank-0 or rank-1 f32 tensor, or a Python number.
  TensorView scale(const char* arg, py::handle object);
  // Scratch memory: what is in it when the call begins does not matter, and no argument may lie in it.
  TensorView workspace(py::handle object);

  // The cudaStream_t that work on `array` belongs to: torch's or CuPy's current one, else the default stream.
  void* stream(py::handle array, int device_id) const;
  // Work on `stream` runs after what the arrays' own streams hold.
  void wait_for_arrays(void* stream, int device_id) const;

 private:
  struct Memory {
    const char* arg;
    Extent extent;
  };

  TensorView read(const char* arg, py::handle object, bool written);
  TensorView read_dlpack(const Check& check, const char* arg, py::handle object, py::handle dlpack);
  TensorView keep(const char* arg, py::handle object, const TensorView& view);
  // Under the emulator, memory that kernels may touch until the call ends.
  void offer(const char* arg, py::handle object, const TensorView& view);

  const char* op_;
  py::list alive_;
  std::vector<Memory> memories_;  // of the arguments
  std::vector<void*> producers_;  // streams on which arrays may still be written
  float numbers_[4];
  int used_ = 0;
#if defined(SIC_SIMT)
  std::vector<simt::Offered> offered_;
#endif
};

#if defined(SIC_SIMT)
// While this thread captures a graph: its stream, the memory that its replays may touch, and whose that is.
struct SimtCapture {
  void* stream = nullptr;
  std::vector<simt::Offered> offered;
  py::list alive;
};
SimtCapture*& simt_capture();
#endif

// `given`, or a new tensor on the device of `like` (an argument of the call).
py::object output(py::handle given, py::handle like, std::initializer_list<int64_t> shape, DType dtype,
                  bool zero = false);

// Whether calls on a CUDA device check lengths, page ids and lists too (SIC_CHECK).
bool device_checks();
void set_device_checks(bool on);

void register_errors();

}  // namespace sic::bind
