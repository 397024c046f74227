// Selection on the device: a radix descent on keys in the order of the scores, 8 bits at a time, finds the key of the
// last unit to take and how many of its equals; a last pass writes the chosen units in order. Counts and weights are
// integers, so that any number of blocks and threads finds the same.
#pragma once
#include "core/gpu.cuh"
#include "slicing/device_views.cuh"
#include "slicing/join_cuda.cuh"

namespace sic::gpu {

// ---- interface ----

// A selection for every row of scores: select's arguments in the form kernels take. The problem of each row follows on
// the device from its length.
struct SelectTask {
  const void* scores = nullptr;
  DType dtype = DType::i16;       // i16, f32, f16, bf16
  int64_t scores_stride[3] = {};  // elements
  int32_t B = 0, T = 1, Hkv = 1, N = 0;
  SeqLens seq_lens;
  int32_t page = 1;  // positions a unit
  double ratio = 0, top_p = 1;
  int64_t budget = -1, sink = 0, recent = 0, min_len = 0, least = 0;
  IntVector budgets;  // by sequence; budgets_stride from head to head
  int64_t budgets_stride = 0;
  IntVector keep;  // [B, keep_count, 2] by element
  int64_t keep_stride[2] = {};
  int32_t keep_count = 0;
  // Either the indices of the chosen units, or a mark for each unit: 1 if chosen. Marks of invisible units are 0.
  DeviceSelection out;
  int64_t K = 0;
  uint8_t* marks = nullptr;  // [B,T,Hkv,N]

  int64_t rows() const { return int64_t{B} * T * Hkv; }
};

SelectTask select_task(const slicing::SelectArgs&);  // with out, from a.indices and a.counts if given
// Scratch that launch_select needs: depends on the shapes and policy of the task, not on its pointers (but on whether
// keep is given).
int64_t select_scratch(const SelectTask&);
void launch_select(const SelectTask&, void* scratch, void* stream);

// The units of the keep spans that no edge forces, as bits, and how many they are; null without keep spans.
struct SelectKeep {
  uint32_t* bits = nullptr;   // [B*T][words of N units]
  int32_t* forced = nullptr;  // [B*T]
};
// Fills both; forced must be zero.
void launch_select_keep(const SelectTask&, const SelectKeep&, void* stream);

// ---- keys ----

// Unsigned integers in the order of the scores: -0 equals +0, NaN is 0 and below everything.
template <class T>
struct SelectKey;

template <>
struct SelectKey<int16_t> {
  static constexpr int kBits = 16;
  __device__ static uint32_t of(uint32_t bits) { return bits ^ 0x8000; }
};
template <int kInfinity>
struct HalfKey {
  static constexpr int kBits = 16;
  __device__ static uint32_t of(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fff;
    if (magnitude > kInfinity) return 0;
    return bits > 0x8000 ? bits ^ 0xffff : magnitude | 0x8000;
  }
};
template <>
struct SelectKey<f16_t> : HalfKey<0x7c00> {};
template <>
struct SelectKey<bf16_t> : HalfKey<0x7f80> {};
template <>
struct SelectKey<float> {
  static constexpr int kBits = 32;
  __device__ static uint32_t of(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0;
    return bits > 0x80000000u ? ~bits : magnitude | 0x80000000u;
  }
};

// The score whose key this is, as a float.
template <class T>
__device__ __forceinline__ float score_of_key(uint32_t key) {
  constexpr uint32_t kSign = 1u << (SelectKey<T>::kBits - 1);
  const uint32_t bits = key & kSign ? key ^ kSign : ~key & (kSign | (kSign - 1));
  if constexpr (sizeof(T) == 4) {
    return detail::float_of(bits);
  } else {
    return to_float(T{static_cast<uint16_t>(bits)});
  }
}

// Softmax weight of a unit, relative to the row's best key.
template <class T>
__device__ __forceinline__ uint32_t weight_of_key(uint32_t key, uint32_t top) {
  if constexpr (std::is_same_v<T, int16_t>) {
    return static_cast<uint32_t>(exp_weight(static_cast<int32_t>(key) - static_cast<int32_t>(top)));
  } else {
    if (key == 0) return 0;  // NaN
    if (key == top) return static_cast<uint32_t>(exp_weight(0));
    const float d = mul_rn(sub_rn(score_of_key<T>(key), score_of_key<T>(top)), slicing::kScoreSteps);
    return static_cast<uint32_t>(exp_weight(d > -65534.0f ? round_to_int(d) : -65534));
  }
}

// ---- the problem of a row ----

struct SelectRowAt {
  int32_t b, t, h;
};

// In units. Forced are [0, front), [back, visible) and the set bits of keep, which lie between.
struct SelectProblem {
  int32_t visible, front, back;
  int32_t free;    // units that are not forced
  int32_t wanted;  // of them, at most
  double top_p;
  const uint32_t* keep;

  __device__ __forceinline__ bool forced(int32_t i) const {
    return i < front || i >= back || (keep && keep[i >> 5] >> (i & 31) & 1);
  }
  // Bit j: unit first + j, of kN, is forced.
  template <int kN>
  __device__ __forceinline__ uint32_t forced_bits(int32_t first) const {
    if (!keep && first >= front && first + kN <= back) return 0;
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) bits |= static_cast<uint32_t>(forced(first + j)) << j;
    return bits;
  }
  // Whether the wanted units are not just all of the free ones, or none.
  __device__ __forceinline__ bool undecided() const { return wanted > 0 && (wanted < free || top_p < 1); }
};

// Units of so many positions, rounded up, and down. Both fit 32 bits, whose division needs no call.
__device__ __forceinline__ int32_t select_units(int64_t positions, int32_t page) {
  const uint32_t p = static_cast<uint32_t>(page);
  return static_cast<int32_t>((static_cast<uint32_t>(positions) + p - 1) / p);
}
__device__ __forceinline__ int32_t select_whole_units(int64_t positions, int32_t page) {
  return static_cast<int32_t>(static_cast<uint32_t>(positions) / static_cast<uint32_t>(page));
}

// Front and back of a row with `tokens` visible positions.
__device__ __forceinline__ SelectProblem select_edges(const SelectTask& a, int64_t tokens) {
  SelectProblem p{};
  const int64_t sink = a.sink < tokens ? a.sink : tokens, recent = a.recent < tokens ? a.recent : tokens;
  p.visible = select_units(tokens, a.page);
  p.front = select_units(sink, a.page);
  p.back = recent > 0 ? select_whole_units(tokens - recent, a.page) : p.visible;
  p.back = p.back > p.front ? p.back : p.front;
  return p;
}

__device__ __forceinline__ int64_t select_tokens_visible(const SelectTask& a, int32_t b, int32_t t) {
  return a.seq_lens.visible(b, a.T, t, int64_t{a.N} * a.page);
}

__device__ __forceinline__ SelectProblem select_problem(const SelectTask& a, SelectRowAt row, const SelectKeep& keep) {
  const int64_t tokens = select_tokens_visible(a, row.b, row.t);
  SelectProblem p = select_edges(a, tokens);
  p.free = p.back - p.front;
  if (keep.bits) {
    const int64_t i = int64_t{row.b} * a.T + row.t;
    p.keep = keep.bits + i * ((a.N + 31) / 32);
    p.free -= keep.forced[i];
  }
  int64_t budget = a.budget >= 0 ? a.budget : static_cast<int64_t>(a.ratio * static_cast<double>(tokens));
  if (a.budgets.data) {
    IntVector heads = a.budgets;
    const int64_t offset = row.b * heads.stride + row.h * a.budgets_stride;
    heads.stride = 1;
    budget = heads[offset] > 0 ? heads[offset] : 0;
  }
  budget = budget > a.least ? budget : a.least;
  p.top_p = tokens <= a.min_len ? 1.0 : a.top_p;
  if (tokens <= a.min_len || budget >= tokens) {
    budget = p.visible;
  } else if (a.page > 1) {
    budget = select_whole_units(budget, a.page);  // below tokens
    budget = budget > 1 ? budget : 1;
  }
  const int64_t wanted = budget - (p.visible - p.free);
  p.wanted = static_cast<int32_t>(wanted < 0 ? 0 : wanted < p.free ? wanted : p.free);
  return p;
}

// ---- reading a row ----

// How 16 bytes of scores are loaded: from global memory that the kernel does not write, wherever rows begin, or from
// shared memory, where they begin at a multiple of 16 bytes.
struct GlobalScores {
  static constexpr bool kAligned = false;
  __device__ static uint4 load(const void* p) { return load_cached16(p); }
};
struct SharedScores {
  static constexpr bool kAligned = true;
  __device__ static uint4 load(const void* p) { return *static_cast<const uint4*>(p); }
};

// A row's units in 16-byte slots of memory; the first and the last may be partly outside.
template <class T, class Memory = GlobalScores>
struct SlotReader {
  static constexpr int kUnits = 16 / static_cast<int>(sizeof(T));
  const T* row;
  int32_t visible, skew;  // units of slot 0 before the row

  __device__ SlotReader(const T* row_, int32_t visible_)
      : row(row_),
        visible(visible_),
        skew(Memory::kAligned ? 0 : static_cast<int32_t>(reinterpret_cast<uintptr_t>(row_) / sizeof(T) % kUnits)) {}
  __device__ __forceinline__ int32_t slots() const {
    return visible > 0 ? static_cast<int32_t>((static_cast<uint32_t>(visible) + skew + kUnits - 1) / kUnits) : 0;
  }
};

template <class T>
struct Slot {
  static constexpr int kUnits = SlotReader<T>::kUnits;
  int32_t first;  // unit of element 0
  int lo, hi;     // elements [lo, hi) are visible units
  uint32_t key[kUnits];

  // Empty if !in.
  template <class Memory>
  __device__ __forceinline__ Slot(const SlotReader<T, Memory>& r, int32_t slot, bool in = true)
      : first(slot * kUnits - r.skew) {
    lo = first < 0 ? -first : 0;
    hi = !in ? 0 : r.visible - first < kUnits ? r.visible - first : kUnits;
    if (lo == 0 && hi == kUnits) {
      const uint4 v = Memory::load(r.row + first);
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < kUnits; ++j)
        key[j] = SelectKey<T>::of(sizeof(T) == 4 ? word[j] : word[j / 2] >> 16 * (j & 1) & 0xffff);
    } else {
#pragma unroll
      for (int j = 0; j < kUnits; ++j) key[j] = has(j) ? SelectKey<T>::of(raw(r.row[first + j])) : 0;
    }
  }
  __device__ __forceinline__ bool has(int j) const { return j >= lo && j < hi; }
  // Bit j: element j is a visible unit.
  __device__ __forceinline__ uint32_t visible() const { return hi > lo ? (1u << hi) - (1u << lo) : 0; }

 private:
  __device__ static uint32_t raw(float x) { return detail::bits_of(x); }
  __device__ static uint32_t raw(int16_t x) { return static_cast<uint16_t>(x); }
  template <class Half>
  __device__ static uint32_t raw(Half x) {
    return x.bits;
  }
};

// ---- the descent ----

constexpr int kDigits = 256;

// Counts of one digit's values among the free units whose higher digits are known; weights for top_p.
struct DigitCounts {
  const uint32_t* count;             // [kDigits]
  const unsigned long long* weight;  // [kDigits + 1], the last: the forced units' (of the first digit); or null
};

// The units to take: keys above `key`, and the first `ties` of those equal to it.
struct SelectCut {
  uint32_t key, ties;

  __device__ static SelectCut nothing() { return {0xffffffffu, 0}; }
  __device__ static SelectCut everything() { return {0, 0xffffffffu}; }
  __device__ bool takes_nothing() const { return key == 0xffffffffu; }
  __device__ bool takes_everything() const { return ties == 0xffffffffu; }
  // Of a problem that is not undecided.
  __device__ static SelectCut decided(const SelectProblem& p) { return p.wanted > 0 ? everything() : nothing(); }
};

struct Descent {
  int key_bits;
  SelectCut cut;  // known digits; units still to take among those that share them
  bool weighted, done;
  unsigned long long weight;  // of the forced units and of those above the cut
  double target;

  __device__ static Descent of(const SelectProblem& p, int key_bits) {
    return {key_bits, {0, static_cast<uint32_t>(p.wanted)}, p.top_p < 1, false, 0, 0};
  }

  __device__ __forceinline__ bool reaches(unsigned long long w) const {
    return weighted && static_cast<double>(w) >= target;
  }

  // By one warp: fixes the digit at `shift`. Lane l looks at values 255 - 8 l downwards.
  __device__ void step(const DigitCounts& digits, int shift, double top_p) {
    if (done) return;
    if (weighted && shift + 8 == key_bits) begin_weights(digits, top_p);
    if (done) return;
    const int lane = lane_id(), high = kDigits - 1 - 8 * lane;
    uint32_t sum = 0;
    unsigned long long mass_sum = 0;
    for (int i = 0; i < 8; ++i) sum += digits.count[high - i], mass_sum += mass_of(digits, high - i);
    uint32_t above = sum;
    unsigned long long mass_above = mass_sum;
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
      const uint32_t c = __shfl_up_sync(kFullWarp, above, h);
      const unsigned long long m = __shfl_up_sync(kFullWarp, mass_above, h);
      if (lane >= h) above += c, mass_above += m;
    }
    const bool here = above >= cut.ties || reaches(weight + mass_above);
    const int winner = __ffs(static_cast<int>(__ballot_sync(kFullWarp, here))) - 1;
    above -= sum, mass_above -= mass_sum;
    // In the winning lane: the first value that completes the count or the weight.
    int digit = high;
    uint32_t last = digits.count[digit];
    unsigned long long mass_last = mass_of(digits, digit);
    while (lane == winner && above + last < cut.ties && !reaches(weight + mass_above + mass_last)) {
      above += last, mass_above += mass_last;
      last = digits.count[--digit], mass_last = mass_of(digits, digit);
    }
    __syncwarp();
    digit = __shfl_sync(kFullWarp, digit, winner);
    cut.key |= static_cast<uint32_t>(digit) << shift;
    cut.ties -= __shfl_sync(kFullWarp, above, winner);
    weight += __shfl_sync(kFullWarp, mass_above, winner);
    last = __shfl_sync(kFullWarp, last, winner), mass_last = __shfl_sync(kFullWarp, mass_last, winner);
    if (weighted && shift == 0) cap_ties(last, mass_last);
  }

 private:
  __device__ __forceinline__ unsigned long long mass_of(const DigitCounts& digits, int digit) const {
    return weighted ? digits.weight[digit] : 0;
  }
  __device__ void begin_weights(const DigitCounts& digits, double top_p) {
    unsigned long long all = 0;
    for (int i = lane_id(); i < kDigits; i += 32) all += digits.weight[i];
    weight = digits.weight[kDigits];
    all = warp_reduce_add(all) + weight;
    target = top_p * static_cast<double>(all);
    weighted = all > 0;  // nothing but NaN: no prefix is better than another
    if (reaches(weight)) cut = SelectCut::nothing(), done = true;
  }
  // Of `equals` units of one weight, the fewest that reach the target.
  __device__ void cap_ties(uint32_t equals, unsigned long long mass) {
    if (equals == 0 || !reaches(weight + mass)) return;
    const unsigned long long each = mass / equals;
    uint32_t low = 1, high = equals;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (reaches(weight + middle * each))
        high = middle;
      else
        low = middle + 1;
    }
    cut.ties = low < cut.ties ? low : cut.ties;
  }
};

}  // namespace sic::gpu
