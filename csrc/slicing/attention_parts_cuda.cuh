// What the attention kernels share: parameters, the division of a call, and the arithmetic of partial results.
//
// A row (query token, head) attends to the slots of a list: positions 0, 1, 2, .. of a dense call, or listed tokens.
// Splits are kSplit slots, steps of a split kStep slots; warp w of a block takes steps w, w + kAttentionWarps, ..
// Warps are added in their order, then splits in theirs. None of this depends on the batch, on the rows that share a
// block or on whether splits run side by side, so neither do a row's bits.
#pragma once
#include <limits>

#include "core/gpu.cuh"
#include "slicing/attention_cuda.h"
#include "slicing/device_views.cuh"

namespace sic::gpu {

constexpr int kSplit = 256;
constexpr int kStep = 16;
constexpr int kAttentionWarps = 4;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct AttentionParams {
  DeviceKv kv;
  DeviceSelection list;  // no indices: dense
  Rows3 q, out, lse;     // by (sequence, query token, head)
  const float* key_bias = nullptr;
  const float* sinks = nullptr;
  int64_t bias_stride = 0, sink_stride = 0, window = 0, max_seq_len = 0;
  float scale = 0, softcap = 0;
  DType type = DType::f32;  // of q and out
  bool pages = false;       // the list holds pages
  bool serial = true;       // a block takes all splits of its rows; else partial results go to states and sums
  int32_t capacity = 0;     // entries of a list
  int32_t B = 0, T = 0, G = 0, Hkv = 0, Dk = 0, Dv = 0;
  int32_t lists = 1, list_tiles = 1;  // lists of a sequence and head; blocks of rows that share a list
  int32_t splits = 1;                 // of the longest list that the shapes allow
  float2* states = nullptr;           // [row][split]: largest logit, sum of weights
  float* sums = nullptr;              // [row][split][Dv rounded up to 4]
  RowMask only;
  OmittedMass mass;

  __device__ __forceinline__ bool dense() const { return list.indices == nullptr; }
  __device__ __forceinline__ int value_stride() const { return (Dv + 3) & ~3; }
  __device__ __forceinline__ int32_t visible(int64_t b, int t) const {
    return static_cast<int32_t>(kv.seq_lens.visible(b, T, t, max_seq_len));
  }
  // The first position that query token t looks at.
  __device__ __forceinline__ int32_t window_start(int64_t b, int t) const {
    if (window == 0) return 0;
    const int64_t first = kv.seq_lens[b] - T + t - window + 1;
    return static_cast<int32_t>(first > 0 ? first : 0);
  }
  // Slots of the list of query tokens up to t.
  __device__ __forceinline__ int32_t listed(int64_t b, int t, int h) const {
    const int32_t positions = visible(b, t);
    if (dense() || positions == 0) return positions;
    const int32_t n = min(max(list.count(b, t, h), 0), capacity);
    return pages ? n * static_cast<int32_t>(kv.pages.split.page) : n;
  }
  __device__ __forceinline__ bool wants(int64_t b, int t, int head) const {
    const RowBytes& m = only.bytes;
    return m.data == nullptr || m.data[b * m.stride[0] + t * m.stride[1] + head * m.stride[2]] == only.value;
  }
};

// The splits with anything in them; those before a dense row's window have nothing.
struct SplitRange {
  int32_t begin, end;
};
__device__ __forceinline__ SplitRange split_range(const AttentionParams& p, int64_t b, int first_t, int last_t, int h) {
  const int32_t n = p.listed(b, last_t, h);
  return {p.dense() ? min(p.window_start(b, first_t), n) / kSplit : 0, (n + kSplit - 1) / kSplit};
}

// ---- the rows of a block ----

struct RowPlace {
  int t, head;
};

struct Tile {
  int64_t b;
  int h, list, first, rows;  // rows [first, first + rows) of the list's
  int32_t slots;
  SplitRange splits;             // that this block takes
  int32_t begin, end;            // positions that any row looks at
  int32_t full_begin, full_end;  // positions that every row looks at

  __device__ __forceinline__ RowPlace row(const AttentionParams& p, int r) const {
    const int i = first + r;
    if (!p.dense()) return {list, h * p.G + i};
    return {i / p.G, h * p.G + i % p.G};
  }
};

// The block's part of the call; !*live: nothing to do.
template <int kRows>
__device__ __forceinline__ Tile find_tile(const AttentionParams& p, bool* live) {
  Tile tile;
  uint32_t rest = blockIdx.x;
  const uint32_t tiles = static_cast<uint32_t>(p.lists * p.list_tiles);
  const uint32_t tile_id = rest % tiles;
  rest /= tiles;
  tile.h = static_cast<int>(rest % static_cast<uint32_t>(p.Hkv));
  const int32_t split = static_cast<int32_t>(rest / static_cast<uint32_t>(p.Hkv));
  tile.b = blockIdx.y + static_cast<int64_t>(blockIdx.z) * gridDim.y;
  *live = tile.b < p.B;
  if (!*live) return tile;
  tile.list = static_cast<int>(tile_id) / p.list_tiles;
  tile.first = static_cast<int>(tile_id) % p.list_tiles * kRows;
  tile.rows = min(kRows, (p.dense() ? p.T * p.G : p.G) - tile.first);
  const int first_t = tile.row(p, 0).t, last_t = tile.row(p, tile.rows - 1).t;
  tile.slots = p.listed(tile.b, last_t, tile.h);
  tile.splits = split_range(p, tile.b, first_t, last_t, tile.h);
  tile.begin = p.window_start(tile.b, first_t);
  tile.end = p.visible(tile.b, last_t);
  tile.full_begin = p.window_start(tile.b, last_t);
  tile.full_end = p.visible(tile.b, first_t);
  if (!p.serial) {
    *live = split >= tile.splits.begin && split < tile.splits.end;
    tile.splits = {split, split + 1};
  }
  return tile;
}

// Whether a block has a row to compute. All threads take part.
__device__ __forceinline__ bool any_wanted(const AttentionParams& p, const Tile& tile) {
  if (p.only.bytes.data == nullptr) return true;
  bool wanted = false;
  if (static_cast<int>(threadIdx.x) < tile.rows) {
    const RowPlace row = tile.row(p, static_cast<int>(threadIdx.x));
    wanted = p.wants(tile.b, row.t, row.head);
  }
  return __syncthreads_or(wanted) != 0;
}

// ---- slots ----

struct Slot {
  Place place;
  int32_t pos;
  float add;  // to the logit, base 2: the bias; -inf where no row may look
};

// A slot without a token repeats one that the block may read: its weight is 0.
__device__ __forceinline__ Slot find_slot(const AttentionParams& p, const Tile& tile, int32_t slot) {
  const uint32_t listed = static_cast<uint32_t>(min(slot, tile.slots - 1));
  int32_t pos = static_cast<int32_t>(listed);
  if (!p.dense()) {
    const int32_t* list = p.list.row(tile.b, tile.list, tile.h);
    if (p.pages) {
      const uint32_t entry = p.kv.pages.split.index(listed), page = p.kv.pages.split.page;
      pos = static_cast<int32_t>(static_cast<uint32_t>(list[entry]) * page + (listed - entry * page));
    } else {
      pos = list[listed];
    }
  }
  const bool seen = slot < tile.slots && pos >= tile.begin && pos < tile.end;
  pos = max(min(max(pos, tile.begin), tile.end - 1), 0);
  Slot s;
  s.pos = pos;
  s.place = p.kv.pages.place(tile.b, static_cast<uint32_t>(pos));
  s.add = !seen ? kNone : p.key_bias ? p.key_bias[tile.b * p.bias_stride + pos] * kLog2e : 0.0f;
  return s;
}

// Whether rows of the block see different parts of the kStep positions from pos; only dense rows can.
__device__ __forceinline__ bool is_ragged(const AttentionParams& p, const Tile& tile, int32_t pos) {
  return p.dense() && (pos < tile.full_begin || pos + kStep > tile.full_end);
}

// The positions [x, y) that row r looks at.
__device__ __forceinline__ int2 row_reach(const AttentionParams& p, const Tile& tile, int r) {
  if (r >= tile.rows) return make_int2(0, 0);
  const int t = tile.row(p, r).t;
  return make_int2(p.window_start(tile.b, t), p.visible(tile.b, t));
}

// ---- logits ----

// From a dot product to a logit in base 2.
struct LogitScale {
  float factor, cap, cap_factor;

  __device__ __forceinline__ static LogitScale of(const AttentionParams& p, int h) {
    const float scale = p.scale * p.kv.k_scale[h];
    return {scale * kLog2e, p.softcap > 0 ? p.softcap * kLog2e : 0.0f, scale / p.softcap};
  }
  // In place of n dot products; add_of(i) is the i-th one's addend.
  template <int n, class AddOf>
  __device__ __forceinline__ void operator()(float (&x)[n], AddOf add_of) const {
    if (cap > 0) {
#pragma unroll
      for (int i = 0; i < n; ++i) x[i] = fmaf(cap, tanhf(mul_rn(x[i], cap_factor)), add_of(i));
      return;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = fmaf(x[i], factor, add_of(i));
  }
};

// ---- states: x the largest logit (base 2), y the sum of weights relative to it ----

__device__ __forceinline__ bool is_empty(float2 s) { return s.x == kNone && s.y == 0; }  // a sum of NaN is not empty

// 2^(x - top), 1 where both are infinite.
__device__ __forceinline__ float relative_weight(float x, float top) { return x == top ? 1.0f : ex2(x - top); }

struct Join {
  float keep, add;
  __device__ __forceinline__ float operator()(float sum, float part) const {
    return add_rn(mul_rn(sum, keep), mul_rn(part, add));
  }
};
// What becomes of sums with largest logit `top` when a part with `part_top` joins them.
__device__ __forceinline__ Join join_of(float top, float part_top) {
  const float both = fmaxf(top, part_top);
  return {relative_weight(top, both), relative_weight(part_top, both)};
}

// ---- results ----

template <class T>
__device__ __forceinline__ void store_float(char* row, int d, float x) {
  from_float(x, reinterpret_cast<T*>(row)[d]);
}
__device__ __forceinline__ void store_output(const AttentionParams& p, char* row, int d, float x) {
  if (p.type == DType::f32) return store_float<float>(row, d, x);
  if (p.type == DType::f16) return store_float<f16_t>(row, d, x);
  store_float<bf16_t>(row, d, x);
}

// A finished row's LSE, and the factor that turns its sums into the output.
struct Finish {
  float lse, factor;
};
__device__ __forceinline__ Finish finish_row(const AttentionParams& p, int head, float2 state) {
  float keep = 1;
  if (p.sinks && state.x != kNone) {  // a row that sees nothing stays empty
    const float sink = p.sinks[head * p.sink_stride] * kLog2e;
    const float top = fmaxf(state.x, sink);
    keep = relative_weight(state.x, top);
    state = make_float2(top, add_rn(mul_rn(state.y, keep), relative_weight(sink, top)));
  }
  if (is_empty(state)) return {kNone, 0.0f};
  return {(state.x + log2f(state.y)) * kLn2, keep / state.y * p.kv.v_scale[head / p.G]};
}

// The share of the whole that was not read, and what follows from it.
__device__ __forceinline__ void finish_mass(const AttentionParams& p, int64_t b, int t, int head, float lse) {
  const OmittedMass& m = p.mass;
  float* omitted = m.log_unread + b * m.stride[0] + t * m.stride[1] + head * m.stride[2];
  const int32_t page = p.pages ? static_cast<int32_t>(p.kv.pages.split.page) : 1;
  const bool all = p.list.count(b, t, head / p.G) == (p.visible(b, t) + page - 1) / page;
  uint8_t status = all ? slicing::kDenseShort : slicing::kSliced;
  float share = *omitted == kNone ? 0.0f : 1.0f / (1.0f + expf(lse - *omitted));
  if (m.limit <= 1 && !(share <= m.limit)) status = slicing::kFallbackMass, share = 0;  // NaN too
  *omitted = share;
  m.status.data[b * m.status.stride[0] + t * m.status.stride[1] + head * m.status.stride[2]] = status;
}

// Everything of a row that is not a channel.
__device__ __forceinline__ void write_row(const AttentionParams& p, int64_t b, int t, int head, float lse) {
  *p.lse.as<float>(b, t, head) = lse;
  if (p.mass.log_unread) finish_mass(p, b, t, head, lse);
}

// ---- a block's rows: warps joined, splits joined or left to the merge ----

// In shared memory; rows of the sums have `stride` floats, four at a time.
struct WarpSums {
  const float2* state;  // [warp][state_stride]
  const float* sums;    // [warp][..][stride]
  int state_stride, stride, warp_stride;
};
// The running result of the splits so far.
struct RowTotals {
  float2* state;
  float* sums;
  int stride;
};

struct WarpJoin {
  float2 state;
  float weight[kAttentionWarps];
};
__device__ __forceinline__ WarpJoin join_warps(const WarpSums& w, int r) {
  WarpJoin j;
  float top = kNone;
#pragma unroll
  for (int i = 0; i < kAttentionWarps; ++i) top = fmaxf(top, w.state[i * w.state_stride + r].x);
  j.state = make_float2(top, 0.0f);
#pragma unroll
  for (int i = 0; i < kAttentionWarps; ++i) {
    const float2 s = w.state[i * w.state_stride + r];
    j.weight[i] = relative_weight(s.x, top);
    j.state.y = add_rn(j.state.y, mul_rn(s.y, j.weight[i]));
  }
  return j;
}

// Rows [first, first + rows) of the tile, which are rows 0, 1, .. of the warps' sums. Threads of a block share the
// work; states of the totals are left for advance_totals().
__device__ __forceinline__ void add_split(const AttentionParams& p, const Tile& tile, int split, int first, int rows,
                                          const WarpSums& warps, const RowTotals& totals) {
  const int quads = p.value_stride() / 4;
  for (int i = static_cast<int>(threadIdx.x); i < rows * quads; i += static_cast<int>(blockDim.x)) {
    const int r = i / quads, d = (i - r * quads) * 4;
    const WarpJoin join = join_warps(warps, first + r);
    float x[4] = {};
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      const float4 y = *reinterpret_cast<const float4*>(warps.sums + w * warps.warp_stride + r * warps.stride + d);
      const float part[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = add_rn(x[e], mul_rn(part[e], join.weight[w]));
    }
    if (p.serial) {
      const Join both = join_of(totals.state[first + r].x, join.state.x);
      float* total = totals.sums + (first + r) * totals.stride + d;
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] = both(total[e], x[e]);
      continue;
    }
    const RowPlace row = tile.row(p, first + r);
    const int64_t part = ((tile.b * p.T + row.t) * p.Hkv * p.G + row.head) * p.splits + split;
    store16(p.sums + part * p.value_stride() + d,
            make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
    if (d == 0) p.states[part] = join.state;
  }
}

// After add_split() of all rows and a barrier: one thread a row.
__device__ __forceinline__ void advance_totals(const Tile& tile, const WarpSums& warps, const RowTotals& totals) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= tile.rows) return;
  const float2 part = join_warps(warps, r).state, total = totals.state[r];
  totals.state[r] = make_float2(fmaxf(total.x, part.x), join_of(total.x, part.x)(total.y, part.y));
}

__device__ __forceinline__ void clear_totals(int rows, const RowTotals& totals) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * totals.stride; i += static_cast<int>(blockDim.x))
    totals.sums[i] = 0.0f;
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += static_cast<int>(blockDim.x))
    totals.state[r] = make_float2(kNone, 0.0f);
}

__device__ __forceinline__ void write_totals(const AttentionParams& p, const Tile& tile, const RowTotals& totals) {
  const int quads = p.value_stride() / 4;
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * quads; i += static_cast<int>(blockDim.x)) {
    const int r = i / quads, d = (i - r * quads) * 4;
    const RowPlace row = tile.row(p, r);
    if (!p.wants(tile.b, row.t, row.head)) continue;
    const Finish f = finish_row(p, row.head, totals.state[r]);
    char* out = p.out.at(tile.b, row.t, row.head);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (d + e < p.Dv) store_output(p, out, d + e, totals.sums[r * totals.stride + d + e] * f.factor);
    if (d == 0) write_row(p, tile.b, row.t, row.head, f.lse);
  }
}

}  // namespace sic::gpu
