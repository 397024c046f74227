// The ragged ops for Python.
#include "bind/call.h"

namespace sic::bind {

void bind_ragged(py::module_&) {}

}  // namespace sic::bind
