// termination_step of one row, for the CPU and the GPU alike.
#pragma once
#include "head/termination.h"

namespace sic::head {

// Where the tensors of a call lie (vectors are contiguous, as the checks demand), and a quotient that kernels need.
struct TerminationRows {
  const void* tokens;
  const float *score, *entropy;     // null: not given
  const uint8_t *status, *matched;  // null: not given
  const int32_t* input_lens;
  int32_t *generated, *streak;
  float* recent;
  int64_t recent_row, capacity;
  uint8_t *state_reason, *done, *reason;
  bool wide_tokens;
  double slope_per_token;
};

SIC_FLAT inline TerminationRows rows_of(const TerminationArgs& a) {
  const TerminationState& s = a.state;
  return {a.tokens.data,
          a.score.as<const float>(),
          a.entropy.as<const float>(),
          a.status.as<const uint8_t>(),
          a.matched.as<const uint8_t>(),
          s.input_lens.as<const int32_t>(),
          s.generated.as<int32_t>(),
          s.streak.as<int32_t>(),
          s.recent.as<float>(),
          s.recent.stride[0],
          s.recent.shape[1],
          s.reason.as<uint8_t>(),
          a.done.as<uint8_t>(),
          a.reason.as<uint8_t>(),
          a.tokens.dtype == DType::i64,
          a.rule.slope_per_1k / 1000.0};
}

// Rounded by itself: nvcc would fuse it with the sum.
SIC_HD SIC_FLAT inline double product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// Computed in double and then compared as float: the score 0.93f does not exceed the threshold 0.93.
SIC_HD SIC_FLAT inline bool keeps_streak(const TerminationRule& rule, double rise, float score, bool begun) {
  const double risen = rule.threshold + rise;
  const double bar = risen < rule.max_threshold ? risen : rule.max_threshold;
  return begun ? score >= static_cast<float>(bar - rule.hysteresis) : score > static_cast<float>(bar);
}

// Whether the last plateau_window entropies, the newest at `newest`, are all known and within the width.
SIC_HD SIC_FLAT inline bool on_plateau(const TerminationRule& rule, const float* recent, int64_t capacity,
                                       int64_t newest) {
  float low = recent[newest], high = low;
  bool known = low == low;
  for (int64_t i = 1; i < rule.plateau_window; ++i) {
    const float h = recent[newest >= i ? newest - i : newest - i + capacity];
    known = known && h == h;
    low = h < low ? h : low, high = h > high ? h : high;
  }
  return known && static_cast<double>(high) - static_cast<double>(low) <= rule.plateau_width;
}

SIC_HD SIC_FLAT inline void termination_row(const TerminationRule& rule, const TerminationRows& r, int64_t b) {
  uint8_t said = r.state_reason[b];
  if (!(said & kStops)) {
    const int64_t token =
        r.wide_tokens ? static_cast<const int64_t*>(r.tokens)[b] : static_cast<const int32_t*>(r.tokens)[b];
    const int32_t before = r.generated[b], count = before + 1;
    r.generated[b] = count;
    uint8_t stops = 0;
    for (int64_t i = 0; i < rule.eos_count; ++i) stops |= token == rule.eos_ids[i] ? kEos : 0;
    if (r.matched && r.matched[b]) stops |= kString;

    int32_t streak = r.streak[b];
    if (r.score) {
      const float score = r.score[b];
      const bool kept = keeps_streak(rule, product(r.slope_per_token, r.input_lens[b]), score, streak > 0);
      streak = !kept ? 0 : static_cast<int32_t>(streak < rule.patience ? streak + 1 : rule.patience);
      r.streak[b] = streak;
      said |= score != score ? kScoreNan : 0;
    }
    stops |= streak >= rule.patience ? kScore : 0;

    float* recent = r.recent + b * r.recent_row;
    const int64_t newest = (before & 0x7fffffff) % r.capacity;  // inside, whatever the caller's state says
    recent[newest] = r.entropy ? r.entropy[b] : __builtin_nanf("");
    said |= r.status && r.status[b] ? kStatsStatus : 0;
    if (rule.plateau_window > 0 && on_plateau(rule, recent, r.capacity, newest)) stops |= kPlateau;

    if (count < rule.min_tokens) stops = 0;
    stops |= count >= rule.max_tokens ? kLength : 0;
    said |= stops;
    r.state_reason[b] = said;
  }
  r.done[b] = (said & kStops) != 0;
  r.reason[b] = said;
}

}  // namespace sic::head
