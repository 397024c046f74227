// merge_stats on the CPU.
#include "core/parallel.h"
#include "head/stats_cpu.h"

namespace sic::cpu::SIC_ISA {
namespace {

constexpr int64_t kRowsPerTask = 16;

template <class T>
SIC_INLINE T at(const TensorView& v, int64_t i, int64_t b, int64_t j = 0) {
  return v.as<const T>()[i * v.stride[0] + b * v.stride[1] + j];
}

// The z of an id that lies in one of the parts; NaN where it was never asked for.
SIC_INLINE float greatest(const TensorView& v, int64_t n, int64_t b, int64_t j) {
  float z = kNever;
  for (int64_t i = 0; i < n; ++i) z = larger(z, at<float>(v, i, b, j));
  return z;
}

void merge_row(const head::MergeArgs& a, int64_t b) {
  float z[head::kMaxTop];
  int32_t id[head::kMaxTop];
  const head::Part& p = a.parts;
  const int64_t n = p.m.shape[0], k = p.top_ids.shape[2];
  const double inverse = inverse_temperature(a.temperature, b);
  RowTotals row{{}, {z, id, static_cast<int>(k)}, 0};
  for (int64_t i = 0; i < n; ++i) {
    row.moments.merge({at<float>(p.m, i, b), at<double>(p.s, i, b), at<double>(p.t, i, b), at<double>(p.u, i, b),
                       at<uint8_t>(p.status, i, b)},
                      inverse);
    for (int64_t j = 0; j < k; ++j) {
      const int64_t listed = at<int64_t>(p.top_ids, i, b, j);
      if (listed >= 0) row.list.offer_any_order(at<float>(p.top, i, b, j), static_cast<int32_t>(listed));
    }
  }
  const RowLog log = write_stats(a.stats, b, row, inverse);
  for (int64_t j = 0; j < p.watch.shape[2]; ++j)
    write(a.stats.watch_logprobs, b, j, log.of(greatest(p.watch, n, b, j)));
  if (p.target.shape[1] > 0) {
    float target = kNever;
    for (int64_t i = 0; i < n; ++i) target = larger(target, at<float>(p.target, i, b));
    write(a.stats.target_logprob, b, log.of(target));
  }
}

}  // namespace

void merge_stats(const head::MergeArgs& a, const Exec&) {
  const int64_t B = a.parts.m.shape[1];
  parallel_for(head::ceil_div(B, kRowsPerTask), [&](int64_t task) {
    for (int64_t b = task * kRowsPerTask; b < std::min(B, (task + 1) * kRowsPerTask); ++b) merge_row(a, b);
  });
}

}  // namespace sic::cpu::SIC_ISA
