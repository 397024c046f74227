// Checks that several head ops share.
#pragma once
#include "core/check.h"
#include "head/head.h"

namespace sic::head {

// Everything about the logits but where they come from; V columns.
void check_logits(const Check&, const Logits& in, int64_t B, int64_t V);
// whole: ids must lie in this vocabulary, which is no shard of another.
void check_wanted(const Check&, const Wanted& w, const Logits& in, int64_t B, int64_t V, bool whole);
void check_temperature(const Check&, const TensorView& temperature, int64_t B);
void check_probe(const Check&, const Probe& p, int64_t D);

// Outputs of B rows with k listed and W watched ids; targets: 0 or B.
struct StatsDims {
  int64_t B, k, W, targets;
};
StatsDims stats_dims(int64_t B, const Wanted& w);
StatsDims stats_dims(const Part& parts);  // stacked, to be merged
void check_stats(const Check&, const Stats& s, const StatsDims& d);
void check_part(const Check&, const Part& p, const StatsDims& d);
// No output in the memory of an input.
void check_apart(const Check&, const Stats& s, std::initializer_list<const TensorView*> inputs);
void check_apart(const Check&, const Part& p, std::initializer_list<const TensorView*> inputs);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace sic::head
