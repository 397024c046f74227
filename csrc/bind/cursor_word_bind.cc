// The progress word for Python: marks in memory that the caller has mapped.
#include <pybind11/pybind11.h>

#include <memory>
#include <new>
#include <string>

#include "bind/tensor_arg.h"
#include "core/check.h"
#include "replay/cursor_word.h"

namespace sic::bind {
namespace {

using namespace replay;

// Keeps the caller's memory mapped while it lives.
class ProgressView {
 public:
  explicit ProgressView(py::handle memory) {
    const Check check("ProgressView");
    if (PyObject_GetBuffer(memory.ptr(), &buffer_, PyBUF_WRITABLE) != 0) {
      PyErr_Clear();
      check.fail("memory", Py_TYPE(memory.ptr())->tp_name, "bytes that can be written");
    }
    const bool fits = buffer_.len >= Py_ssize_t{sizeof(Progress)} &&
                      reinterpret_cast<uintptr_t>(buffer_.buf) % alignof(Progress) == 0;
    if (!fits) {
      const std::string got = std::to_string(buffer_.len) + " bytes";
      PyBuffer_Release(&buffer_);
      check.fail("memory", got, "16 bytes, 8-byte aligned");
    }
    progress_ = static_cast<Progress*>(buffer_.buf);
  }
  ~ProgressView() { PyBuffer_Release(&buffer_); }
  ProgressView(const ProgressView&) = delete;
  ProgressView& operator=(const ProgressView&) = delete;

  void mark(uint64_t epoch, uint64_t layer, uint64_t position, uint64_t stamp) {
    progress_->mark({epoch, layer, position}, stamp);
  }
  // (epoch, layer, position, stamp); None where no whole word is.
  py::object read() const {
    Place p;
    if (!unpack(progress_->word.load(std::memory_order_acquire), &p)) return py::none();
    return py::make_tuple(p.epoch, p.layer, p.position, progress_->stamp.load(std::memory_order_relaxed));
  }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(progress_); }

 private:
  Py_buffer buffer_ = {};
  Progress* progress_ = nullptr;
};

}  // namespace

void bind_cursor_word(py::module_& m) {
  py::class_<ProgressView>(m, "ProgressView")
      .def(py::init<py::handle>())
      .def("mark", &ProgressView::mark)
      .def("read", &ProgressView::read)
      .def("address", &ProgressView::address);
}

}  // namespace sic::bind
