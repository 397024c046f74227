// A row's selection by a cluster of blocks, or by one. Each takes a part of the row's positions, whose joined scores
// stay in its shared memory: joined by plane 0 for the shortlist, then by both planes for the selection. What the parts
// add up to the blocks read from each other's shared memory: the counts of each digit (which also say how many units
// earlier parts take), the heads' maxima and weights over the shortlist, and last the unread mass.
//
// Floor: 2 G bytes a position of plane-0 scores, twice (the unread ones need the selection), and of both planes the
// sectors that hold candidates, which are nearly all; from L2. Arithmetic comes close to that: some 20 operations for
// each exponential, of every candidate for the ranking and of every position for the unread mass.
#include "slicing/attend_rows_cuda.cuh"

#include <algorithm>

#include "slicing/select_rows_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kMostThreads = 1024, kMostWarps = kMostThreads / 32;
constexpr int kMostBlocks = 8;             // of a row: what every device with clusters can have
constexpr int64_t kBlockPositions = 8192;  // beyond, another block takes less time than telling each other
constexpr int kSharingThreads = 512;  // then, so that a multiprocessor has two blocks: one waits while the other works
constexpr int kCopies = 32;           // of a digit's count: no two lanes add to the same
constexpr int kWeights = 4260;        // scores so far below the top have no weight (exp_weight)
constexpr int kPart = 4;              // entries of a shortlist that a thread takes at a time
constexpr int64_t kHeldBytes = 32 * 1024;  // of the shortlist's scores

// A query head's numbers. `top` and `sum` are the block's until all blocks have read them.
struct alignas(16) RowHead {
  HeadReference reference;
  int32_t top;
  float centre;
  unsigned long long sum;
  UnreadSum unread[kMostBlocks];  // in the first block: of all
};

// What a block knows of itself and its row: here, not in registers from step to step.
struct alignas(16) RowShared {
  JoinRow row;
  UnreadRow unread_row;
  int32_t begin, end;    // the block's part of the positions
  int32_t rank, blocks;  // in the cluster
  uint32_t heads, held;  // where they begin, in bytes from here
  BlockCounts counts;
  // For the other blocks, by digit:
  uint32_t count[2][kDigits];
  unsigned long long weight[2][kDigits + 1];
  uint32_t top;
  uint32_t before[2][kDigits];         // counts of the blocks before this one
  uint32_t digits[kDigits * kCopies];  // of a selection; between selections, weights; then bits by slot
  UnreadSum unread[2][kMostWarps];
};
static_assert(sizeof(RowShared::digits) >= kWeights * sizeof(int32_t));
static_assert(sizeof(RowShared) % 16 == 0 && sizeof(RowHead) % 16 == 0);

__host__ __device__ constexpr int64_t slots_of(int64_t positions) { return (positions + kJoinEach - 1) / kJoinEach; }

// The block's part of a row. Dynamic shared memory: RowShared, the part's joined scores in whole vectors, the heads,
// and scores of the shortlist's entries.
struct RowPart {
  RowShared& s;

  // By one thread; a barrier follows.
  __device__ void begin(const RowsTask& a) const {
    const int32_t rank = cluster_rank(), blocks = cluster_size();
    const int64_t row = blockIdx.x / static_cast<unsigned>(blocks);
    s.row = JoinRow(a.join, row), s.unread_row = UnreadRow(a.unread, row);
    s.rank = rank, s.blocks = blocks;
    const auto share = [blocks](int64_t positions) {
      return static_cast<int32_t>((static_cast<uint32_t>(slots_of(positions)) + blocks - 1) / blocks) * kJoinEach;
    };
    const int32_t length = static_cast<int32_t>(s.row.length), mine = share(length);
    s.begin = rank * mine < length ? rank * mine : length;
    s.end = length - s.begin < mine ? length : s.begin + mine;
    s.heads = static_cast<uint32_t>(sizeof(RowShared) + share(a.join.width) * sizeof(int16_t));
    s.held = s.heads + static_cast<uint32_t>(a.join.G * sizeof(RowHead));
  }

  __device__ __forceinline__ int16_t* joined() const { return reinterpret_cast<int16_t*>(&s + 1); }
  __device__ __forceinline__ RowHead& head(int g) const {
    return reinterpret_cast<RowHead*>(reinterpret_cast<char*>(&s) + s.heads)[g];
  }
  __device__ __forceinline__ int16_t* held() const {  // [G][a.held]
    return reinterpret_cast<int16_t*>(reinterpret_cast<char*>(&s) + s.held);
  }
  __device__ __forceinline__ int32_t* weights() const { return reinterpret_cast<int32_t*>(s.digits); }
  // Of each slot: what is selected, then what is not.
  __device__ __forceinline__ uint8_t* slots() const { return reinterpret_cast<uint8_t*>(s.digits); }

  // Barriers of all blocks that share the row.
  __device__ __forceinline__ void sync() const {
    if (s.blocks > 1)
      cluster_sync();
    else
      __syncthreads();
  }
  template <class T>
  __device__ __forceinline__ T* peer(T* p, int block) const {
    return s.blocks > 1 ? peer_shared(p, block) : p;
  }
};

// The threads' positions of the part, 8 at a time.
template <class Body>
__device__ __forceinline__ void for_positions(const RowPart& part, Body body) {
  const int32_t end = part.s.end, step = static_cast<int32_t>(blockDim.x) * kJoinEach;
  for (int32_t first = part.s.begin + static_cast<int32_t>(threadIdx.x) * kJoinEach; first < end; first += step)
    body(first);
}

// ---- what the blocks tell each other ----

// For find_cut.
struct SharedRow {
  const RowPart& part;

  __device__ uint32_t top(uint32_t key) const {
    if (part.s.blocks == 1) return key;
    if (threadIdx.x == 0) part.s.top = key;
    part.sync();
    for (int b = 0; b < part.s.blocks; ++b) {
      const uint32_t other = *part.peer(&part.s.top, b);
      key = other > key ? other : key;
    }
    return key;
  }
  // Each digit has room of its own, and a barrier lies between its uses.
  __device__ void add_up(BlockCounts& counts, int shift, bool weighted) const {
    if (part.s.blocks == 1) return;
    RowShared& s = part.s;
    const int digit = shift == 0, threads = static_cast<int>(blockDim.x);
    for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += threads) s.count[digit][i] = counts.count[i];
    for (int i = static_cast<int>(threadIdx.x); weighted && i <= kDigits; i += threads)
      s.weight[digit][i] = counts.weight[i];
    part.sync();
    for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += threads) {
      uint32_t before = 0, all = 0;
      for (int b = 0; b < part.s.blocks; ++b) {
        const uint32_t count = *part.peer(&s.count[digit][i], b);
        all += count, before += b < part.s.rank ? count : 0;
      }
      counts.count[i] = all, s.before[digit][i] = before;
    }
    for (int i = static_cast<int>(threadIdx.x); weighted && i <= kDigits; i += threads) {
      unsigned long long all = 0;
      for (int b = 0; b < part.s.blocks; ++b) all += *part.peer(&s.weight[digit][i], b);
      counts.weight[i] = all;
    }
    __syncthreads();
  }
};

// The heads' references: the largest of all tops, and (weighed) what all sums are the inverse of. A barrier follows.
template <bool kTops, bool kWeighed>
__device__ __forceinline__ void share_heads(const RowPart& part, int G) {
  part.sync();
  for (int g = static_cast<int>(threadIdx.x); g < G; g += static_cast<int>(blockDim.x)) {
    HeadReference& reference = part.head(g).reference;
    if constexpr (kTops) {
      int32_t top = INT32_MIN;
      for (int b = 0; b < part.s.blocks; ++b) {
        const int32_t other = part.peer(&part.head(g).top, b)[0];
        top = other > top ? other : top;
      }
      reference.top = top;
    }
    if constexpr (kWeighed) {
      unsigned long long sum = 0;
      for (int b = 0; b < part.s.blocks; ++b) sum += part.peer(&part.head(g).sum, b)[0];
      reference.inverse = inverse_weight(sum);
    }
  }
}

// ---- plane 0 ----

// Tops are the scan's. A barrier follows.
__device__ __forceinline__ void begin_heads(const JoinTask& a, const RowPart& part) {
  for (int g = static_cast<int>(threadIdx.x); g < a.G; g += static_cast<int>(blockDim.x)) {
    RowHead& head = part.head(g);
    head.reference = {a.top[part.s.row.row * a.G + g], 0};
    head.top = INT32_MIN, head.sum = 0;
  }
}

__device__ void weigh_row(const JoinTask& a, const RowPart& part) {
  const JoinRow& row = part.s.row;
  for (int g = 0; g < a.G; ++g) {
    const int32_t top = part.head(g).reference.top;
    unsigned long long sum = 0;
    for_positions(part, [&](int32_t first) {
      int32_t x[kJoinEach];
      load_scores(a, row, g, first, x);
      sum += sum_weights(x, row.present(a, first), top);
    });
    sum = warp_reduce_add(sum);
    if (lane_id() == 0) atomicAdd(&part.head(g).sum, sum);
  }
  share_heads<false, true>(part, a.G);
}

template <bool kSoftmax>
__device__ void join_row(const JoinTask& a, const RowPart& part) {
  for_positions(part, [&](int32_t first) {
    int32_t x[kJoinEach];
    join_eight<kSoftmax>(a, part.s.row, first, [&](int g) { return part.head(g).reference; }, x);
    store16(part.joined() + (first - part.s.begin), pack_scores(x));
  });
}

// ---- the shortlist, by both planes ----

// The block's part of it, entries first, .., first + 3 for a thread. Their scores are read once and held, as many as
// there is room for.
struct Shortlist {
  const int32_t* positions;
  int32_t count;

  // For all lanes of a warp alike.
  template <class Body>
  __device__ __forceinline__ void for_entries(Body body) const {
    const int32_t step = kPart * static_cast<int32_t>(blockDim.x), lane = kPart * lane_id();
    for (int32_t warp = kPart * 32 * warp_id(); warp < count; warp += step) body(warp + lane);
  }
  // Positions of entries; those behind the end are the part's first.
  __device__ __forceinline__ void locate(const RowPart& part, int32_t first, uint32_t (&at)[kPart]) const {
#pragma unroll
    for (int i = 0; i < kPart; ++i)
      at[i] = static_cast<uint32_t>(first + i < count ? positions[static_cast<uint32_t>(first + i)] : part.s.begin);
  }
};

// The scores of a thread's entries: where they are read, and where they are held (or null), from head to head.
struct ListedScores {
  const int16_t* fine;
  int16_t* held;

  __device__ ListedScores(const RowsTask& a, const RowPart& part, int32_t first)
      : fine(a.fine + part.s.row.row * a.join.G * a.join.stride),
        held(first < a.held ? part.held() + first : nullptr) {}
  __device__ __forceinline__ void next(const RowsTask& a) {
    fine += a.join.stride;
    if (held) held += a.held;
  }
  __device__ __forceinline__ void read(const uint32_t (&at)[kPart], int32_t (&x)[kPart]) const {
#pragma unroll
    for (int i = 0; i < kPart; ++i) x[i] = fine[at[i]];
  }
  __device__ __forceinline__ void load(const RowPart& part, const Shortlist& list, int32_t first,
                                       int32_t (&x)[kPart]) const {
    if (held) {
      const uint2 v = *reinterpret_cast<const uint2*>(held);
      const uint32_t word[2] = {v.x, v.y};
#pragma unroll
      for (int i = 0; i < kPart; ++i) x[i] = static_cast<int16_t>(word[i / 2] >> 16 * (i & 1));
    } else {
      uint32_t at[kPart];
      list.locate(part, first, at);
      read(at, x);
    }
  }
};

__device__ __forceinline__ uint2 pack_part(const int32_t (&x)[kPart]) {
  return make_uint2(byte_perm(static_cast<uint32_t>(x[0]), static_cast<uint32_t>(x[1]), 0x5410),
                    byte_perm(static_cast<uint32_t>(x[2]), static_cast<uint32_t>(x[3]), 0x5410));
}

// What is joined of scores. weights: of those 0, 1, .. below the top; all others are 0.
template <bool kSoftmax>
__device__ __forceinline__ void to_values(int32_t (&x)[kPart], int32_t top, const int32_t* weights) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    const uint32_t below = static_cast<uint32_t>(top - x[i]);
    if constexpr (kSoftmax)
      x[i] = below < kWeights ? weights[below] : 0;
    else
      x[i] = x[i] - top;
  }
}

// What the heads' scores are measured against: tops, then (softmax) weights, over the lists of all blocks.
template <bool kSoftmax>
__device__ void find_references(const RowsTask& a, const RowPart& part, const Shortlist& list) {
  const int G = a.join.G;
  list.for_entries([&](int32_t first) {
    uint32_t at[kPart];
    if (first < list.count) list.locate(part, first, at);
    ListedScores scores(a, part, first);
#pragma unroll 1
    for (int g = 0; g < G; ++g, scores.next(a)) {
      int32_t x[kPart], top = INT32_MIN;
      if (first < list.count) {
        scores.read(at, x);
        if (scores.held) *reinterpret_cast<uint2*>(scores.held) = pack_part(x);
#pragma unroll
        for (int i = 0; i < kPart; ++i) top = first + i < list.count && x[i] > top ? x[i] : top;
      }
      top = warp_reduce_max(top);
      if (lane_id() == 0) atomicMax(&part.head(g).top, top);
    }
  });
  share_heads<true, false>(part, G);
  __syncthreads();
  if constexpr (kSoftmax) {
    list.for_entries([&](int32_t first) {
      ListedScores scores(a, part, first);
#pragma unroll 1
      for (int g = 0; g < G; ++g, scores.next(a)) {
        int32_t x[kPart];
        uint32_t sum = 0;
        if (first < list.count) {
          scores.load(part, list, first, x);
          to_values<true>(x, part.head(g).reference.top, part.weights());
#pragma unroll
          for (int i = 0; i < kPart; ++i) sum += first + i < list.count ? static_cast<uint32_t>(x[i]) : 0;
        }
        sum = warp_reduce_add(sum);  // of 32 * kPart weights of at most 2^24
        if (lane_id() == 0) atomicAdd(&part.head(g).sum, static_cast<unsigned long long>(sum));
      }
    });
    share_heads<false, true>(part, G);
    __syncthreads();
  }
}

template <bool kSoftmax>
__device__ void join_list(const RowsTask& a, const RowPart& part, const Shortlist& list) {
  list.for_entries([&](int32_t first) {
    if (first >= list.count) return;
    Joined<kSoftmax, kPart> sum;
    ListedScores scores(a, part, first);
#pragma unroll 1
    for (int g = 0; g < a.join.G; ++g, scores.next(a)) {
      int32_t x[kPart];
      const HeadReference head = part.head(g).reference;
      scores.load(part, list, first, x);
      to_values<kSoftmax>(x, head.top, part.weights());
#pragma unroll
      for (int i = 0; i < kPart; ++i) sum.add(i, x[i], head.inverse);
    }
    uint32_t at[kPart];
    list.locate(part, first, at);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (first + i >= list.count) break;
      int32_t score = sum.score(i);
      if (a.join.bias) score = biased(score, a.join.bias[part.s.row.b * a.join.bias_stride + at[i]]);
      part.joined()[at[i] - static_cast<uint32_t>(part.s.begin)] = static_cast<int16_t>(score);
    }
  });
}

// Joined scores of the shortlist by both planes; kInvisible for all others.
template <bool kSoftmax>
__device__ void rank_shortlist(const RowsTask& a, const RowPart& part, const Shortlist& list) {
  const uint32_t none = static_cast<uint16_t>(kInvisible) * 0x10001u;
  for_positions(part, [&](int32_t first) {
    store16(part.joined() + (first - part.s.begin), make_uint4(none, none, none, none));
  });
  if constexpr (kSoftmax)
    for (int i = static_cast<int>(threadIdx.x); i < kWeights; i += static_cast<int>(blockDim.x))
      part.weights()[i] = exp_weight(-i);
  find_references<kSoftmax>(a, part, list);
  join_list<kSoftmax>(a, part, list);
}

// ---- selection ----

using PartRow = SelectRow<int16_t, SharedScores>;

__device__ __forceinline__ SelectRowAt place(const JoinRow& r) { return {r.b, r.t, r.h}; }

__device__ __forceinline__ PartRow part_row(const SelectTask& a, const SelectKeep& keep, const RowPart& part) {
  PartRow row(a, keep, place(part.s.row), part.joined() - part.s.begin);
  // A part begins at a slot; one that is empty, at the row's end.
  const auto slot = [](int32_t position) {
    return static_cast<int32_t>((static_cast<uint32_t>(position) + kJoinEach - 1) / kJoinEach);
  };
  row.begin = slot(part.s.begin), row.end = slot(part.s.end);
  return row;
}

// Of the part's first unit. All threads.
__device__ Rank first_rank(const PartRow& row, const SelectCut& cut, const RowPart& part) {
  if (part.s.rank == 0) return {0, 0};
  const SelectProblem& p = row.problem;
  const int32_t begin = part.s.begin;
  if (cut.takes_everything()) return {static_cast<uint32_t>(begin), 0};
  const bool nothing = cut.takes_nothing();  // but what is forced
  uint32_t mine = 0;
  const int32_t threads = static_cast<int32_t>(blockDim.x), thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t i = thread; p.keep && i * 32 < begin; i += threads) {
    const int32_t bits = begin - i * 32;
    mine += static_cast<uint32_t>(popc(p.keep[i] & (bits < 32 ? (1u << bits) - 1 : 0xffffffffu)));
  }
  for (uint32_t i = threadIdx.x; !nothing && i < kDigits; i += blockDim.x) {
    if (i > cut.key >> 8) mine += part.s.before[0][i];
    if (i > (cut.key & 0xff)) mine += part.s.before[1][i];
  }
  const int32_t edges = (begin < p.front ? begin : p.front) + (begin > p.back ? begin - p.back : 0);
  const uint32_t above = block_reduce_add(mine, part.s.counts.reduce) + static_cast<uint32_t>(edges);
  return {above, nothing ? 0 : part.s.before[1][cut.key & 0xff]};
}

// Lists the candidates.
__device__ Shortlist make_shortlist(const RowsTask& a, const RowPart& part) {
  RowShared& s = part.s;
  const PartRow row = part_row(a.shortlist, {}, part);
  const SelectCut cut = find_cut(row, {s.digits, kCopies}, s.counts, SharedRow{part});
  const Rank first = first_rank(row, cut, part);
  const Rank last = write_chosen(a.shortlist, row, cut, first, place(s.row), nullptr, s.counts);
  const int64_t begin = first.chosen(cut);
  return {a.shortlist.out.row(s.row.b, s.row.t, s.row.h) + begin, static_cast<int32_t>(last.chosen(cut) - begin)};
}

// The last block knows how many there are.
__device__ void select_final(const RowsTask& a, const RowPart& part) {
  RowShared& s = part.s;
  const PartRow row = part_row(a.selection, a.keep, part);
  const SelectCut cut = find_cut(row, {s.digits, kCopies}, s.counts, SharedRow{part});
  const Rank first = first_rank(row, cut, part);
  const Rank last = write_chosen(a.selection, row, cut, first, place(s.row), nullptr, s.counts, part.slots());
  if (part.s.rank == part.s.blocks - 1) finish_row(a.selection, row, cut, last, place(s.row), 0, 1);
}

// ---- the unread mass ----

// The sum over a warp, in lane 0. Lanes are added in a fixed order.
__device__ __forceinline__ UnreadSum warp_total(UnreadSum x) {
#pragma unroll
  for (int h = 16; h > 0; h /= 2) {
    const float top = __shfl_down_sync(kFullWarp, x.top, h), sum = __shfl_down_sync(kFullWarp, x.sum, h);
    x.merge(top, sum);
  }
  return x;
}

// Of each slot: the bits of what is visible, in the window and not selected. Each thread does those that it sums.
__device__ void find_unread(const RowsTask& a, const RowPart& part) {
  for_positions(part, [&](int32_t first) {
    uint8_t& slot = part.slots()[(first - part.s.begin) / kUnreadEach];
    slot = static_cast<uint8_t>(unread_range(a.unread, part.s.unread_row, first) & ~uint32_t{slot});
  });
}

// The thread's part of head g's.
__device__ __forceinline__ UnreadSum sum_unread(const RowsTask& a, const RowPart& part, int g) {
  const UnreadTask& u = a.unread;
  const UnreadRow& row = part.s.unread_row;
  const bool plain = !u.bias && u.softcap <= 0;
  const float top = static_cast<float>(a.join.top[row.row * u.G + g]), centre = part.head(g).centre;
  const uint8_t* const slots = part.slots();
  const int32_t begin = part.s.begin;
  UnreadSum sum;
  if (plain) sum.top = kLogitOfScore * top + centre;
  for_positions(part, [&](int32_t first) {
    const uint32_t unread = slots[(first - begin) / kUnreadEach];
    if (!unread) return;
    float x[kUnreadEach];
    unread_scores(u, a.coarse, row, g, first, unread, x);
    if (plain) {
      sum.add_scores(x, unread, top);
    } else {
      to_logits(u, row, first, unread, centre, x);
      sum.add(x);
    }
  });
  return sum;
}

// The first block adds the blocks' sums in their order.
__device__ void estimate_unread(const RowsTask& a, const RowPart& part) {
  const UnreadTask& u = a.unread;
  RowShared& s = part.s;
  find_unread(a, part);
  for (int g = 0; g < u.G; ++g) {
    UnreadSum sum = warp_total(sum_unread(a, part, g));
    if (lane_id() == 0) s.unread[g & 1][warp_id()] = sum;
    __syncthreads();
    if (warp_id() != 0) continue;
    sum = warp_total(lane_id() < block_warps() ? s.unread[g & 1][lane_id()] : UnreadSum{});
    if (lane_id() == 0) *part.peer(&part.head(g).unread[part.s.rank], 0) = sum;
  }
  part.sync();
  if (part.s.rank != 0) return;
  for (int g = static_cast<int>(threadIdx.x); g < u.G; g += static_cast<int>(blockDim.x)) {
    UnreadSum total;
    for (int b = 0; b < part.s.blocks; ++b) total.merge(part.head(g).unread[b].top, part.head(g).unread[b].sum);
    unread_out(u, s.unread_row, g) = total.log();
  }
}

// ---- the kernel ----

// kTwoStage: plane 0 makes a shortlist by maximum, both planes rank it by pool; else plane 0 ranks by pool.
template <bool kSoftmax, bool kTwoStage>
__global__ void __launch_bounds__(kMostThreads) attend_rows(RowsTask a) {
  SIC_DYNAMIC_SHARED(RowShared, s);
  const RowPart part{*s};
  if (threadIdx.x == 0) part.begin(a);
  __syncthreads();
  begin_heads(a.join, part);
  centre_logits(a.unread, a.coarse, s->unread_row, [&](int g, float logit) { part.head(g).centre = logit; });
  __syncthreads();
  if constexpr (kSoftmax && !kTwoStage) {
    weigh_row(a.join, part);
    __syncthreads();
  } else if constexpr (!kTwoStage) {
    part.sync();  // all blocks have begun, should the selection need no word of them
  }
  join_row<kSoftmax && !kTwoStage>(a.join, part);
  __syncthreads();
  if constexpr (kTwoStage) {
    const Shortlist list = make_shortlist(a, part);
    __syncthreads();
    rank_shortlist<kSoftmax>(a, part, list);
    __syncthreads();
  }
  select_final(a, part);
  __syncthreads();
  estimate_unread(a, part);
}

// ---- host side ----

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "device attribute");
  return value;
}

// By the row's width alone, so that what it gives does not depend on the batch.
int64_t row_blocks(int64_t width) {
  if (!device_attribute(cudaDevAttrClusterLaunch)) return 1;
  int64_t blocks = 1;
  while (blocks < kMostBlocks && width > blocks * kBlockPositions) blocks *= 2;
  return blocks;
}

// Without scores that are held.
int64_t shared_bytes(int64_t width, int64_t G) {
  return int64_t{sizeof(RowShared)} + slicing::ceil_div(slots_of(width), row_blocks(width)) * 16 +
         G * int64_t{sizeof(RowHead)};
}

}  // namespace

bool rows_fit(int64_t width, int64_t G) {
  return shared_bytes(width, G) <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

void launch_rows(const RowsTask& task, void* stream) {
  RowsTask a = task;
  const int64_t blocks = row_blocks(a.join.width), needed = shared_bytes(a.join.width, a.join.G);
  const int64_t left = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - needed;
  const int64_t slot = a.join.G * kJoinEach * int64_t{sizeof(int16_t)};
  if (a.fine) a.held = static_cast<int32_t>(std::min(left, kHeldBytes) / slot * kJoinEach);
  const dim3 grid(grid_blocks(a.join.rows() * blocks)), block(blocks > 1 ? kSharingThreads : kMostThreads);
  const auto shared = static_cast<size_t>(needed + a.held / kJoinEach * slot);
  const auto cluster = static_cast<unsigned>(blocks);
  const bool softmax = a.pool == slicing::Pool::softmax;
  if (a.fine)
    launch_clusters(cluster, softmax ? attend_rows<true, true> : attend_rows<false, true>, grid, block, shared, stream,
                    a);
  else
    launch_clusters(cluster, softmax ? attend_rows<true, false> : attend_rows<false, false>, grid, block, shared,
                    stream, a);
}

}  // namespace sic::gpu
