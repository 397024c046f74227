// attend: checks, then the backend.
#include <algorithm>

#include "slicing/attention.h"
#include "slicing/select.h"
#include "slicing/sketch.h"
#include "slicing/validate.h"

SIC_OP_KERNELS(attend, slicing::AttendArgs)
SIC_OP_KERNELS(select_slice, slicing::AttendArgs)

namespace sic::slicing {

bool attend_is_dense(const AttendArgs& a) { return a.dense_layer || a.attention.q.shape[1] > a.max_sliced_T; }

SelectArgs attend_selection(const AttendArgs& a) {
  SelectArgs s;
  s.seq_lens = a.attention.kv.seq_lens;
  s.unit = a.summary.given() ? Unit::page : Unit::token;
  s.page = a.attention.kv.k_cache.shape[2];
  s.ratio = a.ratio, s.top_p = a.top_p;
  s.sink = a.sink, s.recent = a.recent, s.keep = a.keep;
  s.min_len = a.min_len;
  s.least = 1;
  s.indices = a.indices, s.counts = a.counts;
  const TensorView& q = a.attention.q;
  s.scores = view_of(nullptr, DType::i16, q.shape[0], q.shape[1], a.attention.kv.k_cache.shape[1],
                     s.unit == Unit::token ? a.attention.max_seq_len : ceil_div(a.attention.max_seq_len, s.page));
  return s;
}

int64_t attend_capacity(const AttendArgs& a) {
  return attend_is_dense(a) ? 0 : selection_capacity(attend_selection(a));
}

AttentionArgs attend_attention(const AttendArgs& a) {
  AttentionArgs c = a.attention;
  c.selected = {a.indices, a.counts, a.summary.given() ? Unit::page : Unit::token};
  if (!a.indices.given())
    c.selected.indices =
        view_of(nullptr, DType::i32, c.q.shape[0], c.q.shape[1], c.kv.k_cache.shape[1], attend_capacity(a));
  return c;
}

namespace {

void check_policy(const Check& check, const AttendArgs& a, const CacheDims& d) {
  const TensorView& q = a.attention.q;
  const int64_t D = q.shape[3];
  check.require(a.summary.given() != a.bits.given(), "index", a.summary.given() ? "both kinds" : "None",
                "a KeySketch or a page summary");
  if (a.bits.given()) {
    check_sketch(check, a.bits, a.norm, a.planes, d, D);
    check.tensor("params.centre", a.centre, DType::f32, {d.Hkv, D});
  } else {
    check.tensor("index", a.summary, kFloats, {d.P, d.Hkv, 2, D});
  }
  check.value(a.ratio > 0 && a.ratio <= 1, "policy.ratio", a.ratio, "above 0, at most 1");
  check.value(a.candidates > 0 && a.candidates <= 1, "policy.candidates", a.candidates, "above 0, at most 1");
  check.value(a.top_p > 0 && a.top_p <= 1, "policy.top_p", a.top_p, "above 0, at most 1");
  check_count(check, "policy.sink", a.sink);
  check_count(check, "policy.recent", a.recent);
  check_count(check, "policy.min_len", a.min_len);
  check_finite(check, "policy.beta", a.beta);
  check_keep(check, a.keep, d.B);
}

void check_inputs(const Check& check, const AttendArgs& a) {
  check_policy(check, a, check_attention(check, a.attention));
  if (a.summary.given()) check.tensor("index", a.summary, summary_dtype(a.attention.kv.k_cache.dtype), a.summary.rank);
}

// The index stands for the cache: its pages and heads are the cache's.
void check_slice_inputs(const Check& check, const AttendArgs& a) {
  const AttentionArgs& c = a.attention;
  const TensorView& index = a.summary.given() ? a.summary : a.norm;
  check.require(index.given(), "index", "None", "a KeySketch or a page summary");
  check.tensor("index", index, a.summary.given() ? kFloats : DTypeSet(DType::bf16), a.summary.given() ? 4 : 3);
  const int64_t page = c.kv.k_cache.shape[2];
  const CacheDims d = check_cache(check, "index", index, kFloats, c.kv.block_table, c.kv.seq_lens, page);
  check_query(check, c.q, d, c.q.rank == 4 ? c.q.shape[3] : -1);
  check_attention_extras(check, c, d);
  check_policy(check, a, d);
}

void check_selection_outputs(const Check& check, const AttendArgs& a) {
  const TensorView& q = a.attention.q;
  const int64_t B = q.shape[0], T = q.shape[1], Hkv = a.attention.kv.k_cache.shape[1];
  check.output("indices", a.indices, DType::i32, {B, T, Hkv, -1});
  const int64_t K = a.indices.shape[3], least = attend_capacity(a);
  if (K < least) check.fail("indices", std::to_string(K), "at least " + std::to_string(least) + " slots a row");
  check.output("counts", a.counts, DType::i32, {B, T, Hkv});
  if (!attend_is_dense(a)) check_capacity(check, attend_selection(a));
}

void check_outputs(const Check& check, const AttendArgs& a) {
  const TensorView& q = a.attention.q;
  check_attention_outputs(check, a.attention);
  check_selection_outputs(check, a);
  check.output("omitted_mass", a.omitted_mass, DType::f32, {q.shape[0], q.shape[1], q.shape[2]});
  check.output("status", a.status, DType::u8, {q.shape[0], q.shape[1], q.shape[2]});
  const AttentionArgs& c = a.attention;
  check.apart({{"out", c.out},
               {"lse", c.lse},
               {"indices", a.indices},
               {"counts", a.counts},
               {"omitted_mass", a.omitted_mass},
               {"status", a.status}},
              {&q, &c.kv.k_cache, &c.kv.v_cache, &c.kv.block_table, &c.kv.seq_lens, &c.kv.k_scale, &c.kv.v_scale,
               &c.key_bias, &c.sinks, &a.bits, &a.norm, &a.centre, &a.summary, &a.keep});
}

void check_slice_outputs(const Check& check, const AttendArgs& a) {
  const TensorView& q = a.attention.q;
  check_selection_outputs(check, a);
  check.output("log_unread", a.omitted_mass, DType::f32, {q.shape[0], q.shape[1], q.shape[2]});
  const AttentionArgs& c = a.attention;
  check.apart({{"indices", a.indices}, {"counts", a.counts}, {"log_unread", a.omitted_mass}},
              {&q, &c.kv.block_table, &c.kv.seq_lens, &c.key_bias, &a.bits, &a.norm, &a.centre, &a.summary, &a.keep});
}

bool is_empty(const AttendArgs& a) { return a.attention.q.size() == 0; }

int64_t cpu_workspace(const AttendArgs& a) {
  return attention_workspace(attend_is_dense(a) ? a.attention : attend_attention(a));
}

}  // namespace

const Op<AttendArgs> attend{"attend", check_inputs, check_outputs, SIC_KERNELS(attend), is_empty, cpu_workspace};
const Op<AttendArgs> select_slice{"select_slice", check_slice_inputs, check_slice_outputs, SIC_KERNELS(select_slice),
                                  is_empty};

}  // namespace sic::slicing
