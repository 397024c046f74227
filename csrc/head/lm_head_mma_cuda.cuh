// Products of hidden states and weights of one half type on tensor cores, D a multiple of 8 below 2^30, weights 16-byte
// aligned.
//
// A warp takes 16 rows of weights, straight from global memory into registers: no staging, each read once for the 8, 16
// or 32 rows of hidden states of the block, which lie in shared memory. With lane = 4 g + c: the lane loads 16 bytes of
// rows g and g + 8. Channels may sit anywhere inside a dot product, so these 8 are its words of two k16 steps; the
// hidden states lie in that order too. A row of hidden states is a column of the product, whose sums do not depend on
// the other columns: neither on the batch, then, nor on how many rows a block takes.
//
// Floor: weights of 16 rows and 32 channels are 1024 bytes, 71 clocks of an SM at 14.5 bytes/clock (H100); they take
// 2 loads, 1 to 4 reads of shared memory and 2 to 8 mma of a warp. 128 bytes a thread are in flight.
#pragma once
#include "head/lm_head_tile_cuda.cuh"

namespace sic::gpu {

template <class T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, f16_t>)
    mma_f16_16816(d, a, b);
  else
    mma_bf16_16816(d, a, b);
}

template <class T, int kTiles>
struct MmaProducts {
  static constexpr int kRows = 8 * kTiles, kStep = 32, kAhead = 4;
  static constexpr int kMaxChunk = 4096 / kTiles;  // channels in 64 KB

  const LmHeadParams& p;
  const HeadTask& task;
  int D;
  uint4* hidden;           // [chunk / kStep][kTiles][32]: 8 channels of row g of a tile, by lane
  const char *low, *high;  // the lane's channels of its rows g and g + 8
  uint4 weight[kAhead][2];
  float sum[kTiles][4];

  SIC_HD static int64_t bytes_of(int chunk) { return int64_t{chunk} * kRows * 2; }

  __device__ __forceinline__ MmaProducts(const LmHeadParams& params, const HeadTask& where, char* shared)
      : p(params), task(where), D(static_cast<int>(p.D)), hidden(reinterpret_cast<uint4*>(shared)) {}

  __device__ __forceinline__ void load(int channel, uint4 (&w)[2]) const {
    const bool live = channel + lane_id() % 4 * 8 < D;
    w[0] = live ? load16(low + int64_t{channel} * 2) : make_uint4(0, 0, 0, 0);
    w[1] = live ? load16(high + int64_t{channel} * 2) : make_uint4(0, 0, 0, 0);
  }

  // Channels from `at` on; rows and channels beyond the end are 0.
  __device__ __forceinline__ void stage(int at) const {
    for (int i = static_cast<int>(threadIdx.x); i < p.chunk / kStep * kTiles * 32; i += kHeadThreads) {
      const int lane = i % 32, n = i / 32 % kTiles * 8 + lane / 4;
      const int channel = at + i / (32 * kTiles) * kStep + lane % 4 * 8;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (n < task.rows && channel < D) {
        const T* from = reinterpret_cast<const T*>(p.hidden.data + (task.first_row + n) * p.hidden.stride) + channel;
        if (p.hidden.wide)
          v = load_cached16(from);
        else
          v = make_uint4(pair(from), pair(from + 2), pair(from + 4), pair(from + 6));
      }
      hidden[i] = v;
    }
  }
  __device__ __forceinline__ static uint32_t pair(const T* x) {
    return x[0].bits | static_cast<uint32_t>(x[1].bits) << 16;
  }

  __device__ __forceinline__ void multiply(const uint4 (&w)[2], int step) {
    const uint32_t even[4] = {w[0].x, w[1].x, w[0].y, w[1].y}, odd[4] = {w[0].z, w[1].z, w[0].w, w[1].w};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint4 h = hidden[(step * kTiles + n) * 32 + lane_id()];
      const uint32_t h_even[2] = {h.x, h.y}, h_odd[2] = {h.z, h.w};
      mma_16816<T>(sum[n], even, h_even);
      mma_16816<T>(sum[n], odd, h_odd);
    }
  }

  __device__ __forceinline__ void run(int64_t first, bool first_tile, float* x) {
    const int g = lane_id() / 4, c = lane_id() % 4, row = warp_id() * 16 + g;
    // Rows behind the last count for nothing: any that is there will do.
    const auto row_at = [&](int64_t column) {
      const int64_t last = p.logits.columns - 1;
      return p.weight + (column < last ? column : last) * p.weight_stride + c * 16;
    };
    low = row_at(first + row), high = row_at(first + row + 8);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i * kStep, weight[i]);
    for (int at = 0; at < D; at += p.chunk) {
      if (first_tile || p.chunk < D) {
        __syncthreads();  // the channels before are still read
        stage(at);
        __syncthreads();
      }
      walk(at);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[(n * 8 + 2 * c + e % 2) * kTileStride + row + e / 2 * 8] = sum[n][e];
  }

  // The weights of the chunk's first steps have been asked for; those of the next chunk are at the end.
  __device__ __forceinline__ void walk(int at) {
    const int left = D - at, steps = ((left < p.chunk ? left : p.chunk) + kStep - 1) / kStep;
    for (int step = 0; step < steps; step += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (step + i < steps) multiply(weight[i], step + i);
        load(at + (step + i + kAhead) * kStep, weight[i]);
      }
    }
  }
};

}  // namespace sic::gpu
