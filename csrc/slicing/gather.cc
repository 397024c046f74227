// gather: checks, then the backend.
#include <algorithm>

#include "core/paged.h"
#include "slicing/validate.h"

SIC_OP_KERNELS(gather, slicing::GatherArgs)

namespace sic::slicing {
namespace {

void check_inputs(const Check& check, const GatherArgs& a) {
  const CacheDims d = check_kv(check, a.kv);
  check.tensor("selection.indices", a.selected.indices, DType::i32, 4);
  check_selection(check, a.selected, d, a.selected.indices.shape[1], a.kv.seq_lens);
}

// Of host tensors.
int64_t count_rows(const GatherArgs& a) {
  const TensorView& s = a.selected.indices;
  int64_t rows = 0;
  for (int64_t b = 0; b < s.shape[0]; ++b)
    for (int64_t t = 0; t < s.shape[1]; ++t)
      for (int64_t h = 0; h < s.shape[2]; ++h) rows += gathered_of_row(a, b, t, h);
  return rows;
}

// The call with its counts, lists and lengths where the host can read them; not given where it may not.
GatherArgs on_host(const Check& check, const GatherArgs& a, bool always) {
  GatherArgs h = a;
  h.kv.seq_lens = check.host(a.kv.seq_lens, always);
  h.selected.indices = check.host(a.selected.indices, always);
  h.selected.counts = check.host(a.selected.counts, always);
  return h;
}

void check_outputs(const Check& check, const GatherArgs& a) {
  const TensorView& s = a.selected.indices;
  const GatherArgs host = on_host(check, a, false);
  const int64_t rows = host.selected.counts.given() ? count_rows(host) : 0;
  check.output("k", a.k, a.kv.k_cache.dtype, {-1, a.kv.k_cache.shape[3]});
  check.output("v", a.v, a.kv.k_cache.dtype, {-1, a.kv.v_cache.shape[3]});
  check.value(a.k.shape[0] >= rows, "k", double(a.k.shape[0]), "as many rows as are selected");
  check.value(a.v.shape[0] >= rows, "v", double(a.v.shape[0]), "as many rows as are selected");
  check.output("indptr", a.indptr, DType::i64, {s.shape[0] * s.shape[1] * s.shape[2] + 1});
  check.apart(
      {{"k", a.k}, {"v", a.v}, {"indptr", a.indptr}},
      {&a.kv.k_cache, &a.kv.v_cache, &a.kv.block_table, &a.kv.seq_lens, &a.selected.indices, &a.selected.counts});
}

}  // namespace

int64_t gathered_of_row(const GatherArgs& a, int64_t b, int64_t t, int64_t h) {
  const Selected& s = a.selected;
  const int64_t n =
      s.counts.as<const int32_t>()[b * s.counts.stride[0] + t * s.counts.stride[1] + h * s.counts.stride[2]];
  if (s.unit == Unit::token) return n;
  const int64_t page = a.kv.k_cache.shape[2];
  const int64_t visible =
      visible_positions(index_at(a.kv.seq_lens, b * a.kv.seq_lens.stride[0]), s.indices.shape[1], t, INT32_MAX);
  const int32_t* list =
      s.indices.as<const int32_t>() + b * s.indices.stride[0] + t * s.indices.stride[1] + h * s.indices.stride[2];
  int64_t rows = 0;
  for (int64_t i = 0; i < n; ++i) rows += std::min(page, visible - list[i] * page);
  return rows;
}

int64_t gathered_rows(const GatherArgs& a, const Exec& exec) {
  const Check check("gather", exec.device, exec.device_id, false, exec.stream);
  return count_rows(on_host(check, a, true));
}

const Op<GatherArgs> gather{"gather", check_inputs, check_outputs, SIC_KERNELS(gather)};

}  // namespace sic::slicing
