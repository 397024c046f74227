// score_tokens and refine_tokens: checks, then the backend.
#include "core/isa.h"
#include "slicing/validate.h"

SIC_CPU_OP(score_tokens, slicing::SketchScoreArgs)
SIC_CPU_OP(refine_tokens, slicing::SketchScoreArgs)

namespace sic::slicing {
namespace {

CacheDims check_scoring(const Check& check, const SketchScoreArgs& a) {
  const CacheDims d = check_cache(check, "sketch.norm", a.norm, DType::bf16, a.block_table, a.seq_lens, a.page);
  check.tensor("q", a.q, kFloats, 4);
  check_query(check, a.q, d, a.q.shape[3]);
  check_sketch(check, a.bits, a.norm, a.planes, d, a.q.shape[3]);
  check_max_seq_len(check, a.max_seq_len, d, a.seq_lens);
  return d;
}

}  // namespace

void score_tokens(const SketchScoreArgs& a, const Exec& exec) {
  const Check check("score_tokens", exec.device);
  const CacheDims d = check_scoring(check, a);
  if (exec.check_only && !a.out.given()) return;
  check.output("out", a.out, DType::i16, {d.B, a.q.shape[1], d.Hkv, a.max_seq_len});
  if (runs_on_cpu(check, exec) && a.out.size() > 0) cpu::score_tokens(a);
}

void refine_tokens(const SketchScoreArgs& a, const Exec& exec) {
  const Check check("refine_tokens", exec.device);
  const CacheDims d = check_scoring(check, a);
  check.value(a.planes == 2, "sketch.planes", a.planes, "2");
  check_selection(check, {a.cand_indices, a.cand_counts, Unit::token}, d, a.q.shape[1], a.seq_lens);
  if (exec.check_only && !a.out.given()) return;
  check.output("out", a.out, DType::i16, {d.B, a.q.shape[1], d.Hkv, a.cand_indices.shape[3]});
  if (runs_on_cpu(check, exec) && a.out.size() > 0) cpu::refine_tokens(a);
}

}  // namespace sic::slicing
