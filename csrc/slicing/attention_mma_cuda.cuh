// Attention on tensor cores: q and cache f16 or bf16, head sizes multiples of 8 up to 256, rows 16-byte aligned.
//
// A warp takes 16 tokens of K and V at a time, straight from global memory into registers: no staging, each row read
// once for the 8 or 16 query rows of the block. With lane = 4 g + c:
//   S = Q K^T      The lane loads 16 bytes of tokens g and g + 8. Channels may sit anywhere inside a dot product, so
//                  these 8 are K's words of two k16 steps; the queries lie in shared memory in that order.
//   O^T = V^T P^T  The lane loads 16 bytes of tokens 2c, 2c + 1, 2c + 8, 2c + 9; byte_perm pairs tokens per channel.
//                  The accumulators of S, rounded to pairs of tokens, are the words of P^T. A row of ones in place
//                  of V adds up the weights as they were rounded: the output is a mean under exactly these weights.
// The reference of a row's weights follows its maximum only when that has grown by more than 2^kSlack: every row
// decides for itself, a vote of the warp skips the rest.
//
// Floor: K + V of a token are 4 D bytes, 512 at D = 128: 35 clocks of an SM at 14.5 bytes/clock (H100), 25 at 20.7
// (H200). A step of 16 tokens at D = 128 is about 200 instructions of a warp, 25 of them mma: 3 issue slots a token
// on each of an SM's four schedulers. 256 bytes a thread are in flight (V of this step, K of the next).
#pragma once
#include "slicing/attention_parts_cuda.cuh"

namespace sic::gpu {

constexpr float kSlack = 8;

template <class T>
struct Half;
template <>
struct Half<f16_t> {
  static constexpr uint32_t kOnes = 0x3c003c00u;
  __device__ __forceinline__ static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_f16_16816(d, a, b);
  }
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return pack_f16x2(low, high); }
};
template <>
struct Half<bf16_t> {
  static constexpr uint32_t kOnes = 0x3f803f80u;
  __device__ __forceinline__ static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bf16_16816(d, a, b);
  }
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return pack_bf16x2(low, high); }
};

// D: 64, 128 or 256, at least the head sizes; kTiles * 8 query rows.
template <int D, int kTiles>
struct MmaShared {
  uint4 q[D / 16][32];                  // each lane's words of rows g and g + 8 for a k16 step
  uint32_t k_at[kSplit], v_at[kSplit];  // rows of the split's tokens, in units of 16 bytes from the head's first
  float add[kSplit];
  int2 reach[kTiles * 8];
  float2 state[kAttentionWarps][kTiles * 8], total_state[kTiles * 8];
  float sums[kAttentionWarps][8][D + 4];  // of one tile of 8 rows
  float total[kTiles * 8][D];
};

// Resident blocks that leave a thread the registers it needs.
template <int D, int kTiles>
constexpr int mma_blocks() {
  return D == 64 ? (kTiles == 1 ? 4 : 3) : D == 128 && kTiles == 1 ? 3 : 2;
}

// One warp's share of a split.
template <class T, int D, int kTiles, bool kExact>
struct MmaWarp {
  static constexpr int kKeyLoads = D / 32, kChunks = D / 64, kAhead = D == 128 ? 2 : 1;
  static constexpr bool kKeysAhead = D < 256 || kExact;  // else registers do not suffice
  using Shared = MmaShared<D, kTiles>;

  const AttentionParams& p;
  const Tile& tile;
  Shared& s;
  LogitScale to_logit;
  const char *k_base, *v_base;        // the lane's first channel of the head
  float out[kTiles][D / 16][4];       // channels by rows 2c, 2c + 1 of a tile
  float rounded[kTiles][4];           // sums of weights in the same layout, one channel like the other
  float sum[kTiles];                  // weights of row g of a tile before rounding, the lane's tokens
  float base[kTiles], limit[kTiles];  // reference of row g, and where it must follow

  __device__ __forceinline__ MmaWarp(const AttentionParams& params, const Tile& where, Shared& shared)
      : p(params), tile(where), s(shared), to_logit(LogitScale::of(params, where.h)) {
    k_base = p.kv.k.data + tile.h * p.kv.k.stride[1] + lane_id() % 4 * 16;
    v_base = p.kv.v.data + tile.h * p.kv.v.stride[1] + lane_id() / 4 * 16;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      base[n] = 0, limit[n] = kNone, sum[n] = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) rounded[n][e] = 0;
#pragma unroll
      for (int m = 0; m < D / 16; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][m][e] = 0;
    }
  }

  // ---- loads ----

  __device__ __forceinline__ static uint4 load_row(const char* row, int channel, int channels) {
    if (kExact || channel < channels) return load16(row);
    return make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load_keys(int step, uint4 (&k)[2][kKeyLoads]) const {
    const int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* row = k_base + static_cast<uint64_t>(s.k_at[step * kStep + half * 8 + g]) * 16;
#pragma unroll
      for (int j = 0; j < kKeyLoads; ++j) k[half][j] = load_row(row + j * 64, j * 32 + c * 8, p.Dk);
    }
  }
  // Rows of tokens 2c, 2c + 1 and 2c + 8, 2c + 9.
  struct ValueRows {
    uint2 low, high;
  };
  __device__ __forceinline__ ValueRows value_rows(int step) const {
    const uint32_t* at = s.v_at + step * kStep + lane_id() % 4 * 2;
    return {*reinterpret_cast<const uint2*>(at), *reinterpret_cast<const uint2*>(at + 8)};
  }
  __device__ __forceinline__ void load_values(const ValueRows& rows, int chunk, uint4 (&v)[4]) const {
    const uint32_t at[4] = {rows.low.x, rows.low.y, rows.high.x, rows.high.y};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = load_row(v_base + static_cast<uint64_t>(at[i]) * 16 + chunk * 128, chunk * 64 + lane_id() / 4 * 8, p.Dv);
  }

  // ---- arithmetic; a logit's index: [tokens 0-7 or 8-15 of the step][2 * tile of rows + token 2c or 2c + 1] ----

  __device__ __forceinline__ void dot(const uint4 (&k)[2][kKeyLoads], float (&logit)[2][4]) const {
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) {
      const uint4 even = s.q[2 * j][lane_id()], odd = s.q[2 * j + 1][lane_id()];
      const uint32_t q_even[4] = {even.x, even.y, even.z, even.w}, q_odd[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t k_even[2] = {k[half][j].x, k[half][j].y}, k_odd[2] = {k[half][j].z, k[half][j].w};
        Half<T>::mma(logit[half], q_even, k_even);
        Half<T>::mma(logit[half], q_odd, k_odd);
      }
    }
  }

  __device__ __forceinline__ void to_logits(int step, float (&logit)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = step * kStep + half * 8 + lane_id() % 4 * 2;
      const float2 add = *reinterpret_cast<const float2*>(s.add + slot);
      to_logit(logit[half], [&](int e) { return e % 2 ? add.y : add.x; });
    }
  }

  // Positions outside a row's reach, in a step where rows differ.
  __device__ __forceinline__ void mask(int32_t pos, float (&logit)[2][4]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int2 reach = s.reach[n * 8 + lane_id() / 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t at = pos + i / 2 * 8 + lane_id() % 4 * 2 + i % 2;
        if (at < reach.x || at >= reach.y) logit[i / 2][n * 2 + i % 2] = kNone;
      }
    }
  }

  // What the lanes of row 2c + r hold, c being this lane's.
  __device__ __forceinline__ static float of_column(float x, int r) {
    return __shfl_sync(kFullWarp, x, (lane_id() % 4 * 2 + r) * 4);
  }

  // Rows whose maximum has outgrown their reference take it for the new one.
  __device__ __forceinline__ void follow(const float (&logit)[2][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float top = fmaxf(fmaxf(logit[0][n * 2], logit[0][n * 2 + 1]), fmaxf(logit[1][n * 2], logit[1][n * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
      const bool grown = top > limit[n];
      const float keep = !grown ? 1.0f : limit[n] == kNone ? 0.0f : ex2(base[n] - top);
      if (grown) base[n] = top, limit[n] = top + kSlack;
      sum[n] *= keep;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = of_column(keep, r);
        rounded[n][r] *= factor, rounded[n][r + 2] *= factor;
#pragma unroll
        for (int m = 0; m < D / 16; ++m) out[n][m][r] *= factor, out[n][m][r + 2] *= factor;
      }
    }
  }

  // Dot products become weights, each pair of tokens a word.
  __device__ __forceinline__ void weigh(int split, int step, float (&logit)[2][4], uint32_t (&weight)[kTiles][2]) {
    to_logits(step, logit);
    const int32_t pos = split * kSplit + step * kStep;
    if (is_ragged(p, tile, pos)) mask(pos, logit);
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 2 * kTiles; ++e) grown |= logit[half][e] > limit[e / 2];
    if (__any_sync(kFullWarp, grown)) follow(logit);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = ex2(logit[half][n * 2] - base[n]), second = ex2(logit[half][n * 2 + 1] - base[n]);
        sum[n] = add_rn(sum[n], add_rn(first, second));
        weight[n][half] = Half<T>::pack(first, second);
      }
  }

  __device__ __forceinline__ void add_values(const uint4 (&v)[4], int chunk, const uint32_t (&weight)[kTiles][2]) {
    const uint32_t words[4][4] = {{v[0].x, v[0].y, v[0].z, v[0].w},
                                  {v[1].x, v[1].y, v[1].z, v[1].w},
                                  {v[2].x, v[2].y, v[2].z, v[2].w},
                                  {v[3].x, v[3].y, v[3].z, v[3].w}};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      // Rows g and g + 8 of the operand are channels 2w and 2w + 1 of the lane's eight.
      const uint32_t a[4] = {byte_perm(words[0][w], words[1][w], 0x5410), byte_perm(words[0][w], words[1][w], 0x7632),
                             byte_perm(words[2][w], words[3][w], 0x5410), byte_perm(words[2][w], words[3][w], 0x7632)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) Half<T>::mma(out[n][chunk * 4 + w], a, weight[n]);
    }
  }

  __device__ __forceinline__ void walk(int split) {
    const uint32_t ones[4] = {Half<T>::kOnes, Half<T>::kOnes, Half<T>::kOnes, Half<T>::kOnes};
    const int steps = (min(tile.slots - split * kSplit, kSplit) + kStep - 1) / kStep;
    clear();
    if (warp_id() >= steps) return;
    uint4 k[2][kKeyLoads], v[kAhead][4];
    if (kKeysAhead) load_keys(warp_id(), k);
    ValueRows rows = value_rows(warp_id());  // of the next step while this one is worked on
    for (int step = warp_id(); step < steps; step += kAttentionWarps) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_values(rows, i, v[i]);
      if (!kKeysAhead) load_keys(step, k);
      float logit[2][4] = {};
      uint32_t weight[kTiles][2];
      __syncwarp();  // else the compiler keeps all queries in registers, which loads in flight need
      dot(k, logit);
      if (kKeysAhead && step + kAttentionWarps < steps) load_keys(step + kAttentionWarps, k);
      weigh(split, step, logit, weight);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) Half<T>::mma(rounded[n], ones, weight[n]);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        add_values(v[chunk % kAhead], chunk, weight);
        if (chunk + kAhead < kChunks) load_values(rows, chunk + kAhead, v[chunk % kAhead]);
      }
      rows = value_rows(min(step + kAttentionWarps, steps - 1));
    }
  }

  // ---- results, to shared memory ----

  // The largest logits and the sums of weights; all tiles before any of their channels.
  __device__ __forceinline__ void store_state() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      sum[n] += __shfl_xor_sync(kFullWarp, sum[n], 1);
      sum[n] += __shfl_xor_sync(kFullWarp, sum[n], 2);
      if (lane_id() % 4 == 0)
        s.state[warp_id()][n * 8 + lane_id() / 4] = make_float2(limit[n] == kNone ? kNone : base[n], sum[n]);
    }
  }
  // The sums of the channels of 8 rows, for weights as they were before rounding; the lane has 8 neighbouring channels
  // of each chunk.
  __device__ __forceinline__ void store_sums(int n) const {
    const int g = lane_id() / 4, c = lane_id() % 4;
    const float (&o)[D / 16][4] = out[n];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float exact = of_column(sum[n], r), factor = rounded[n][r] > 0 ? exact / rounded[n][r] : 1.0f;
#pragma unroll
      for (int m = 0; m < D / 16; m += 2)
        *reinterpret_cast<float4*>(&s.sums[warp_id()][2 * c + r][m / 4 * 64 + g * 8 + m % 4 * 2]) =
            make_float4(o[m][r] * factor, o[m][r + 2] * factor, o[m + 1][r] * factor, o[m + 1][r + 2] * factor);
    }
  }
};

// The queries of the block as the operand of 16 rows; rows and channels beyond the end are 0.
template <class T, int D, int kTiles>
__device__ __forceinline__ void stage_queries(const AttentionParams& p, const Tile& tile, MmaShared<D, kTiles>& s) {
  for (int i = static_cast<int>(threadIdx.x); i < D * 2; i += kAttentionWarps * 32) {
    const int lane = i % 32, k_step = i / 32;
    // Two steps share 32 channels: a lane's 8 are 4 of one step and 4 of the next.
    const int channel = k_step / 2 * 32 + lane % 4 * 8 + k_step % 2 * 4;
    uint32_t words[2][2] = {};  // [row g or g + 8][channels 0, 1 or 2, 3]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = half * 8 + lane / 4;
      if (r >= tile.rows || channel >= p.Dk) continue;
      const RowPlace row = tile.row(p, r);
      const T* q = p.q.as<const T>(tile.b, row.t, row.head) + channel;
#pragma unroll
      for (int e = 0; e < 4; ++e) words[half][e / 2] |= static_cast<uint32_t>(q[e].bits) << (e % 2 * 16);
    }
    s.q[k_step][lane] = make_uint4(words[0][0], words[1][0], words[0][1], words[1][1]);
  }
  for (int r = static_cast<int>(threadIdx.x); r < kTiles * 8; r += kAttentionWarps * 32)
    s.reach[r] = row_reach(p, tile, r);
}

template <int D, int kTiles>
__device__ __forceinline__ void stage_slots(const AttentionParams& p, const Tile& tile, int split,
                                            MmaShared<D, kTiles>& s) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kSplit; i += kAttentionWarps * 32) {
    const Slot slot = find_slot(p, tile, split * kSplit + i);
    const int64_t offset = static_cast<int64_t>(slot.place.offset);
    s.k_at[i] = static_cast<uint32_t>((slot.place.page_id * p.kv.k.stride[0] + offset * p.kv.k.stride[2]) / 16);
    s.v_at[i] = static_cast<uint32_t>((slot.place.page_id * p.kv.v.stride[0] + offset * p.kv.v.stride[2]) / 16);
    s.add[i] = slot.add;
  }
}

template <class T, int D, int kTiles, bool kExact>
__global__ void __launch_bounds__(kAttentionWarps * 32, mma_blocks<D, kTiles>())
    attention_mma(const __grid_constant__ AttentionParams p) {
  using Shared = MmaShared<D, kTiles>;
  SIC_DYNAMIC_SHARED(Shared, shared);
  Shared& s = *shared;
  bool live;
  const Tile tile = find_tile<kTiles * 8>(p, &live);
  if (!live || !any_wanted(p, tile)) return;
  const WarpSums sums = {&s.state[0][0], &s.sums[0][0][0], kTiles * 8, D + 4, 8 * (D + 4)};
  const RowTotals totals = {s.total_state, &s.total[0][0], D};
  stage_queries<T>(p, tile, s);
  if (p.serial) clear_totals(kTiles * 8, totals);
  MmaWarp<T, D, kTiles, kExact> warp(p, tile, s);
  for (int split = tile.splits.begin; split < tile.splits.end; ++split) {
    stage_slots(p, tile, split, s);
    __syncthreads();
    warp.walk(split);
    warp.store_state();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      warp.store_sums(n);
      __syncthreads();
      add_split(p, tile, split, n * 8, min(tile.rows - n * 8, 8), sums, totals);
      __syncthreads();
    }
    if (p.serial) advance_totals(tile, sums, totals);
  }
  __syncthreads();
  if (p.serial) write_totals(p, tile, totals);
}

}  // namespace sic::gpu
