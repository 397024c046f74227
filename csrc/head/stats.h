// What the ops on logits share on every backend.
#pragma once
#include <cfloat>

#include "head/validate.h"

namespace sic::head {

inline int64_t rows(const StatsArgs& a) { return (a.in.x.given() ? a.in.x : a.in.hidden).shape[0]; }
inline int64_t vocabulary(const StatsArgs& a) { return (a.in.x.given() ? a.in.x.shape[1] : a.in.weight.shape[0]); }
inline bool is_part(const StatsArgs& a) { return a.part.m.given(); }
// Entries of a row's list: the greatest is always known.
inline int64_t listed(const StatsArgs& a) {
  const int64_t k = is_part(a) ? a.part.top_ids.shape[1] : a.wanted.k;
  return k > 1 ? k : 1;
}
// Columns that can take part: ids below the valid vocabulary.
inline int64_t columns(const StatsArgs& a) {
  const int64_t valid = a.in.valid_vocab - a.in.vocab_start, V = vocabulary(a);
  return valid < 0 ? 0 : valid < V ? valid : V;
}

// log2(e) / temperature, finite: infinity times the distance 0 of the greatest would be NaN.
SIC_HD SIC_FLAT inline float factor_of(double inverse_temperature) {
  constexpr double kLn2 = 0.6931471805599453, kMost = FLT_MAX;
  const double factor = inverse_temperature / kLn2;
  return static_cast<float>(factor < kMost ? factor : kMost);
}

template <bool kWhole>
void check_results(const Check& check, const StatsArgs& a, int64_t B, std::initializer_list<const TensorView*> inputs) {
  const StatsDims d = stats_dims(B, a.wanted);
  if constexpr (kWhole) {
    check_stats(check, a.stats, d);
    check_apart(check, a.stats, inputs);
  } else {
    check_part(check, a.part, d);
    check_apart(check, a.part, inputs);
  }
}

}  // namespace sic::head
