// What a block does with a row of scores, or with its part of one that several share, in global or in shared memory:
// finding the cut, writing the chosen units.
#pragma once
#include "slicing/select_cuda.cuh"

namespace sic::gpu {

// ---- finding the cut ----

// Rows are numbered by blocks, so that 32 bits hold any.
__device__ __forceinline__ SelectRowAt select_row_at(const SelectTask& a, uint32_t row) {
  const uint32_t heads = static_cast<uint32_t>(a.Hkv), tokens = static_cast<uint32_t>(a.T), query = row / heads;
  return {static_cast<int32_t>(query / tokens), static_cast<int32_t>(query % tokens),
          static_cast<int32_t>(row % heads)};
}

// A row, or the part of its slots that a block takes.
template <class T, class Memory = GlobalScores>
struct SelectRow {
  SelectProblem problem;
  SlotReader<T, Memory> reader;
  int32_t begin, end;  // the block's slots

  __device__ SelectRow(const SelectTask& a, const SelectKeep& keep, SelectRowAt at, const T* scores)
      : problem(select_problem(a, at, keep)), reader(scores, problem.visible), begin(0), end(reader.slots()) {}

  __device__ __forceinline__ uint32_t top_key() const {
    uint32_t top = 0;
    for (int32_t i = begin + static_cast<int32_t>(threadIdx.x); i < end; i += static_cast<int32_t>(blockDim.x)) {
      const Slot<T> slot(reader, i);
#pragma unroll
      for (int j = 0; j < Slot<T>::kUnits; ++j) top = slot.key[j] > top ? slot.key[j] : top;
    }
    return top;
  }
};

// Where a block counts digits: neighbouring lanes often add to the same one, so that they have copies.
struct Histogram {
  uint32_t* counts;  // [kDigits][copies], in shared memory
  int copies;        // a power of two, at most 32
};

struct BlockCounts {
  uint32_t count[kDigits];
  unsigned long long weight[kDigits + 1];
  uint32_t reduce[32], totals[2][32];
  Descent descent;
};

// Adds the weights of a slot's units that share the known digits; those of forced ones once, with the first digit.
template <class T>
__device__ __forceinline__ void weigh_slot(const Slot<T>& slot, uint32_t forced, uint32_t known, int shift,
                                           uint32_t top, unsigned long long* weight) {
  const bool first_digit = shift + 8 == SelectKey<T>::kBits;
#pragma unroll
  for (int j = 0; j < Slot<T>::kUnits; ++j) {
    const uint32_t key = slot.key[j];
    const bool is_forced = forced >> j & 1;
    if (!slot.has(j) || (key ^ known) >> shift >> 8 || (is_forced && !first_digit)) continue;
    const int digit = is_forced ? kDigits : static_cast<int>(key >> shift & (kDigits - 1));
    atomicAdd(weight + digit, static_cast<unsigned long long>(weight_of_key<T>(key, top)));
  }
}

// Counts the digit at `shift` of the free units that share the cut's higher digits, in the block's slots. All threads.
template <class T, class Memory>
__device__ void count_digit(const SelectRow<T, Memory>& row, uint32_t known, int shift, uint32_t top,
                            const Histogram& h, BlockCounts& s) {
  const bool weighted = row.problem.top_p < 1, first_digit = shift + 8 == SelectKey<T>::kBits;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < h.copies * kDigits; i += threads) h.counts[i] = 0;
  for (int i = thread; weighted && i <= kDigits; i += threads) s.weight[i] = 0;
  __syncthreads();
  uint32_t* const mine = h.counts + (lane_id() & (h.copies - 1));
  for (int32_t i = row.begin + thread; i < row.end; i += threads) {
    const Slot<T> slot(row.reader, i);
    const uint32_t forced = row.problem.template forced_bits<Slot<T>::kUnits>(slot.first);
    const uint32_t free = slot.visible() & ~forced;
    const bool all = first_digit && free == (1u << Slot<T>::kUnits) - 1;  // count: no branches
#pragma unroll
    for (int j = 0; all && j < Slot<T>::kUnits; ++j)
      atomicAdd(mine + (slot.key[j] >> (SelectKey<T>::kBits - 8)) * static_cast<uint32_t>(h.copies), 1u);
#pragma unroll
    for (int j = 0; !all && j < Slot<T>::kUnits; ++j) {
      const uint32_t key = slot.key[j];
      if (free >> j & 1 && !((key ^ known) >> shift >> 8))
        atomicAdd(mine + (key >> shift & (kDigits - 1)) * static_cast<uint32_t>(h.copies), 1u);
    }
    if (weighted) weigh_slot(slot, forced, known, shift, top, s.weight);
  }
  __syncthreads();
  for (int i = thread; i < kDigits; i += threads) {
    uint32_t sum = 0;  // beginning where no other lane does
    for (int c = 0; c < h.copies; ++c) sum += h.counts[i * h.copies + ((c + i) & (h.copies - 1))];
    s.count[i] = sum;
  }
  __syncthreads();
}

// How a block's numbers become the row's, where it has the row to itself: they are.
struct WholeRow {
  __device__ __forceinline__ uint32_t top(uint32_t key) const { return key; }
  __device__ __forceinline__ void add_up(BlockCounts&, int /*shift*/, bool /*weighted*/) const {}
};

// The units that a block's row takes. All threads; where blocks share the row, all of them.
template <class T, class Memory, class Sharing = WholeRow>
__device__ SelectCut find_cut(const SelectRow<T, Memory>& row, const Histogram& h, BlockCounts& s,
                              const Sharing& sharing = {}) {
  SelectCut cut = SelectCut::decided(row.problem);
  if (!row.problem.undecided()) return cut;
  if (threadIdx.x == 0) s.descent = Descent::of(row.problem, SelectKey<T>::kBits);
  const uint32_t top = row.problem.top_p < 1 ? sharing.top(block_reduce_max(row.top_key(), s.reduce)) : 0;
  cut.key = 0;
  for (int shift = SelectKey<T>::kBits - 8; shift >= 0; shift -= 8) {
    count_digit(row, cut.key, shift, top, h, s);
    sharing.add_up(s, shift, row.problem.top_p < 1);
    if (warp_id() == 0) {
      Descent descent = s.descent;
      descent.step({s.count, s.weight}, shift, row.problem.top_p);
      __syncwarp();
      if (lane_id() == 0) s.descent = descent;
    }
    __syncthreads();
    cut = s.descent.cut;
    if (s.descent.done) break;
  }
  return cut;
}

// ---- writing ----

// Sums of the block's threads before this one, and of all; called once a round with alternating buffers.
__device__ __forceinline__ uint32_t block_scan(uint32_t v, uint32_t* totals, uint32_t& all) {
  const int lane = lane_id(), warp = warp_id();
  uint32_t sum = v;
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {
    const uint32_t x = __shfl_up_sync(kFullWarp, sum, h);
    if (lane >= h) sum += x;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  uint32_t before = lane < block_warps() ? totals[lane] : 0;
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {
    const uint32_t x = __shfl_up_sync(kFullWarp, before, h);
    if (lane >= h) before += x;
  }
  all = __shfl_sync(kFullWarp, before, 31);
  before = __shfl_sync(kFullWarp, before, (warp + 31) & 31);
  return sum - v + (warp > 0 ? before : 0);
}

// What a slot holds: bits of forced units and those above the cut, and of those equal to it.
struct SlotChoice {
  uint32_t above = 0, equal = 0;

  template <class T, class Memory>
  __device__ __forceinline__ SlotChoice(const SelectRow<T, Memory>& row, const Slot<T>& slot, const SelectCut& cut) {
#pragma unroll
    for (int j = 0; j < Slot<T>::kUnits; ++j) {
      above |= static_cast<uint32_t>(slot.key[j] > cut.key) << j;
      equal |= static_cast<uint32_t>(slot.key[j] == cut.key) << j;
    }
    const uint32_t forced = row.problem.template forced_bits<Slot<T>::kUnits>(slot.first);
    above = (above | forced) & slot.visible();
    equal &= ~forced & slot.visible();
  }
  // The units to take, if `before` equals are taken or left before the slot.
  __device__ __forceinline__ uint32_t chosen(uint32_t before, const SelectCut& cut) const {
    uint32_t left = before < cut.ties ? cut.ties - before : 0, bits = above;
    for (uint32_t e = equal; e && left; e &= e - 1, --left) bits |= e & (0u - e);
    return bits;
  }
  // Equals in the upper half: a round of a block has at most 1024 * 8 units.
  __device__ __forceinline__ uint32_t counts() const {
    return static_cast<uint32_t>(popc(above)) | static_cast<uint32_t>(popc(equal)) << 16;
  }
};

struct Rank {
  uint32_t above, equal;  // before a unit

  __device__ __forceinline__ int64_t chosen(const SelectCut& cut) const {
    return int64_t{above} + (equal < cut.ties ? equal : cut.ties);
  }
};

// A row's marks, if that is the output.
__device__ __forceinline__ uint8_t* row_marks(const SelectTask& a, const SelectRowAt& at) {
  return a.marks ? a.marks + ((int64_t{at.b} * a.T + at.t) * a.Hkv + at.h) * a.N : nullptr;
}

// Writes the chosen units of the block's slots, to marks if given; rank: of the first. Returns the rank after the last.
// slots: if given, receives for each of the block's slots the bits of the units that are listed. All threads.
template <class T, class Memory>
__device__ Rank write_chosen(const SelectTask& a, const SelectRow<T, Memory>& row, const SelectCut& cut, Rank rank,
                             SelectRowAt at, uint8_t* marks, BlockCounts& s, uint8_t* slots = nullptr) {
  int32_t* const out = marks ? nullptr : a.out.row(at.b, at.t, at.h);
  const auto room = static_cast<uint32_t>(a.K);
  int buffer = 0;
  for (int32_t from = row.begin; from < row.end; from += static_cast<int32_t>(blockDim.x), buffer ^= 1) {
    const int32_t i = from + static_cast<int32_t>(threadIdx.x);
    const Slot<T> slot(row.reader, i, i < row.end);
    const SlotChoice choice(row, slot, cut);
    uint32_t all;
    const uint32_t before = block_scan(choice.counts(), s.totals[buffer], all);
    const uint32_t equal = rank.equal + (before >> 16);
    uint32_t chosen = choice.chosen(equal, cut);
    uint32_t to = rank.above + (before & 0xffff) + (equal < cut.ties ? equal : cut.ties);
    if (marks) {
#pragma unroll
      for (int j = 0; j < Slot<T>::kUnits; ++j)
        if (slot.has(j)) marks[slot.first + j] = chosen >> j & 1;
    } else {
      for (uint32_t bits = chosen; bits; bits &= bits - 1, ++to) {
        if (to < room)
          out[to] = slot.first + __ffs(static_cast<int>(bits)) - 1;
        else
          chosen ^= bits & (0u - bits);
      }
      if (slots && i < row.end) slots[i - row.begin] = static_cast<uint8_t>(chosen);
    }
    rank.above += all & 0xffff, rank.equal += all >> 16;
  }
  return rank;
}

// Fills what lies behind the chosen units: this block's part of `blocks` equal ones. total: the row's.
template <class T, class Memory>
__device__ void finish_row(const SelectTask& a, const SelectRow<T, Memory>& row, const SelectCut& cut, Rank total,
                           SelectRowAt at, int block, int blocks) {
  const int64_t step = int64_t{blockDim.x} * blocks, mine = int64_t{blockDim.x} * block + threadIdx.x;
  if (uint8_t* const marks = row_marks(a, at)) {
    for (int64_t i = row.problem.visible + mine; i < a.N; i += step) marks[i] = 0;
    return;
  }
  const int64_t count = total.chosen(cut) < a.K ? total.chosen(cut) : a.K;
  int32_t* out = a.out.row(at.b, at.t, at.h);
  for (int64_t i = count + mine; i < a.K; i += step) out[i] = -1;
  if (mine == 0) a.out.count(at.b, at.t, at.h) = static_cast<int32_t>(count);
}

}  // namespace sic::gpu
