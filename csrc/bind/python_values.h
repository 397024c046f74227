// Plain Python values as C++ ones, with the library's errors.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "core/check.h"

namespace sic::bind {

namespace py = pybind11;

inline std::string type_of(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

inline int64_t int_of(const char* op, const char* arg, py::handle object) {
  int overflow = 0;
  const int64_t value = PyIndex_Check(object.ptr()) ? PyLong_AsLongLongAndOverflow(object.ptr(), &overflow) : 0;
  if (!PyIndex_Check(object.ptr()) || overflow || (value == -1 && PyErr_Occurred())) {
    PyErr_Clear();
    Check(op).fail(arg, overflow ? "an integer of more than 64 bits" : type_of(object), "an integer");
  }
  return value;
}

}  // namespace sic::bind
