// gather: checks, then the backend.
#include <algorithm>

#include "core/isa.h"
#include "core/paged.h"
#include "slicing/validate.h"

SIC_CPU_OP(gather, slicing::GatherArgs)

namespace sic::slicing {
namespace {

CacheDims check_gather(const Check& check, const GatherArgs& a) {
  const CacheDims d = check_kv(check, a.kv);
  check.tensor("selection.indices", a.selected.indices, DType::i32, 4);
  check_selection(check, a.selected, d, a.selected.indices.shape[1], a.kv.seq_lens);
  return d;
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

int64_t gathered_rows(const GatherArgs& a) {
  const CacheDims d = check_gather(Check("gather"), a);
  int64_t rows = 0;
  for (int64_t b = 0; b < d.B; ++b)
    for (int64_t t = 0; t < a.selected.indices.shape[1]; ++t)
      for (int64_t h = 0; h < d.Hkv; ++h) rows += gathered_of_row(a, b, t, h);
  return rows;
}

void gather(const GatherArgs& a, const Exec& exec) {
  const Check check("gather", exec.device);
  const CacheDims d = check_gather(check, a);
  if (exec.check_only && !a.k.given()) return;
  const int64_t T = a.selected.indices.shape[1], rows = exec.device == Device::cpu ? gathered_rows(a) : 0;
  check.output("k", a.k, a.kv.k_cache.dtype, {-1, a.kv.k_cache.shape[3]});
  check.output("v", a.v, a.kv.k_cache.dtype, {-1, a.kv.v_cache.shape[3]});
  check.value(a.k.shape[0] >= rows, "k", double(a.k.shape[0]), "as many rows as are selected");
  check.value(a.v.shape[0] >= rows, "v", double(a.v.shape[0]), "as many rows as are selected");
  check.output("indptr", a.indptr, DType::i64, {d.B * T * d.Hkv + 1});
  if (runs_on_cpu(check, exec)) cpu::gather(a);
}

}  // namespace sic::slicing
