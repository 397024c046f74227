// merge_states and merge_many on the CPU: softmax states over disjoint keys become the state over all of them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "core/rows.h"
#include "core/scratch.h"
#include "slicing/slicing.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int64_t kRowsPerTask = 64;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

struct Part {
  const TensorView* out;
  int64_t offset;
  float lse;
};

// Other stacks mark an empty state with +inf.
float lse_at(const TensorView& lse, int64_t offset) {
  const float x = lse.as<const float>()[offset];
  return std::isinf(x) ? kEmpty : x;
}

// One row: sum of the parts weighted by exp(lse - max).
template <class PartAt>
void merge_row(int64_t n, PartAt part, const TensorView& out, int64_t out_at, float* lse) {
  const int64_t D = out.shape[out.rank - 1];
  float* acc = reinterpret_cast<float*>(thread_scratch(2 * D * static_cast<int64_t>(sizeof(float))));
  float* row = acc + D;
  float top = kEmpty, total = 0;
  for (int64_t i = 0; i < n; ++i) top = larger(top, part(i).lse);
  std::fill(acc, acc + D, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    const Part p = part(i);
    if (p.lse == kEmpty) continue;
    const float weight = p.lse == top ? 1.0f : std::exp(p.lse - top);
    total += weight;
    load_row(*p.out, p.offset, D, 1.0f, row);
    for (int64_t d = 0; d < D; ++d) acc[d] += weight * row[d];
  }
  const bool empty = total == 0;
  store_row(out, out_at, D, acc, empty ? 0.0f : 1.0f / total);
  *lse = empty ? kEmpty : top + std::log(total);
}

template <class Row>
void for_rows(int64_t rows, Row row) {
  parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t i = task * kRowsPerTask; i < std::min(rows, (task + 1) * kRowsPerTask); ++i) row(i);
  });
}

}  // namespace

void merge_states(const slicing::MergeStatesArgs& a, const Exec&) {
  const int64_t H = a.out.shape[1];
  for_rows(a.out.shape[0] * H, [&](int64_t i) {
    const int64_t r = i / H, h = i % H;
    const auto at = [&](const TensorView& v) { return r * v.stride[0] + h * v.stride[1]; };
    const Part parts[2] = {{&a.out_a, at(a.out_a), lse_at(a.lse_a, at(a.lse_a))},
                           {&a.out_b, at(a.out_b), lse_at(a.lse_b, at(a.lse_b))}};
    merge_row(2, [&](int64_t p) { return parts[p]; }, a.out, at(a.out), a.lse.as<float>() + at(a.lse));
  });
}

void merge_many(const slicing::MergeArgs& a, const Exec&) {
  const int64_t H = a.out.shape[1];
  for_rows(a.out.shape[0] * H, [&](int64_t i) {
    const int64_t r = i / H, h = i % H;
    const auto part = [&](int64_t p) {
      return Part{&a.outs, p * a.outs.stride[0] + r * a.outs.stride[1] + h * a.outs.stride[2],
                  lse_at(a.lses, p * a.lses.stride[0] + r * a.lses.stride[1] + h * a.lses.stride[2])};
    };
    merge_row(a.outs.shape[0], part, a.out, r * a.out.stride[0] + h * a.out.stride[1],
              a.lse.as<float>() + r * a.lse.stride[0] + h * a.lse.stride[1]);
  });
}

}  // namespace sic::cpu::SIC_ISA
