// lm_head_stats and lm_head_part: checks, then the backend.
#include "head/stats.h"

SIC_OP_KERNELS(lm_head_stats, head::StatsArgs)

namespace sic::head {
namespace {

template <bool kWhole>
void check_inputs(const Check& check, const StatsArgs& a) {
  check.tensor("hidden", a.in.hidden, kFloats, 2);
  const int64_t B = a.in.hidden.shape[0], D = a.in.hidden.shape[1];
  check.tensor("weight", a.in.weight, kFloats, {-1, D});
  const int64_t V = a.in.weight.shape[0];
  check_logits(check, a.in, B, V);
  check_wanted(check, a.wanted, a.in, B, V, kWhole);
  if (a.probe.projection.given()) check_probe(check, a.probe, D);
}

template <bool kWhole>
void check_outputs(const Check& check, const StatsArgs& a) {
  const Probe& p = a.probe;
  const int64_t B = a.in.hidden.shape[0];
  const std::initializer_list<const TensorView*> inputs = {
      &a.in.hidden,        &a.in.weight,         &a.in.temperature, &a.in.bias, &a.in.mask_bits,
      &a.wanted.watch_ids, &a.wanted.target_ids, &p.projection,     &p.vector,  &p.bias};
  check_results<kWhole>(check, a, B, inputs);
  if (!p.projection.given()) return;
  check.output("score", p.score, DType::f32, {B, p.vector.shape[0]});
  check.apart({{"score", p.score}}, inputs);
  if (kWhole) check_apart(check, a.stats, {&p.score});
}

}  // namespace

const Op<StatsArgs> lm_head_stats{"lm_head_stats", check_inputs<true>, check_outputs<true>, SIC_KERNELS(lm_head_stats)};
const Op<StatsArgs> lm_head_part{"partial_stats", check_inputs<false>, check_outputs<false>,
                                 SIC_KERNELS(lm_head_stats)};

}  // namespace sic::head
