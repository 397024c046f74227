// When a row is done: one step of a rule over B rows, each with a state of its own.
//
// Everything is on the device and the state is updated in place, so that a step can be captured and replayed.
#pragma once
#include <cstdint>

#include "core/op.h"

namespace sic::head {

constexpr int kMaxEosIds = 32;
constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1;

// Why a row is done; every reason of the step in which it ended. The last two end nothing: they say that the row once
// had a score that was NaN, or statistics with a status.
enum Reason : uint8_t {
  kEos = 1,
  kString = 2,
  kScore = 4,
  kLength = 8,
  kPlateau = 16,
  kStops = kEos | kString | kScore | kLength | kPlateau,
  kScoreNan = 32,
  kStatsStatus = 64,
};

// The score is held against min(max_threshold, threshold + slope_per_1k / 1000 * input_len).
struct TerminationRule {
  double threshold = 0.92, slope_per_1k = 0.01, max_threshold = 0.99;
  double hysteresis = 0;  // a streak once begun goes on down to the threshold minus this
  int64_t patience = 1;   // steps of a streak
  int64_t min_tokens = 0, max_tokens = kMostTokens;
  int64_t plateau_window = 0;  // steps over which the entropy must stay within plateau_width; 0: off
  double plateau_width = 0;
  int64_t eos_ids[kMaxEosIds] = {};
  int64_t eos_count = 0;
};

struct TerminationState {
  TensorView input_lens;         // i32 [B]: tokens of the prompt
  TensorView generated, streak;  // i32 [B]
  TensorView recent;             // f32 [B,W]: entropies, that of token n at n % W; NaN where there was none
  TensorView reason;             // u8 [B]
};

struct TerminationArgs {
  TensorView tokens;           // i32|i64 [B]: just sampled
  TensorView score;            // f32 [B], optional
  TensorView entropy, status;  // f32, u8 [B] of TokenStats; both or neither
  TensorView matched;          // bool|u8 [B] of a stop matcher, optional
  TerminationState state;
  TerminationRule rule;
  TensorView done, reason;  // out: bool, u8 [B]
};
extern const Op<TerminationArgs> termination_step;

}  // namespace sic::head
