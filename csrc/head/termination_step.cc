// termination_step: checks, then the backend.
#include <cmath>

#include "core/check.h"
#include "head/termination.h"

SIC_OP_KERNELS(termination_step, head::TerminationArgs)

namespace sic::head {

namespace {

void check_rule(const Check& check, const TerminationRule& r, int64_t capacity) {
  check.value(r.max_threshold >= 0 && r.max_threshold <= 1, "max_threshold", r.max_threshold, "0 to 1");
  check.value(r.threshold >= 0 && r.threshold <= r.max_threshold, "threshold", r.threshold, "0 to max_threshold");
  check.value(r.slope_per_1k >= 0 && std::isfinite(r.slope_per_1k), "slope_per_1k", r.slope_per_1k, "0 or more");
  check.value(r.hysteresis >= 0 && r.hysteresis <= 1, "hysteresis", r.hysteresis, "0 to 1");
  check.value(r.patience >= 1 && r.patience <= kMostTokens, "patience", double(r.patience), "1 to 2^31 - 1");
  check.value(r.max_tokens >= 1 && r.max_tokens <= kMostTokens, "max_tokens", double(r.max_tokens), "1 to 2^31 - 1");
  check.value(r.min_tokens >= 0 && r.min_tokens <= r.max_tokens, "min_tokens", double(r.min_tokens), "0 to max_tokens");
  check.value(r.eos_count >= 0 && r.eos_count <= kMaxEosIds, "eos_ids", double(r.eos_count), "at most 32");
  check.value(r.plateau_window >= 0, "plateau_window", double(r.plateau_window), "0 (off) or more");
  check.require(r.plateau_window <= capacity, "plateau_window", std::to_string(r.plateau_window),
                "at most the " + std::to_string(capacity) + " steps that the state keeps");
  check.value(r.plateau_width >= 0 && std::isfinite(r.plateau_width), "plateau_width", r.plateau_width, "0 or more");
}

void check_inputs(const Check& check, const TerminationArgs& a) {
  check.tensor("tokens", a.tokens, kIndexInts, 1);
  const int64_t B = a.tokens.shape[0];
  if (a.score.given()) check.tensor("score", a.score, DType::f32, {B});
  if (a.entropy.given()) check.tensor("stats.entropy", a.entropy, DType::f32, {B});
  if (a.entropy.given() || a.status.given()) check.tensor("stats.status", a.status, DType::u8, {B});
  if (a.matched.given()) check.tensor("matched", a.matched, DTypeSet(DType::boolean) | DType::u8, {B});
  const TerminationState& s = a.state;
  check.tensor("state.input_lens", s.input_lens, DType::i32, {B});
  check.output("state.generated", s.generated, DType::i32, {B});
  check.output("state.streak", s.streak, DType::i32, {B});
  check.output("state.recent", s.recent, DType::f32, {B, -1});
  check.output("state.reason", s.reason, DType::u8, {B});
  check.value(s.recent.shape[1] >= 1, "state.recent", double(s.recent.shape[1]), "room for one step or more");
  check_rule(check, a.rule, s.recent.shape[1]);
  check.require(a.rule.plateau_window == 0 || a.entropy.given(), "stats", "None",
                "the step's TokenStats, for the rule's plateau");
  check.apart({{"state.generated", s.generated},
               {"state.streak", s.streak},
               {"state.recent", s.recent},
               {"state.reason", s.reason}},
              {&a.tokens, &a.score, &a.entropy, &a.status, &a.matched, &s.input_lens});
}

void check_outputs(const Check& check, const TerminationArgs& a) {
  const int64_t B = a.tokens.shape[0];
  const TerminationState& s = a.state;
  check.output("done", a.done, DType::boolean, {B});
  check.output("reason", a.reason, DType::u8, {B});
  check.apart({{"done", a.done}, {"reason", a.reason}}, {&a.tokens, &a.score, &a.entropy, &a.status, &a.matched,
                                                         &s.input_lens, &s.generated, &s.streak, &s.recent, &s.reason});
}

}  // namespace

const Op<TerminationArgs> termination_step{"termination_step", check_inputs, check_outputs,
                                           SIC_KERNELS(termination_step),
                                           [](const TerminationArgs& a) { return a.tokens.shape[0] == 0; }};

}  // namespace sic::head
