// Rows and the slots they are written to: of several rows for one slot only the last one counts. Few rows are looked
// through by every block; more of them meet in a hash table, since looking through all would cost more than the rows.
#pragma once
#include "slicing/device_views.cuh"
#include "slicing/validate.h"

namespace sic::gpu {

constexpr int64_t kScanRows = 512;

// Which rows count. Of two rows for one slot the later one stays; of all rows of a page the one of the last slot makes
// the page's summary.
struct Winners {
  IntVector slots;
  int64_t rows, page;
  int32_t *by_slot = nullptr, *by_page = nullptr;  // hash tables of row + 1, 0: empty; given beyond kScanRows
  uint32_t mask = 0;

  __device__ __forceinline__ int64_t key(bool of_page, int64_t slot) const { return of_page ? slot / page : slot; }
  // Whether row i goes before row j, both of one key.
  __device__ __forceinline__ bool beats(int64_t i, int64_t slot, int64_t j, int64_t other) const {
    return slot > other || (slot == other && i > j);
  }
  __device__ __forceinline__ static uint32_t hash(int64_t key) {
    return static_cast<uint32_t>(static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15u >> 32);
  }

  // Puts row i into a table unless a better one is there.
  __device__ void enter(int32_t* table, bool of_page, int64_t i, int64_t slot) const {
    const int64_t mine = key(of_page, slot);
    const int32_t entry = static_cast<int32_t>(i + 1);
    for (uint32_t at = hash(mine) & mask;; at = (at + 1) & mask) {
      int32_t seen = atomicCAS(table + at, 0, entry);
      while (seen != 0) {
        const int64_t other = slots[seen - 1];
        if (key(of_page, other) != mine) break;
        if (!beats(i, slot, seen - 1, other)) return;
        const int32_t before = atomicCAS(table + at, seen, entry);
        if (before == seen) return;
        seen = before;
      }
      if (seen == 0) return;
    }
  }

  __device__ bool won(const int32_t* table, bool of_page, int64_t i, int64_t slot) const {
    const int64_t mine = key(of_page, slot);
    for (uint32_t at = hash(mine) & mask;; at = (at + 1) & mask) {
      const int64_t row = table[at] - 1;
      if (row == i) return true;
      if (key(of_page, slots[row]) == mine) return false;
    }
  }
};

// The same by looking through all rows, for few of them: every block keeps the slots in shared memory.
struct SlotScan {
  const int64_t* slots;
  int rows;

  // Whether a row is better than row i, as far as this lane of `lanes` sees.
  __device__ __forceinline__ bool beaten(const Winners& w, bool of_page, int64_t i, int64_t slot, int lane,
                                         int lanes) const {
    const int64_t first = of_page ? slot / w.page * w.page : slot, last = of_page ? first + w.page - 1 : slot;
    bool beaten = false;
    for (int j = lane; j < rows; j += lanes)
      beaten |= slots[j] >= first && slots[j] <= last && w.beats(j, slots[j], i, slot);
    return beaten;
  }
};

// Called by the whole block: fills the shared slots where they are looked through.
__device__ __forceinline__ SlotScan load_slots(const Winners& w, int64_t* shared) {
  const int n = w.by_slot ? 0 : static_cast<int>(w.rows);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) shared[i] = w.slots[i];
  __syncthreads();
  return {shared, n};
}

// Whether row i counts; asked by `lanes` neighbouring lanes about one row, by all lanes of the warp.
__device__ __forceinline__ bool counts(const Winners& w, const SlotScan& scan, bool of_page, int64_t i, int64_t slot,
                                       int lanes) {
  const int32_t* table = of_page ? w.by_page : w.by_slot;
  if (table) return slot >= 0 && w.won(table, of_page, i, slot);
  const bool beaten = slot >= 0 && scan.beaten(w, of_page, i, slot, lane_id() & (lanes - 1), lanes);
  const uint32_t row_of_lanes = lanes == 32 ? kFullWarp : ((1u << lanes) - 1) << (lane_id() & ~(lanes - 1));
  return (__ballot_sync(kFullWarp, beaten) & row_of_lanes) == 0 && slot >= 0;
}

static __global__ void __launch_bounds__(256) enter_rows_kernel(const __grid_constant__ Winners w) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t slot = i < w.rows ? w.slots[i] : -1;
  if (slot < 0) return;
  w.enter(w.by_slot, false, i, slot);
  if (w.by_page) w.enter(w.by_page, true, i, slot);
}

// ---- host side ----

// Entries of a hash table; at most half of them are taken.
inline int64_t winner_entries(int64_t rows) {
  int64_t n = 1;
  while (n < 2 * rows) n *= 2;
  return n;
}
inline int64_t winner_bytes(int64_t rows, bool of_pages) {
  return rows <= kScanRows ? 0 : winner_entries(rows) * static_cast<int64_t>(sizeof(int32_t)) * (of_pages ? 2 : 1);
}

// tables: winner_bytes() of workspace.
inline Winners enter_rows(const TensorView& slots, int64_t page, bool of_pages, int32_t* tables, void* stream) {
  Winners w;
  w.slots = IntVector::of(slots);
  w.rows = slots.shape[0], w.page = page;
  if (w.rows <= kScanRows) return w;
  const int64_t entries = winner_entries(w.rows);
  w.by_slot = tables;
  if (of_pages) w.by_page = tables + entries;
  w.mask = static_cast<uint32_t>(entries - 1);
  memset_async(tables, 0, static_cast<size_t>(winner_bytes(w.rows, of_pages)), stream);
  launch(enter_rows_kernel, dim3(grid_blocks(slicing::ceil_div(w.rows, 256))), dim3(256), 0, stream, w);
  return w;
}

}  // namespace sic::gpu
