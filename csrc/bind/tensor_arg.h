// Python objects as tensor views, and outputs made by torch.
#pragma once
#include <pybind11/pybind11.h>

#include <initializer_list>

#include "core/check.h"
#if defined(SIC_SIMT)
#include <vector>

#include "simt/memory.h"
#endif

namespace sic::bind {

namespace py = pybind11;

// Reads tensors of one call: torch, NumPy, CuPy, JAX or anything else with DLPack or `__cuda_array_interface__`. Views
// stay valid while this object lives.
class Args {
 public:
  explicit Args(const char* op) : op_(op) {}
  TensorView operator()(const char* arg, py::handle object) { return on_device(arg, object, read(arg, object)); }
  // A rank-0 or rank-1 f32 tensor, or a Python number.
  TensorView scale(const char* arg, py::handle object);

  // The cudaStream_t that work on `array` belongs to: torch's or CuPy's current one, else the default stream.
  void* stream(py::handle array, int device_id) const;

 private:
  TensorView read(const char* arg, py::handle object);
  // Under the emulator, memory that kernels may touch until the call ends.
  TensorView on_device(const char* arg, py::handle object, const TensorView& view);

  const char* op_;
  py::list alive_;
  float numbers_[4];
  int used_ = 0;
#if defined(SIC_SIMT)
  std::vector<simt::Offered> offered_;
#endif
};

#if defined(SIC_SIMT)
// While a graph is captured: its stream, and the memory that its replays may touch.
struct SimtCapture {
  void* stream = nullptr;
  std::vector<simt::Offered> offered;
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
