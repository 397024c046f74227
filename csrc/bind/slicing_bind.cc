// The slicing ops for Python: objects become argument structs, missing outputs are allocated once the inputs are
// checked.
#include "bind/call.h"
#include "bind/defaults.h"
#include "slicing/attention.h"
#include "slicing/sketch.h"
#include "slicing/validate.h"

namespace sic::bind {
namespace {

using namespace slicing;

py::tuple append_kv(py::handle k, py::handle v, py::handle k_cache, py::handle v_cache, py::handle slots,
                    py::handle k_scale, py::handle v_scale, py::handle bits, py::handle norm, py::handle centre,
                    py::handle summary, py::handle workspace, int code) {
  Args in("append_kv", workspace);
  AppendKvArgs a{in("k", k),
                 in("v", v),
                 in.out("k_cache", k_cache),
                 in.out("v_cache", v_cache),
                 in("slots", slots),
                 in.scale("k_scale", k_scale),
                 in.scale("v_scale", v_scale),
                 in.out("sketch.bits", bits),
                 in.out("sketch.norm", norm),
                 in("params.centre", centre),
                 in.out("summary", summary)};
  Call call(in, k_cache, a.k_cache, workspace, code);
  call.run(slicing::append_kv, a, true, [] {});
  return py::tuple(0);
}

py::tuple key_sketch(py::handle k_cache, py::handle block_table, py::handle seq_lens, py::handle centre,
                     py::handle k_scale, int planes, py::handle start, py::object bits, py::object norm,
                     py::handle workspace, int code) {
  Args in("key_sketch", workspace);
  KeySketchArgs a{in("k_cache", k_cache),      in("block_table", block_table), in("seq_lens", seq_lens),
                  in("params.centre", centre), in.scale("k_scale", k_scale),   planes,
                  in("start", start),          in.out("bits", bits),           in.out("norm", norm)};
  Call call(in, k_cache, a.k_cache, workspace, code);
  call.run(slicing::key_sketch, a, a.bits.given() && a.norm.given(), [&] {
    const int64_t P = a.k_cache.shape[0], Hkv = a.k_cache.shape[1], page = a.k_cache.shape[2];
    // Head-first in memory: a scan follows one head through all pages.
    const int64_t bytes = planes * sketch_plane_bytes(page, a.k_cache.shape[3]);
    if (bits.is_none()) bits = output(bits, k_cache, {Hkv, P, bytes}, DType::u8, true).attr("transpose")(0, 1);
    if (norm.is_none()) norm = output(norm, k_cache, {Hkv, P, page}, DType::bf16, true).attr("transpose")(0, 1);
    a.bits = in.out("bits", bits), a.norm = in.out("norm", norm);
  });
  return py::make_tuple(bits, norm);
}

SketchScoreArgs scoring(Args& in, py::handle q, py::handle bits, py::handle norm, py::handle block_table,
                        py::handle seq_lens, int64_t page, int planes, int pool, Number scale, Count max_seq_len) {
  SketchScoreArgs a;
  a.q = in("q", q), a.bits = in("sketch.bits", bits), a.norm = in("sketch.norm", norm);
  a.block_table = in("block_table", block_table), a.seq_lens = in("seq_lens", seq_lens);
  a.page = page, a.planes = planes, a.pool = static_cast<Pool>(pool);
  a.scale = default_scale(scale, a.q);
  a.max_seq_len = max_seq_len.value_or(positions(a.block_table, page));
  return a;
}

py::object score_tokens(py::handle q, py::handle bits, py::handle norm, py::handle block_table, py::handle seq_lens,
                        int64_t page, int planes, int pool, Number scale, Count max_seq_len, py::object out,
                        py::handle workspace, int code) {
  Args in("score_tokens", workspace);
  SketchScoreArgs a = scoring(in, q, bits, norm, block_table, seq_lens, page, planes, pool, scale, max_seq_len);
  a.out = in.out("out", out);
  Call call(in, q, a.q, workspace, code);
  call.run(slicing::score_tokens, a, a.out.given(), [&] {
    a.out =
        in.out("out", out = output(out, q, {a.q.shape[0], a.q.shape[1], a.norm.shape[1], a.max_seq_len}, DType::i16));
  });
  return out;
}

py::object refine_tokens(py::handle q, py::handle bits, py::handle norm, py::handle block_table, py::handle seq_lens,
                         int64_t page, py::handle indices, py::handle counts, int pool, Number scale, Count max_seq_len,
                         py::object out, py::handle workspace, int code) {
  Args in("refine_tokens", workspace);
  SketchScoreArgs a = scoring(in, q, bits, norm, block_table, seq_lens, page, 2, pool, scale, max_seq_len);
  a.cand_indices = in("candidates.indices", indices), a.cand_counts = in("candidates.counts", counts);
  a.out = in.out("out", out);
  Call call(in, q, a.q, workspace, code);
  call.run(slicing::refine_tokens, a, a.out.given(), [&] {
    a.out = in.out(
        "out", out = output(out, q, {a.q.shape[0], a.q.shape[1], a.norm.shape[1], dim(a.cand_indices, 3)}, DType::i16));
  });
  return out;
}

py::object page_summary(py::handle k_cache, py::handle block_table, py::handle seq_lens, py::handle k_scale,
                        py::handle start, py::object summary, py::handle workspace, int code) {
  Args in("page_summary", workspace);
  PageSummaryArgs a{in("k_cache", k_cache),   in("block_table", block_table),
                    in("seq_lens", seq_lens), in.scale("k_scale", k_scale),
                    in("start", start),       in.out("summary", summary)};
  Call call(in, k_cache, a.k_cache, workspace, code);
  call.run(slicing::page_summary, a, a.summary.given(), [&] {
    const TensorView& c = a.k_cache;
    a.summary = in.out("summary", summary = output(summary, k_cache, {c.shape[0], c.shape[1], 2, c.shape[3]},
                                                   summary_dtype(c.dtype), true));
  });
  return summary;
}

py::object score_pages(py::handle q, py::handle summary, py::handle block_table, py::handle seq_lens, int64_t page,
                       double beta, int pool, Number scale, Count max_seq_len, py::object out, py::handle workspace,
                       int code) {
  Args in("score_pages", workspace);
  ScorePagesArgs a{in("q", q), in("summary", summary),   in("block_table", block_table), in("seq_lens", seq_lens),
                   page,       static_cast<float>(beta), static_cast<Pool>(pool),        0,
                   0,          in.out("out", out)};
  a.scale = default_scale(scale, a.q);
  a.max_seq_len = max_seq_len.value_or(positions(a.block_table, page));
  Call call(in, q, a.q, workspace, code);
  call.run(slicing::score_pages, a, a.out.given(), [&] {
    a.out = in.out("out",
                   out = output(out, q, {a.q.shape[0], a.q.shape[1], a.summary.shape[1], ceil_div(a.max_seq_len, page)},
                                DType::f32));
  });
  return out;
}

py::tuple select(py::handle scores, py::handle seq_lens, int unit, int64_t page, double ratio, py::handle budget,
                 Number top_p, int64_t sink, int64_t recent, py::handle keep, Count capacity, py::object indices,
                 py::object counts, py::handle workspace, int code) {
  Args in("select", workspace);
  SelectArgs a;
  a.scores = in("scores", scores), a.seq_lens = in("seq_lens", seq_lens);
  a.unit = static_cast<Unit>(unit), a.page = page, a.ratio = ratio;
  if (PyLong_Check(budget.ptr())) {
    a.budget = budget.cast<int64_t>();
    Check("select").value(a.budget >= 0, "budget", static_cast<double>(a.budget), "0 or more tokens");
  } else {
    a.budgets = in("budget", budget);
  }
  a.top_p = top_p.value_or(1.0), a.sink = sink, a.recent = recent;
  a.keep = in("keep", keep);
  Check("select").value(capacity.value_or(0) >= 0, "capacity", static_cast<double>(capacity.value_or(0)),
                        "0 or more slots");
  a.indices = in.out("indices", indices), a.counts = in.out("counts", counts);
  Call call(in, scores, a.scores, workspace, code);
  call.run(slicing::select, a, a.indices.given() && a.counts.given(), [&] {
    const TensorView& s = a.scores;
    const int64_t K = capacity.value_or(selection_capacity(a));
    a.indices =
        in.out("indices", indices = output(indices, scores, {s.shape[0], s.shape[1], s.shape[2], K}, DType::i32));
    a.counts = in.out("counts", counts = output(counts, scores, {s.shape[0], s.shape[1], s.shape[2]}, DType::i32));
  });
  return py::make_tuple(indices, counts);
}

PagedKv paged(Args& in, py::handle k_cache, py::handle v_cache, py::handle block_table, py::handle seq_lens,
              py::handle k_scale = {}, py::handle v_scale = {}) {
  return {in("k_cache", k_cache),   in("v_cache", v_cache),       in("block_table", block_table),
          in("seq_lens", seq_lens), in.scale("k_scale", k_scale), in.scale("v_scale", v_scale)};
}

py::tuple gather(py::handle k_cache, py::handle v_cache, py::handle block_table, py::handle seq_lens,
                 py::handle indices, py::handle counts, int unit, py::object k, py::object v, py::object indptr,
                 py::handle workspace, int code) {
  Args in("gather", workspace);
  GatherArgs a{paged(in, k_cache, v_cache, block_table, seq_lens),
               {in("selection.indices", indices), in("selection.counts", counts), static_cast<Unit>(unit)},
               in.out("k", k),
               in.out("v", v),
               in.out("indptr", indptr)};
  Call call(in, k_cache, a.kv.k_cache, workspace, code);
  call.run(slicing::gather, a, a.k.given() && a.v.given() && a.indptr.given(), [&] {
    const TensorView& s = a.selected.indices;
    const int64_t rows = gathered_rows(a, call.exec());
    a.k = in.out("k", k = output(k, k_cache, {rows, a.kv.k_cache.shape[3]}, a.kv.k_cache.dtype));
    a.v = in.out("v", v = output(v, k_cache, {rows, a.kv.v_cache.shape[3]}, a.kv.v_cache.dtype));
    a.indptr =
        in.out("indptr", indptr = output(indptr, k_cache, {s.shape[0] * s.shape[1] * s.shape[2] + 1}, DType::i64));
  });
  return py::make_tuple(k, v, indptr);
}

AttentionArgs attention(Args& in, py::handle q, py::handle k_cache, py::handle v_cache, py::handle block_table,
                        py::handle seq_lens, Number scale, py::handle key_bias, Number softcap, Count window,
                        py::handle sinks, py::handle k_scale, py::handle v_scale, Count max_seq_len) {
  AttentionArgs a;
  a.q = in("q", q);
  a.kv = paged(in, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale);
  a.scale = default_scale(scale, a.q);
  a.key_bias = in("key_bias", key_bias), a.sinks = in("sinks", sinks);
  a.softcap = softcap_of(softcap), a.window = window.value_or(0);
  a.max_seq_len = max_seq_len.value_or(positions(a.kv.block_table, dim(a.kv.k_cache, 2)));
  return a;
}

py::tuple sliced_attention(py::handle q, py::handle k_cache, py::handle v_cache, py::handle block_table,
                           py::handle seq_lens, py::handle indices, py::handle counts, int unit, Number scale,
                           py::handle key_bias, Number softcap, Count window, py::handle sinks, py::handle k_scale,
                           py::handle v_scale, Count max_seq_len, py::object out, py::object lse, py::handle workspace,
                           int code) {
  Args in("sliced_attention", workspace);
  AttentionArgs a = attention(in, q, k_cache, v_cache, block_table, seq_lens, scale, key_bias, softcap, window, sinks,
                              k_scale, v_scale, max_seq_len);
  a.selected = {in("selection.indices", indices), in("selection.counts", counts), static_cast<Unit>(unit)};
  a.out = in.out("out", out), a.lse = in.out("lse", lse);
  Call call(in, q, a.q, workspace, code);
  call.run(slicing::sliced_attention, a, a.out.given() && a.lse.given(), [&] {
    a.out = in.out("out",
                   out = output(out, q, {a.q.shape[0], a.q.shape[1], a.q.shape[2], a.kv.v_cache.shape[3]}, a.q.dtype));
    a.lse = in.out("lse", lse = output(lse, q, {a.q.shape[0], a.q.shape[1], a.q.shape[2]}, DType::f32));
  });
  return py::make_tuple(out, lse);
}

py::tuple merge_states(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b, py::object out,
                       py::object lse, py::handle workspace, int code) {
  Args in("merge_states", workspace);
  MergeStatesArgs a{in("out_a", out_a), in("lse_a", lse_a), in("out_b", out_b),
                    in("lse_b", lse_b), in.out("out", out), in.out("lse", lse)};
  Call call(in, out_a, a.out_a, workspace, code);
  call.run(slicing::merge_states, a, a.out.given() && a.lse.given(), [&] {
    const TensorView& s = a.out_a;
    a.out = in.out("out", out = output(out, out_a, {s.shape[0], s.shape[1], s.shape[2]}, s.dtype));
    a.lse = in.out("lse", lse = output(lse, out_a, {s.shape[0], s.shape[1]}, DType::f32));
  });
  return py::make_tuple(out, lse);
}

py::tuple merge_many(py::handle outs, py::handle lses, py::object out, py::object lse, py::handle workspace, int code) {
  Args in("merge_many", workspace);
  MergeArgs a{in("outs", outs), in("lses", lses), in.out("out", out), in.out("lse", lse)};
  Call call(in, outs, a.outs, workspace, code);
  call.run(slicing::merge_many, a, a.out.given() && a.lse.given(), [&] {
    const TensorView& s = a.outs;
    a.out = in.out("out", out = output(out, outs, {s.shape[1], s.shape[2], s.shape[3]}, s.dtype));
    a.lse = in.out("lse", lse = output(lse, outs, {s.shape[1], s.shape[2]}, DType::f32));
  });
  return py::make_tuple(out, lse);
}

AttendArgs attending(Args& in, const AttentionArgs& attention, py::handle bits, py::handle norm, py::handle centre,
                     int planes, py::handle summary, py::handle keep) {
  AttendArgs a;
  a.attention = attention;
  a.bits = in("sketch.bits", bits), a.norm = in("sketch.norm", norm), a.centre = in("params.centre", centre),
  a.planes = planes;
  a.summary = in("summary", summary), a.keep = in("keep", keep);
  return a;
}

py::tuple attend(py::handle q, py::handle k_cache, py::handle v_cache, py::handle bits, py::handle norm,
                 py::handle centre, int planes, py::handle summary, py::handle block_table, py::handle seq_lens,
                 double ratio, double candidates, Number top_p, int64_t sink, int64_t recent, double beta, int pool,
                 Number max_omitted_mass, bool dense_layer, int64_t max_sliced_T, int64_t min_len, py::handle keep,
                 Number scale, py::handle key_bias, Number softcap, Count window, py::handle sinks, py::handle k_scale,
                 py::handle v_scale, Count max_seq_len, py::object out, py::object lse, py::object indices,
                 py::object counts, py::object omitted, py::object status, py::handle workspace, int code) {
  Args in("attend", workspace);
  AttendArgs a = attending(in,
                           attention(in, q, k_cache, v_cache, block_table, seq_lens, scale, key_bias, softcap, window,
                                     sinks, k_scale, v_scale, max_seq_len),
                           bits, norm, centre, planes, summary, keep);
  a.ratio = ratio, a.candidates = candidates, a.top_p = top_p.value_or(1.0), a.sink = sink, a.recent = recent;
  a.beta = static_cast<float>(beta), a.pool = static_cast<Pool>(pool);
  a.max_omitted_mass = static_cast<float>(max_omitted_mass.value_or(2.0));
  a.dense_layer = dense_layer, a.max_sliced_T = max_sliced_T, a.min_len = min_len;
  AttentionArgs& c = a.attention;
  c.out = in.out("out", out), c.lse = in.out("lse", lse);
  a.indices = in.out("indices", indices), a.counts = in.out("counts", counts),
  a.omitted_mass = in.out("omitted_mass", omitted), a.status = in.out("status", status);
  const bool given = c.out.given() && c.lse.given() && a.indices.given() && a.counts.given() &&
                     a.omitted_mass.given() && a.status.given();
  Call call(in, q, c.q, workspace, code);
  call.run(slicing::attend, a, given, [&] {
    const int64_t B = c.q.shape[0], T = c.q.shape[1], Hq = c.q.shape[2], Hkv = c.kv.k_cache.shape[1];
    c.out = in.out("out", out = output(out, q, {B, T, Hq, c.kv.v_cache.shape[3]}, c.q.dtype));
    c.lse = in.out("lse", lse = output(lse, q, {B, T, Hq}, DType::f32));
    a.counts = in.out("counts", counts = output(counts, q, {B, T, Hkv}, DType::i32));
    a.indices = in.out("indices", indices = output(indices, q, {B, T, Hkv, attend_capacity(a)}, DType::i32));
    a.omitted_mass = in.out("omitted_mass", omitted = output(omitted, q, {B, T, Hq}, DType::f32));
    a.status = in.out("status", status = output(status, q, {B, T, Hq}, DType::u8));
  });
  return py::make_tuple(out, lse, indices, counts, omitted, status);
}

// page, Dk: of the cache that the index stands for.
py::tuple select_slice(py::handle q, py::handle bits, py::handle norm, py::handle centre, int planes,
                       py::handle summary, py::handle block_table, py::handle seq_lens, int64_t page, double ratio,
                       double candidates, Number top_p, int64_t sink, int64_t recent, double beta, int pool,
                       int64_t min_len, py::handle keep, Number scale, py::handle key_bias, Number softcap,
                       Count window, Count max_seq_len, py::object indices, py::object counts, py::object log_unread,
                       py::handle workspace, int code) {
  Args in("select_slice", workspace);
  AttendArgs a;
  a.bits = in("sketch.bits", bits), a.norm = in("sketch.norm", norm), a.centre = in("params.centre", centre);
  a.planes = planes, a.summary = in("index", summary), a.keep = in("keep", keep);
  AttentionArgs& c = a.attention;
  c.q = in("q", q), c.kv.block_table = in("block_table", block_table), c.kv.seq_lens = in("seq_lens", seq_lens);
  const TensorView& index = a.summary.given() ? a.summary : a.norm;
  c.kv.k_cache = c.kv.v_cache = view_of(nullptr, DType::f32, dim(index, 0), dim(index, 1), page, dim(c.q, 3));
  c.scale = default_scale(scale, c.q), c.key_bias = in("key_bias", key_bias);
  c.softcap = softcap_of(softcap), c.window = window.value_or(0);
  c.max_seq_len = max_seq_len.value_or(positions(c.kv.block_table, page));
  a.ratio = ratio, a.candidates = candidates, a.top_p = top_p.value_or(1.0), a.sink = sink, a.recent = recent;
  a.beta = static_cast<float>(beta), a.pool = static_cast<Pool>(pool), a.min_len = min_len;
  a.max_sliced_T = dim(c.q, 1);
  a.indices = in("indices", indices), a.counts = in("counts", counts), a.omitted_mass = in("log_unread", log_unread);
  Call call(in, q, c.q, workspace, code);
  call.run(slicing::select_slice, a, a.indices.given() && a.counts.given() && a.omitted_mass.given(), [&] {
    const int64_t B = c.q.shape[0], T = c.q.shape[1], Hq = c.q.shape[2], Hkv = c.kv.k_cache.shape[1];
    a.counts = in("counts", counts = output(counts, q, {B, T, Hkv}, DType::i32));
    a.indices = in("indices", indices = output(indices, q, {B, T, Hkv, attend_capacity(a)}, DType::i32));
    a.omitted_mass = in("log_unread", log_unread = output(log_unread, q, {B, T, Hq}, DType::f32));
  });
  return py::make_tuple(indices, counts, log_unread);
}

}  // namespace

void bind_slicing(py::module_& m) {
  define(m, "append_kv", &append_kv);
  define(m, "key_sketch", &key_sketch);
  define(m, "score_tokens", &score_tokens);
  define(m, "refine_tokens", &refine_tokens);
  define(m, "page_summary", &page_summary);
  define(m, "score_pages", &score_pages);
  define(m, "select", &select);
  define(m, "gather", &gather);
  define(m, "sliced_attention", &sliced_attention);
  define(m, "merge_states", &merge_states);
  define(m, "merge_many", &merge_many);
  define(m, "attend", &attend);
  define(m, "select_slice", &select_slice);
}

}  // namespace sic::bind
