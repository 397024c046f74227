// The stop matcher for Python.
#include "bind/call.h"

namespace sic::bind {

#if !defined(SIC_SIMT)
void bind_stop_matcher(py::module_&) {}
#endif

}  // namespace sic::bind
