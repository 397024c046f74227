// What a block of attention_codes shares, and its part for rows that are not coded: the side table's and the tail's.
#pragma once
#include "delta/attention_cuda.h"

namespace sic::gpu {

constexpr int kCodedStride = 128 + 4;
constexpr int kCodedParts = kAttentionWarps + 1;  // of a split: the warps' and the raw rows
constexpr float kSlack = 8;

struct CodesShared {
  union {
    uint2 q[kAttentionWarps][8][32];           // each lane's words of row g, in the order of K's, turned back by a warp
    float sums[kCodedParts][8][kCodedStride];  // of the parts; after the queries have been used
  };
  uint2 q_plain[8][32];
  uint4 low[delta::kRopeBlock][17];  // cosines and sines of the low table as halves; one more for the banks
  uint32_t k_at[kSplit], v_at[kSplit];
  float add[kSplit], raw_add[kSplit];  // coded rows' and raw rows'
  float k_scale[kSplit], v_scale[kSplit];
  uint16_t k_id[kSplit], v_id[kSplit];
  int32_t pos[kSplit], position[kSplit];  // in the sequence, of RoPE
  uint32_t raw[kSplit / 32];              // which rows are raw
  int2 reach[8];
  float2 state[kCodedParts][8], joined[kAttentionWarps][8], total_state[8];
  float weight[kAttentionWarps][8];
  float total[8][128];
};

// Raw rows two at a time; a warp does it for two query rows, with four channels a lane, 32 apart.
struct RawRows {
  static constexpr int kOwn = 2, kPieces = 4, kAtOnce = 2;

  const DeltaAttentionParams& p;
  const Tile& tile;
  CodesShared& s;
  LogitScale to_logit;
  int64_t tail;
  float q[kOwn][kPieces], out[kOwn][kPieces], top[kOwn], sum[kOwn];

  __device__ __forceinline__ int row(int r) const { return warp_id() * kOwn + r; }

  __device__ __forceinline__ RawRows(const DeltaAttentionParams& params, const Tile& where, CodesShared& shared)
      : p(params), tile(where), s(shared), to_logit(LogitScale::of(params, where.h)) {
    tail = p.tail.start.data ? p.tail.start[tile.b] : int64_t{0x7fffffff};
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      top[r] = kNone, sum[r] = 0;
      const RowPlace place = tile.row(p, row(r) < tile.rows ? row(r) : 0);
      const char* from = p.q.at(tile.b, place.t, place.head);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) q[r][i] = load_float(p.type, from, lane_id() + 32 * i), out[r][i] = 0;
    }
  }

  struct Rows {
    const char *k, *v;
    DType type;
    bool turned;  // the key has its position
  };
  __device__ __forceinline__ Rows find(int slot) const {
    const int32_t pos = s.pos[slot];
    if (pos >= tail)
      return {p.tail.k.at(tile.b, tile.h, pos - tail), p.tail.v.at(tile.b, tile.h, pos - tail), p.tail.type, true};
    const DevicePages& pages = p.cache.pages;
    const char* code = p.cache.k.codes.at(0, tile.h, 0) + static_cast<uint64_t>(s.k_at[slot]) * 16;
    const int32_t entry = load_entry(code, pages.entries);
    return {pages.raw_row(entry, false), pages.raw_row(entry, true), pages.raw_type, false};
  }

  // Channels lane, lane + 32, ..; pairs of RoPE are 64 apart.
  __device__ __forceinline__ void load(int slot, float (&k)[kPieces], float (&v)[kPieces]) const {
    const Rows from = find(slot);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      k[i] = load_float(from.type, from.k, lane_id() + 32 * i);
      v[i] = load_float(from.type, from.v, lane_id() + 32 * i);
    }
    if (from.turned || !p.cache.rope.lo) return;
    const RopeAngles at = p.cache.rope.at(s.position[slot], p.cache.rope.hi);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int d = lane_id() + 32 * i;
      turn(k[i], k[i + 2], at.lo[d], at.lo[64 + d]);
      turn(k[i], k[i + 2], at.hi[d], at.hi[64 + d]);
    }
  }

  __device__ __forceinline__ void add(int split, int slot, const float (&k)[kPieces], const float (&v)[kPieces]) {
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      float x[1] = {0};
#pragma unroll
      for (int i = 0; i < kPieces; ++i) x[0] = fmaf(q[r][i], k[i], x[0]);
      x[0] = warp_reduce_add(x[0]);
      to_logit(x, [&](int) { return s.raw_add[slot]; });
      const int2 reach = s.reach[row(r)];
      const int32_t at = split * kSplit + slot;
      if (p.dense() && (at < reach.x || at >= reach.y)) continue;
      const float reached = fmaxf(top[r], x[0]);
      if (reached == kNone) continue;
      const float keep = top[r] == kNone ? 0.0f : ex2(top[r] - reached), weight = ex2(x[0] - reached);
      top[r] = reached, sum[r] = add_rn(mul_rn(sum[r], keep), weight);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) out[r][i] = fmaf(weight, v[i], mul_rn(out[r][i], keep));
    }
  }

  __device__ __forceinline__ void walk(int split) {
#pragma unroll 1
    for (int word = 0; word < kSplit / 32; ++word)
      for (uint32_t left = s.raw[word]; left;) {
        const int first = word * 32 + __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const bool two = left != 0;
        const int second = two ? word * 32 + __ffs(static_cast<int>(left)) - 1 : first;
        left &= left - 1;
        float k[kAtOnce][kPieces], v[kAtOnce][kPieces];
        load(first, k[0], v[0]);
        load(second, k[1], v[1]);
        add(split, first, k[0], v[0]);
        if (two) add(split, second, k[1], v[1]);
      }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      if (lane_id() == 0) s.state[kAttentionWarps][row(r)] = make_float2(top[r], sum[r]);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) s.sums[kAttentionWarps][row(r)][lane_id() + 32 * i] = out[r][i];
    }
  }
};

__device__ __forceinline__ void attend_raw_rows(const DeltaAttentionParams& p, const Tile& tile, int split,
                                                CodesShared& s) {
  RawRows rows(p, tile, s);
  rows.walk(split);
  rows.store();
}

}  // namespace sic::gpu
