// Products of hidden states and weights of any types on CUDA cores, in f32.
//
// A warp takes 4 rows of weights by 8 rows of hidden states, 4 channels a lane. Floor: 4 channels of 4 rows of f32 are
// 64 bytes a lane; they take 4 loads, 8 reads of shared memory and 128 fused products. Alignment changes no bit.
#pragma once
#include "head/lm_head_tile_cuda.cuh"

namespace sic::gpu {

template <class T>
struct SimtProducts {
  static constexpr int kRows = 8, kWeights = 4, kVec = 4, kStep = 32 * kVec, kChannels = kStep;
  static constexpr int kMaxChunk = 2048;  // channels in 64 KB

  const LmHeadParams& p;
  const HeadTask& task;
  float* hidden;  // [kRows][chunk]

  SIC_HD static int64_t bytes_of(int chunk) { return int64_t{chunk} * kRows * 4; }

  __device__ __forceinline__ SimtProducts(const LmHeadParams& params, const HeadTask& where, char* shared)
      : p(params), task(where), hidden(reinterpret_cast<float*>(shared)) {}

  __device__ __forceinline__ void stage(int64_t at) const {
    for (int i = static_cast<int>(threadIdx.x) * 8; i < kRows * p.chunk; i += kHeadThreads * 8) {
      float x[8] = {};
      if (i / p.chunk < task.rows) p.hidden.load8(task.first_row + i / p.chunk, at + i % p.chunk, p.D, x);
#pragma unroll
      for (int j = 0; j < 8; j += 4)
        *reinterpret_cast<float4*>(hidden + i + j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
    }
  }

  // Channels i .. i + 4 of a row of weights; those from the end on are 0.
  __device__ __forceinline__ void load(const T* row, int64_t i, float (&w)[kVec]) const {
    if (p.wide_weight && i + kVec <= p.D) {
      if constexpr (sizeof(T) == 4) {
        const uint4 v = load16(row + i);
        w[0] = __uint_as_float(v.x), w[1] = __uint_as_float(v.y), w[2] = __uint_as_float(v.z),
        w[3] = __uint_as_float(v.w);
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(row + i);
        const float2 a = std::is_same_v<T, f16_t> ? unpack_f16x2(v.x) : unpack_bf16x2(v.x);
        const float2 b = std::is_same_v<T, f16_t> ? unpack_f16x2(v.y) : unpack_bf16x2(v.y);
        w[0] = a.x, w[1] = a.y, w[2] = b.x, w[3] = b.y;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) w[j] = i + j < p.D ? to_float(row[i + j]) : 0.0f;
  }

  __device__ __forceinline__ void walk(int64_t at, const T* const (&rows)[kWeights],
                                       float (&sum)[kWeights][kRows]) const {
    const int64_t left = p.D - at, channels = left < p.chunk ? left : p.chunk;
    for (int i = lane_id() * kVec; i < channels; i += kStep) {
      float w[kWeights][kVec];
#pragma unroll
      for (int r = 0; r < kWeights; ++r) load(rows[r], at + i, w[r]);
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const float4 h = *reinterpret_cast<const float4*>(hidden + n * p.chunk + i);
#pragma unroll
        for (int r = 0; r < kWeights; ++r)
          sum[r][n] = fmaf(w[r][3], h.w, fmaf(w[r][2], h.z, fmaf(w[r][1], h.y, fmaf(w[r][0], h.x, sum[r][n]))));
      }
    }
  }

  __device__ __forceinline__ void run(int64_t first, bool first_tile, float* x) const {
    constexpr int kPass = kHeadWarps * kWeights;
    bool fresh = first_tile;
    for (int pass = 0; pass < kTileColumns; pass += kPass) {
      const int row = pass + warp_id() * kWeights;
      const T* rows[kWeights];
#pragma unroll
      for (int r = 0; r < kWeights; ++r) {
        const int64_t column = first + row + r, last = p.logits.columns - 1;
        rows[r] = reinterpret_cast<const T*>(p.weight + (column < last ? column : last) * p.weight_stride);
      }
      float sum[kWeights][kRows] = {};
      for (int64_t at = 0; at < p.D; at += p.chunk) {
        if (fresh || p.chunk < p.D) {
          __syncthreads();  // the channels before are still read
          stage(at);
          __syncthreads();
        }
        walk(at, rows, sum);
      }
      fresh = false;
      float mine = 0;  // lane 8 r + n keeps row r by n
#pragma unroll
      for (int i = 0; i < kWeights * kRows; ++i) {
        const float total = warp_reduce_add(sum[i / kRows][i % kRows]);
        if (lane_id() == i) mine = total;
      }
      x[lane_id() % kRows * kTileStride + row + lane_id() / kRows] = mine;
    }
  }
};

}  // namespace sic::gpu
