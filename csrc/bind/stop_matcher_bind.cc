// The stop matcher for Python. The emulator's module has none: nothing here runs on a device.
#if !defined(SIC_SIMT)
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bind/tensor_arg.h"
#include "head/stop_matcher.h"

namespace sic::bind {
namespace {

using head::StopMatcher;
using Rows = std::optional<std::vector<int64_t>>;

// The chunks as a tuple of bytes, which nobody can change while they are read.
py::tuple chunks_of(const Check& check, py::handle chunks) {
  const bool sequence = PyList_Check(chunks.ptr()) || PyTuple_Check(chunks.ptr());
  check.require(sequence, "chunks", Py_TYPE(chunks.ptr())->tp_name, "a list of bytes");
  auto tuple = py::reinterpret_steal<py::tuple>(PySequence_Tuple(chunks.ptr()));
  if (!tuple) throw py::error_already_set();
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

// What may be emitted. Whether a row is matched and how much of it is to be cut go to bool [B] and i64 [B]. From the
// count of the rows to the last of them no Python code runs, so other threads, iterators and finalizers, which may
// change the matcher, see a step as a whole.
py::list feed(StopMatcher& matcher, py::handle chunks, py::handle matched, py::handle trim) {
  Args in("StopMatcher.feed", py::none());
  const TensorView is_matched = in.out("matched", matched), cut = in.out("trim", trim);
  const Check check("StopMatcher.feed");
  const py::tuple given = chunks_of(check, chunks);
  py::list safe(given.size());
  const int64_t rows = matcher.rows();
  check.require(static_cast<int64_t>(given.size()) == rows, "chunks", std::to_string(given.size()),
                std::to_string(rows) + ", one a row");
  check.output("matched", is_matched, DType::boolean, {rows});
  check.output("trim", cut, DType::i64, {rows});
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

// The rows that are named, or all: there may be fewer of them than when the caller looked.
std::vector<int64_t> rows_of(const StopMatcher& matcher, const char* op, const Rows& rows) {
  const int64_t end = matcher.rows();
  std::vector<int64_t> chosen(rows ? *rows : std::vector<int64_t>(static_cast<size_t>(end)));
  if (!rows) std::iota(chosen.begin(), chosen.end(), 0);
  for (const int64_t row : chosen)
    if (row < 0 || row >= end) Check(op).fail("rows", std::to_string(row), "rows from 0 to " + std::to_string(end - 1));
  return chosen;
}

py::list finish(StopMatcher& matcher, const Rows& rows) {
  const std::vector<int64_t> chosen = rows_of(matcher, "StopMatcher.finish", rows);
  py::list rest(chosen.size());
  for (size_t i = 0; i < chosen.size(); ++i) PyList_SET_ITEM(rest.ptr(), i, bytes_of({matcher.finish(chosen[i]), {}}));
  return rest;
}

void reset(StopMatcher& matcher, const Rows& rows) {
  for (const int64_t row : rows_of(matcher, "StopMatcher.reset", rows)) matcher.reset(row);
}

void reorder(StopMatcher& matcher, const std::vector<int64_t>& rows) {
  matcher.reorder(rows_of(matcher, "StopMatcher.reorder", rows));
}

}  // namespace

void bind_stop_matcher(py::module_& m) {
  py::class_<StopMatcher>(m, "StopMatcher")
      .def(py::init([](std::vector<std::string> stops, int64_t rows, bool include) {
        return std::make_unique<StopMatcher>(std::move(stops), StopMatcher::Options{rows, include});
      }))
      .def("feed", &feed)
      .def("finish", &finish)
      .def("reset", &reset)
      .def("reorder", &reorder)
      .def("rows", &StopMatcher::rows)
      .def("nbytes", &StopMatcher::nbytes);
}

}  // namespace sic::bind
#endif
