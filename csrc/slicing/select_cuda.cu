// select on the device.
//
// Many rows, or short ones: one block a row. Few long ones: a kernel for each digit, over (row, chunk) blocks that add
// to the row's counts; every block repeats the cheap descent over the digits known so far. Then the chunks count what
// they hold above and at the cut, and write it behind what earlier chunks hold.
//
// Floor: the row once from memory (N * itemsize bytes), 4 K bytes of indices written; later passes find it in L2.
#include <algorithm>
#include <cstring>

#include "slicing/select_cuda.cuh"

namespace sic::gpu {
namespace {

constexpr int64_t kFewRows = 2 * 132;      // below, blocks of whole rows would leave multiprocessors idle
constexpr int64_t kOneBlockUnits = 16384;  // a block has these done before more kernels would be
constexpr int kChunkThreads = 256;
constexpr int kMaxCopies = 8;  // of a block's counts: neighbouring lanes often add to the same digit
constexpr int kCountPitch = kDigits + 1;

struct Scratch {
  uint32_t* keep_bits = nullptr;   // [B*T][words]
  int32_t* keep_forced = nullptr;  // [B*T]
  // Of rows in chunks:
  uint32_t* top = nullptr;               // [rows] best key, for top_p
  uint32_t* count = nullptr;             // [rows][digits of a key][kDigits]
  unsigned long long* weight = nullptr;  // [rows][digits of a key][kDigits + 1], for top_p
  uint2* chunk_counts = nullptr;         // [rows][chunks]: above the cut or forced, and equal to it
  int32_t chunks = 0, chunk_slots = 0;   // 0: one block a row

  void* zeroed = nullptr;
  int64_t zeroed_bytes = 0, bytes = 0;
};

int key_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

Scratch scratch_of(const SelectTask& a, void* memory) {
  Scratch s;
  char* base = static_cast<char*>(memory);
  const auto take = [&](auto*& p, int64_t count) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(base + s.bytes);
    s.bytes += (count * static_cast<int64_t>(sizeof *p) + 15) / 16 * 16;
  };
  const int64_t rows = a.rows(), digits = key_bytes(a.dtype), slot_units = 16 / digits;
  const bool in_chunks = rows < kFewRows && a.N > kOneBlockUnits;
  s.zeroed = base;
  if (a.keep_count > 0) take(s.keep_forced, int64_t{a.B} * a.T);
  if (in_chunks) {
    take(s.count, rows * digits * kDigits);
    if (a.top_p < 1) take(s.top, rows), take(s.weight, rows * digits * (kDigits + 1));
  }
  s.zeroed_bytes = s.bytes;
  if (a.keep_count > 0) take(s.keep_bits, int64_t{a.B} * a.T * ((a.N + 31) / 32));
  if (in_chunks) {
    const int64_t slots = (a.N + 2 * slot_units - 2) / slot_units;  // wherever a row begins in its first
    const int64_t share = slots * rows / (2 * kFewRows);
    s.chunk_slots = static_cast<int32_t>((share / kChunkThreads + 1) * kChunkThreads);
    s.chunks = static_cast<int32_t>((slots + s.chunk_slots - 1) / s.chunk_slots);
    take(s.chunk_counts, rows * s.chunks);
  }
  return s;
}

// ---- device: a row ----

__device__ __forceinline__ SelectRowAt row_at(const SelectTask& a, int64_t row) {
  return {static_cast<int32_t>(row / a.Hkv / a.T), static_cast<int32_t>(row / a.Hkv % a.T),
          static_cast<int32_t>(row % a.Hkv)};
}

template <class T>
struct Row {
  SelectRowAt at;
  SelectProblem problem;
  SlotReader<T> reader;
  int32_t begin = 0, end = 0;  // the block's slots

  __device__ Row(const SelectTask& a, const Scratch& s, int64_t row)
      : at(row_at(a, row)),
        problem(select_problem(a, at, s.keep_bits, s.keep_forced)),
        reader(static_cast<const T*>(a.scores) + at.b * a.scores_stride[0] + at.t * a.scores_stride[1] +
                   at.h * a.scores_stride[2],
               problem.visible) {
    const int32_t slots = reader.slots();
    if (s.chunks == 0) {
      end = slots;
    } else {
      const int64_t from = int64_t{blockIdx.x} * s.chunk_slots;
      begin = static_cast<int32_t>(from < slots ? from : slots);
      end = slots - begin < s.chunk_slots ? slots : begin + s.chunk_slots;
    }
  }

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

struct BlockCounts {
  uint32_t copies[kMaxCopies * kCountPitch];
  uint32_t count[kDigits];
  unsigned long long weight[kDigits + 1];
  uint32_t reduce[32];
  SelectCut cut;
  bool done;
};

// Counts the digit at `shift` of the free units that share the cut's higher digits, in the block's slots. All threads.
template <class T>
__device__ void count_digit(const Row<T>& row, uint32_t known, int shift, uint32_t top, int copies, BlockCounts& s) {
  const bool weighted = row.problem.top_p < 1, first_digit = shift + 8 == SelectKey<T>::kBits;
  for (int i = static_cast<int>(threadIdx.x); i < copies * kCountPitch; i += static_cast<int>(blockDim.x))
    s.copies[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); weighted && i <= kDigits; i += static_cast<int>(blockDim.x))
    s.weight[i] = 0;
  __syncthreads();
  uint32_t* const mine = s.copies + (lane_id() & (copies - 1)) * kCountPitch;
  for (int32_t i = row.begin + static_cast<int32_t>(threadIdx.x); i < row.end; i += static_cast<int32_t>(blockDim.x)) {
    const Slot<T> slot(row.reader, i);
#pragma unroll
    for (int j = 0; j < Slot<T>::kUnits; ++j) {
      const uint32_t key = slot.key[j];
      if (!slot.has(j) || (key ^ known) >> shift >> 8) continue;
      const bool forced = row.problem.forced(slot.first + j);
      const int digit = forced ? kDigits : static_cast<int>(key >> shift & (kDigits - 1));
      if (!forced) atomicAdd(mine + digit, 1u);
      if (weighted && (!forced || first_digit))
        atomicAdd(s.weight + digit, static_cast<unsigned long long>(weight_of_key<T>(key, top)));
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += static_cast<int>(blockDim.x)) {
    uint32_t sum = 0;
    for (int c = 0; c < copies; ++c) sum += s.copies[c * kCountPitch + i];
    s.count[i] = sum;
  }
  __syncthreads();
}

// ---- device: writing ----

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

  template <class T>
  __device__ __forceinline__ SlotChoice(const Row<T>& row, const Slot<T>& slot, const SelectCut& cut) {
#pragma unroll
    for (int j = 0; j < Slot<T>::kUnits; ++j) {
      if (!slot.has(j)) continue;
      const bool forced = row.problem.forced(slot.first + j);
      above |= static_cast<uint32_t>(forced || slot.key[j] > cut.key) << j;
      equal |= static_cast<uint32_t>(!forced && slot.key[j] == cut.key) << j;
    }
  }
  // Equals in the upper half: a round of a block has at most 1024 * 8 units.
  __device__ __forceinline__ uint32_t counts() const {
    return static_cast<uint32_t>(popc(above)) | static_cast<uint32_t>(popc(equal)) << 16;
  }
};

struct Rank {
  uint32_t above, equal;  // before a unit
};

// Writes the chosen units of the block's slots; rank: of the first. Returns the rank after the last. All threads.
template <class T>
__device__ Rank write_chosen(const SelectTask& a, const Row<T>& row, const SelectCut& cut, Rank rank) {
  __shared__ uint32_t totals[2][32];
  int32_t* const out = a.marks ? nullptr : a.out.row(row.at.b, row.at.t, row.at.h);
  uint8_t* const marks = a.marks ? a.marks + ((int64_t{row.at.b} * a.T + row.at.t) * a.Hkv + row.at.h) * a.N : nullptr;
  int buffer = 0;
  for (int32_t from = row.begin; from < row.end; from += static_cast<int32_t>(blockDim.x), buffer ^= 1) {
    const int32_t i = from + static_cast<int32_t>(threadIdx.x);
    const Slot<T> slot(row.reader, i, i < row.end);
    const SlotChoice choice(row, slot, cut);
    uint32_t all;
    const uint32_t before = block_scan(choice.counts(), totals[buffer], all);
    uint32_t above = rank.above + (before & 0xffff), equal = rank.equal + (before >> 16);
#pragma unroll
    for (int j = 0; j < Slot<T>::kUnits; ++j) {
      const bool sure = choice.above >> j & 1, tied = choice.equal >> j & 1;
      const bool chosen = sure || (tied && equal < cut.ties);
      if (marks) {
        if (slot.has(j)) marks[slot.first + j] = chosen;
      } else if (chosen) {
        const int64_t to = int64_t{above} + (equal < cut.ties ? equal : cut.ties);
        if (to < a.K) out[to] = slot.first + j;
      }
      above += sure, equal += tied;
    }
    rank.above += all & 0xffff, rank.equal += all >> 16;
  }
  return rank;
}

// Fills what lies behind the chosen units: this block's part of `blocks` equal ones. total: the row's.
template <class T>
__device__ void finish_row(const SelectTask& a, const Row<T>& row, const SelectCut& cut, Rank total, int block,
                           int blocks) {
  const int64_t step = int64_t{blockDim.x} * blocks, mine = int64_t{blockDim.x} * block + threadIdx.x;
  if (a.marks) {
    uint8_t* marks = a.marks + ((int64_t{row.at.b} * a.T + row.at.t) * a.Hkv + row.at.h) * a.N;
    for (int64_t i = row.problem.visible + mine; i < a.N; i += step) marks[i] = 0;
    return;
  }
  int64_t count = int64_t{total.above} + (total.equal < cut.ties ? total.equal : cut.ties);
  count = count < a.K ? count : a.K;
  int32_t* out = a.out.row(row.at.b, row.at.t, row.at.h);
  for (int64_t i = count + mine; i < a.K; i += step) out[i] = -1;
  if (mine == 0) a.out.count(row.at.b, row.at.t, row.at.h) = static_cast<int32_t>(count);
}

// ---- kernels: one block a row ----

template <class T>
__global__ void __launch_bounds__(1024) select_rows(SelectTask a, Scratch scratch, int copies) {
  __shared__ BlockCounts s;
  const Row<T> row(a, scratch, blockIdx.x);
  SelectCut cut = SelectCut::decided(row.problem);
  if (row.problem.undecided()) {
    const uint32_t top = row.problem.top_p < 1 ? block_reduce_max(row.top_key(), s.reduce) : 0;
    Descent descent(row.problem, SelectKey<T>::kBits);
    cut.key = 0;
    for (int shift = SelectKey<T>::kBits - 8; shift >= 0; shift -= 8) {
      count_digit(row, cut.key, shift, top, copies, s);
      if (warp_id() == 0) {
        descent.step({s.count, s.weight}, shift, row.problem.top_p);
        if (lane_id() == 0) s.cut = descent.cut, s.done = descent.done;
      }
      __syncthreads();
      cut = s.cut;
      if (s.done) break;
    }
  }
  const Rank total = write_chosen(a, row, cut, Rank{0, 0});
  finish_row(a, row, cut, total, 0, 1);
}

// ---- kernels: rows in chunks; grid (chunks, rows) ----

// The digits fixed by the `known` first counts of the row. All threads; the result is the same for all.
template <class T>
__device__ SelectCut replay(const Row<T>& row, const Scratch& scratch, int known, BlockCounts& s) {
  constexpr int kKeyBytes = SelectKey<T>::kBits / 8;
  if (!row.problem.undecided()) return SelectCut::decided(row.problem);
  if (warp_id() == 0) {
    Descent descent(row.problem, SelectKey<T>::kBits);
    for (int d = 0; d < known; ++d) {
      const int64_t at = int64_t{blockIdx.y} * kKeyBytes + d;
      const unsigned long long* weight = scratch.weight ? scratch.weight + at * (kDigits + 1) : nullptr;
      descent.step({scratch.count + at * kDigits, weight}, SelectKey<T>::kBits - 8 * (d + 1), row.problem.top_p);
    }
    if (lane_id() == 0) s.cut = descent.cut, s.done = descent.done;
  }
  __syncthreads();
  return s.cut;
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads) select_top(SelectTask a, Scratch scratch) {
  const Row<T> row(a, scratch, blockIdx.y);
  if (!row.problem.undecided() || row.problem.top_p >= 1) return;
  const uint32_t top = warp_reduce_max(row.top_key());
  if (lane_id() == 0) atomicMax(scratch.top + blockIdx.y, top);
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads) select_digit(SelectTask a, Scratch scratch, int digit) {
  __shared__ BlockCounts s;
  const Row<T> row(a, scratch, blockIdx.y);
  if (!row.problem.undecided() || row.begin >= row.end) return;
  const SelectCut cut = replay(row, scratch, digit, s);
  if (s.done) return;
  const bool weighted = row.problem.top_p < 1;
  const uint32_t top = weighted ? scratch.top[blockIdx.y] : 0;
  count_digit(row, cut.key, SelectKey<T>::kBits - 8 * (digit + 1), top, kMaxCopies, s);
  const int64_t at = int64_t{blockIdx.y} * (SelectKey<T>::kBits / 8) + digit;
  for (int i = static_cast<int>(threadIdx.x); i <= kDigits; i += static_cast<int>(blockDim.x)) {
    if (i < kDigits && s.count[i]) atomicAdd(scratch.count + at * kDigits + i, s.count[i]);
    if (weighted && s.weight[i]) atomicAdd(scratch.weight + at * (kDigits + 1) + i, s.weight[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads) select_count(SelectTask a, Scratch scratch) {
  __shared__ BlockCounts s;
  const Row<T> row(a, scratch, blockIdx.y);
  const SelectCut cut = replay(row, scratch, SelectKey<T>::kBits / 8, s);
  uint32_t above = 0, equal = 0;
  for (int32_t i = row.begin + static_cast<int32_t>(threadIdx.x); i < row.end; i += static_cast<int32_t>(blockDim.x)) {
    const Slot<T> slot(row.reader, i);
    const SlotChoice choice(row, slot, cut);
    above += popc(choice.above), equal += popc(choice.equal);
  }
  above = block_reduce_add(above, s.reduce);
  equal = block_reduce_add(equal, s.reduce);
  if (threadIdx.x == 0)
    scratch.chunk_counts[int64_t{blockIdx.y} * scratch.chunks + blockIdx.x] = make_uint2(above, equal);
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads) select_write(SelectTask a, Scratch scratch) {
  __shared__ BlockCounts s;
  const Row<T> row(a, scratch, blockIdx.y);
  const SelectCut cut = replay(row, scratch, SelectKey<T>::kBits / 8, s);
  Rank before = {0, 0}, total = {0, 0};
  for (int c = static_cast<int>(threadIdx.x); c < scratch.chunks; c += static_cast<int>(blockDim.x)) {
    const uint2 n = scratch.chunk_counts[int64_t{blockIdx.y} * scratch.chunks + c];
    total.above += n.x, total.equal += n.y;
    if (c < static_cast<int>(blockIdx.x)) before.above += n.x, before.equal += n.y;
  }
  before.above = block_reduce_add(before.above, s.reduce), before.equal = block_reduce_add(before.equal, s.reduce);
  total.above = block_reduce_add(total.above, s.reduce), total.equal = block_reduce_add(total.equal, s.reduce);
  write_chosen(a, row, cut, before);
  finish_row(a, row, cut, total, static_cast<int>(blockIdx.x), scratch.chunks);
}

// ---- keep spans ----

// The units of keep spans between front and back, as bits; grid (words, B*T flattened over x).
__global__ void __launch_bounds__(kChunkThreads) select_keep(SelectTask a, Scratch scratch, int32_t blocks) {
  const int64_t i = blockIdx.x / blocks;
  const int32_t words = (a.N + 31) / 32, b = static_cast<int32_t>(i / a.T), t = static_cast<int32_t>(i % a.T);
  const int32_t word = static_cast<int32_t>(blockIdx.x % blocks * blockDim.x + threadIdx.x);
  const int64_t tokens = select_tokens_visible(a, b, t);
  const SelectProblem edges = select_edges(a, tokens);
  uint32_t bits = 0;
  if (word < words) {
    const auto span_bits = [&](int64_t from, int64_t to) {  // units [from, to) of this word
      from -= int64_t{word} * 32, to -= int64_t{word} * 32;
      from = from > 0 ? from : 0, to = to < 32 ? to : 32;
      return from < to ? (to == 32 ? ~0u : (1u << to) - 1) & ~0u << from : 0u;
    };
    for (int32_t n = 0; n < a.keep_count; ++n) {
      const int32_t* span = a.keep + b * a.keep_stride[0] + n * a.keep_stride[1];
      const int64_t from = span[0], to = span[1] < tokens ? span[1] : tokens;
      if (from >= 0 && from < to) bits |= span_bits(from / a.page, (to + a.page - 1) / a.page);
    }
    bits &= span_bits(edges.front, edges.back);
    scratch.keep_bits[i * words + word] = bits;
  }
  const int forced = warp_reduce_add(popc(bits));
  if (lane_id() == 0 && forced > 0) atomicAdd(scratch.keep_forced + i, forced);
}

// ---- launching ----

template <class T>
void launch_one_block(const SelectTask& a, const Scratch& s, void* stream) {
  const int64_t slots = (int64_t{a.N} * static_cast<int64_t>(sizeof(T)) + 15) / 16 + 1;
  const int64_t most = a.rows() < kFewRows ? 1024 : 512;
  const auto threads = static_cast<unsigned>(std::clamp<int64_t>((slots + 31) / 32 * 32, 64, most));
  launch(select_rows<T>, dim3(static_cast<unsigned>(a.rows())), dim3(threads), 0, stream, a, s,
         a.N >= 2048 ? kMaxCopies : 1);
}

template <class T>
void launch_chunks(const SelectTask& a, const Scratch& s, void* stream) {
  const dim3 grid(static_cast<unsigned>(s.chunks), static_cast<unsigned>(a.rows())), block(kChunkThreads);
  if (a.top_p < 1) launch(select_top<T>, grid, block, 0, stream, a, s);
  for (int digit = 0; digit < SelectKey<T>::kBits / 8; ++digit)
    launch(select_digit<T>, grid, block, 0, stream, a, s, digit);
  launch(select_count<T>, grid, block, 0, stream, a, s);
  launch(select_write<T>, grid, block, 0, stream, a, s);
}

template <class T>
void launch_typed(const SelectTask& a, const Scratch& s, void* stream) {
  s.chunks > 0 ? launch_chunks<T>(a, s, stream) : launch_one_block<T>(a, s, stream);
}

}  // namespace

SelectTask select_task(const slicing::SelectArgs& a) {
  SelectTask t;
  t.scores = a.scores.data, t.dtype = a.scores.dtype;
  for (int i = 0; i < 3; ++i) t.scores_stride[i] = a.scores.stride[i];
  t.B = static_cast<int32_t>(a.scores.shape[0]), t.T = static_cast<int32_t>(a.scores.shape[1]);
  t.Hkv = static_cast<int32_t>(a.scores.shape[2]), t.N = static_cast<int32_t>(a.scores.shape[3]);
  t.seq_lens = SeqLens::of(a.seq_lens);
  t.page = a.unit == slicing::Unit::token ? 1 : static_cast<int32_t>(a.page);
  t.ratio = a.ratio, t.top_p = a.top_p, t.budget = a.budget;
  t.sink = a.sink, t.recent = a.recent, t.min_len = a.min_len, t.least = a.least;
  t.budgets = IntVector::of(a.budgets);
  if (a.budgets.given()) t.budgets_stride = a.budgets.stride[1];
  if (a.keep.given()) {
    t.keep = a.keep.as<const int32_t>(), t.keep_count = static_cast<int32_t>(a.keep.shape[1]);
    t.keep_stride[0] = a.keep.stride[0], t.keep_stride[1] = a.keep.stride[1];
  }
  t.out = DeviceSelection::of(a.indices, a.counts);
  t.K = a.indices.given() ? a.indices.shape[3] : 0;
  return t;
}

int64_t select_scratch(const SelectTask& a) { return scratch_of(a, nullptr).bytes; }

void launch_select(const SelectTask& a, void* scratch, void* stream) {
  if (a.rows() == 0) return;
  const Scratch s = scratch_of(a, scratch);
  memset_async(s.zeroed, 0, static_cast<size_t>(s.zeroed_bytes), stream);
  if (a.keep_count > 0 && a.N > 0) {
    const int32_t blocks = ((a.N + 31) / 32 + kChunkThreads - 1) / kChunkThreads;
    launch(select_keep, dim3(static_cast<unsigned>(int64_t{a.B} * a.T * blocks)), dim3(kChunkThreads), 0, stream, a, s,
           blocks);
  }
  if (a.dtype == DType::i16) return launch_typed<int16_t>(a, s, stream);
  with_storage_type(a.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>) launch_typed<decltype(type)>(a, s, stream);
  });
}

int64_t select_workspace(const slicing::SelectArgs& a) { return select_scratch(select_task(a)); }

void select(const slicing::SelectArgs& a, const Exec& exec) {
  launch_select(select_task(a), exec.workspace.data, exec.stream);
}

}  // namespace sic::gpu
