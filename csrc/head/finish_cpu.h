// Segments of a row become its results: a part, or the statistics.
#pragma once
#include "head/stats_cpu.h"

namespace sic::cpu::SIC_ISA {

// The segments of row b, in the order of their columns.
SIC_INLINE RowTotals join_segments(const Segments& segments, int64_t b, double inverse_temperature, TopList list,
                                   int64_t vocab_start) {
  RowTotals row{{}, list, vocab_start};
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& part = *reinterpret_cast<const Segment*>(segments.at(b, i));
    row.moments.merge(part.moments, inverse_temperature);
    const TopList listed = segments.list(b, i);
    for (int j = 0; j < part.used; ++j) row.list.offer(listed.z[j], listed.id[j]);
  }
  return row;
}

SIC_INLINE void write_part(const head::Part& out, int64_t b, const RowTotals& row) {
  const bool bad = row.moments.status != 0;
  const Moments a = bad ? Moments{kNever, 0, 0, 0, row.moments.status} : row.moments;
  const auto put = [&](const TensorView& v, double x) { v.as<double>()[b * v.stride[0]] = x; };
  write(out.m, b, a.m), put(out.s, a.s), put(out.t, a.t), put(out.u, a.u);
  out.status.as<uint8_t>()[b * out.status.stride[0]] = a.status;
  for (int64_t i = 0; i < out.top_ids.shape[1]; ++i) {
    const bool listed = !bad && i < row.list.used;
    write_id(out.top_ids, b, i, listed ? row.list.id[i] + row.vocab_start : -1);
    write(out.top, b, i, listed ? row.list.z[i] : kNever);
  }
}

// Results of row b. z_at(column) is z of a column that takes part.
template <class ZAt>
SIC_INLINE void finish_row(const StatsArgs& a, int64_t b, const Segments& segments, ZAt z_at) {
  float z[head::kMaxTop];
  int32_t id[head::kMaxTop];
  const int64_t start = a.in.vocab_start, columns = head::columns(a);
  const double inverse = inverse_temperature(a.in.temperature, b);
  const TopList list{z, id, static_cast<int>(segments.room)};
  const RowTotals row = join_segments(segments, b, inverse, list, start);
  const auto at = [&](int64_t global) {
    const int64_t column = global - start;
    return column >= 0 && column < columns && row.moments.status == 0 ? z_at(column) : kNever;
  };
  const TensorView &watch = a.wanted.watch_ids, &target = a.wanted.target_ids;
  const auto watched = [&](int64_t i) {
    return index_at(watch, (watch.rank == 2 ? b * watch.stride[0] : 0) + i * watch.stride[watch.rank - 1]);
  };
  const int64_t W = watch.given() ? watch.shape[watch.rank - 1] : 0;
  const int64_t aim = target.given() ? index_at(target, b * target.stride[0]) : -1;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (head::is_part(a)) {
    write_part(a.part, b, row);
    const bool bad = row.moments.status != 0;
    for (int64_t i = 0; i < W; ++i) write(a.part.watch, b, i, bad ? nan : at(watched(i)));
    if (target.given()) write(a.part.target, b, bad || aim < 0 ? nan : at(aim));
    return;
  }
  const RowLog log = write_stats(a.stats, b, row, inverse);
  for (int64_t i = 0; i < W; ++i) write(a.stats.watch_logprobs, b, i, log.of(at(watched(i))));
  if (target.given()) write(a.stats.target_logprob, b, aim < 0 ? nan : log.of(at(aim)));
}

}  // namespace sic::cpu::SIC_ISA
