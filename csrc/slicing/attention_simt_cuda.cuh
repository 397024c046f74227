// Attention on CUDA cores: any element types, head sizes, alignment.
//
// A warp takes 16 tokens at a time. With lane = 4 g + c: logits by four lanes a token (tokens g and g + 8), each with
// 16-byte pieces of the key, for all query rows of the block; the four add up so that lane c is left with rows c and
// c + 4. Then every lane owns 4 of 128 channels and walks the 16 value rows. Sums of channels live in shared memory, so
// that no head size is too large.
//
// Floor for f32, D = 128: 1024 bytes a token, 71 clocks of an SM on an H100; for 4 rows a step of 16 tokens is about
// 900 instructions of a warp, 14 issue slots a token on each of four schedulers. f8: 256 bytes, 18 clocks, 17 slots.
#pragma once
#include "slicing/attention_parts_cuda.cuh"

namespace sic::gpu {

// kCount neighbouring elements of a row, to floats.
template <class T, int kCount>
__device__ __forceinline__ void widen(const uint32_t* words, float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else if constexpr (sizeof(T) == 2) {
      T y;
      y.bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      x[i] = to_float(y);
    } else {
      T y;
      y.bits = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
      x[i] = to_float(y);
    }
  }
}

// Dynamic shared memory, all of it in 16-byte units.
struct SimtShared {
  float* q;                     // [kRows][q_stride], 0 beyond the last channel
  int64_t *k_at, *v_at;         // [kSplit] rows of the split's tokens, in bytes from the head's first
  float* add;                   // [kSplit]
  float* weight;                // [warp][kStep][kRows]
  float* decay;                 // [warp][kRows]
  float* sums;                  // [warp][kRows][value_stride]
  float* total;                 // [kRows][value_stride]
  float2 *state, *total_state;  // [warp][kRows], [kRows]
  int2* reach;                  // [kRows]
};

// Floats of a query row: whole rounds of four lanes.
template <class T, bool kWide>
SIC_HD constexpr int simt_query_stride(int Dk) {
  const int round = kWide ? 64 / static_cast<int>(sizeof(T)) : 4;
  return (Dk + round - 1) / round * round;
}

// Lays the parts out from `base`; returns the bytes.
SIC_HD inline int64_t lay_out(char* base, int rows, int q_stride, int value_stride, SimtShared* s) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* part = base + used;
    used += (bytes + 15) / 16 * 16;
    return part;
  };
  s->q = reinterpret_cast<float*>(take(int64_t{4} * rows * q_stride));
  s->k_at = reinterpret_cast<int64_t*>(take(8 * kSplit));
  s->v_at = reinterpret_cast<int64_t*>(take(8 * kSplit));
  s->add = reinterpret_cast<float*>(take(4 * kSplit));
  s->weight = reinterpret_cast<float*>(take(4 * kAttentionWarps * kStep * rows));
  s->decay = reinterpret_cast<float*>(take(4 * kAttentionWarps * rows));
  s->sums = reinterpret_cast<float*>(take(int64_t{4} * kAttentionWarps * rows * value_stride));
  s->total = reinterpret_cast<float*>(take(int64_t{4} * rows * value_stride));
  s->state = reinterpret_cast<float2*>(take(8 * kAttentionWarps * rows));
  s->total_state = reinterpret_cast<float2*>(take(8 * rows));
  s->reach = reinterpret_cast<int2*>(take(8 * rows));
  return used;
}

// One warp's share of a split.
template <class T, int kRows, bool kWide>
struct SimtWarp {
  static constexpr int kPiece = kWide ? 16 / static_cast<int>(sizeof(T)) : 1;  // elements a lane loads at once
  static constexpr int kOwn = kRows < 4 ? 1 : kRows / 4;                       // rows a lane is left with

  const AttentionParams& p;
  const Tile& tile;
  const SimtShared& s;
  LogitScale to_logit;
  int q_stride;
  const char *k_base, *v_base;
  float top[kOwn], sum[kOwn];  // the lane's own tokens

  __device__ __forceinline__ SimtWarp(const AttentionParams& params, const Tile& where, const SimtShared& shared)
      : p(params),
        tile(where),
        s(shared),
        to_logit(LogitScale::of(params, where.h)),
        q_stride(simt_query_stride<T, kWide>(params.Dk)) {
    k_base = p.kv.k.data + tile.h * p.kv.k.stride[1];
    v_base = p.kv.v.data + tile.h * p.kv.v.stride[1];
  }

  __device__ __forceinline__ float* sums() const { return s.sums + warp_id() * kRows * p.value_stride(); }

  __device__ __forceinline__ static void load_piece(const T* key, float (&x)[kPiece]) {
    if constexpr (kWide) {
      const uint4 v = load16(key);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      widen<T>(words, x);
    } else {
      x[0] = to_float(*key);
    }
  }

  // dot[token][row] over the channels of this lane.
  __device__ __forceinline__ void dot(int step, float (&dot)[2][kRows]) const {
    const int g = lane_id() / 4, c = lane_id() % 4;
    const T* key[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      key[half] = reinterpret_cast<const T*>(k_base + s.k_at[step * kStep + half * 8 + g]);
#pragma unroll 4
    for (int d = c * kPiece; d < p.Dk; d += 4 * kPiece) {
      float x[2][kPiece];
#pragma unroll
      for (int half = 0; half < 2; ++half) load_piece(key[half] + d, x[half]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float q[kPiece];
        load_query(r, d, q);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < kPiece; ++e) dot[half][r] = fmaf(q[e], x[half][e], dot[half][r]);
      }
    }
  }
  __device__ __forceinline__ void load_query(int r, int d, float (&q)[kPiece]) const {
    const float* from = s.q + r * q_stride + d;
    if constexpr (kWide) {
#pragma unroll
      for (int e = 0; e < kPiece; e += 4) {
        const float4 y = *reinterpret_cast<const float4*>(from + e);
        q[e] = y.x, q[e + 1] = y.y, q[e + 2] = y.z, q[e + 3] = y.w;
      }
    } else {
      q[0] = *from;
    }
  }

  // The lane's own rows of `dot`, added over the four lanes of a token.
  __device__ __forceinline__ void add_lanes(const float (&dot)[kRows], float (&own)[kOwn]) const {
    if constexpr (kRows == 1) {
      own[0] = warp_reduce_add_of_four(dot[0]);
    } else {
      const bool upper = lane_id() & 2, odd = lane_id() & 1;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float* x = dot + i * 4;
        const float first = (upper ? x[2] : x[0]) + __shfl_xor_sync(kFullWarp, upper ? x[0] : x[2], 2);
        const float second = (upper ? x[3] : x[1]) + __shfl_xor_sync(kFullWarp, upper ? x[1] : x[3], 2);
        own[i] = (odd ? second : first) + __shfl_xor_sync(kFullWarp, odd ? first : second, 1);
      }
    }
  }
  __device__ __forceinline__ static float warp_reduce_add_of_four(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 2);
    return x + __shfl_xor_sync(kFullWarp, x, 1);
  }
  __device__ __forceinline__ int own_row(int i) const { return kRows == 1 ? 0 : i * 4 + lane_id() % 4; }

  // The weights of the step's tokens, and what their maximum leaves of the sums before them.
  __device__ __forceinline__ void weigh(int split, int step, const float (&dot)[2][kRows]) {
    float x[2][kOwn];
    const int slot = lane_id() / 4;
    const int32_t pos = split * kSplit + step * kStep + slot;
    const bool ragged = is_ragged(p, tile, pos - slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      add_lanes(dot[half], x[half]);
      const float add = s.add[step * kStep + half * 8 + slot];
      to_logit(x[half], [&](int) { return add; });
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int2 reach = s.reach[own_row(i)];
        const int32_t at = pos + half * 8;
        if (ragged && (at < reach.x || at >= reach.y)) x[half][i] = kNone;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float new_top = fmaxf(top[i], fmaxf(x[0][i], x[1][i]));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) new_top = fmaxf(new_top, __shfl_xor_sync(kFullWarp, new_top, lanes));
      const float base = new_top == kNone ? 0.0f : new_top, decay = top[i] == kNone ? 0.0f : ex2(top[i] - base);
      const float weight[2] = {ex2(x[0][i] - base), ex2(x[1][i] - base)};
      sum[i] = add_rn(mul_rn(sum[i], decay), add_rn(weight[0], weight[1]));
      top[i] = new_top;
      if (kRows == 1 && lane_id() % 4 != 0) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        s.weight[(warp_id() * kStep + half * 8 + slot) * kRows + own_row(i)] = weight[half];
      if (slot == 0) s.decay[warp_id() * kRows + own_row(i)] = decay;
    }
  }

  // 4 channels from d of a value row; narrow: every 32nd one.
  __device__ __forceinline__ void load_values(const T* row, int d, float (&x)[4]) const {
    if constexpr (kWide) {
      uint32_t words[4];
      if constexpr (sizeof(T) == 4) {
        const uint4 v = load16(row + d);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      } else if constexpr (sizeof(T) == 2) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(row + d));
        words[0] = v.x, words[1] = v.y;
      } else {
        words[0] = __ldg(reinterpret_cast<const uint32_t*>(row + d));
      }
      widen<T>(words, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = d + e * 32 < p.Dv ? to_float(row[d + e * 32]) : 0.0f;
    }
  }
  // Where the lane's channel e of the block from d0 lies.
  __device__ __forceinline__ static int channel(int d0, int e) {
    return kWide ? d0 + lane_id() * 4 + e : d0 + e * 32 + lane_id();
  }

  __device__ __forceinline__ void add_values(int step) const {
    const float* weights = s.weight + warp_id() * kStep * kRows;
    const int stride = p.value_stride();
    for (int d0 = 0; d0 < p.Dv; d0 += 128) {
      if (channel(d0, 0) >= p.Dv) break;
      float acc[kRows][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int d = channel(d0, e);
          acc[r][e] = d < p.Dv ? mul_rn(sums()[r * stride + d], s.decay[warp_id() * kRows + r]) : 0.0f;
        }
#pragma unroll 8
      for (int j = 0; j < kStep; ++j) {
        float x[4];
        load_values(reinterpret_cast<const T*>(v_base + s.v_at[step * kStep + j]), channel(d0, 0), x);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[r][e] = fmaf(weights[j * kRows + r], x[e], acc[r][e]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (channel(d0, e) < p.Dv) sums()[r * stride + channel(d0, e)] = acc[r][e];
    }
  }

  __device__ __forceinline__ void clear() {
    for (int i = lane_id(); i < kRows * p.value_stride(); i += 32) sums()[i] = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) top[i] = kNone, sum[i] = 0;
  }
  __device__ __forceinline__ void store_state() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum[i] += __shfl_xor_sync(kFullWarp, sum[i], lanes);
      if (lane_id() < (kRows == 1 ? 1 : 4)) s.state[warp_id() * kRows + own_row(i)] = make_float2(top[i], sum[i]);
    }
  }

  __device__ __forceinline__ void walk(int split) {
    const int steps = (min(tile.slots - split * kSplit, kSplit) + kStep - 1) / kStep;
    clear();
    for (int step = warp_id(); step < steps; step += kAttentionWarps) {
      float dots[2][kRows] = {};
      dot(step, dots);
      __syncwarp();  // the weights of the step before have been used
      weigh(split, step, dots);
      __syncwarp();
      add_values(step);
    }
    store_state();
  }
};

__device__ __forceinline__ float load_query_element(const AttentionParams& p, const char* row, int d) {
  if (p.type == DType::f32) return reinterpret_cast<const float*>(row)[d];
  if (p.type == DType::f16) return to_float(reinterpret_cast<const f16_t*>(row)[d]);
  return to_float(reinterpret_cast<const bf16_t*>(row)[d]);
}

template <int kRows>
__device__ __forceinline__ void stage_simt_queries(const AttentionParams& p, const Tile& tile, int q_stride,
                                                   const SimtShared& s) {
  const int threads = kAttentionWarps * 32, tid = static_cast<int>(threadIdx.x);
  for (int r = 0; r < kRows; ++r) {
    const RowPlace row = tile.row(p, r < tile.rows ? r : 0);
    const char* q = p.q.at(tile.b, row.t, row.head);
    for (int d = tid; d < q_stride; d += threads)
      s.q[r * q_stride + d] = r < tile.rows && d < p.Dk ? load_query_element(p, q, d) : 0.0f;
  }
  if (tid < kRows) s.reach[tid] = row_reach(p, tile, tid);
}

__device__ __forceinline__ void stage_simt_slots(const AttentionParams& p, const Tile& tile, int split,
                                                 const SimtShared& s) {
  for (int i = static_cast<int>(threadIdx.x); i < kSplit; i += kAttentionWarps * 32) {
    const Slot slot = find_slot(p, tile, split * kSplit + i);
    s.k_at[i] = slot.place.page_id * p.kv.k.stride[0] + slot.place.offset * p.kv.k.stride[2];
    s.v_at[i] = slot.place.page_id * p.kv.v.stride[0] + slot.place.offset * p.kv.v.stride[2];
    s.add[i] = slot.add;
  }
}

// Resident blocks that leave a thread the registers it needs.
template <int kRows>
constexpr int simt_blocks() {
  return kRows == 1 ? 5 : 3;
}

template <class T, int kRows, bool kWide>
__global__ void __launch_bounds__(kAttentionWarps * 32, simt_blocks<kRows>())
    attention_simt(const __grid_constant__ AttentionParams p) {
  SIC_DYNAMIC_SHARED(char, shared);
  const int q_stride = simt_query_stride<T, kWide>(p.Dk), value_stride = p.value_stride();
  SimtShared s;
  lay_out(shared, kRows, q_stride, value_stride, &s);
  bool live;
  const Tile tile = find_tile<kRows>(p, &live);
  if (!live || !any_wanted(p, tile)) return;
  const WarpSums sums = {s.state, s.sums, kRows, value_stride, kRows * value_stride};
  const RowTotals totals = {s.total_state, s.total, value_stride};
  stage_simt_queries<kRows>(p, tile, q_stride, s);
  if (p.serial) clear_totals(kRows, totals);
  SimtWarp<T, kRows, kWide> warp(p, tile, s);
  for (int split = tile.splits.begin; split < tile.splits.end; ++split) {
    stage_simt_slots(p, tile, split, s);
    __syncthreads();
    warp.walk(split);
    __syncthreads();
    add_split(p, tile, split, 0, tile.rows, sums, totals);
    __syncthreads();
    if (p.serial) advance_totals(tile, sums, totals);
  }
  __syncthreads();
  if (p.serial) write_totals(p, tile, totals);
}

}  // namespace sic::gpu
