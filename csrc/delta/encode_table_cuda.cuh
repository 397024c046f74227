// The side table on the GPU: entries are handed out in the order of rows and heads, then raw rows are copied to them.
//
// One block goes over all rows, kTableItems at a time; most have nothing to settle. Where no entry becomes free, the
// k-th row in need takes the k-th free entry, which the block finds together; else one thread goes row by row.
#pragma once
#include "delta/codec_cuda.cuh"

namespace sic::gpu {

constexpr int kTableItems = 512;

struct TableParams {
  DevicePages pages;
  DeviceRope rope;
  IntVector positions, slots;
  Rows3 k, v;                // by (row, head)
  int32_t* fates = nullptr;  // in: delta::fate(); out: the entry + 1 of a row that is kept raw, 0 of the others
  const uint8_t* misfits = nullptr;
  int64_t rows = 0, page = 1;
  int32_t heads = 0;
  DType type = DType::f32;

  __device__ __forceinline__ int64_t& owner(int64_t entry) const { return pages.owner[entry * pages.owner_stride]; }
};

enum RowNeed : int { kNothing = 0, kKeeps = 1, kTakes = 2, kFrees = 3 };

// A row of lanes or a thread of the table's block has one of these.
struct TableItem {
  int32_t entry = -1;
  RowNeed need = kNothing;

  __device__ __forceinline__ static TableItem load(const TableParams& p, int64_t item) {
    TableItem t;
    if (item >= p.rows * p.heads) return t;
    const int32_t fate = p.fates[item];
    const bool raw = delta::fate_is_raw(fate) || p.misfits[item];
    t.entry = delta::fate_entry(fate);
    if (t.entry >= 0 && p.owner(t.entry) != mine(p, item)) t.entry = -1;  // a copied page
    t.need = raw ? (t.entry >= 0 ? kKeeps : kTakes) : t.entry >= 0 ? kFrees : kNothing;
    return t;
  }
  __device__ __forceinline__ static int64_t mine(const TableParams& p, int64_t item) {
    return p.slots[item / p.heads] * p.heads + item % p.heads;
  }
};

struct TableShared {
  int32_t entry[kTableItems];  // free entries in order; or, row by row, what each item has
  uint8_t need[kTableItems];
  int32_t warp_sums[32];
  int32_t first_free, used, refused;
};

// How many threads before this one have `set`, and *total of all.
__device__ __forceinline__ int rank_in_block(bool set, int32_t* warp_sums, int* total) {
  const uint32_t votes = __ballot_sync(kFullWarp, set);
  __syncthreads();  // sums of before may still be read
  if (lane_id() == 0) warp_sums[warp_id()] = popc(votes);
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < block_warps(); ++w) {
    const int n = warp_sums[w];
    before += w < warp_id() ? n : 0;
    all += n;
  }
  *total = all;
  return before + popc(votes & ((1u << lane_id()) - 1));
}

// The lowest free entries, up to `wanted` of them, to s.entry; returns their number.
__device__ __forceinline__ int find_free(const TableParams& p, TableShared& s, int wanted) {
  int found = 0, entry = s.first_free;
  while (found < wanted && entry < p.pages.entries) {
    const int mine = entry + static_cast<int>(threadIdx.x);
    const bool is_free = mine < p.pages.entries && p.owner(mine) < 0;
    int total;
    const int at = found + rank_in_block(is_free, s.warp_sums, &total);
    if (is_free && at < wanted) s.entry[at] = mine;
    found += total;
    entry += kTableItems;
  }
  __syncthreads();
  return min(found, wanted);
}

// Nothing becomes free: rows in need take free entries in their order.
__device__ __forceinline__ void take_together(const TableParams& p, TableShared& s, int64_t item, TableItem& t) {
  int wanted;
  const int rank = rank_in_block(t.need == kTakes, s.warp_sums, &wanted);
  if (wanted == 0) return;
  const int found = find_free(p, s, wanted);
  if (t.need == kTakes && rank < found) {
    t.entry = s.entry[rank];
    p.owner(t.entry) = TableItem::mine(p, item);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  s.first_free = found < wanted ? p.pages.entries : s.entry[found - 1] + 1;
  s.used += found, s.refused += wanted - found;
}

// One thread, row by row.
__device__ __forceinline__ void settle_in_order(const TableParams& p, TableShared& s, int64_t first) {
  for (int i = 0; i < kTableItems; ++i) {
    const int32_t entry = s.entry[i];
    if (s.need[i] == kFrees) {
      p.owner(entry) = -1;
      s.first_free = min(s.first_free, entry), --s.used;
    } else if (s.need[i] == kTakes) {
      while (s.first_free < p.pages.entries && p.owner(s.first_free) >= 0) ++s.first_free;
      if (s.first_free < p.pages.entries) {
        s.entry[i] = s.first_free++;
        p.owner(s.entry[i]) = TableItem::mine(p, first + i), ++s.used;
      } else {
        ++s.refused;
      }
    }
  }
}

static __global__ void __launch_bounds__(kTableItems) settle_table(const __grid_constant__ TableParams p) {
  __shared__ TableShared s;
  if (threadIdx.x == 0) s.first_free = s.used = s.refused = 0;
  const int64_t items = p.rows * p.heads;
  for (int64_t first = 0; first < items; first += kTableItems) {
    const int64_t item = first + threadIdx.x;
    TableItem t = TableItem::load(p, item);
    if (__syncthreads_or(t.need == kFrees)) {
      s.entry[threadIdx.x] = t.entry, s.need[threadIdx.x] = static_cast<uint8_t>(t.need);
      __syncthreads();
      if (threadIdx.x == 0) settle_in_order(p, s, first);
      __syncthreads();
      t.entry = s.entry[threadIdx.x];
      __syncthreads();
    } else if (__syncthreads_or(t.need == kTakes)) {
      take_together(p, s, item, t);
      __syncthreads();
    }
    if (item < items) p.fates[item] = t.need == kKeeps || t.need == kTakes ? t.entry + 1 : 0;
  }
  if (threadIdx.x != 0) return;
  p.pages.state[0] += s.used;
  p.pages.state[p.pages.state_stride] += s.refused;
}

// A warp a row of a head: the raw values of those that have an entry, and the stored row that leads to it.
static __global__ void __launch_bounds__(256) write_raw_rows(const __grid_constant__ TableParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x / p.heads) * (blockDim.x / 32) + warp_id(),
                h = blockIdx.x % p.heads;
  const int64_t item = i * p.heads + h;
  if (i >= p.rows || p.fates[item] == 0) return;
  const int64_t slot = p.slots[i], id = slot / p.page;
  const int64_t offset = slot - id * p.page;
  const int32_t entry = p.fates[item] - 1;
  const DevicePages& pages = p.pages;
  const char *k = p.k.at(i, h, 0), *v = p.v.at(i, h, 0);
  char* const to = pages.raw + entry * pages.raw_stride;
  const RopeAngles angles = p.rope.lo ? p.rope.at(p.positions[i], p.rope.undo) : RopeAngles{};
  for (int d = lane_id(); d < pages.Dk; d += 32) {
    float x = load_float(p.type, k, d);
    if (d < p.rope.channels()) x = turned<false>(p.rope, angles, d, x, load_float(p.type, k, p.rope.partner(d)));
    store_float(pages.raw_type, to, d, x);
  }
  for (int d = lane_id(); d < pages.Dv; d += 32)
    store_float(pages.raw_type, to, pages.Dk + d, load_float(p.type, v, d));
  char *k_code = pages.k_codes.at(id, h, offset), *v_code = pages.v_codes.at(id, h, offset);
  for (int b = lane_id(); b < pages.k_bytes; b += 32)
    k_code[b] = b < 4 ? static_cast<char>(static_cast<uint32_t>(entry) >> 8 * b) : 0;
  for (int b = lane_id(); b < pages.v_bytes; b += 32) v_code[b] = 0;
  if (lane_id() < 3)
    reinterpret_cast<uint16_t*>(pages.tags.at(id, h, offset))[lane_id()] = lane_id() == 0 ? delta::kRawScale : 0;
}

inline void launch_table(const TableParams& p, void* stream) {
  launch(settle_table, dim3(1), kTableItems, 0, stream, p);
  launch(write_raw_rows, dim3(grid_blocks(slicing::ceil_div(p.rows, 8) * p.heads)), 256, 0, stream, p);
}

}  // namespace sic::gpu
