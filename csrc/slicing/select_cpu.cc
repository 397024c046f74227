// select on the CPU.
#include "slicing/select_cpu.h"

#include <cmath>

#include "core/paged.h"
#include "core/parallel.h"
#include "core/rows.h"
#include "core/scratch.h"

namespace sic::cpu::SIC_ISA {
namespace {

using slicing::SelectArgs;

// Keys: integers in the order of the scores; -0 equals +0, NaN comes last.
int32_t key_of(float x) {
  const int32_t bits = static_cast<int32_t>(detail::bits_of(x + 0.0f));
  if (x != x) return INT32_MIN;
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

template <class T>
float score_nats(T x) {
  if constexpr (std::is_same_v<T, int16_t>)
    return x / slicing::kScoreSteps;
  else
    return to_float(x);
}

// Weights of top_p: exp(score - max) in fixed point.
struct Weights {
  const int32_t* steps;  // (score - max) in 1/256 nat, per unit
  uint64_t of(int64_t i) const { return static_cast<uint32_t>(exp_weight(steps[i])); }
};

// The shortest prefix, in the order of the keys, that brings the chosen weight to top_p of the whole.
int64_t nucleus(const int32_t* keys, const SelectRow& row, double top_p, const Weights& w, int64_t most) {
  uint64_t all = 0, chosen = 0;
  for (int32_t i = 0; i < row.visible; ++i) all += w.of(i);
  for (int32_t s = 0; s < row.span_count; ++s)
    for (int32_t i = row.spans[s].begin; i < row.spans[s].end; ++i) chosen += w.of(i);
  const double target = top_p * static_cast<double>(all);
  if (static_cast<double>(chosen) >= target || most <= 0) return 0;
  const auto weight_from = [&](int64_t t) {
    uint64_t sum = chosen;
    for_free(row, [&](int32_t b, int32_t e) {
      for (int32_t i = b; i < e; ++i) sum += keys[i] >= t ? w.of(i) : 0;
    });
    return static_cast<double>(sum);
  };
  const int32_t t = bisect(INT32_MIN, INT32_MAX, [&](int32_t k) { return weight_from(k) >= target; });
  const uint64_t above = t == INT32_MAX ? chosen : static_cast<uint64_t>(weight_from(int64_t{t} + 1));
  int64_t n = 0, tied = 0;
  uint64_t each = 0;
  for_free(row, [&](int32_t b, int32_t e) {
    for (int32_t i = b; i < e; ++i) n += keys[i] > t, tied += keys[i] == t, each = keys[i] == t ? w.of(i) : each;
  });
  uint64_t sum = above;
  while (tied-- > 0 && static_cast<double>(sum) < target) sum += each, ++n;
  return std::min(n, most);
}

template <class T>
void fill_keys(const T* scores, int64_t n, int32_t* keys) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (std::is_same_v<T, int16_t>)
      keys[i] = scores[i];
    else
      keys[i] = key_of(to_float(scores[i]));
  }
}

template <class T>
void fill_steps(const T* scores, int64_t n, int32_t* steps) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) top = score_nats(scores[i]) > top ? score_nats(scores[i]) : top;
  for (int64_t i = 0; i < n; ++i) {
    const float d = top == score_nats(scores[i]) ? 0.0f : std::nearbyint((score_nats(scores[i]) - top) * slicing::kScoreSteps);
    steps[i] = d > -65534.0f ? static_cast<int32_t>(d) : -65534;
  }
}

template <class T>
void select_one(const SelectArgs& a, int64_t b, int64_t t, int64_t h) {
  const int64_t T_ = a.scores.shape[1], N = a.scores.shape[3];
  const auto at = [&](const TensorView& v) { return b * v.stride[0] + t * v.stride[1] + h * v.stride[2]; };
  const int64_t tokens = visible_positions(index_at(a.seq_lens, b * a.seq_lens.stride[0]), T_, t, N * (a.unit == slicing::Unit::token ? 1 : a.page));
  const bool nucleus_wanted = a.top_p < 1;
  const int64_t span_bytes = slicing::span_room(a) * static_cast<int64_t>(sizeof(Span));
  Carver carve(thread_scratch(span_bytes + 2 * N * int64_t{4} + 256));
  const SelectRow row = slicing::select_row(a, b, h, tokens, carve.take<Span>(slicing::span_room(a)));
  const T* scores = a.scores.as<const T>() + at(a.scores);
  int64_t wanted = row.count() - row.forced;
  int32_t* out = a.indices.as<int32_t>() + at(a.indices);
  int32_t* count = a.counts.as<int32_t>() + at(a.counts);
  if constexpr (std::is_same_v<T, int16_t>) {
    if (!nucleus_wanted) return write_selection(scores, row, cut_by_count(scores, row, wanted), out, a.indices.shape[3], count);
  }
  int32_t* keys = carve.take<int32_t>(N);
  fill_keys(scores, row.visible, keys);
  if (nucleus_wanted) {
    int32_t* steps = carve.take<int32_t>(N);
    fill_steps(scores, row.visible, steps);
    wanted = nucleus(keys, row, a.top_p, {steps}, wanted);
  }
  write_selection(keys, row, cut_by_count(keys, row, wanted), out, a.indices.shape[3], count);
}

}  // namespace

void select(const SelectArgs& a) {
  const int64_t T = a.scores.shape[1], Hkv = a.scores.shape[2];
  parallel_for(a.scores.shape[0] * T * Hkv, [&](int64_t task) {
    const int64_t h = task % Hkv, t = task / Hkv % T, b = task / Hkv / T;
    if (a.scores.dtype == DType::i16) return select_one<int16_t>(a, b, t, h);
    with_float_type(a.scores.dtype, [&](auto type) {
      if constexpr (!std::is_same_v<decltype(type), f8_t>) select_one<decltype(type)>(a, b, t, h);
    });
  });
}

}  // namespace sic::cpu::SIC_ISA
