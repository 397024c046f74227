// What a block of the LM head does with logits that never leave it: a tile of columns by some rows of hidden states at
// a time lies in shared memory, a warp counts its rows.
//
// Products come from a policy (tensor cores or CUDA cores):
//   kRows                      rows of hidden states
//   kChannels, kMaxChunk       channels in shared memory at once: a multiple of the one, the other at most
//   bytes_of(chunk)            of shared memory for so many channels
//   run(first, first_tile, x)  logits of columns first, first + 1, .. to x [kRows][kTileStride]; all threads
#pragma once
#include "head/finish_cuda.cuh"
#include "head/float_rows_cuda.cuh"

namespace sic::gpu {

constexpr int kTileColumns = 128, kTilePer = kTileColumns / 32;
constexpr int kTileStride = kTileColumns + 4;  // floats: rows of accumulators then lie in different banks

struct LmHeadParams {
  DeviceLogits logits;
  DeviceWanted wanted;
  Segments segments;
  float* found;  // [B, watched ids and target]: their z
  FloatRows hidden;
  const char* weight;
  int64_t weight_stride;  // bytes
  bool wide_weight;       // rows of weights are 16-byte aligned
  int64_t B, D;
  int row_blocks, tiles;  // tiles of a segment
  int chunk;              // channels of the hidden states that lie in shared memory at once
};

// Rows first_row .. first_row + rows of the block, and its segment of columns.
struct HeadTask {
  int64_t first_row;
  int segment, rows, tiles;

  template <int kRows>
  __device__ __forceinline__ static HeadTask of(const LmHeadParams& p) {
    HeadTask t;
    // Blocks that share weights are neighbours.
    t.segment = static_cast<int>(blockIdx.x) / p.row_blocks;
    t.first_row = int64_t{static_cast<int>(blockIdx.x) % p.row_blocks} * kRows;
    const int64_t rows = p.B - t.first_row, columns = p.logits.columns - t.column(p, 0);
    const int64_t tiles = columns > 0 ? (columns + kTileColumns - 1) / kTileColumns : 0;
    t.rows = static_cast<int>(rows < kRows ? rows : kRows);
    t.tiles = static_cast<int>(tiles < p.tiles ? tiles : p.tiles);
    return t;
  }
  // The first of a tile.
  __device__ __forceinline__ int64_t column(const LmHeadParams& p, int tile) const {
    return (int64_t{segment} * p.tiles + tile) * kTileColumns;
  }
};

// Shared memory of a block besides the products'.
template <int kRows>
struct HeadTile {
  float* x;          // [kRows][kTileStride]
  Moments* moments;  // [kRows], of the tiles before, as the lists
  float* z;          // [kRows][room]
  int32_t* id;

  static int64_t bytes_of(int room) {
    return kRows * (kTileStride * 4 + static_cast<int64_t>(sizeof(Moments)) + room * 8);
  }
  __device__ __forceinline__ static HeadTile of(char* shared, int room) {
    HeadTile t;
    t.x = reinterpret_cast<float*>(shared), t.moments = reinterpret_cast<Moments*>(t.x + kRows * kTileStride);
    t.z = reinterpret_cast<float*>(t.moments + kRows), t.id = reinterpret_cast<int32_t*>(t.z + kRows * room);
    return t;
  }
};

// z of the asked-for ids among the tile's columns; z: of the row.
__device__ __forceinline__ void keep_wanted(const LmHeadParams& p, int64_t b, int64_t first, const float* z) {
  for (int i = lane_id(); i < p.wanted.count(); i += 32) {
    const int64_t column = p.wanted(b, i) - p.logits.vocab_start;
    if (column >= first && column < first + kTileColumns && column < p.logits.columns)
      p.found[b * p.wanted.count() + i] = z[column - first];
  }
}

// Adds the tile's columns to what row n of the block has. By the warp that has had the row before.
template <int kRows>
__device__ __forceinline__ void count_row(const LmHeadParams& p, const HeadTask& task, const HeadTile<kRows>& tile,
                                          int n, int64_t first, bool first_tile, bool last_tile) {
  const int64_t b = task.first_row + n;
  const int room = p.segments.room, lane = lane_id();
  const double inverse = inverse_of(p.logits.temperature, b);
  float* const row = tile.x + n * kTileStride + lane * kTilePer;
  const float4 x = *reinterpret_cast<const float4*>(row);
  Chunk<kTilePer> chunk = {{x.x, x.y, x.z, x.w}};
#pragma unroll
  for (int j = 0; j < kTilePer; ++j) {
    const int64_t column = first + lane * kTilePer + j;
    chunk.z[j] = column < p.logits.columns ? p.logits(chunk.z[j], b, column) : kNever;
  }
  if (p.wanted.count() > 0) {
    *reinterpret_cast<float4*>(row) = make_float4(chunk.z[0], chunk.z[1], chunk.z[2], chunk.z[3]);
    __syncwarp();
    keep_wanted(p, b, first, tile.x + n * kTileStride);
  }
  Moments total = first_tile ? Moments::none() : tile.moments[n];
  WarpList list = first_tile ? WarpList::none(room) : WarpList::load(tile.z + n * room, tile.id + n * room, room);
  const uint32_t faults = chunk.faults();
  const float top = faults ? kNever : chunk.top();
  total.status |= faults;
  if (top != kNever) {
    total.merge(chunk.moments(top, head::factor_of(inverse)), inverse);
    if (top >= list.least)
      list.offer<true>(chunk.z, [&](int j) { return static_cast<int32_t>(first + lane * kTilePer + j); });
  }
  if (last_tile) {
    p.segments.put(b, task.segment, total, list);
  } else {
    __syncwarp();  // all lanes have read the sums
    if (lane == 0) tile.moments[n] = total;
    list.store(tile.z + n * room, tile.id + n * room);
  }
}

// A whole block.
template <class Products>
__device__ __forceinline__ void count_segment(const LmHeadParams& p, char* shared) {
  constexpr int kRows = Products::kRows;
  const HeadTask task = HeadTask::of<kRows>(p);
  const auto tile = HeadTile<kRows>::of(shared + Products::bytes_of(p.chunk), p.segments.room);
  Products products(p, task, shared);
#pragma unroll 1
  for (int i = 0; i < task.tiles; ++i) {
    const int64_t first = task.column(p, i);
    products.run(first, i == 0, tile.x);
    __syncthreads();
#pragma unroll 1
    for (int n = warp_id(); n < task.rows; n += kHeadWarps)
      count_row(p, task, tile, n, first, i == 0, i + 1 == task.tiles);
    __syncthreads();  // the next tile takes the place
  }
  if (task.tiles > 0) return;
  for (int n = warp_id(); n < task.rows; n += kHeadWarps)
    p.segments.put(task.first_row + n, task.segment, Moments::none(), WarpList::none(p.segments.room));
}

}  // namespace sic::gpu
