// Attention on the CPU, whatever its rows are stored as.
//
// A task is one KV head, a few query rows and one split of the listed tokens. It walks the list in tiles: K rows give a
// tile of logits, an online softmax (base 2) gives weights, V rows are added to the rows' sums. Each K and V row is
// read once for all query heads of its group. Tiles and splits have fixed boundaries and every row's sums are added in
// the same order however rows are grouped: results are bitwise equal across batches, thread counts and full selections.
#pragma once
#include <cmath>
#include <limits>

#include "core/paged.h"
#include "core/parallel.h"
#include "core/rows.h"
#include "core/scratch.h"
#include "core/simd.h"
#include "slicing/attention.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {

using slicing::AttentionArgs;
using slicing::AttentionPlan;
using slicing::Unit;

constexpr int kTile = 256;  // tokens of one step of the online softmax
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

// The tokens of one step of the online softmax.
struct Positions {
  int32_t pos[kTile];
  int n;
};

// ---- kernels on one tile ----

// logits[r][j] = q[r] . k[j] for R rows of q (padded to Dp floats) and tile tokens j < n. fetch: the rows that stand
// kAhead places further on, too.
template <class T, int R, int kAhead = 0>
SIC_INLINE void tile_logits(const float* q, int64_t Dp, const char* const* k, int n, int64_t D, float* logits,
                            bool fetch = false) {
  constexpr int N = W / R;  // tokens at a time: R * N sums make one vector
  const int64_t whole = D / W * W;
  for (int j = 0; j < n; j += N) {
    const T* row[N];
    SIC_UNROLL for (int i = 0; i < N; ++i) row[i] = reinterpret_cast<const T*>(k[j + i]);
    vf sum[W] = {};
    for (int64_t d = 0; d < whole; d += W) {
      // A line at a time, between the sums: a burst would fill the queue of outstanding misses and stop the arithmetic.
      if (fetch && d * sizeof(T) % 64 == 0)
        SIC_UNROLL for (int i = 0; i < N; ++i) prefetch(k[j + i + kAhead] + d * sizeof(T));
      vf kv[N];
      SIC_UNROLL for (int i = 0; i < N; ++i) kv[i] = load(row[i] + d);
      SIC_UNROLL for (int r = 0; r < R; ++r) {
        const vf qv = load(q + r * Dp + d);
        SIC_UNROLL for (int i = 0; i < N; ++i) sum[r * N + i] = fma(qv, kv[i], sum[r * N + i]);
      }
    }
    if (whole < D) {
      SIC_UNROLL for (int i = 0; i < N; ++i) {
        const vf kv = load_first(row[i] + whole, static_cast<int>(D - whole));
        SIC_UNROLL for (int r = 0; r < R; ++r) sum[r * N + i] = fma(load(q + r * Dp + whole), kv, sum[r * N + i]);
      }
    }
    float dots[W];
    store(dots, transpose_add(sum));
    SIC_UNROLL for (int r = 0; r < R; ++r) std::memcpy(logits + r * kTile + j, dots + r * N, sizeof(float) * N);
  }
}

// acc[r] = acc[r] * decay[r] + sum over j in [from, to) of p[r][j] * v[j].
template <class T, int R, int kAhead = 0>
SIC_INLINE void tile_values(const float* p, const float* decay, const char* const* v, int from, int to, int64_t D,
                            float* acc, int64_t Dp, bool fetch = false) {
  constexpr int C = (W == 16 ? 16 : 8) / R;  // vectors of a row at a time: R * C sums stay in registers
  int64_t d = 0;
  for (; d + C * W <= D; d += C * W) {
    vf sum[R][C];
    SIC_UNROLL for (int r = 0; r < R; ++r) SIC_UNROLL for (int c = 0; c < C; ++c) sum[r][c] =
        load(acc + r * Dp + d + c * W) * splat(decay[r]);
    for (int j = from; j < to; ++j) {
      if (fetch) prefetch_row(v[j + kAhead] + d * sizeof(T), C * W * sizeof(T));
      const T* row = reinterpret_cast<const T*>(v[j]) + d;
      vf x[C];
      SIC_UNROLL for (int c = 0; c < C; ++c) x[c] = load(row + c * W);
      SIC_UNROLL for (int r = 0; r < R; ++r) {
        const vf weight = splat(p[r * kTile + j]);
        SIC_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = fma(weight, x[c], sum[r][c]);
      }
    }
    SIC_UNROLL for (int r = 0; r < R; ++r) SIC_UNROLL for (int c = 0; c < C; ++c)
        store(acc + r * Dp + d + c * W, sum[r][c]);
  }
  for (; d < D; d += W) {
    const int left = static_cast<int>(D - d < W ? D - d : W);
    vf sum[R];
    SIC_UNROLL for (int r = 0; r < R; ++r) sum[r] = load(acc + r * Dp + d) * splat(decay[r]);
    for (int j = from; j < to; ++j) {
      const T* row = reinterpret_cast<const T*>(v[j]) + d;
      const vf x = left == W ? load(row) : load_first(row, left);
      SIC_UNROLL for (int r = 0; r < R; ++r) sum[r] = fma(splat(p[r * kTile + j]), x, sum[r]);
    }
    SIC_UNROLL for (int r = 0; r < R; ++r) store(acc + r * Dp + d, sum[r]);
  }
}

// Calls the kernel for 4, 2 or 1 rows.
template <class Body>
SIC_INLINE void in_row_groups(int rows, Body body) {
  int r = 0;
  for (; r + 3 <= rows; r += 4) body(std::integral_constant<int, 4>(), r);  // 3 rows are padded to 4
  if (r + 2 <= rows) body(std::integral_constant<int, 2>(), r), r += 2;
  if (r < rows) body(std::integral_constant<int, 1>(), r);
}

// ---- one task ----

struct RowState {
  float max = kNone, sum = 0;
  bool empty() const { return max == kNone && sum == 0; }  // a sum of NaN is not empty
};

// The running softmax of the rows of a task; buffers hold a multiple of 4 rows.
struct Rows {
  int count = 0;
  int64_t Dk, Dv, Dkp, Dvp;
  float* q;       // [rows][Dkp], scaled to base 2 unless a softcap comes between
  float* acc;     // [rows][Dvp]
  float* logits;  // [rows][kTile]
  float* decay;   // [rows]: what a tile's new maximum leaves of the sums
  RowState* state;
  int32_t* from;  // per row: listed positions allowed, [from, to)
  int32_t* to;
};

// Rows of a cache in some form, those of one sequence and KV head, with buffers of a task in memory that it is given.
//   Args                             of the op; Tile: derives from Positions, with what place() finds
//   bytes(args, rows)                memory a task takes
//   begin()                          before a split
//   place(tile)                      where the tile's tokens lie
//   fetch_first(tile, rows)             the first rows of a split into the caches
//   start(tile, next)                before a tile's rows are read; next is placed, too, or empty
//   logits(tile, rows, row, n, to)   of n query rows from `row` on with the tokens before `to`
//   values(tile, rows, row, n, from, to)  weights in place of the logits: rows' sums decay and grow
//   finish(rows)                     after a split: sums as they count
template <class Source>
class AttentionWorker {
 public:
  AttentionWorker(const typename Source::Args& args, const AttentionArgs& a, const AttentionPlan& plan)
      : args_(args), a_(a), plan_(plan), page_(a.kv.k_cache.shape[2] > 0 ? a.kv.k_cache.shape[2] : 1) {}

  void run(int64_t task, float* partials) const;

 private:
  using Tile = typename Source::Tile;
  struct Place {
    int64_t b, h, t, tokens, split;
  };
  Place place(int64_t task) const;
  int64_t set_up_rows(const Place&, Rows&, char* scratch) const;  // returns the bytes used
  void clear(Rows&) const;
  int64_t listed(const Place&) const;
  void fill_tile(const Place&, const Rows&, int64_t begin, int64_t end, Positions&) const;
  void add_split(const Place&, Source&, Rows&, int64_t begin, int64_t end) const;
  void add_tile(const Place&, Source&, const Tile&, Rows&, int row, int rows, int from, int to) const;
  void softmax(const Place&, const Positions&, Rows&, int row, int from, int to) const;
  void finish_logits(const Place&, const Positions&, float* logits) const;
  void store_partial(const Place&, const Rows&, float* partials) const;

  const typename Source::Args& args_;
  const AttentionArgs& a_;
  const AttentionPlan& plan_;
  PageSplit page_;
};

template <class Source>
typename AttentionWorker<Source>::Place AttentionWorker<Source>::place(int64_t task) const {
  Place p;
  p.split = task % plan_.splits, task /= plan_.splits;
  const int64_t block = task % plan_.token_tasks;
  task /= plan_.token_tasks;
  const int64_t Hkv = a_.kv.k_cache.shape[1];
  p.h = task % Hkv, p.b = task / Hkv;
  p.t = block * plan_.tokens_per_task;
  p.tokens = std::min(plan_.tokens_per_task, a_.q.shape[1] - p.t);
  return p;
}

inline int64_t attention_scratch(const AttentionArgs& a, const AttentionPlan& plan) {
  const int64_t rows = plan.tokens_per_task * plan.group + 3;
  const int64_t floats = padded(a.q.shape[3]) + 2 * padded(a.kv.v_cache.shape[3]) + kTile + 12;
  return rows * floats * int64_t{4} + 1024;  // and the gaps between the parts
}

template <class Source>
int64_t AttentionWorker<Source>::set_up_rows(const Place& p, Rows& rows, char* scratch) const {
  const TensorView& q = a_.q;
  rows.Dk = q.shape[3], rows.Dv = a_.kv.v_cache.shape[3];
  rows.Dkp = padded(rows.Dk), rows.Dvp = padded(rows.Dv);
  rows.count = static_cast<int>(p.tokens * plan_.group);
  const int64_t room = (rows.count + 3) / 4 * 4;
  Carver carve(scratch);
  rows.q = carve.take<float>(room * rows.Dkp);
  rows.acc = carve.take<float>(room * rows.Dvp);
  rows.logits = carve.take<float>(room * kTile);
  rows.decay = carve.take<float>(room);
  rows.state = carve.take<RowState>(room);
  rows.from = carve.take<int32_t>(room);
  rows.to = carve.take<int32_t>(room);
  std::memset(rows.q, 0, room * rows.Dkp * sizeof(float));
  std::memset(rows.logits, 0, room * kTile * sizeof(float));
  std::memset(rows.decay, 0, room * sizeof(float));
  const float factor = a_.scale * slicing::scale_at(a_.kv.k_scale, p.h) * (a_.softcap > 0 ? 1.0f : kLog2e);
  const int64_t seq_len = index_at(a_.kv.seq_lens, p.b * a_.kv.seq_lens.stride[0]);
  for (int r = 0; r < rows.count; ++r) {
    const int64_t t = p.t + r / plan_.group, head = p.h * plan_.group + r % plan_.group;
    const int64_t offset = p.b * q.stride[0] + t * q.stride[1] + head * q.stride[2];
    load_row(q, offset, rows.Dk, factor, rows.q + r * rows.Dkp);
    rows.to[r] = static_cast<int32_t>(visible_positions(seq_len, q.shape[1], t, a_.max_seq_len));
    const int64_t self = seq_len - q.shape[1] + t;
    rows.from[r] = a_.window > 0 ? static_cast<int32_t>(std::max<int64_t>(0, self - a_.window + 1)) : 0;
  }
  clear(rows);
  return carve.used();
}

template <class Source>
void AttentionWorker<Source>::clear(Rows& rows) const {
  std::memset(rows.acc, 0, (rows.count + 3) / 4 * 4 * rows.Dvp * sizeof(float));
  for (int r = 0; r < rows.count; ++r) rows.state[r] = RowState();
}

// Slots of this task's list: tokens, or pages times their size.
template <class Source>
int64_t AttentionWorker<Source>::listed(const Place& p) const {
  const TensorView& counts = a_.selected.counts;
  if (!counts.given()) {
    const int64_t seq_len = index_at(a_.kv.seq_lens, p.b * a_.kv.seq_lens.stride[0]);
    return visible_positions(seq_len, a_.q.shape[1], p.t + p.tokens - 1, a_.max_seq_len);
  }
  const int64_t n =
      counts.as<const int32_t>()[p.b * counts.stride[0] + p.t * counts.stride[1] + p.h * counts.stride[2]];
  return a_.selected.unit == Unit::token ? n : n * a_.kv.k_cache.shape[2];
}

template <class Source>
void AttentionWorker<Source>::fill_tile(const Place& p, const Rows& rows, int64_t begin, int64_t end,
                                        Positions& tile) const {
  tile.n = 0;
  if (!a_.selected.indices.given()) {
    for (int64_t i = begin; i < end; ++i) tile.pos[tile.n++] = static_cast<int32_t>(i);
  } else {
    const TensorView& indices = a_.selected.indices;
    const int32_t* list =
        indices.as<const int32_t>() + p.b * indices.stride[0] + p.t * indices.stride[1] + p.h * indices.stride[2];
    for (int64_t i = begin; i < end; ++i) {
      uint32_t pos;
      if (a_.selected.unit == Unit::token) {
        pos = static_cast<uint32_t>(list[i]);
      } else {
        const uint32_t page = page_.index(static_cast<uint32_t>(i));
        pos = static_cast<uint32_t>(list[page]) * page_.page + (static_cast<uint32_t>(i) - page * page_.page);
      }
      if (static_cast<int32_t>(pos) < rows.to[0] && static_cast<int32_t>(pos) >= rows.from[0])
        tile.pos[tile.n++] = static_cast<int32_t>(pos);
    }
  }
}

// Softcap and bias; logits leave in base 2.
template <class Source>
void AttentionWorker<Source>::finish_logits(const Place& p, const Positions& tile, float* logits) const {
  if (a_.softcap > 0)
    for (int j = 0; j < tile.n; ++j) logits[j] = a_.softcap * std::tanh(logits[j] / a_.softcap) * kLog2e;
  if (a_.key_bias.given()) {
    const float* bias = a_.key_bias.as<const float>() + p.b * a_.key_bias.stride[0];
    for (int j = 0; j < tile.n; ++j) logits[j] += bias[tile.pos[j]] * kLog2e;
  }
}

// Logits of row r become weights; the maximum and the sum of the row move on.
template <class Source>
void AttentionWorker<Source>::softmax(const Place& p, const Positions& tile, Rows& rows, int r, int from,
                                      int to) const {
  float* logits = rows.logits + r * kTile;
  finish_logits(p, tile, logits);
  const auto end = static_cast<int>(padded(to));
  for (int j = 0; j < from; ++j) logits[j] = kNone;
  for (int j = to; j < end; ++j) logits[j] = kNone;
  vf top = load(logits);
  for (int j = W; j < end; j += W) top = max(top, load(logits + j));
  RowState& s = rows.state[r];
  const float tile_max = reduce_max(top), new_max = tile_max > s.max ? tile_max : s.max;
  const float base = new_max == kNone ? 0.0f : new_max;
  vf total = {};
  for (int j = 0; j < end; j += W) {
    const vf e = exp2(load(logits + j) - splat(base));
    store(logits + j, e);
    total += e;
  }
  rows.decay[r] = s.max == kNone ? 0.0f : reduce_max(exp2(splat(s.max - base)));
  s.sum = s.sum * rows.decay[r] + reduce_add(total);
  s.max = new_max;
}

template <class Source>
void AttentionWorker<Source>::add_tile(const Place& p, Source& source, const Tile& tile, Rows& rows, int row, int count,
                                       int from, int to) const {
  source.logits(tile, rows, row, count, to);
  for (int r = row; r < row + count; ++r) softmax(p, tile, rows, r, from, to);
  source.values(tile, rows, row, count, from, to);
}

template <class Source>
void AttentionWorker<Source>::add_split(const Place& p, Source& source, Rows& rows, int64_t begin, int64_t end) const {
  Tile tiles[2];
  if (!a_.selected.indices.given() && rows.from[0] > begin)  // before every row's window; the first row's begins first
    begin = rows.from[0] >= end ? end : begin + (rows.from[0] - begin) / kTile * kTile;
  source.begin();
  fill_tile(p, rows, begin, std::min(begin + kTile, end), tiles[0]);
  source.place(tiles[0]);
  source.fetch_first(tiles[0], rows);
  for (int64_t i = begin, turn = 0; i < end; i += kTile, turn ^= 1) {
    Tile &tile = tiles[turn], &next = tiles[turn ^ 1];
    next.n = 0;
    if (i + kTile < end) {
      fill_tile(p, rows, i + kTile, std::min(i + 2 * kTile, end), next);
      source.place(next);
    }
    if (tile.n == 0) continue;
    source.start(tile, next);
    bool uniform = true;  // every row sees the whole tile
    const int32_t first = tile.pos[0], last = tile.pos[tile.n - 1];
    if (!a_.selected.indices.given())
      for (int r = 0; r < rows.count; ++r) uniform = uniform && rows.from[r] <= first && last < rows.to[r];
    if (uniform) {
      add_tile(p, source, tile, rows, 0, rows.count, 0, tile.n);
      continue;
    }
    for (int r = 0, like; r < rows.count; r += like) {  // the heads of a group see the same tokens
      const int from = std::max(0, rows.from[r] - first), to = std::min(tile.n, rows.to[r] - first);
      for (like = 1; r + like < rows.count && rows.from[r + like] == rows.from[r] && rows.to[r + like] == rows.to[r];)
        ++like;
      if (like % 4 == 3) --like;  // three would be padded to four, over the row behind them
      if (from < to) add_tile(p, source, tile, rows, r, like, from, to);
    }
  }
  source.finish(rows);
}

// state, acc <- the two parts merged; unnormalised, base 2.
inline void merge_into(RowState& s, float* acc, const RowState& t, const float* part, int64_t D) {
  if (t.empty()) return;
  const float new_max = t.max > s.max ? t.max : s.max;
  const float keep = s.max == kNone ? 0.0f : std::exp2(s.max - new_max), add = std::exp2(t.max - new_max);
  for (int64_t d = 0; d < D; ++d) acc[d] = acc[d] * keep + part[d] * add;
  s.sum = s.sum * keep + t.sum * add;
  s.max = new_max;
}

// The finished row: normalised, with the sink logit in the denominator.
inline void write_result(const AttentionArgs& a, int64_t b, int64_t t, int64_t head, RowState s, const float* acc) {
  float keep = 1;
  if (a.sinks.given() && s.max != kNone) {  // a row that sees nothing stays empty
    const float sink = a.sinks.as<const float>()[head * a.sinks.stride[0]] * kLog2e;
    const RowState values = s;
    s.max = sink > s.max ? sink : s.max;
    keep = std::exp2(values.max - s.max);
    s.sum = values.sum * keep + (std::exp2(sink - s.max));
  }
  const bool empty = s.empty();
  a.lse.as<float>()[b * a.lse.stride[0] + t * a.lse.stride[1] + head * a.lse.stride[2]] =
      empty ? kNone : (s.max + std::log2(s.sum)) * kLn2;
  const int64_t h = head / (a.q.shape[2] / a.kv.k_cache.shape[1]);
  const float factor = empty ? 0.0f : keep / s.sum * slicing::scale_at(a.kv.v_scale, h);
  store_row(a.out, b * a.out.stride[0] + t * a.out.stride[1] + head * a.out.stride[2], a.out.shape[3], acc, factor);
}

// ---- a task from its rows to its result ----

template <class Source>
void AttentionWorker<Source>::store_partial(const Place& p, const Rows& rows, float* partials) const {
  const int64_t stride = rows.Dv + 2;
  for (int r = 0; r < rows.count; ++r) {
    const int64_t t = p.t + r / plan_.group, head = p.h * plan_.group + r % plan_.group;
    float* part = partials + (((p.b * a_.q.shape[1] + t) * a_.q.shape[2] + head) * plan_.splits + p.split) * stride;
    std::memcpy(part, rows.acc + r * rows.Dvp, rows.Dv * sizeof(float));
    part[rows.Dv] = rows.state[r].max;
    part[rows.Dv + 1] = rows.state[r].sum;
  }
}

template <class Source>
void AttentionWorker<Source>::run(int64_t task, float* partials) const {
  const Place p = place(task);
  Rows rows;
  const int64_t room = (p.tokens * plan_.group + 3) / 4 * 4;
  char* scratch = thread_scratch(attention_scratch(a_, plan_) + Source::bytes(args_, room));
  Carver carve(scratch + set_up_rows(p, rows, scratch));
  Source source(args_, p.b, p.h, room, carve);
  const int64_t n = listed(p);
  if (plan_.splits > 1) {
    const int64_t begin = p.split * slicing::kSplitTokens;
    add_split(p, source, rows, begin, std::min(n, begin + slicing::kSplitTokens));
    return store_partial(p, rows, partials);
  }
  RowState* total = carve.take<RowState>(rows.count);
  float* total_acc = carve.take<float>(rows.count * rows.Dvp);
  std::memset(total_acc, 0, rows.count * rows.Dvp * sizeof(float));
  for (int r = 0; r < rows.count; ++r) total[r] = RowState();
  for (int64_t begin = 0; begin < n; begin += slicing::kSplitTokens) {
    if (begin > 0) clear(rows);
    add_split(p, source, rows, begin, std::min(n, begin + slicing::kSplitTokens));
    for (int r = 0; r < rows.count; ++r)
      merge_into(total[r], total_acc + r * rows.Dvp, rows.state[r], rows.acc + r * rows.Dvp, rows.Dv);
  }
  for (int r = 0; r < rows.count; ++r)
    write_result(a_, p.b, p.t + r / plan_.group, p.h * plan_.group + r % plan_.group, total[r],
                 total_acc + r * rows.Dvp);
}

// Row (b, t, head): its partials merged in the order of the splits.
inline void merge_partials(const AttentionArgs& a, const AttentionPlan& plan, const float* partials, int64_t row) {
  const int64_t Dv = a.kv.v_cache.shape[3], stride = Dv + 2;
  float* acc = reinterpret_cast<float*>(thread_scratch(Dv * static_cast<int64_t>(sizeof(float))));
  std::memset(acc, 0, Dv * sizeof(float));
  RowState s;
  for (int64_t i = 0; i < plan.splits; ++i) {
    const float* part = partials + (row * plan.splits + i) * stride;
    merge_into(s, acc, {part[Dv], part[Dv + 1]}, part, Dv);
  }
  const int64_t Hq = a.q.shape[2], T = a.q.shape[1];
  write_result(a, row / (Hq * T), row / Hq % T, row % Hq, s, acc);
}

template <class Source>
void run_attention(const typename Source::Args& args, const AttentionArgs& a, const Exec& exec) {
  const AttentionPlan plan = slicing::plan_attention(a);
  const CallScratch partials(exec.workspace, slicing::attention_workspace(a));
  const AttentionWorker<Source> worker(args, a, plan);
  const int64_t tasks = a.q.shape[0] * a.kv.k_cache.shape[1] * plan.token_tasks * plan.splits;
  parallel_for(tasks, [&](int64_t task) { worker.run(task, reinterpret_cast<float*>(partials.data())); });
  if (plan.splits == 1) return;
  parallel_for(plan.rows,
               [&](int64_t row) { merge_partials(a, plan, reinterpret_cast<const float*>(partials.data()), row); });
}

}  // namespace sic::cpu::SIC_ISA
