// Counting logits on the device: what a warp counts of one row, and how counts join.
//
// A warp holds some values of z in registers: their maximum first, then the sums relative to it in f32, no value seen
// twice; sums of different warps, blocks and parts join in double. Lists of the greatest lie sorted across the lanes.
#pragma once
#include <limits>

#include "core/gpu_views.cuh"
#include "head/stats.h"

namespace sic::gpu {

constexpr float kNever = -INFINITY, kLargest = std::numeric_limits<float>::max();
constexpr double kLn2 = 0.6931471805599453;
constexpr int kHeadWarps = 8, kHeadThreads = 32 * kHeadWarps;

// ---- moments ----

// Of some ids: the greatest z, and sums of e^y, y e^y, y^2 e^y with y = (z - m) / temperature.
struct Moments {
  float m;
  uint32_t status;
  double s, t, u;

  __device__ __forceinline__ static Moments none(uint32_t status = 0) { return {kNever, status, 0, 0, 0}; }

  // Sums relative to a new maximum; d = (m - m') / temperature.
  __device__ __forceinline__ void shift(double d) {
    const double weight = exp(d);
    u = weight * (u + 2 * d * t + d * d * s);
    t = weight * (t + d * s);
    s = weight * s;
  }
  __device__ __forceinline__ void merge(Moments other, double inverse_temperature) {
    other.status |= status;
    status = other.status;
    if (other.m == kNever) return;
    if (m != kNever) {
      const double d = (static_cast<double>(m) - other.m) * inverse_temperature;
      if (d <= 0) {
        shift(d);
      } else {
        other.shift(-d);
        other.m = m;
      }
      other.s += s, other.t += t, other.u += u;
    }
    *this = other;
  }
};

// Of all lanes, to all lanes.
__device__ __forceinline__ Moments join_lanes(Moments a, double inverse_temperature) {
  const float m = warp_reduce_max(a.m);
  if (a.m != kNever && a.m < m) a.shift((static_cast<double>(a.m) - m) * inverse_temperature);
  return {m, __reduce_or_sync(kFullWarp, a.status), warp_reduce_add(a.s), warp_reduce_add(a.t), warp_reduce_add(a.u)};
}

// kPer values of each lane; what takes no part is -inf.
template <int kPer>
struct Chunk {
  float z[kPer];

  // Bits for NaN and +inf on any lane.
  __device__ __forceinline__ uint32_t faults() const {
    bool good = true;
#pragma unroll
    for (int j = 0; j < kPer; ++j) good = good && z[j] < INFINITY;
    if (__all_sync(kFullWarp, good)) return 0;
    bool nan = false, inf = false;
#pragma unroll
    for (int j = 0; j < kPer; ++j) nan |= z[j] != z[j], inf |= z[j] == INFINITY;
    return (__any_sync(kFullWarp, nan) ? uint32_t{head::kNan} : 0) |
           (__any_sync(kFullWarp, inf) ? uint32_t{head::kInf} : 0);
  }
  __device__ __forceinline__ float top() const {
    float top = z[0];
#pragma unroll
    for (int j = 1; j < kPer; ++j) top = fmaxf(top, z[j]);
    return warp_reduce_max(top);
  }
  // Without faults; top is finite. factor: factor_of(1 / temperature).
  __device__ __forceinline__ Moments moments(float top, float factor) const {
    float s = 0, t = 0, u = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      // -inf becomes something whose power of two is 0: 0 times infinity would be NaN.
      const float x = fmaxf(-512.0f, (z[j] - top) * factor), e = ex2(x), xe = x * e;
      s += e, t += xe, u = fmaf(x, xe, u);
    }
    return {top, 0, warp_reduce_add(s), kLn2 * warp_reduce_add(t), kLn2 * kLn2 * warp_reduce_add(u)};
  }
};

// ---- lists of the greatest ----

// Ascends with the number and is above 0 for all but NaN; -0 and 0 are equal.
__device__ __forceinline__ uint32_t order_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(uint32_t order) {
  return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

constexpr int32_t kNoId = 0x7fffffff;

// Whether (z, id) comes before (other, other_id): the greater first, of equals the lowest id.
__device__ __forceinline__ bool precedes(float z, int32_t id, float other, int32_t other_id) {
  return z > other || (z == other && id < other_id);
}

// The greatest `room` of what was offered, in order; lane i holds entries i and i + 32. Called by whole warps.
struct WarpList {
  float z[2];
  int32_t id[2];
  int room;
  float least;  // the last entry
  int32_t least_id;

  __device__ __forceinline__ static WarpList none(int room) {
    return {{kNever, kNever}, {kNoId, kNoId}, room, kNever, kNoId};
  }

  // From lists of `room` entries in memory, and to them.
  __device__ __forceinline__ static WarpList load(const float* z, const int32_t* id, int room) {
    WarpList list = none(room);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (lane_id() + 32 * h < room) list.z[h] = z[lane_id() + 32 * h], list.id[h] = id[lane_id() + 32 * h];
    list.find_least();
    return list;
  }
  __device__ __forceinline__ void store(float* to_z, int32_t* to_id) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (lane_id() + 32 * h < room) to_z[lane_id() + 32 * h] = z[h], to_id[lane_id() + 32 * h] = id[h];
  }

  // Enters what is not below floor of the lanes' values; -inf never. Ids are unique, kAscending: in order on each lane.
  // The values are used up.
  template <bool kAscending, int kPer, class IdOf>
  __device__ __forceinline__ void offer(float (&values)[kPer], IdOf id_of, float floor = kNever) {
    float best;
    int32_t best_id;
    const auto scan = [&] {
      best = values[0], best_id = id_of(0);
#pragma unroll
      for (int j = 1; j < kPer; ++j)
        if (kAscending ? values[j] > best : precedes(values[j], id_of(j), best, best_id))
          best = values[j], best_id = id_of(j);
    };
    scan();
    while (true) {
      const bool enters = best > kNever && best >= floor && precedes(best, best_id, least, least_id);
      const uint32_t order = enters ? order_of(best) : 0, top = __reduce_max_sync(kFullWarp, order);
      if (top == 0) return;
      const uint32_t mine = order == top ? static_cast<uint32_t>(best_id) : 0xffffffffu;
      const int32_t chosen = static_cast<int32_t>(__reduce_min_sync(kFullWarp, mine));
      insert(number_of(top), chosen);
      if (best_id != chosen) continue;
#pragma unroll
      for (int j = 0; j < kPer; ++j)
        if (id_of(j) == chosen) values[j] = kNever;
      scan();
    }
  }
  // Entries first, first + 1, .. of lists in memory.
  template <int kPer>
  __device__ __forceinline__ void offer_entries(const float* from_z, const int32_t* from_id, int64_t first,
                                                int64_t end) {
    float values[kPer];
    int32_t ids[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int64_t i = first + lane_id() + 32 * j;
      values[j] = i < end ? from_z[i] : kNever, ids[j] = i < end ? from_id[i] : kNoId;
    }
    offer<false>(values, [&](int j) { return ids[j]; });
  }

 private:
  __device__ __forceinline__ int32_t count_before(int h, float v, int32_t i) const {
    return popc(__ballot_sync(kFullWarp, precedes(z[h], id[h], v, i)));
  }
  // Entries of a half from `at` on move one lane up, and the value takes the place.
  __device__ __forceinline__ void shift_in(int h, int at, float v, int32_t i) {
    const float up = __shfl_up_sync(kFullWarp, z[h], 1);
    const int32_t up_id = __shfl_up_sync(kFullWarp, id[h], 1);
    if (lane_id() > at) z[h] = up, id[h] = up_id;
    if (lane_id() == at) z[h] = v, id[h] = i;
  }
  __device__ __forceinline__ void insert(float v, int32_t i) {
    const int at = count_before(0, v, i);
    if (room > 32) {
      const float carry = __shfl_sync(kFullWarp, z[0], 31);
      const int32_t carry_id = __shfl_sync(kFullWarp, id[0], 31);
      const int after = count_before(1, v, i);
      shift_in(1, at < 32 ? 0 : after, at < 32 ? carry : v, at < 32 ? carry_id : i);
    }
    shift_in(0, at, v, i);
    find_least();
  }
  __device__ __forceinline__ void find_least() {
    const int lane = (room - 1) & 31;
    least = __shfl_sync(kFullWarp, room > 32 ? z[1] : z[0], lane);
    least_id = __shfl_sync(kFullWarp, room > 32 ? id[1] : id[0], lane);
  }
};

// ---- a block's warps ----

struct JoinShared {
  Moments moments[kHeadWarps];
  float z[kHeadWarps * head::kMaxTop];
  int32_t id[kHeadWarps * head::kMaxTop];
};

// Warp 0 receives what all warps of the block have counted. Once a kernel: all threads.
__device__ __forceinline__ void join_warps(Moments& moments, WarpList& list, double inverse_temperature,
                                           JoinShared& s) {
  const int warp = warp_id(), lane = lane_id(), room = list.room;
  moments = join_lanes(moments, inverse_temperature);
  if (lane == 0) s.moments[warp] = moments;
  list.store(s.z + warp * room, s.id + warp * room);
  __syncthreads();
  if (warp > 0) return;
  moments = join_lanes(lane < kHeadWarps ? s.moments[lane] : Moments::none(), inverse_temperature);
  for (int first = room; first < kHeadWarps * room; first += 64)
    list.offer_entries<2>(s.z, s.id, first, kHeadWarps * room);
}

// ---- from x to z ----

struct DeviceLogits {
  const float* bias;
  const int32_t* mask;
  int64_t mask_stride;
  float softcap;
  FloatVector temperature;
  int64_t columns;  // that can take part
  int64_t vocab_start;

  static DeviceLogits of(const head::StatsArgs& a) {
    DeviceLogits d{};
    if (a.in.bias.given()) d.bias = a.in.bias.as<const float>();
    if (a.in.mask_bits.given()) d.mask = a.in.mask_bits.as<const int32_t>(), d.mask_stride = a.in.mask_bits.stride[0];
    d.softcap = a.in.softcap, d.temperature = FloatVector::of(a.in.temperature);
    d.columns = head::columns(a), d.vocab_start = a.in.vocab_start;
    return d;
  }
  __device__ __forceinline__ bool plain() const { return !bias && !mask && softcap == 0; }
  __device__ __forceinline__ float operator()(float x, int64_t b, int64_t column) const {
    if (softcap > 0) x = tanhf(x / softcap) * softcap;
    if (bias) x += bias[column];
    if (mask && !(static_cast<uint32_t>(mask[b * mask_stride + column / 32]) >> (column % 32) & 1)) x = kNever;
    return x;
  }
};

__device__ __forceinline__ double inverse_of(const FloatVector& temperature, int64_t b) {
  const float t = temperature[b];
  return t > 0 ? 1 / static_cast<double>(t) : 1;
}

// ---- what is asked about single ids ----

struct DeviceWanted {
  const void *watch, *target;
  int64_t watch_row, watch_stride, target_stride;  // elements
  int W;
  bool watch_wide, target_wide;

  static DeviceWanted of(const head::Wanted& w) {
    DeviceWanted d{};
    if (w.watch_ids.given()) {
      const TensorView& v = w.watch_ids;
      d.watch = v.data, d.watch_wide = v.dtype == DType::i64, d.W = static_cast<int>(v.shape[v.rank - 1]);
      d.watch_row = v.rank == 2 ? v.stride[0] : 0, d.watch_stride = v.stride[v.rank - 1];
    }
    if (w.target_ids.given())
      d.target = w.target_ids.data, d.target_wide = w.target_ids.dtype == DType::i64,
      d.target_stride = w.target_ids.stride[0];
    return d;
  }
  SIC_HD int count() const { return W + (target ? 1 : 0); }
  // Of row b: the W watched ids, and the target as the last.
  __device__ __forceinline__ int64_t operator()(int64_t b, int i) const {
    const bool is_target = i == W;
    const int64_t at = is_target ? b * target_stride : b * watch_row + i * watch_stride;
    const void* ids = is_target ? target : watch;
    return (is_target ? target_wide : watch_wide) ? static_cast<const int64_t*>(ids)[at]
                                                  : int64_t{static_cast<const int32_t*>(ids)[at]};
  }
};

// ---- what the blocks of a row leave in the workspace ----

struct Segments {
  Moments* moments;  // [B, count]
  float* z;          // [B, count, room]
  int32_t* id;
  int64_t count;
  int room;

  template <class Carver>
  static Segments of(Carver& carve, const head::StatsArgs& a, int64_t count) {
    const int64_t B = head::rows(a), room = head::listed(a);
    Segments s{};
    s.moments = carve.template take<Moments>(B * count), s.z = carve.template take<float>(B * count * room);
    s.id = carve.template take<int32_t>(B * count * room), s.count = count, s.room = static_cast<int>(room);
    return s;
  }
  // By a warp that holds the same moments on all lanes.
  __device__ __forceinline__ void put(int64_t b, int64_t segment, const Moments& m, const WarpList& list) const {
    const int64_t at = b * count + segment;
    if (lane_id() == 0) moments[at] = m;
    list.store(z + at * room, id + at * room);
  }
};

}  // namespace sic::gpu
