// delta_attention: checks, then the backend.
#include "slicing/attention.h"

#include "core/paged.h"
#include "delta/validate.h"

SIC_OP_KERNELS(delta_attention, delta::AttentionArgs)

namespace sic::delta {
namespace {

void check_tail(const Check& check, const Tail& tail, const AttentionArgs& a, const CodedDims& d) {
  if (!tail.k.given() && !tail.v.given() && !tail.start.given()) return;
  const TensorView& lengths = a.attention.kv.seq_lens;
  const int64_t B = lengths.shape[0];
  check.tensor("raw_tail.k", tail.k, kFloats, {B, d.Hkv, -1, d.Dk});
  check.tensor("raw_tail.v", tail.v, tail.k.dtype, {B, d.Hkv, tail.k.shape[2], d.Dv});
  check.tensor("raw_tail.start", tail.start, kIndexInts, {B});
  const TensorView start = check.host(tail.start), lens = check.host(lengths);
  for (int64_t b = 0; start.given() && lens.given() && b < B; ++b) {
    const int64_t first = index_at(start, b * start.stride[0]), n = index_at(lens, b * lens.stride[0]);
    check.require(first >= 0 && n - first <= tail.k.shape[2], "raw_tail.start",
                  std::to_string(first) + " for sequence " + std::to_string(b),
                  "0 or more, with at most " + std::to_string(tail.k.shape[2]) + " positions behind it");
  }
}

void check_inputs(const Check& check, const AttentionArgs& a) {
  const CodedDims d = check_coded(check, a.pages, a.codec, false);
  const slicing::AttentionArgs& c = a.attention;
  const slicing::CacheDims cache = check_sequences(check, a.pages, c.kv.block_table, c.kv.seq_lens);
  slicing::check_query(check, c.q, cache, d.Dk);
  slicing::check_attention_extras(check, c, cache);
  check_cache_positions(check, a.positions, c.kv.seq_lens, a.codec, c.max_seq_len);
  check_tail(check, a.tail, a, d);
}

void check_outputs(const Check& check, const AttentionArgs& a) {
  slicing::check_attention_outputs(check, a.attention);
  const slicing::AttentionArgs& c = a.attention;
  check.apart({{"out", c.out}, {"lse", c.lse}},
              {&c.q, &a.pages.k_codes, &a.pages.v_codes, &a.pages.tags, &a.pages.raw, &a.tail.k, &a.tail.v,
               &a.tail.start, &a.positions, &c.kv.block_table, &c.kv.seq_lens, &c.selected.indices, &c.selected.counts,
               &c.key_bias, &c.sinks});
}

bool is_empty(const AttentionArgs& a) { return a.attention.q.size() == 0; }

}  // namespace

const Op<AttentionArgs> delta_attention{
    "delta_attention", check_inputs,
    check_outputs,     SIC_KERNELS(delta_attention),
    is_empty,          [](const AttentionArgs& a) { return slicing::attention_workspace(a.attention); }};

}  // namespace sic::delta
