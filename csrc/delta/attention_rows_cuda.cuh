// Attention on coded rows, on CUDA cores in f32: any head sizes, bits, types, positions.
//
// As attention_simt of slicing, with rows decoded to shared memory first: a warp takes 16 tokens at a time, decodes
// their keys (as delta_decode does), makes logits with four lanes a token, decodes the values over the keys and adds
// them up. Head sizes above 256 are decoded two tokens at a time.
//
// Bound: instructions. D = 128: half a warp decodes a key in about 700, a value in about 400; with dots and sums a
// token takes 600 of a warp, 150 clocks of an SM's four schedulers, against 9 clocks for its 134 B on an H100.
#pragma once
#include "delta/attention_cuda.h"
#include "slicing/attention_simt_cuda.cuh"

namespace sic::gpu {

// Dynamic shared memory: SimtShared, where k_at holds page ids and v_at offsets; and more.
struct RowsShared {
  SimtShared simt;
  float* levels[2];  // of keys, of values
  float* rows;       // [warp][token of a tile][row_stride]
  int32_t* pos;      // [kSplit]
  int row_stride;
};
template <int R>
constexpr int kTileTokens = R == 1 ? kStep : 2;

template <int R>
SIC_HD int64_t lay_out(char* base, int rows, int Dk, int Dv, RowsShared* s) {
  const int q_stride = simt_query_stride<float, true>(Dk), value_stride = (Dv + 3) & ~3;
  int64_t used = lay_out(base, rows, q_stride, value_stride, &s->simt);
  s->row_stride = ((Dk > Dv ? Dk : Dv) + 15) / 16 * 16 + 4;
  s->levels[0] = reinterpret_cast<float*>(base + used), s->levels[1] = s->levels[0] + 32;
  used += 4 * 64;
  s->pos = reinterpret_cast<int32_t*>(base + used);
  used += 4 * kSplit;
  s->rows = reinterpret_cast<float*>(base + used);
  return used + int64_t{4} * kAttentionWarps * kTileTokens<R> * s->row_stride;
}

// One warp's share of a split.
template <int kRows, int R, bool Uniform>
struct RowsWarp : SimtWarp<float, kRows, true> {
  using Base = SimtWarp<float, kRows, true>;
  static constexpr int kTile = kTileTokens<R>;

  const DeltaAttentionParams& d;
  const RowsShared& shared;
  float* const rows;
  const int32_t tail;  // the first position of the tail

  __device__ __forceinline__ RowsWarp(const DeltaAttentionParams& params, const Tile& where, const RowsShared& s)
      : Base(params, where, s.simt),
        d(params),
        shared(s),
        rows(s.rows + warp_id() * kTile * s.row_stride),
        tail(params.tail.start.data ? static_cast<int32_t>(min(params.tail.start[where.b], int64_t{0x7fffffff}))
                                    : 0x7fffffff) {}

  // Tokens [first, first + kTile) of the split to shared memory; a row of lanes takes one at a time.
  template <bool kValues>
  __device__ __forceinline__ void decode(int first) const {
    const CodeSide& side = kValues ? d.cache.v : d.cache.k;
    const RowDecoder<R, Uniform> decoder(side, shared.levels[kValues]);
    const DType raw_type = d.cache.pages.raw_type;
    const int lanes = decoder.row.lanes, own = lane_id() / lanes, per_pass = 32 / lanes;
    __syncwarp();  // rows of before have been used
#pragma unroll 1
    for (int t = 0; t < kTile; t += per_pass) {
      const bool extra = t + own >= kTile;  // of 32 lanes some have no token: they decode the last one
      const int token = extra ? kTile - 1 : t + own, slot = first + token;
      const int32_t pos = shared.pos[slot];
      float x[R][kGroup];
      float* const room = rows + token * shared.row_stride;
      if (__any_sync(kFullWarp, pos < tail)) {
        RowSource source;
        source.codes = side.codes.at(0, 0, 0);
        if (pos < tail)
          source = find_row(d.cache.pages, side, kValues, this->s.k_at[slot], this->tile.h,
                            static_cast<uint32_t>(this->s.v_at[slot]));
        const int64_t position = pos < tail ? d.cache.position(this->tile.b, pos) : 0;
        if constexpr (kValues) {
          decode_value(decoder, source, raw_type, this->tile.h, x);
        } else {
          decode_key(decoder, d.cache.rotation, d.cache.rope, source, raw_type, this->tile.h, position, room, x);
        }
      }
      const Rows3& newest = kValues ? d.tail.v : d.tail.k;
      if (pos >= tail) decoder.load_raw(d.tail.type, newest.at(this->tile.b, this->tile.h, pos - tail), x);
      __syncwarp();
      if (!extra) put_row(decoder.row, x, room);
    }
    __syncwarp();
  }

  // dot[token][row] over the channels of this lane, of the tokens in the tile.
  __device__ __forceinline__ void dot(int first, float (&dot)[2][kRows]) const {
    const int g = lane_id() / 4, c = lane_id() % 4;
    const float* key[2];
    bool inside[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = half * 8 + g - first;
      inside[half] = token >= 0 && token < kTile;
      key[half] = rows + (inside[half] ? token : 0) * shared.row_stride;
    }
    for (int e = c * 4; e < d.Dk; e += 16) {
      float4 x[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[half] = *reinterpret_cast<const float4*>(key[half] + e);
        if (!inside[half]) x[half] = make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float q[4];
        this->load_query(r, e, q);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& sum = dot[half][r];
          sum = fmaf(q[0], x[half].x, sum), sum = fmaf(q[1], x[half].y, sum);
          sum = fmaf(q[2], x[half].z, sum), sum = fmaf(q[3], x[half].w, sum);
        }
      }
    }
  }

  // The tile's values, times weights, to the sums; decay: they are the step's first.
  __device__ __forceinline__ void add_values(int first, bool decay) const {
    const float* weights = this->s.weight + (warp_id() * kStep + first) * kRows;
    const int stride = d.value_stride();
    for (int at = lane_id() * 4; at < d.Dv; at += 128) {
      float acc[kRows][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 y = *reinterpret_cast<const float4*>(this->sums() + r * stride + at);
        const float keep = decay ? this->s.decay[warp_id() * kRows + r] : 1.0f;
        acc[r][0] = mul_rn(y.x, keep), acc[r][1] = mul_rn(y.y, keep);
        acc[r][2] = mul_rn(y.z, keep), acc[r][3] = mul_rn(y.w, keep);
      }
#pragma unroll 4
      for (int j = 0; j < kTile; ++j) {
        const float4 x = *reinterpret_cast<const float4*>(rows + j * shared.row_stride + at);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float w = weights[j * kRows + r];
          acc[r][0] = fmaf(w, x.x, acc[r][0]), acc[r][1] = fmaf(w, x.y, acc[r][1]);
          acc[r][2] = fmaf(w, x.z, acc[r][2]), acc[r][3] = fmaf(w, x.w, acc[r][3]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        *reinterpret_cast<float4*>(this->sums() + r * stride + at) =
            make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
  }

  __device__ __forceinline__ void step(int split, int step) {
    float dots[2][kRows] = {};
#pragma unroll 1
    for (int first = 0; first < kStep; first += kTile) {
      decode<false>(step * kStep + first);
      dot(first, dots);
    }
    this->weigh(split, step, dots);
#pragma unroll 1
    for (int first = 0; first < kStep; first += kTile) {
      decode<true>(step * kStep + first);
      add_values(first, first == 0);
    }
  }

  __device__ __forceinline__ void walk(int split) {
    const int steps = (min(this->tile.slots - split * kSplit, kSplit) + kStep - 1) / kStep;
    this->clear();
    for (int i = warp_id(); i < steps; i += kAttentionWarps) step(split, i);
    this->store_state();
  }
};

__device__ __forceinline__ void stage_coded_slots(const DeltaAttentionParams& p, const Tile& tile, int split,
                                                  const RowsShared& s) {
  for (int i = static_cast<int>(threadIdx.x); i < kSplit; i += kAttentionWarps * 32) {
    const Slot slot = find_slot(p, tile, split * kSplit + i);
    s.simt.k_at[i] = slot.place.page_id, s.simt.v_at[i] = slot.place.offset;
    s.simt.add[i] = slot.add, s.pos[i] = slot.pos;
  }
}

template <int kRows, int R, bool Uniform>
__global__ void __launch_bounds__(kAttentionWarps * 32, R == 4 ? 2 : 3)
    attention_coded_rows(const __grid_constant__ DeltaAttentionParams p) {
  SIC_DYNAMIC_SHARED(char, shared);
  RowsShared s;
  lay_out<R>(shared, kRows, p.Dk, p.Dv, &s);
  const int value_stride = p.value_stride();
  bool live;
  const Tile tile = find_tile<kRows>(p, &live);
  if (!live) return;
  const WarpSums sums = {s.simt.state, s.simt.sums, kRows, value_stride, kRows * value_stride};
  const RowTotals totals = {s.simt.total_state, s.simt.total, value_stride};
  fill_levels(p.cache.k, s.levels[0]);
  fill_levels(p.cache.v, s.levels[1]);
  stage_simt_queries<kRows>(p, tile, simt_query_stride<float, true>(p.Dk), s.simt);
  if (p.serial) clear_totals(kRows, totals);
  RowsWarp<kRows, R, Uniform> warp(p, tile, s);
  for (int split = tile.splits.begin; split < tile.splits.end; ++split) {
    stage_coded_slots(p, tile, split, s);
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
