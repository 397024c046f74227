// select on the device.
//
// Many rows, or short ones: one block a row. Few long ones: a kernel for each digit, over (row, chunk) blocks that add
// to the row's counts; every block repeats the cheap descent over the digits known so far. Then the chunks count what
// they hold above and at the cut, and write it behind what earlier chunks hold.
//
// Floor: the row once from memory (N * itemsize bytes), 4 K bytes of indices written; later passes find it in L2.
#include <algorithm>
#include <cstring>

#include "core/scratch.h"
#include "slicing/select_rows_cuda.cuh"

namespace sic::gpu {
namespace {

constexpr int64_t kFewRows = 2 * 132;                 // below, blocks of whole rows would leave multiprocessors idle
constexpr int64_t kOneBlockUnits = 16384;             // a block has these done before more kernels would be
constexpr int kChunkThreads = 256, kChunkBlocks = 4;  // of a multiprocessor
constexpr int kCopies = 8;                            // of a block's counts

struct Scratch {
  SelectKeep keep;
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
  Carver carve(memory, 16);
  const int64_t rows = a.rows(), digits = key_bytes(a.dtype), slot_units = 16 / digits;
  const bool in_chunks = rows < kFewRows && a.N > kOneBlockUnits;
  s.zeroed = memory;
  if (a.keep_count > 0) s.keep.forced = carve.take<int32_t>(int64_t{a.B} * a.T);
  if (in_chunks) {
    s.count = carve.take<uint32_t>(rows * digits * kDigits);
    if (a.top_p < 1) {
      s.top = carve.take<uint32_t>(rows);
      s.weight = carve.take<unsigned long long>(rows * digits * (kDigits + 1));
    }
  }
  s.zeroed_bytes = carve.used();
  if (a.keep_count > 0) s.keep.bits = carve.take<uint32_t>(int64_t{a.B} * a.T * ((a.N + 31) / 32));
  if (in_chunks) {
    const int64_t slots = (a.N + 2 * slot_units - 2) / slot_units;  // wherever a row begins in its first
    const int64_t share = slots * rows / (2 * kFewRows);
    s.chunk_slots = static_cast<int32_t>((share / kChunkThreads + 1) * kChunkThreads);
    s.chunks = static_cast<int32_t>((slots + s.chunk_slots - 1) / s.chunk_slots);
    s.chunk_counts = carve.take<uint2>(rows * s.chunks);
  }
  s.bytes = carve.used();
  return s;
}

// ---- device: a row ----

template <class T>
__device__ __forceinline__ SelectRow<T> global_row(const SelectTask& a, const Scratch& s, SelectRowAt at) {
  SelectRow<T> row(a, s.keep, at,
                   static_cast<const T*>(a.scores) + at.b * a.scores_stride[0] + at.t * a.scores_stride[1] +
                       at.h * a.scores_stride[2]);
  if (s.chunks == 0) return row;
  const int32_t slots = row.end;
  const int64_t from = int64_t{blockIdx.x} * s.chunk_slots;
  row.begin = static_cast<int32_t>(from < slots ? from : slots);
  row.end = slots - row.begin < s.chunk_slots ? slots : row.begin + s.chunk_slots;
  return row;
}

// ---- kernels: one block a row ----

template <class T>
__global__ void __launch_bounds__(1024) select_rows(SelectTask a, Scratch scratch, int copies) {
  __shared__ BlockCounts s;
  __shared__ uint32_t counts[kCopies * kDigits];
  const SelectRowAt at = select_row_at(a, blockIdx.x);
  const auto row = global_row<T>(a, scratch, at);
  const SelectCut cut = find_cut(row, {counts, copies}, s);
  const Rank total = write_chosen(a, row, cut, Rank{0, 0}, at, row_marks(a, at), s);
  finish_row(a, row, cut, total, at, 0, 1);
}

// ---- kernels: rows in chunks; grid (chunks, rows) ----

// The digits fixed by the `known` first counts of the row. All threads; the result is the same for all.
template <class T>
__device__ SelectCut replay(const SelectRow<T>& row, const Scratch& scratch, int known, BlockCounts& s) {
  constexpr int kKeyBytes = SelectKey<T>::kBits / 8;
  if (!row.problem.undecided()) return SelectCut::decided(row.problem);
  if (warp_id() == 0) {
    Descent descent = Descent::of(row.problem, SelectKey<T>::kBits);
    for (int d = 0; d < known; ++d) {
      const int64_t at = int64_t{blockIdx.y} * kKeyBytes + d;
      const unsigned long long* weight = scratch.weight ? scratch.weight + at * (kDigits + 1) : nullptr;
      descent.step({scratch.count + at * kDigits, weight}, SelectKey<T>::kBits - 8 * (d + 1), row.problem.top_p);
    }
    if (lane_id() == 0) s.descent = descent;
  }
  __syncthreads();
  return s.descent.cut;
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads, kChunkBlocks) select_top(SelectTask a, Scratch scratch) {
  const auto row = global_row<T>(a, scratch, select_row_at(a, blockIdx.y));
  if (!row.problem.undecided() || row.problem.top_p >= 1) return;
  const uint32_t top = warp_reduce_max(row.top_key());
  if (lane_id() == 0) atomicMax(scratch.top + blockIdx.y, top);
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads, kChunkBlocks) select_digit(SelectTask a, Scratch scratch, int digit) {
  __shared__ BlockCounts s;
  __shared__ uint32_t counts[kCopies * kDigits];
  const auto row = global_row<T>(a, scratch, select_row_at(a, blockIdx.y));
  if (!row.problem.undecided() || row.begin >= row.end) return;
  const SelectCut cut = replay(row, scratch, digit, s);
  if (s.descent.done) return;
  const bool weighted = row.problem.top_p < 1;
  const uint32_t top = weighted ? scratch.top[blockIdx.y] : 0;
  count_digit(row, cut.key, SelectKey<T>::kBits - 8 * (digit + 1), top, {counts, kCopies}, s);
  const int64_t at = int64_t{blockIdx.y} * (SelectKey<T>::kBits / 8) + digit;
  for (int i = static_cast<int>(threadIdx.x); i <= kDigits; i += static_cast<int>(blockDim.x)) {
    if (i < kDigits && s.count[i]) atomicAdd(scratch.count + at * kDigits + i, s.count[i]);
    if (weighted && s.weight[i]) atomicAdd(scratch.weight + at * (kDigits + 1) + i, s.weight[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads, kChunkBlocks) select_count(SelectTask a, Scratch scratch) {
  __shared__ BlockCounts s;
  const auto row = global_row<T>(a, scratch, select_row_at(a, blockIdx.y));
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
__global__ void __launch_bounds__(kChunkThreads, kChunkBlocks) select_write(SelectTask a, Scratch scratch) {
  __shared__ BlockCounts s;
  const SelectRowAt at = select_row_at(a, blockIdx.y);
  const auto row = global_row<T>(a, scratch, at);
  const SelectCut cut = replay(row, scratch, SelectKey<T>::kBits / 8, s);
  Rank before = {0, 0}, total = {0, 0};
  for (int c = static_cast<int>(threadIdx.x); c < scratch.chunks; c += static_cast<int>(blockDim.x)) {
    const uint2 n = scratch.chunk_counts[int64_t{blockIdx.y} * scratch.chunks + c];
    total.above += n.x, total.equal += n.y;
    if (c < static_cast<int>(blockIdx.x)) before.above += n.x, before.equal += n.y;
  }
  before.above = block_reduce_add(before.above, s.reduce), before.equal = block_reduce_add(before.equal, s.reduce);
  total.above = block_reduce_add(total.above, s.reduce), total.equal = block_reduce_add(total.equal, s.reduce);
  write_chosen(a, row, cut, before, at, row_marks(a, at), s);
  finish_row(a, row, cut, total, at, static_cast<int>(blockIdx.x), scratch.chunks);
}

// ---- keep spans ----

// The units of keep spans between front and back, as bits; grid (words, B*T flattened over x).
__global__ void __launch_bounds__(kChunkThreads) select_keep(SelectTask a, SelectKeep keep, int32_t blocks) {
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
      const int64_t at = b * a.keep_stride[0] + n * a.keep_stride[1];
      const int64_t begin = a.keep[at], end = a.keep[at + 1];
      const int64_t from = begin > 0 ? begin : 0, to = end < tokens ? end : tokens;
      if (from < to) bits |= span_bits(from / a.page, (to + a.page - 1) / a.page);
    }
    bits &= span_bits(edges.front, edges.back);
    keep.bits[i * words + word] = bits;
  }
  const int forced = warp_reduce_add(popc(bits));
  if (lane_id() == 0 && forced > 0) atomicAdd(keep.forced + i, forced);
}

// ---- launching ----

template <class T>
void launch_one_block(const SelectTask& a, const Scratch& s, void* stream) {
  const int64_t slots = (int64_t{a.N} * static_cast<int64_t>(sizeof(T)) + 15) / 16 + 1;
  const int64_t most = a.rows() < kFewRows ? 1024 : 512;
  const auto threads = static_cast<unsigned>(std::clamp<int64_t>((slots + 31) / 32 * 32, 64, most));
  launch(select_rows<T>, dim3(grid_blocks(a.rows())), dim3(threads), 0, stream, a, s, a.N >= 2048 ? kCopies : 1);
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
    t.keep = IntVector::of(a.keep), t.keep_count = static_cast<int32_t>(a.keep.shape[1]);
    t.keep_stride[0] = a.keep.stride[0], t.keep_stride[1] = a.keep.stride[1], t.keep.stride = 1;
  }
  t.out = DeviceSelection::of(a.indices, a.counts);
  t.K = a.indices.given() ? a.indices.shape[3] : 0;
  return t;
}

int64_t select_scratch(const SelectTask& a) { return scratch_of(a, nullptr).bytes; }

void launch_select_keep(const SelectTask& a, const SelectKeep& keep, void* stream) {
  if (a.keep_count == 0 || a.N == 0) return;
  const int32_t blocks = ((a.N + 31) / 32 + kChunkThreads - 1) / kChunkThreads;
  launch(select_keep, dim3(grid_blocks(int64_t{a.B} * a.T * blocks)), dim3(kChunkThreads), 0, stream, a, keep, blocks);
}

void launch_select(const SelectTask& a, void* scratch, void* stream) {
  if (a.rows() == 0) return;
  const Scratch s = scratch_of(a, scratch);
  memset_async(s.zeroed, 0, static_cast<size_t>(s.zeroed_bytes), stream);
  launch_select_keep(a, s.keep, stream);
  if (a.dtype == DType::i16) return launch_typed<int16_t>(a, s, stream);
  with_float_type(a.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>) launch_typed<decltype(type)>(a, s, stream);
  });
}

int64_t select_workspace(const slicing::SelectArgs& a) { return select_scratch(select_task(a)); }

void select(const slicing::SelectArgs& a, const Exec& exec) {
  launch_select(select_task(a), exec.workspace.data, exec.stream);
}

}  // namespace sic::gpu
