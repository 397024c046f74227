// A probe on one hidden state. A block takes a row.
#pragma once
#include "head/float_rows_cuda.cuh"
#include "head/stats_cuda.cuh"

namespace sic::gpu {

struct ProbeParams {
  FloatRows hidden, projection;
  const float *vector, *bias;
  float* score;
  int64_t D, vector_stride, score_stride;
  int R, outputs;
  bool relu, sigmoid;

  static ProbeParams of(const TensorView& hidden, const head::Probe& probe) {
    ProbeParams p{};
    p.hidden = FloatRows::of(hidden), p.projection = FloatRows::of(probe.projection);
    if (!probe.projection.given()) return p;
    p.vector = probe.vector.as<const float>(), p.vector_stride = probe.vector.stride[0];
    p.bias = probe.bias.as<const float>();
    p.score = probe.score.as<float>(), p.score_stride = probe.score.stride[0];
    p.D = hidden.shape[1], p.R = static_cast<int>(probe.vector.shape[1]);
    p.outputs = static_cast<int>(probe.vector.shape[0]);
    p.relu = probe.activation == head::Activation::relu, p.sigmoid = probe.link == head::Link::sigmoid;
    return p;
  }
};

struct ProbeShared {
  float inner[head::kMaxRank];
};

// All threads of the block.
__device__ __forceinline__ void probe_row(const ProbeParams& p, int64_t b, ProbeShared& s) {
  const int lane = lane_id();
  for (int r = warp_id(); r < p.R; r += kHeadWarps) {
    float sum = 0;
    for (int64_t i = lane * 8; i < p.D; i += 32 * 8) {
      float x[8], w[8];
      p.hidden.load8(b, i, p.D, x);
      p.projection.load8(r, i, p.D, w);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(x[j], w[j], sum);
    }
    sum = warp_reduce_add(sum);
    if (lane == 0) s.inner[r] = p.relu && sum < 0 ? 0.0f : sum;
  }
  __syncthreads();
  for (int i = warp_id(); i < p.outputs; i += kHeadWarps) {
    float sum = 0;
    for (int r = lane; r < p.R; r += 32) sum = fmaf(s.inner[r], p.vector[i * p.vector_stride + r], sum);
    const float score = warp_reduce_add(sum) + p.bias[i];
    if (lane == 0) p.score[b * p.score_stride + i] = p.sigmoid ? 1.0f / (1.0f + expf(-score)) : score;
  }
}

}  // namespace sic::gpu
