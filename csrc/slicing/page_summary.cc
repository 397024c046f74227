// page_summary: checks, then the backend.
#include "slicing/validate.h"

SIC_OP_KERNELS(page_summary, slicing::PageSummaryArgs)

namespace sic::slicing {

namespace {

void check_inputs(const Check& check, const PageSummaryArgs& a) {
  check.tensor("k_cache", a.k_cache, kCacheFloats, 4);
  const CacheDims d =
      check_cache(check, "k_cache", a.k_cache, kCacheFloats, a.block_table, a.seq_lens, a.k_cache.shape[2]);
  check_scale(check, "k_scale", a.k_scale, a.k_cache, d.Hkv);
  check_start(check, a.start, d.B);
}

void check_outputs(const Check& check, const PageSummaryArgs& a) {
  const TensorView& c = a.k_cache;
  check.output("summary", a.summary, summary_dtype(c.dtype), {c.shape[0], c.shape[1], 2, c.shape[3]});
  check.apart({{"summary", a.summary}}, {&c, &a.block_table, &a.seq_lens, &a.k_scale, &a.start});
}

}  // namespace

const Op<PageSummaryArgs> page_summary{"page_summary", check_inputs, check_outputs, SIC_KERNELS(page_summary)};

}  // namespace sic::slicing
