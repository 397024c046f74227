// Partial results of splits become rows: one block a row, a thread a channel, splits in their order.
#pragma once
#include "slicing/attention_parts_cuda.cuh"

namespace sic::gpu {

// How 32 splits, one a lane, join the state before them.
struct MergeStep {
  Join join;
  float sum;  // of the lane's split
};
__device__ __forceinline__ MergeStep merge_step(float2 part, float& top) {
  float reached = fmaxf(part.x, top);
#pragma unroll
  for (int back = 1; back < 32; back *= 2) {
    const float other = __shfl_up_sync(kFullWarp, reached, back);
    if (lane_id() >= back) reached = fmaxf(reached, other);
  }
  const float before = __shfl_up_sync(kFullWarp, reached, 1);
  const Join join = join_of(lane_id() == 0 ? top : before, part.x);
  top = __shfl_sync(kFullWarp, reached, 31);
  return {join, part.y};
}

// The row's state after all splits, and the sums of one channel (those of channel 0 beyond the last).
__device__ __forceinline__ float2 merge_channel(const AttentionParams& p, int64_t row, SplitRange splits, int d,
                                                float* sum) {
  constexpr int kAtOnce = 8;
  const int stride = p.value_stride();
  float2 state = make_float2(kNone, 0.0f);
  *sum = 0;
  for (int32_t first = splits.begin; first < splits.end; first += 32) {
    const int32_t n = min(splits.end - first, 32);
    const int64_t part = row * p.splits + first;
    const float2 mine = lane_id() < n ? p.states[part + lane_id()] : make_float2(kNone, 0.0f);
    const MergeStep step = merge_step(mine, state.x);
    const float* from = p.sums + part * stride + d;
    for (int32_t i = 0; i < n; i += kAtOnce) {
      float x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) x[j] = i + j < n ? from[static_cast<int64_t>(i + j) * stride] : 0.0f;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const Join join = {__shfl_sync(kFullWarp, step.join.keep, i + j), __shfl_sync(kFullWarp, step.join.add, i + j)};
        *sum = join(*sum, x[j]);
        state.y = join(state.y, __shfl_sync(kFullWarp, step.sum, i + j));
      }
    }
  }
  return state;
}

__global__ void __launch_bounds__(128, 6) attention_merge(const __grid_constant__ AttentionParams p) {
  const int64_t row = blockIdx.x;
  const int Hq = p.Hkv * p.G;
  const int head = static_cast<int>(row % Hq), t = static_cast<int>(row / Hq % p.T);
  const int64_t b = row / Hq / p.T;
  if (!p.wants(b, t, head)) return;
  const SplitRange splits = split_range(p, b, t, t, head / p.G);
  for (int first = 0; first < p.Dv; first += static_cast<int>(blockDim.x)) {
    const int d = first + static_cast<int>(threadIdx.x);
    float sum;
    const float2 state = merge_channel(p, row, splits, d < p.Dv ? d : 0, &sum);
    const Finish f = finish_row(p, head, state);
    if (d < p.Dv) store_output(p, p.out.at(b, t, head), d, sum * f.factor);
    if (d == 0) write_row(p, b, t, head, f.lse);
  }
}

}  // namespace sic::gpu
