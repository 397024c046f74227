// score_tokens and refine_tokens: checks, then the backend.
#include "slicing/validate.h"

SIC_OP_KERNELS(score_tokens, slicing::SketchScoreArgs)
SIC_OP_KERNELS(refine_tokens, slicing::SketchScoreArgs)

namespace sic::slicing {
namespace {

CacheDims check_scoring(const Check& check, const SketchScoreArgs& a) {
  const CacheDims d = check_cache(check, "sketch.norm", a.norm, DType::bf16, a.block_table, a.seq_lens, a.page);
  check.tensor("q", a.q, kFloats, 4);
  check_query(check, a.q, d, a.q.shape[3]);
  check_sketch(check, a.bits, a.norm, a.planes, d, a.q.shape[3]);
  check_max_seq_len(check, a.max_seq_len, d, a.seq_lens);
  check_finite(check, "scale", a.scale);
  return d;
}

void check_scores(const Check& check, const SketchScoreArgs& a, int64_t width) {
  check.output("out", a.out, DType::i16, {a.q.shape[0], a.q.shape[1], a.norm.shape[1], width});
  check.apart({{"out", a.out}}, {&a.q, &a.bits, &a.norm, &a.block_table, &a.seq_lens, &a.cand_indices, &a.cand_counts});
}

void check_tokens(const Check& check, const SketchScoreArgs& a) { check_scoring(check, a); }
void check_token_scores(const Check& check, const SketchScoreArgs& a) { check_scores(check, a, a.max_seq_len); }

void check_candidates(const Check& check, const SketchScoreArgs& a) {
  const CacheDims d = check_scoring(check, a);
  check.value(a.planes == 2, "sketch.planes", a.planes, "2");
  check_selection(check, {a.cand_indices, a.cand_counts, Unit::token}, d, a.q.shape[1], a.seq_lens);
}
void check_candidate_scores(const Check& check, const SketchScoreArgs& a) {
  check_scores(check, a, a.cand_indices.shape[3]);
}

bool is_empty(const SketchScoreArgs& a) { return a.out.size() == 0; }

}  // namespace

const Op<SketchScoreArgs> score_tokens{"score_tokens", check_tokens, check_token_scores, SIC_KERNELS(score_tokens),
                                       is_empty};
const Op<SketchScoreArgs> refine_tokens{"refine_tokens", check_candidates, check_candidate_scores,
                                        SIC_KERNELS(refine_tokens), is_empty};

}  // namespace sic::slicing
