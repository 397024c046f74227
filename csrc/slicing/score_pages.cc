// score_pages: checks, then the backend.
#include "core/isa.h"
#include "slicing/validate.h"

SIC_CPU_OP(score_pages, slicing::ScorePagesArgs)

namespace sic::slicing {

void score_pages(const ScorePagesArgs& a, const Exec& exec) {
  const Check check("score_pages", exec.device);
  const CacheDims d = check_cache(check, "summary", a.summary, kFloats, a.block_table, a.seq_lens, a.page);
  check.tensor("q", a.q, kFloats, 4);
  check.tensor("summary", a.summary, kFloats, {d.P, d.Hkv, 2, a.q.shape[3]});
  check_query(check, a.q, d, a.q.shape[3]);
  check_max_seq_len(check, a.max_seq_len, d, a.seq_lens);
  if (exec.check_only && !a.out.given()) return;
  check.output("out", a.out, DType::f32, {d.B, a.q.shape[1], d.Hkv, ceil_div(a.max_seq_len, a.page)});
  if (runs_on_cpu(check, exec) && a.out.size() > 0) cpu::score_pages(a);
}

}  // namespace sic::slicing
