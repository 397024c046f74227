// The ragged ops for Python.
#include "ragged/ragged.h"

#include "bind/call.h"
#include "bind/defaults.h"

namespace sic::bind {
namespace {

// A new tensor on the device of `like`: the leading sizes, then what `view` has behind its first `lead` dimensions.
py::object output_rows(py::handle like, const TensorView& view, int lead, std::initializer_list<int64_t> leading) {
  py::list shape;
  int64_t rows = 1, size = 1;
  for (const int64_t n : leading) shape.append(n), rows *= n;
  for (int i = lead; i < view.rank; ++i) shape.append(view.shape[i]), size *= view.shape[i];
  return output(py::none(), like, {rows, size}, view.dtype).attr("resize_")(shape);  // the same elements, other sizes
}

// rows: what cu_seqlens ends with, where the caller knows it; else it is read, which waits for a device.
py::object pack(py::handle padded, py::handle cu_seqlens, Count rows, py::object out, py::handle workspace, int code) {
  Args in("pack", workspace);
  ragged::PackArgs a{in("padded", padded), in("cu_seqlens", cu_seqlens), in.out("out", out)};
  Call call(in, padded, a.padded, workspace, code);
  call.run(ragged::pack, a, a.out.given(), [&] {
    const int64_t N = rows ? *rows : ragged::packed_rows(a, call.exec());
    a.out = in.out("out", out = output_rows(padded, a.padded, 2, {N}));
  });
  return out;
}

// fill: the bits of an element, as a signed integer.
py::object unpack(py::handle packed, py::handle cu_seqlens, int64_t max_len, int64_t fill, py::object out,
                  py::handle workspace, int code) {
  Args in("unpack", workspace);
  ragged::UnpackArgs a{in("packed", packed), in("cu_seqlens", cu_seqlens), max_len, fill, in.out("out", out)};
  Call call(in, packed, a.packed, workspace, code);
  call.run(ragged::unpack, a, a.out.given(), [&] {
    a.out = in.out("out", out = output_rows(packed, a.packed, 1, {a.cu_seqlens.shape[0] - 1, max_len}));
  });
  return out;
}

}  // namespace

void bind_ragged(py::module_& m) {
  define(m, "pack", &pack);
  define(m, "unpack", &unpack);
}

}  // namespace sic::bind
