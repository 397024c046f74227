// The ops of the replay family for Python.
#include "replay/replay.h"

#include "bind/call.h"

namespace sic::bind {
namespace {

py::object uniform(py::handle key, int64_t count, py::object out, py::handle workspace, int code) {
  Args in("uniform", workspace);
  replay::UniformArgs a{in("key", key), count, in.out("out", out)};
  Call call(in, key, a.key, workspace, code);
  call.run(replay::uniform, a, a.out.given(),
           [&] { a.out = in.out("out", out = output(out, key, {count}, DType::f32)); });
  return out;
}

}  // namespace

void bind_replay(py::module_& m) { define(m, "uniform", &uniform); }

}  // namespace sic::bind
