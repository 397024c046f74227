// Centre and radius of a page's keys on the GPU, a warp a page; the same roundings as slicing/page_summary_cpu.h.
#pragma once
#include <type_traits>

#include "slicing/device_views.cuh"
#include "slicing/row_groups.cuh"

namespace sic::gpu {

// f8 is too coarse for a bound, so the summary of such a cache is f32.
template <class T>
using SummaryOf = std::conditional_t<std::is_same_v<T, f8_t>, float, T>;

struct SummaryParams {
  Rows3 keys, summary;  // summary: by (page id, head, centre or radius)
  HeadScale scale;
  int D, lanes;
  bool wide_keys, wide_summary;

  static SummaryParams of(const TensorView& k_cache, const TensorView& k_scale, const TensorView& summary) {
    const int64_t D = k_cache.shape[3];
    return {Rows3::of(k_cache), Rows3::of(summary),      HeadScale::of(k_scale), static_cast<int>(D),
            lanes_per_row(D),   groups_aligned(k_cache), groups_aligned(summary)};
  }
};

// a - b rounded towards +infinity: the error of the subtraction is recovered exactly (two-sum).
__device__ __forceinline__ float subtract_up(float a, float b) {
  const float d = sub_rn(a, b), v = sub_rn(d, a), error = sub_rn(sub_rn(a, sub_rn(d, v)), add_rn(b, v));
  return error > 0 ? nextafterf(d, INFINITY) : d;
}

// The smallest value of the type that is not below x >= 0; NaN and infinity stay.
template <class T>
__device__ __forceinline__ T round_up(float x) {
  T y;
  from_float(x, y);
  if constexpr (!std::is_same_v<T, float>) {
    if (to_float(y) < x) ++y.bits;
  }
  return y;
}

// Smallest and largest value of each channel of a group; a NaN stays.
struct ChannelRange {
  float low[kGroup], high[kGroup];

  __device__ __forceinline__ ChannelRange() {
#pragma unroll
    for (int c = 0; c < kGroup; ++c) low[c] = INFINITY, high[c] = -INFINITY;
  }
  __device__ __forceinline__ void include(int c, float least, float most) {
    low[c] = least < low[c] || least != least ? least : low[c];
    high[c] = most > high[c] || most != most ? most : high[c];
  }
};

// The range of group j over rows first, first + step, ... of a page's live keys: four rows in flight.
template <class T>
__device__ __forceinline__ ChannelRange range_of_rows(const SummaryParams& p, const char* rows, int j, float scale,
                                                      uint32_t first, uint32_t step, uint32_t live) {
  constexpr int kInFlight = 4;
  ChannelRange range;
  const int n = group_size(p.D, j);
  for (uint32_t i = first; i < live; i += kInFlight * step) {
    Group<T> keys[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const uint32_t row = i + u * step < live ? i + u * step : i;
      keys[u] = load_group(reinterpret_cast<const T*>(rows + row * p.keys.stride[2]) + j * kGroup, n, p.wide_keys);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const float x = mul_rn(to_float(keys[u].element(c)), scale);
        range.include(c, x, x);
      }
  }
  return range;
}

// The summary of the first `live` keys (at least one) of a page and head. The whole warp.
template <class T>
__device__ __forceinline__ void summarise_page(const SummaryParams& p, int64_t page_id, int64_t h, uint32_t live) {
  using S = SummaryOf<T>;
  const int lane = lane_id() & (p.lanes - 1), row = lane_id() / p.lanes;
  const float scale = p.scale[h];
  for (int first = 0; first * kGroup < p.D; first += p.lanes) {
    const int j = first + lane;
    ChannelRange range = range_of_rows<T>(p, p.keys.at(page_id, h, 0), j, scale, row, 32 / p.lanes, live);
    for (int g = p.lanes; g < 32; g *= 2) {
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const float least = __shfl_xor_sync(kFullWarp, range.low[c], g);
        const float most = __shfl_xor_sync(kFullWarp, range.high[c], g);
        range.include(c, least, most);
      }
    }
    if (row > 0) continue;
    Group<S> centre = {}, radius = {};
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      S middle;
      from_float(add_rn(mul_rn(range.low[c], 0.5f), mul_rn(range.high[c], 0.5f)), middle);
      const float up = subtract_up(range.high[c], to_float(middle)), down = subtract_up(to_float(middle), range.low[c]);
      centre.put(c, middle);
      radius.put(c, round_up<S>(larger(up, down)));
    }
    const int n = group_size(p.D, j);
    store_group(p.summary.as<S>(page_id, h, 0) + j * kGroup, centre, n, p.wide_summary);
    store_group(p.summary.as<S>(page_id, h, 1) + j * kGroup, radius, n, p.wide_summary);
  }
}

}  // namespace sic::gpu
