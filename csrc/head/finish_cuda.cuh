// Segments of a row become its results: a part, or the statistics. A block takes a row.
#pragma once
#include "head/stats_cuda.cuh"

namespace sic::gpu {

// A result by (row, column).
template <class T>
struct ResultRows {
  T* data;
  int64_t stride;

  static ResultRows of(const TensorView& v) { return {v.as<T>(), v.stride[0]}; }
  __device__ __forceinline__ T& operator()(int64_t b, int64_t i = 0) const { return data[b * stride + i]; }
};

struct DeviceStats {
  ResultRows<float> lse, entropy, varentropy;
  ResultRows<int64_t> argmax, topk_ids;
  ResultRows<float> topk_logprobs, watch_logprobs, target_logprob;
  ResultRows<uint8_t> status;
  int k;

  static DeviceStats of(const head::Stats& s) {
    DeviceStats d;
    d.lse = d.lse.of(s.lse), d.entropy = d.entropy.of(s.entropy), d.varentropy = d.varentropy.of(s.varentropy);
    d.argmax = d.argmax.of(s.argmax), d.topk_ids = d.topk_ids.of(s.topk_ids);
    d.topk_logprobs = d.topk_logprobs.of(s.topk_logprobs), d.watch_logprobs = d.watch_logprobs.of(s.watch_logprobs);
    d.target_logprob = d.target_logprob.of(s.target_logprob), d.status = d.status.of(s.status);
    d.k = static_cast<int>(s.topk_ids.shape[1]);
    return d;
  }
};

struct DevicePart {
  ResultRows<float> m;
  ResultRows<double> s, t, u;
  ResultRows<int64_t> top_ids;
  ResultRows<float> top, watch, target;
  ResultRows<uint8_t> status;

  static DevicePart of(const head::Part& p) {
    DevicePart d;
    d.m = d.m.of(p.m), d.s = d.s.of(p.s), d.t = d.t.of(p.t), d.u = d.u.of(p.u);
    d.top_ids = d.top_ids.of(p.top_ids), d.top = d.top.of(p.top);
    d.watch = d.watch.of(p.watch), d.target = d.target.of(p.target), d.status = d.status.of(p.status);
    return d;
  }
};

// A finished row but for single ids: what turns z into a log-probability.
struct RowLog {
  double m, inverse_temperature, log_s;
  bool bad;

  __device__ __forceinline__ float operator()(float z) const {
    if (bad) return NAN;
    return static_cast<float>((static_cast<double>(z) - m) * inverse_temperature - log_s);
  }
};

// By a warp that holds the same moments on all lanes.
__device__ __forceinline__ RowLog write_stats(const DeviceStats& out, int64_t b, const Moments& a, const WarpList& list,
                                              double inverse_temperature, int64_t vocab_start) {
  const uint32_t status = a.status ? a.status : a.s == 0 ? uint32_t{head::kEmpty} : 0;
  const RowLog log{a.m, inverse_temperature, ::log(a.s), status != 0};
  if (lane_id() == 0) {
    const double mean = a.t / a.s, spread = a.u / a.s - mean * mean;
    out.status(b) = static_cast<uint8_t>(status);
    out.lse(b) = log.bad ? NAN : static_cast<float>(log.m * inverse_temperature + log.log_s);
    out.entropy(b) = log.bad ? NAN : static_cast<float>(fmax(0.0, log.log_s - mean));
    out.varentropy(b) = log.bad ? NAN : static_cast<float>(fmax(0.0, spread));
    out.argmax(b) = log.bad ? 0 : list.id[0] + vocab_start;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = lane_id() + 32 * h;
    if (i >= out.k) continue;
    const bool listed = !log.bad && list.z[h] > kNever;
    out.topk_ids(b, i) = listed ? list.id[h] + vocab_start : log.bad && i == 0 ? 0 : -1;
    out.topk_logprobs(b, i) = log(listed ? list.z[h] : kNever);
  }
  return log;
}

__device__ __forceinline__ void write_part(const DevicePart& out, int64_t b, const Moments& counted,
                                           const WarpList& list, int64_t vocab_start) {
  const bool bad = counted.status != 0;
  const Moments a = bad ? Moments::none(counted.status) : counted;
  if (lane_id() == 0) {
    out.m(b) = a.m, out.s(b) = a.s, out.t(b) = a.t, out.u(b) = a.u;
    out.status(b) = static_cast<uint8_t>(a.status);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = lane_id() + 32 * h;
    if (i >= list.room) continue;
    const bool listed = !bad && list.z[h] > kNever;
    out.top_ids(b, i) = listed ? list.id[h] + vocab_start : -1;
    out.top(b, i) = listed ? list.z[h] : kNever;
  }
}

struct FinishParams {
  DeviceLogits logits;
  DeviceWanted wanted;
  Segments segments;
  bool part;
  DeviceStats stats;  // or
  DevicePart parts;

  static FinishParams of(const head::StatsArgs& a, const Segments& segments) {
    FinishParams p{};
    p.logits = DeviceLogits::of(a), p.wanted = DeviceWanted::of(a.wanted), p.segments = segments;
    p.part = head::is_part(a);
    if (p.part)
      p.parts = DevicePart::of(a.part);
    else
      p.stats = DeviceStats::of(a.stats);
    return p;
  }
};

// The segments of a row, in warp 0. All threads of the block.
__device__ __forceinline__ void join_segments(const Segments& segments, int64_t b, double inverse_temperature,
                                              Moments& moments, WarpList& list, JoinShared& s) {
  constexpr int kPer = 4, kAtOnce = 32 * kPer;
  moments = Moments::none(), list = WarpList::none(segments.room);
  const int64_t first = b * segments.count, entries = segments.count * segments.room;
  for (int64_t i = threadIdx.x; i < segments.count; i += kHeadThreads)
    moments.merge(segments.moments[first + i], inverse_temperature);
  const int64_t at = first * segments.room;
  for (int64_t i = int64_t{warp_id()} * kAtOnce; i < entries; i += kHeadWarps * kAtOnce)
    list.offer_entries<kPer>(segments.z + at, segments.id + at, i, entries);
  join_warps(moments, list, inverse_temperature, s);
}

// z_at(i, column): z of the i-th asked-for id, which is a column that takes part. All threads of the block.
template <class ZAt>
__device__ __forceinline__ void finish_row(const FinishParams& p, int64_t b, JoinShared& s, ZAt z_at) {
  const double inverse = inverse_of(p.logits.temperature, b);
  Moments moments;
  WarpList list;
  join_segments(p.segments, b, inverse, moments, list, s);
  if (warp_id() > 0) return;
  RowLog log{0, 0, 0, moments.status != 0};
  if (p.part)
    write_part(p.parts, b, moments, list, p.logits.vocab_start);
  else
    log = write_stats(p.stats, b, moments, list, inverse, p.logits.vocab_start);
  for (int i = lane_id(); i < p.wanted.count(); i += 32) {
    const int64_t id = p.wanted(b, i), column = id - p.logits.vocab_start;
    const bool target = i == p.wanted.W, none = log.bad || (target && id < 0);
    const float z = !none && column >= 0 && column < p.logits.columns ? z_at(i, column) : kNever;
    const float result = none ? NAN : p.part ? z : log(z);
    if (p.part)
      (target ? p.parts.target(b) : p.parts.watch(b, i)) = result;
    else
      (target ? p.stats.target_logprob(b) : p.stats.watch_logprobs(b, i)) = result;
  }
}

}  // namespace sic::gpu
