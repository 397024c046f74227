// Statistics of a row of logits on the CPU: blocks of z in the first-level cache, moments of a block in vectors, sums
// of blocks in double. Blocks and segments are counted from the first column: what a row gives depends on V alone.
#pragma once
#include <atomic>
#include <cmath>
#include <limits>

#include "core/rows.h"
#include "core/scratch.h"
#include "head/stats.h"

namespace sic::cpu::SIC_ISA {

using head::StatsArgs;

constexpr int64_t kBlock = 2048;  // columns whose z are looked at twice
constexpr int kInGroup = 4;       // vectors that are worked on at a time
constexpr int64_t kGroup = kInGroup * W;
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kSmallest = std::numeric_limits<float>::min();
constexpr double kLn2 = 0.6931471805599453;

// ---- lists of the greatest -----------------------------------------------------------------------------------------

// The greatest `room` of what was offered, greatest first, of equals the lowest id first. What is not above `floor` is
// never listed.
struct TopList {
  float* z;
  int32_t* id;
  int room, used = 0;
  float floor = kNever;

  SIC_MEMBER_INLINE float least() const { return used < room ? floor : z[used - 1]; }
  // Ids come in ascending order.
  SIC_MEMBER_INLINE void offer(float x, int32_t i) {
    if (!(x > least())) return;
    insert(x, i, [&](int at) { return z[at] < x; });
  }
  SIC_MEMBER_INLINE void offer_any_order(float x, int32_t i) {
    const auto follows = [&](int at) { return z[at] < x || (z[at] == x && id[at] > i); };
    if (x > floor && (used < room || follows(used - 1))) insert(x, i, follows);
  }

 private:
  template <class Follows>
  SIC_MEMBER_INLINE void insert(float x, int32_t i, Follows follows) {
    int at = used < room ? used++ : used - 1;
    for (; at > 0 && follows(at - 1); --at) z[at] = z[at - 1], id[at] = id[at - 1];
    z[at] = x, id[at] = i;
  }
};

// What the segments of a row share.
class SharedRow {
 public:
  SIC_MEMBER_INLINE void begin(int64_t segments) {
    floor_.store(kNever, std::memory_order_relaxed);
    left_.store(segments, std::memory_order_relaxed);
  }
  // Not above it nothing can be listed any more. Which segments know how much does not change what is listed in the
  // end.
  SIC_MEMBER_INLINE float floor() const { return floor_.load(std::memory_order_relaxed); }
  // A full list: equals of its last may have lower ids elsewhere.
  SIC_MEMBER_INLINE void raise(const TopList& list) {
    if (list.used < list.room) return;
    float below = std::nextafter(list.least(), kNever);
    if (std::fabs(below) < kSmallest) below = -kSmallest;  // threads may take subnormal numbers for 0
    float known = floor();
    while (known < below && !floor_.compare_exchange_weak(known, below, std::memory_order_relaxed)) {
    }
  }
  // A segment is done: whether it was the last, who sees what all of them wrote.
  SIC_MEMBER_INLINE bool last() { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::atomic<float> floor_;
  std::atomic<int64_t> left_;
};

// ---- moments --------------------------------------------------------------------------------------------------------

// Of the columns so far: m, and sums of e^y, y e^y, y^2 e^y with y = (z - m) / temperature.
struct Moments {
  float m = kNever;
  double s = 0, t = 0, u = 0;
  uint8_t status = 0;

  // Sums relative to a new maximum; d = (m - m') / temperature.
  SIC_MEMBER_INLINE void shift(double d) {
    const double weight = std::exp(d);
    u = weight * (u + 2 * d * t + d * d * s);
    t = weight * (t + d * s);
    s = weight * s;
  }
  SIC_MEMBER_INLINE void merge(Moments other, double inverse_temperature) {
    status |= other.status;
    if (other.m == kNever) return;
    if (m == kNever) {
      const uint8_t bits = status;
      *this = other, status = bits;
      return;
    }
    const double d = (static_cast<double>(m) - other.m) * inverse_temperature;
    if (d < 0)
      shift(d), m = other.m;
    else
      other.shift(-d);
    s += other.s, t += other.t, u += other.u;
  }
};

// 2^x of x <= 0 or NaN, relative error below 2e-7; 0 for what is far below.
SIC_INLINE vf exp2_down(vf x) {
#if defined(__AVX512BW__)
  // Half the instructions of exp2: the scaling underflows by itself.
  const vf n = vf(_mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)), f = x - n;
  vf p = splat(1.326472731307149e-3f);
  p = fma(p, f, splat(9.671512991189957e-3f));
  p = fma(p, f, splat(5.550733581185341e-2f));
  p = fma(p, f, splat(2.402224242687225e-1f));
  p = fma(p, f, splat(6.931470036506653e-1f));
  p = fma(p, f, splat(1.0f));
  return vf(_mm512_scalef_ps(p, n));
#else
  return exp2(x);
#endif
}

struct VectorSums {
  vf s = {}, t = {}, u = {};  // of e, x e, x^2 e with e = 2^x

  SIC_MEMBER_INLINE void add(vf z, vf m, vf factor) {
    // -inf becomes something whose power of two is 0: 0 times infinity would be NaN. A NaN stays one.
    const vf x = max(splat(-512.0f), (z - m) * factor), e = exp2_down(x), xe = x * e;
    s = s + e, t = t + xe, u = fma(x, xe, u);
  }
};

// The greatest z of a block, and lane by lane of each whole group; NaN are passed over.
struct BlockTop {
  vf groups[kBlock / kGroup];
  vf lanes;
  float top;

  SIC_MEMBER_INLINE void begin() { lanes = splat(kNever); }
  SIC_MEMBER_INLINE void look(const float* z, int64_t group) {
    const vf low = max(load(z), max(load(z + W), splat(kNever)));
    const vf high = max(load(z + 2 * W), max(load(z + 3 * W), splat(kNever)));
    groups[group] = max(low, high);
    lanes = max(groups[group], lanes);
  }
  SIC_MEMBER_INLINE void end() { top = reduce_max(lanes); }
  SIC_MEMBER_INLINE void of(const float* z, int64_t n) {
    begin();
    int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) look(z + i, i / kGroup);
    end();
    for (; i < n; ++i) top = z[i] > top ? z[i] : top;
  }
};

// What a row's memory does while a block is counted.
struct Meanwhile {
  const float* next = nullptr;   // a whole block of which the greatest is found
  const float* ahead = nullptr;  // what is brought to the second-level cache: the first one has too few lines under way
  BlockTop* top = nullptr;       // of next
};

// Adds n columns whose greatest z is top.
SIC_INLINE void add_block(const float* z, int64_t n, float top, double inverse_temperature, const Meanwhile& meanwhile,
                          Moments& total) {
  if (top > total.m) {
    if (total.m != kNever) total.shift((static_cast<double>(total.m) - top) * inverse_temperature);
    total.m = top;
  }
  const vf m = splat(total.m), factor = splat(head::factor_of(inverse_temperature));
  VectorSums sums[kInGroup];
  int64_t i = 0;
  const auto add_group = [&] {
    SIC_UNROLL
    for (int j = 0; j < kInGroup; ++j) {
      sums[j].add(load(z + i + j * W), m, factor);
      __builtin_prefetch(meanwhile.ahead + i + j * W, 0, 2);
    }
  };
  if (meanwhile.next) {
    BlockTop& next_top = *meanwhile.top;
    next_top.begin();
    for (; i < kBlock; i += kGroup) {
      next_top.look(meanwhile.next + i, i / kGroup);
      add_group();
    }
    next_top.end();
  }
  for (; i + kGroup <= n; i += kGroup) add_group();
  for (; i < n; i += W) {
    vf rest = splat(kNever);
    std::memcpy(&rest, z + i, std::min<int64_t>(W, n - i) * sizeof(float));
    sums[0].add(rest, m, factor);
  }
  total.s += reduce_add((sums[0].s + sums[1].s) + (sums[2].s + sums[3].s));
  total.t += kLn2 * reduce_add((sums[0].t + sums[1].t) + (sums[2].t + sums[3].t));
  total.u += kLn2 * kLn2 * reduce_add((sums[0].u + sums[1].u) + (sums[2].u + sums[3].u));
}

// Bits for NaN and +inf.
SIC_INLINE uint8_t faults_of(const float* z, int64_t n) {
  bool nan = false, inf = false;
  for (int64_t i = 0; i < n; ++i) nan |= z[i] != z[i], inf |= z[i] == -kNever;
  return static_cast<uint8_t>(nan * head::kNan | inf * head::kInf);
}

// Lists what is above the least of the list.
SIC_INLINE void list_block(const float* z, int64_t n, int64_t first, const vf* groups, TopList& list) {
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    if (!any(*groups++ > splat(list.least()))) continue;
    for (int64_t j = i; j < i + kGroup; j += W) {
      if (!any(load(z + j) > splat(list.least()))) continue;
      for (int64_t lane = j; lane < j + W; ++lane) list.offer(z[lane], static_cast<int32_t>(first + lane));
    }
  }
  for (; i < n; ++i) list.offer(z[i], static_cast<int32_t>(first + i));
}

// A block of z of one row: columns first, first + 1, .. Whether the next one was looked at.
SIC_INLINE bool count_block(const float* z, int64_t n, int64_t first, const BlockTop& own, double inverse_temperature,
                            const Meanwhile& meanwhile, Moments& total, TopList& list) {
  if (own.top == kNever || own.top == -kNever) {  // nothing to count, but a NaN must not hide among -inf
    total.status |= faults_of(z, n);
    return false;
  }
  add_block(z, n, own.top, inverse_temperature, meanwhile, total);
  if (total.s != total.s) {
    total.status |= faults_of(z, n);
    total = {kNever, 0, 0, 0, total.status};
  } else if (own.top > list.least()) {
    list_block(z, n, first, own.groups, list);
  }
  return meanwhile.next != nullptr;
}

// ---- from x to z ----------------------------------------------------------------------------------------------------

SIC_INLINE vf tanh(vf x) {
  constexpr float kNear = 0.25f;  // below it 1 - e loses digits, above it the series does
  const vf e = exp2(abs(x) * splat(static_cast<float>(-2 / kLn2))), square = x * x;
  const vf far = (splat(1.0f) - e) / (splat(1.0f) + e);
  vf series = fma(square, splat(62.0f / 2835), splat(-17.0f / 315));
  series = fma(square, series, splat(2.0f / 15));
  series = fma(square, series, splat(-1.0f / 3)) * square;
  const vf size = abs(x) < splat(kNear) ? fma(series, abs(x), abs(x)) : far;
  return bit_cast<vf>(bit_cast<vu>(size) | (bit_cast<vu>(x) & 0x80000000));
}

// What becomes of the logits of one row.
struct Shaping {
  const float* bias = nullptr;    // of the first column
  const int32_t* mask = nullptr;  // of the row
  float softcap = 0;

  SIC_MEMBER_INLINE Shaping(const head::Logits& in, int64_t b) : softcap(in.softcap) {
    if (in.bias.given()) bias = in.bias.as<const float>();
    if (in.mask_bits.given()) mask = in.mask_bits.as<const int32_t>() + b * in.mask_bits.stride[0];
  }
  SIC_MEMBER_INLINE bool none() const { return !bias && !mask && softcap == 0; }

  // W columns, or the first n of them.
  SIC_MEMBER_INLINE vf operator()(vf x, int64_t column, int64_t n = W) const {
    if (softcap > 0) x = tanh(x / splat(softcap)) * splat(softcap);
    if (bias) x = x + (n == W ? load(bias + column) : load_first(bias + column, static_cast<int>(n)));
    if (!mask) return x;
    const vi word = vi{} + mask[column / 32];
    const vi bit = (word >> (lane_numbers() + static_cast<int32_t>(column % 32))) & 1;
    return bit != 0 ? x : splat(kNever);
  }
};

// z of columns first .. first + n of a row of x, first a multiple of 32.
template <class T>
SIC_INLINE void shape_block(const T* x, const Shaping& shaping, int64_t first, int64_t n, float* z) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(z + i, shaping(load(x + i), first + i));
  if (i < n)
    store_first(z + i, shaping(load_first(x + i, static_cast<int>(n - i)), first + i, n - i), static_cast<int>(n - i));
}

// ---- results --------------------------------------------------------------------------------------------------------

SIC_INLINE double inverse_temperature(const TensorView& temperature, int64_t b) {
  if (!temperature.given()) return 1;
  const float t = temperature.as<const float>()[temperature.rank == 1 ? b * temperature.stride[0] : 0];
  return t > 0 ? 1 / static_cast<double>(t) : 1;
}

// What a segment of a row gives; lists of `room` behind it.
struct Segment {
  Moments moments;
  int32_t used;
};

// Where the segments of a call's rows lie, in order; count of a row.
struct Segments {
  char* data;
  SharedRow* rows;
  int64_t count, room;

  Segments(Carver& carve, const StatsArgs& a, int64_t count_of_row) : count(count_of_row), room(head::listed(a)) {
    rows = carve.take<SharedRow>(head::rows(a));
    data = carve.take<char>(head::rows(a) * count * bytes_of(room));
  }
  static int64_t bytes_of(int64_t room) { return (static_cast<int64_t>(sizeof(Segment)) + room * 8 + 63) / 64 * 64; }
  SIC_MEMBER_INLINE char* at(int64_t b, int64_t i) const { return data + (b * count + i) * bytes_of(room); }
  SIC_MEMBER_INLINE TopList list(int64_t b, int64_t i) const {
    float* z = reinterpret_cast<float*>(at(b, i) + sizeof(Segment));
    return {z, reinterpret_cast<int32_t*>(z + room), static_cast<int>(room), 0, rows[b].floor()};
  }
  // Whether the row is complete with it.
  SIC_MEMBER_INLINE bool put(int64_t b, int64_t i, const Moments& moments, const TopList& list) const {
    *reinterpret_cast<Segment*>(at(b, i)) = {moments, list.used};
    rows[b].raise(list);
    return rows[b].last();
  }
};

// Of all columns of a row.
struct RowTotals {
  Moments moments;
  TopList list;  // columns, or ids where parts are merged
  int64_t vocab_start;
};

SIC_INLINE void write(const TensorView& v, int64_t b, float x) { v.as<float>()[b * v.stride[0]] = x; }
SIC_INLINE void write(const TensorView& v, int64_t b, int64_t i, float x) { v.as<float>()[b * v.stride[0] + i] = x; }
SIC_INLINE void write_id(const TensorView& v, int64_t b, int64_t i, int64_t id) {
  v.as<int64_t>()[b * v.stride[0] + i * (v.rank == 2)] = id;
}

// A finished row but for its watched ids: what turns z into a log-probability.
struct RowLog {
  double m, inverse_temperature, log_s;
  bool bad;

  SIC_MEMBER_INLINE float of(float z) const {
    if (bad) return std::numeric_limits<float>::quiet_NaN();
    return static_cast<float>((static_cast<double>(z) - m) * inverse_temperature - log_s);
  }
};

SIC_INLINE RowLog write_stats(const head::Stats& out, int64_t b, const RowTotals& row, double inverse_temperature) {
  const Moments& a = row.moments;
  const uint8_t status = a.status ? a.status : a.s == 0 ? head::kEmpty : 0;
  const RowLog log{a.m, inverse_temperature, std::log(a.s), status != 0};
  const double mean = a.t / a.s, nan = std::numeric_limits<double>::quiet_NaN();
  out.status.as<uint8_t>()[b * out.status.stride[0]] = status;
  write(out.lse, b, static_cast<float>(log.bad ? nan : log.m * inverse_temperature + log.log_s));
  write(out.entropy, b, static_cast<float>(log.bad ? nan : std::max(0.0, log.log_s - mean)));
  write(out.varentropy, b, static_cast<float>(log.bad ? nan : std::max(0.0, a.u / a.s - mean * mean)));
  write_id(out.argmax, b, 0, log.bad ? 0 : row.list.id[0] + row.vocab_start);
  for (int64_t i = 0; i < out.topk_ids.shape[1]; ++i) {
    const bool listed = !log.bad && i < row.list.used;
    write_id(out.topk_ids, b, i, listed ? row.list.id[i] + row.vocab_start : log.bad && i == 0 ? 0 : -1);
    write(out.topk_logprobs, b, i, log.of(listed ? row.list.z[i] : kNever));
  }
  return log;
}

}  // namespace sic::cpu::SIC_ISA
