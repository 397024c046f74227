// logits_stats and logits_part: checks, then the backend.
#include "head/stats.h"
#include "head/validate.h"

SIC_OP_KERNELS(logits_stats, head::StatsArgs)

namespace sic::head {
namespace {

template <bool kWhole>
void check_inputs(const Check& check, const StatsArgs& a) {
  check.tensor("logits", a.in.x, kFloats, 2);
  const int64_t B = a.in.x.shape[0], V = a.in.x.shape[1];
  check_logits(check, a.in, B, V);
  check_wanted(check, a.wanted, a.in, B, V, kWhole);
}

template <bool kWhole>
void check_outputs(const Check& check, const StatsArgs& a) {
  check_results<kWhole>(
      check, a, a.in.x.shape[0],
      {&a.in.x, &a.in.temperature, &a.in.bias, &a.in.mask_bits, &a.wanted.watch_ids, &a.wanted.target_ids});
}

}  // namespace

const Op<StatsArgs> logits_stats{"logits_stats", check_inputs<true>, check_outputs<true>, SIC_KERNELS(logits_stats)};
const Op<StatsArgs> logits_part{"partial_stats", check_inputs<false>, check_outputs<false>, SIC_KERNELS(logits_stats)};

}  // namespace sic::head
