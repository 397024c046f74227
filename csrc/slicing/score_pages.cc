// score_pages: checks, then the backend.
#include "slicing/validate.h"

SIC_OP_KERNELS(score_pages, slicing::ScorePagesArgs)

namespace sic::slicing {

namespace {

void check_inputs(const Check& check, const ScorePagesArgs& a) {
  const CacheDims d = check_cache(check, "summary", a.summary, kFloats, a.block_table, a.seq_lens, a.page);
  check.tensor("q", a.q, kFloats, 4);
  check.tensor("summary", a.summary, kFloats, {d.P, d.Hkv, 2, a.q.shape[3]});
  check_query(check, a.q, d, a.q.shape[3]);
  check.value(a.q.shape[3] >= 1, "q", double(a.q.shape[3]), "a head size of at least 1");
  check_max_seq_len(check, a.max_seq_len, d, a.seq_lens);
  check_finite(check, "scale", a.scale);
  check_finite(check, "beta", a.beta);
}

void check_outputs(const Check& check, const ScorePagesArgs& a) {
  check.output("out", a.out, DType::f32,
               {a.q.shape[0], a.q.shape[1], a.summary.shape[1], ceil_div(a.max_seq_len, a.page)});
  check.apart({{"out", a.out}}, {&a.q, &a.summary, &a.block_table, &a.seq_lens});
}

}  // namespace

const Op<ScorePagesArgs> score_pages{"score_pages", check_inputs, check_outputs, SIC_KERNELS(score_pages),
                                     [](const ScorePagesArgs& a) { return a.out.size() == 0; }};

}  // namespace sic::slicing
