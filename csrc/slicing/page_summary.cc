// page_summary: checks, then the backend.
#include "core/isa.h"
#include "slicing/validate.h"

SIC_CPU_OP(page_summary, slicing::PageSummaryArgs)

namespace sic::slicing {

void page_summary(const PageSummaryArgs& a, const Exec& exec) {
  const Check check("page_summary", exec.device);
  check.tensor("k_cache", a.k_cache, kCacheFloats, 4);
  const CacheDims d =
      check_cache(check, "k_cache", a.k_cache, kCacheFloats, a.block_table, a.seq_lens, a.k_cache.shape[2]);
  check_scale(check, "k_scale", a.k_scale, a.k_cache, d.Hkv);
  check_start(check, a.start, d.B);
  if (exec.check_only && !a.summary.given()) return;
  check.output("summary", a.summary, summary_dtype(a.k_cache.dtype), {d.P, d.Hkv, 2, a.k_cache.shape[3]});
  if (runs_on_cpu(check, exec)) cpu::page_summary(a);
}

}  // namespace sic::slicing
