// merge_states and merge_many on the GPU: softmax states over disjoint keys become the state over all of them.
//
// Floor: every part read once, the result written once: (n + 1) * (D * itemsize + 4) bytes a row. A row of lanes takes
// a row, 8 channels a lane, and keeps four parts in flight.
#include "slicing/device_views.cuh"
#include "slicing/row_groups.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kInFlight = 4;

// The states to merge, by (part, row, head).
struct ManyParts {
  Rows3 outs, lses;
  int64_t n;

  __device__ __forceinline__ int64_t count() const { return n; }
  __device__ __forceinline__ const char* out(int64_t i, int64_t r, int64_t h) const { return outs.at(i, r, h); }
  __device__ __forceinline__ float lse(int64_t i, int64_t r, int64_t h) const { return *lses.as<const float>(i, r, h); }
};
struct TwoParts {
  Rows3 out_a, out_b, lse_a, lse_b;

  __device__ __forceinline__ int64_t count() const { return 2; }
  __device__ __forceinline__ const char* out(int64_t i, int64_t r, int64_t h) const {
    return i == 0 ? out_a.at(r, h, 0) : out_b.at(r, h, 0);
  }
  __device__ __forceinline__ float lse(int64_t i, int64_t r, int64_t h) const {
    return i == 0 ? *lse_a.as<const float>(r, h, 0) : *lse_b.as<const float>(r, h, 0);
  }
};

template <class Parts>
struct Params {
  Parts parts;
  Rows3 out, lse;  // by (row, head)
  int64_t rows;    // R * H
  int heads, D, lanes;
  bool wide_parts, wide_out;
};

// Other stacks mark an empty state with +inf.
__device__ __forceinline__ float known_lse(float x) { return isinf(x) ? -INFINITY : x; }
__device__ __forceinline__ float weight_of(float lse, float top) {
  return lse == -INFINITY ? 0.0f : lse == top ? 1.0f : expf(lse - top);
}

template <class T, class Parts>
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(const __grid_constant__ Params<Parts> p) {
  const int lane = lane_id() & (p.lanes - 1), per_warp = 32 / p.lanes;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kWarps + warp_id()) * per_warp + lane_id() / p.lanes;
  const bool live = row < p.rows;
  const int64_t r = live ? row / p.heads : 0, h = live ? row % p.heads : 0, n = live ? p.parts.count() : 0;
  float top = -INFINITY, total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float x = known_lse(p.parts.lse(i, r, h));
    top = x > top || x != x ? x : top;
  }
  for (int64_t i = 0; i < n; ++i) total += weight_of(known_lse(p.parts.lse(i, r, h)), top);
  const float inverse = total == 0 ? 0.0f : 1.0f / total;

  for (int j = lane; j * kGroup < p.D; j += p.lanes) {
    const int size = group_size(p.D, j);
    float sum[kGroup] = {};
    for (int64_t first = 0; first < n; first += kInFlight) {
      Group<T> part[kInFlight];
      float weight[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t i = first + u;
        const float lse = i < n ? known_lse(p.parts.lse(i, r, h)) : -INFINITY;
        weight[u] = weight_of(lse, top);
        // An empty part may hold anything: it is not read.
        part[u] = load_group(reinterpret_cast<const T*>(p.parts.out(i < n ? i : 0, r, h)) + j * kGroup,
                             lse == -INFINITY ? 0 : size, p.wide_parts);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u)
#pragma unroll
        for (int c = 0; c < kGroup; ++c) sum[c] = fmaf(weight[u], to_float(part[u].element(c)), sum[c]);
    }
    Group<T> merged = {};
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      T x;
      from_float(sum[c] * inverse, x);
      merged.put(c, x);
    }
    if (live) store_group(p.out.template as<T>(r, h, 0) + j * kGroup, merged, size, p.wide_out);
  }
  __syncwarp();  // out and lse may be those of a part: every lane has read it
  if (live && lane == 0) *p.lse.template as<float>(r, h, 0) = total == 0 ? -INFINITY : top + logf(total);
}

template <class Parts>
void merge(const Parts& parts, bool wide_parts, const TensorView& out, const TensorView& lse, const Exec& exec) {
  Params<Parts> p;
  p.parts = parts;
  p.out = Rows3::of(out), p.lse = Rows3::of(lse);
  p.rows = out.shape[0] * out.shape[1], p.heads = static_cast<int>(out.shape[1]);
  p.D = static_cast<int>(out.shape[2]), p.lanes = lanes_per_row(p.D);
  p.wide_parts = wide_parts, p.wide_out = groups_aligned(out);
  const int64_t blocks = slicing::ceil_div(p.rows, kWarps * (32 / p.lanes));
  with_float_type(out.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>)
      launch(merge_kernel<decltype(type), Parts>, dim3(grid_blocks(blocks)), dim3(kThreads), 0, exec.stream, p);
  });
}

}  // namespace

int64_t merge_states_workspace(const slicing::MergeStatesArgs&) { return 0; }
int64_t merge_many_workspace(const slicing::MergeArgs&) { return 0; }

void merge_states(const slicing::MergeStatesArgs& a, const Exec& exec) {
  const TwoParts parts{Rows3::of(a.out_a), Rows3::of(a.out_b), Rows3::of(a.lse_a), Rows3::of(a.lse_b)};
  merge(parts, groups_aligned(a.out_a) && groups_aligned(a.out_b), a.out, a.lse, exec);
}

void merge_many(const slicing::MergeArgs& a, const Exec& exec) {
  merge(ManyParts{Rows3::of(a.outs), Rows3::of(a.lses), a.outs.shape[0]}, groups_aligned(a.outs), a.out, a.lse, exec);
}

}  // namespace sic::gpu
