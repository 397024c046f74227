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
void fill_keys(const T* scores, int64_t n, int32_t* keys) {
  for (int64_t i = 0; i < n; ++i) keys[i] = key_of(to_float(scores[i]));
}

template <class T>
void fill_steps(const T* scores, int64_t n, int32_t* steps) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) top = to_float(scores[i]) > top ? to_float(scores[i]) : top;
  for (int64_t i = 0; i < n; ++i) {
    const float d =
        top == to_float(scores[i]) ? 0.0f : std::nearbyint((to_float(scores[i]) - top) * slicing::kScoreSteps);
    steps[i] = d > -65534.0f ? static_cast<int32_t>(d) : -65534;
  }
}

template <class T>
void select_one(const SelectArgs& a, int64_t b, int64_t t, int64_t h) {
  const int64_t N = a.scores.shape[3], K = a.indices.shape[3];
  const auto at = [&](const TensorView& v) { return b * v.stride[0] + t * v.stride[1] + h * v.stride[2]; };
  const int64_t limit = N * (a.unit == slicing::Unit::token ? 1 : a.page);
  const int64_t tokens = visible_positions(index_at(a.seq_lens, b * a.seq_lens.stride[0]), a.scores.shape[1], t, limit);
  const int64_t spans = slicing::span_room(a);
  Carver carve(thread_scratch(spans * static_cast<int64_t>(sizeof(Span)) + 2 * N * int64_t{4} + 256));
  const SelectRow row = slicing::select_row(a, b, h, tokens, carve.take<Span>(spans));
  const T* scores = a.scores.as<const T>() + at(a.scores);
  int32_t* out = a.indices.as<int32_t>() + at(a.indices);
  int32_t* count = a.counts.as<int32_t>() + at(a.counts);
  if constexpr (std::is_same_v<T, int16_t>) {
    select_scores(scores, row, out, K, count);
  } else {
    int32_t* keys = carve.take<int32_t>(N);
    fill_keys(scores, row.visible, keys);
    int64_t wanted = row.count() - row.forced;
    if (row.top_p < 1) {
      int32_t* steps = carve.take<int32_t>(N);
      fill_steps(scores, row.visible, steps);
      wanted = nucleus(keys, row, [&](int64_t i) { return exp_weight(steps[i]); }, wanted);
    }
    write_selection(keys, row, cut_by_count(keys, row, wanted), out, K, count);
  }
}

}  // namespace

void select(const SelectArgs& a, const Exec&) {
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
