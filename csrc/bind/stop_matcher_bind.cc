// The stop matcher for Python. The emulator's module has none: nothing here runs on a device.
#if !defined(SIC_SIMT)
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bind/tensor_arg.h"
#include "head/stop_matcher.h"

namespace sic::bind {
namespace {

using head::StopMatcher;

// The chunks as a tuple of bytes, which nobody can change while they are read.
py::tuple chunks_of(const StopMatcher& matcher, py::handle chunks) {
  const Check check("StopMatcher.feed");
  const bool sequence = PyList_Check(chunks.ptr()) || PyTuple_Check(chunks.ptr());
  check.require(sequence, "chunks", Py_TYPE(chunks.ptr())->tp_name, "a list of bytes");
  auto tuple = py::reinterpret_steal<py::tuple>(PySequence_Tuple(chunks.ptr()));
  if (!tuple) throw py::error_already_set();
  check.require(static_cast<int64_t>(tuple.size()) == matcher.rows(), "chunks", std::to_string(tuple.size()),
                std::to_string(matcher.rows()) + ", one a row");
  for (size_t i = 0; i < tuple.size(); ++i) {
    PyObject* chunk = PyTuple_GET_ITEM(tuple.ptr(), i);
    if (!PyBytes_Check(chunk))
      check.fail("chunks", Py_TYPE(chunk)->tp_name + (" at [" + std::to_string(i) + "]"), "bytes");
  }
  return tuple;
}

PyObject* bytes_of(const StopMatcher::Safe& safe) {
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(safe.size()));
  if (!bytes) throw py::error_already_set();
  char* to = PyBytes_AS_STRING(bytes);
  safe.held.copy(to, safe.held.size());
  safe.chunk.copy(to + safe.held.size(), safe.chunk.size());
  return bytes;
}

// What may be emitted. Whether a row is matched and how much of it is to be cut go to bool [B] and i64 [B]. Between the
// first row and the last no Python code runs: the step is taken for all rows or for none.
py::list feed(StopMatcher& matcher, py::handle chunks, py::handle matched, py::handle trim) {
  Args in("StopMatcher.feed", py::none());
  const TensorView is_matched = in.out("matched", matched), cut = in.out("trim", trim);
  const Check check("StopMatcher.feed");
  check.output("matched", is_matched, DType::boolean, {matcher.rows()});
  check.output("trim", cut, DType::i64, {matcher.rows()});
  const py::tuple given = chunks_of(matcher, chunks);
  py::list safe(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    PyObject* chunk = PyTuple_GET_ITEM(given.ptr(), i);
    const auto row = static_cast<int64_t>(i);
    const auto released = matcher.feed(row, {PyBytes_AS_STRING(chunk), static_cast<size_t>(PyBytes_GET_SIZE(chunk))});
    PyList_SET_ITEM(safe.ptr(), i, bytes_of(released));
    is_matched.as<bool>()[i] = matcher.matched(row);
    cut.as<int64_t>()[i] = matcher.trim(row);
  }
  return safe;
}

py::list finish(StopMatcher& matcher, const std::vector<int64_t>& rows) {
  py::list rest;
  for (int64_t row : rows) {
    const std::string_view held = matcher.finish(row);
    rest.append(py::bytes(held.data(), held.size()));
  }
  return rest;
}

}  // namespace

// Rows are checked by sic_kernels/head/stops.py, the only caller.
void bind_stop_matcher(py::module_& m) {
  py::class_<StopMatcher>(m, "StopMatcher")
      .def(py::init([](std::vector<std::string> stops, int64_t rows, bool include) {
        return std::make_unique<StopMatcher>(std::move(stops), StopMatcher::Options{rows, include});
      }))
      .def("feed", &feed)
      .def("finish", &finish)
      .def("reset",
           [](StopMatcher& matcher, const std::vector<int64_t>& rows) {
             for (int64_t row : rows) matcher.reset(row);
           })
      .def("reorder", &StopMatcher::reorder)
      .def("rows", &StopMatcher::rows)
      .def("nbytes", &StopMatcher::nbytes);
}

}  // namespace sic::bind
#endif
