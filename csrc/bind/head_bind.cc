// The head ops for Python.
#include "bind/call.h"

namespace sic::bind {

void bind_head(py::module_&) {}

}  // namespace sic::bind
