// sliced_attention: checks, then the backend.
#include "slicing/attention.h"
#include "slicing/validate.h"

SIC_OP_KERNELS(sliced_attention, slicing::AttentionArgs)

namespace sic::slicing {

int64_t listed_tokens(const AttentionArgs& a) {
  if (!a.selected.indices.given()) return a.max_seq_len;
  const int64_t unit = a.selected.unit == Unit::page ? std::max<int64_t>(1, a.kv.k_cache.shape[2]) : 1;
  return std::min(a.selected.indices.shape[3], ceil_div(a.max_seq_len, unit)) * unit;
}

AttentionPlan plan_attention(const AttentionArgs& a) {
  AttentionPlan p;
  const int64_t B = a.q.shape[0], T = a.q.shape[1], Hkv = a.kv.k_cache.shape[1];
  p.group = a.q.shape[2] / Hkv;
  // Every query token of a sliced call has a list of its own; a dense call reads K and V once for several rows.
  p.tokens_per_task =
      a.selected.indices.given() ? 1 : std::max<int64_t>(1, std::min<int64_t>(T, kRowsPerTask / p.group));
  p.token_tasks = ceil_div(T, p.tokens_per_task);
  p.splits = std::max<int64_t>(1, ceil_div(listed_tokens(a), kSplitTokens));
  if (B * Hkv * p.token_tasks >= kTasksWithoutSplit) p.splits = 1;
  p.rows = B * T * a.q.shape[2];
  return p;
}

int64_t attention_workspace(const AttentionArgs& a) {
  const AttentionPlan p = plan_attention(a);
  return p.splits == 1 ? 0 : p.rows * p.splits * (a.kv.v_cache.shape[3] + 2) * int64_t{4};
}

void check_attention_extras(const Check& check, const AttentionArgs& a, const CacheDims& d) {
  const int64_t T = a.q.shape[1], Hq = a.q.shape[2];
  check_max_seq_len(check, a.max_seq_len, d, a.kv.seq_lens);
  if (a.selected.indices.given() || a.selected.counts.given()) check_selection(check, a.selected, d, T, a.kv.seq_lens);
  if (a.key_bias.given()) {
    check.tensor("key_bias", a.key_bias, DType::f32, {d.B, -1});
    check.value(a.key_bias.shape[1] >= a.max_seq_len, "key_bias", double(a.key_bias.shape[1]),
                "at least max_seq_len columns");
  }
  if (a.sinks.given()) check.tensor("sinks", a.sinks, DType::f32, {Hq});
  check.value(a.softcap == 0 || (a.softcap >= kSmallest && a.softcap <= kLargest), "softcap", a.softcap,
              "0 (none), or a finite float32 number of at least 2^-126");
  check.value(a.window >= 0, "window", double(a.window), "0 (none) or more positions");
  check_finite(check, "scale", a.scale);
}

CacheDims check_attention(const Check& check, const AttentionArgs& a) {
  const CacheDims d = check_kv(check, a.kv);
  check_query(check, a.q, d, a.kv.k_cache.shape[3]);
  check_attention_extras(check, a, d);
  return d;
}

void check_attention_outputs(const Check& check, const AttentionArgs& a) {
  const int64_t B = a.q.shape[0], T = a.q.shape[1], Hq = a.q.shape[2];
  check.output("out", a.out, a.q.dtype, {B, T, Hq, a.kv.v_cache.shape[3]});
  check.output("lse", a.lse, DType::f32, {B, T, Hq});
}

namespace {
void check_inputs(const Check& check, const AttentionArgs& a) { check_attention(check, a); }
void check_outputs(const Check& check, const AttentionArgs& a) {
  check_attention_outputs(check, a);
  check.apart({{"out", a.out}, {"lse", a.lse}},
              {&a.q, &a.kv.k_cache, &a.kv.v_cache, &a.kv.block_table, &a.kv.seq_lens, &a.kv.k_scale, &a.kv.v_scale,
               &a.selected.indices, &a.selected.counts, &a.key_bias, &a.sinks});
}
bool is_empty(const AttentionArgs& a) { return a.q.size() == 0; }
}  // namespace

const Op<AttentionArgs> sliced_attention{
    "sliced_attention", check_inputs, check_outputs, SIC_KERNELS(sliced_attention), is_empty, attention_workspace,
};

}  // namespace sic::slicing
