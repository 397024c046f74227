// The delta ops for Python. Pages and codec arrive as tuples of tensors, in the order of their structs.
#include "bind/call.h"
#include "bind/defaults.h"
#include "delta/delta.h"

namespace sic::bind {
namespace {

using delta::Codec;
using delta::Pages;
using delta::Templates;

Templates templates(Args& in, const char* centres, const py::tuple& t) {
  return {in(centres, t[0]),          in("templates.search", t[1]), in("templates.half_norm", t[2]),
          in("templates.mean", t[3]), in("templates.step", t[4]),   in("templates.bound", t[5])};
}

// (k_bits, v_bits, k_rotation, k_templates, v_templates, (lo, hi, undo), interleaved)
Codec codec(Args& in, const py::tuple& t) {
  Codec c;
  c.k_bits = t[0].cast<int>(), c.v_bits = t[1].cast<int>(), c.k_rotation = t[2].cast<int64_t>();
  c.k = templates(in, "codec.k_templates.centres", t[3]), c.v = templates(in, "codec.v_templates.centres", t[4]);
  const py::tuple rope = t[5];
  c.rope = {in("rope.lo", rope[0]), in("rope.hi", rope[1]), in("rope.undo", rope[2]), t[6].cast<bool>()};
  return c;
}

Pages pages(Args& in, const py::tuple& t) {
  return {in("pages.k_codes", t[0]), in("pages.v_codes", t[1]),   in("pages.tags", t[2]),
          in("pages.raw", t[3]),     in("pages.raw_owner", t[4]), in("pages.raw_state", t[5])};
}

py::tuple delta_encode(py::handle k, py::handle v, py::handle positions, py::handle slots, py::tuple of, int64_t sinks,
                       py::tuple into, py::handle bits, py::handle norm, py::handle centre, py::handle workspace,
                       int code) {
  Args in("delta_encode", workspace);
  delta::EncodeArgs a;
  a.k = in("k", k), a.v = in("v", v), a.positions = in("positions", positions), a.slots = in("slots", slots);
  a.codec = codec(in, of), a.sinks = sinks, a.pages = pages(in, into);
  a.bits = in("sketch.bits", bits), a.norm = in("sketch.norm", norm), a.centre = in("params.centre", centre);
  Call call(in, k, a.k, workspace, code);
  call.run(delta::delta_encode, a, true, [] {});
  return py::tuple(0);
}

py::tuple delta_decode(py::handle seq_lens, py::handle block_table, py::tuple from, py::tuple of, py::handle positions,
                       Count max_seq_len, int dtype, py::object k, py::object v, py::handle workspace, int code) {
  Args in("delta_decode", workspace);
  delta::DecodeArgs a;
  a.pages = pages(in, from), a.codec = codec(in, of);
  a.block_table = in("block_table", block_table), a.seq_lens = in("seq_lens", seq_lens);
  a.positions = in("positions", positions);
  a.max_seq_len = max_seq_len.value_or(bind::positions(a.block_table, dim(a.pages.k_codes, 2)));
  a.k = in("k", k), a.v = in("v", v);
  Call call(in, seq_lens, a.seq_lens, workspace, code);
  call.run(delta::delta_decode, a, a.k.given() && a.v.given(), [&] {
    const int64_t B = a.seq_lens.shape[0], S = a.max_seq_len, Hkv = a.pages.k_codes.shape[1];
    const auto type = static_cast<DType>(dtype);
    a.k = in("k", k = output(k, seq_lens, {B, S, Hkv, a.codec.k.centres.shape[2]}, type));
    a.v = in("v", v = output(v, seq_lens, {B, S, Hkv, a.codec.v.centres.shape[2]}, type));
  });
  return py::make_tuple(k, v);
}

// The cache that coded pages stand for: its shape.
TensorView decoded_shape(const TensorView& codes, const TensorView& centres) {
  return view_of(nullptr, DType::f32, dim(codes, 0), dim(codes, 1), dim(codes, 2), dim(centres, 2));
}

py::tuple delta_attention(py::handle q, py::tuple from, py::tuple of, py::handle block_table, py::handle seq_lens,
                          py::handle indices, py::handle counts, int unit, py::handle positions, py::handle tail_k,
                          py::handle tail_v, py::handle tail_start, Number scale, py::handle key_bias, Number softcap,
                          Count window, py::handle sinks, Count max_seq_len, py::object out, py::object lse,
                          py::handle workspace, int code) {
  Args in("delta_attention", workspace);
  delta::AttentionArgs a;
  a.pages = pages(in, from), a.codec = codec(in, of), a.positions = in("positions", positions);
  a.tail = {in("raw_tail.k", tail_k), in("raw_tail.v", tail_v), in("raw_tail.start", tail_start)};
  slicing::AttentionArgs& c = a.attention;
  c.q = in("q", q);
  c.kv.k_cache = decoded_shape(a.pages.k_codes, a.codec.k.centres);
  c.kv.v_cache = decoded_shape(a.pages.k_codes, a.codec.v.centres);
  c.kv.block_table = in("block_table", block_table), c.kv.seq_lens = in("seq_lens", seq_lens);
  c.selected = {in("selection.indices", indices), in("selection.counts", counts), static_cast<slicing::Unit>(unit)};
  c.scale = default_scale(scale, c.q);
  c.key_bias = in("key_bias", key_bias), c.sinks = in("sinks", sinks);
  c.softcap = softcap_of(softcap), c.window = window.value_or(0);
  c.max_seq_len = max_seq_len.value_or(bind::positions(c.kv.block_table, dim(a.pages.k_codes, 2)));
  c.out = in("out", out), c.lse = in("lse", lse);
  Call call(in, q, c.q, workspace, code);
  call.run(delta::delta_attention, a, c.out.given() && c.lse.given(), [&] {
    const int64_t B = c.q.shape[0], T = c.q.shape[1], Hq = c.q.shape[2];
    c.out = in("out", out = output(out, q, {B, T, Hq, a.codec.v.centres.shape[2]}, c.q.dtype));
    c.lse = in("lse", lse = output(lse, q, {B, T, Hq}, DType::f32));
  });
  return py::make_tuple(out, lse);
}

}  // namespace

void bind_delta(py::module_& m) {
  define(m, "delta_encode", &delta_encode);
  define(m, "delta_decode", &delta_decode);
  define(m, "delta_attention", &delta_attention);
}

}  // namespace sic::bind
