// Products of hidden states and weights of one half type on tensor cores, D a multiple of 8 below 2^30, weights 16-byte
// aligned.
//
// A warp takes 16 rows of weights, straight from global memory into registers: no staging, each read once for the 8, 16
// or 32 rows of hidden states of the block, which lie in shared memory. With lane = 4 g + c: the lane loads 16 bytes of
// rows g and g + 8. Channels may sit anywhere inside a dot product, so these 8 are its words of two k16 steps, and the
// hidden states lie in that order too. A product's sums do not depend on the other rows of the tile: neither on the
// batch, then, nor on how many rows a block takes.
//
// Floor: weights of 16 rows and 32 channels are 1024 bytes, 71 clocks of an SM at 14.5 bytes/clock (H100); they take
// 2 loads, 1 to 4 reads of shared memory and 4 to 8 mma of a warp. 128 bytes a thread are in flight.
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

template <class T, int kBlockRows>
struct MmaProducts {
  static constexpr int kRows = kBlockRows, kTiles = kRows == 8 ? 1 : kRows / 16;
  static constexpr int kWords = kRows / 8;  // of 16 bytes that a lane has of a step's hidden states
  static constexpr int kStep = 32, kAhead = 4;
  static constexpr int kChannels = kStep * kAhead;     // of a turn of the loop: chunks are multiples
  static constexpr int kMaxChunk = 32 * 1024 / kRows;  // channels in 64 KB

  const LmHeadParams& p;
  const HeadTask& task;
  int D;
  uint4* hidden;           // [chunk / kStep][kWords][32]: the lanes' operands
  const char *low, *high;  // the lane's channels of its rows g and g + 8
  uint4 weight[kAhead][2];
  float sum[kTiles][2][4];

  SIC_HD static int64_t bytes_of(int chunk) { return int64_t{chunk} * kRows * 2; }

  __device__ __forceinline__ MmaProducts(const LmHeadParams& params, const HeadTask& where, char* shared)
      : p(params), task(where), D(static_cast<int>(p.D)), hidden(reinterpret_cast<uint4*>(shared)) {}

  // ---- hidden states: rows and channels beyond the end are 0 ----

  __device__ __forceinline__ static uint32_t pair(const T* x) {
    return x[0].bits | static_cast<uint32_t>(x[1].bits) << 16;
  }
  __device__ __forceinline__ uint4 hidden_at(int row, int channel) const {
    if (row >= task.rows || channel >= D) return make_uint4(0, 0, 0, 0);
    const T* from = reinterpret_cast<const T*>(p.hidden.data + (task.first_row + row) * p.hidden.stride) + channel;
    if (p.hidden.wide) return load_cached16(from);
    return make_uint4(pair(from), pair(from + 2), pair(from + 4), pair(from + 6));
  }
  // Channels from `at` on.
  __device__ __forceinline__ void stage(int at) const {
    for (int i = static_cast<int>(threadIdx.x); i < p.chunk / kStep * kTiles * 32; i += kHeadThreads) {
      const int lane = i % 32, tile = i / 32 % kTiles, step = i / (32 * kTiles);
      const int row = tile * 16 + lane / 4, channel = at + step * kStep + lane % 4 * 8;
      uint4* const to = hidden + (step * kTiles + tile) * (kRows == 8 ? 1 : 2) * 32 + lane;
      const uint4 upper = hidden_at(row, channel);
      if constexpr (kRows == 8) {
        *to = upper;
      } else {
        const uint4 lower = hidden_at(row + 8, channel);
        to[0] = make_uint4(upper.x, lower.x, upper.y, lower.y);
        to[32] = make_uint4(upper.z, lower.z, upper.w, lower.w);
      }
    }
  }

  // ---- products ----

  __device__ __forceinline__ void load(int channel, uint4 (&w)[2]) const {
    const bool live = channel + lane_id() % 4 * 8 < D;
    w[0] = live ? load16(low + int64_t{channel} * 2) : make_uint4(0, 0, 0, 0);
    w[1] = live ? load16(high + int64_t{channel} * 2) : make_uint4(0, 0, 0, 0);
  }

  // The operands of a step's two k16 steps.
  __device__ __forceinline__ void load_hidden(int step, int tile, uint32_t (&even)[4], uint32_t (&odd)[4]) const {
    const uint4* from = hidden + step * kWords * 32 + tile * 64 + lane_id();
    const uint4 first = from[0];
    if constexpr (kRows == 8) {
      even[0] = first.x, even[1] = 0, even[2] = first.y, even[3] = 0;
      odd[0] = first.z, odd[1] = 0, odd[2] = first.w, odd[3] = 0;
    } else {
      const uint4 second = from[32];
      even[0] = first.x, even[1] = first.y, even[2] = first.z, even[3] = first.w;
      odd[0] = second.x, odd[1] = second.y, odd[2] = second.z, odd[3] = second.w;
    }
  }

  __device__ __forceinline__ void multiply(const uint4 (&w)[2], int step) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t even[4], odd[4];
      load_hidden(step, tile, even, odd);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t w_even[2] = {w[half].x, w[half].y}, w_odd[2] = {w[half].z, w[half].w};
        mma_16816<T>(sum[tile][half], even, w_even);
        mma_16816<T>(sum[tile][half], odd, w_odd);
      }
    }
  }

  // The weights of the chunk's first steps have been asked for; those of the next chunk are at the end. What a turn has
  // behind the last channel is 0.
  __device__ __forceinline__ void walk(int at) {
    const int left = D - at, steps = ((left < p.chunk ? left : p.chunk) + kStep - 1) / kStep;
#pragma unroll 1
    for (int step = 0; step < steps; step += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        __syncwarp();  // else the compiler reads hidden states ahead, into registers that weights in flight need
        multiply(weight[i], step + i);
        load(at + (step + i + kAhead) * kStep, weight[i]);
      }
    }
  }

  __device__ __forceinline__ void run(int64_t first, bool first_tile, float* x) {
    const int g = lane_id() / 4, c = lane_id() % 4, row = warp_id() * 16;
    // Rows behind the last count for nothing: any that is there will do.
    const auto row_at = [&](int64_t column) {
      const int64_t last = p.logits.columns - 1;
      return p.weight + (column < last ? column : last) * p.weight_stride + c * 16;
    };
    low = row_at(first + row + g), high = row_at(first + row + g + 8);
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0;
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
    for (int i = 0; i < kTiles * 4; ++i) {
      const int tile = i / 4, half = i / 2 % 2, lower = i % 2;
      if (kRows == 8 && lower) continue;
      *reinterpret_cast<float2*>(x + (tile * 16 + lower * 8 + g) * kTileStride + row + half * 8 + 2 * c) =
          make_float2(sum[tile][half][2 * lower], sum[tile][half][2 * lower + 1]);
    }
  }
};

}  // namespace sic::gpu
