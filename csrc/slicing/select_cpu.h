// Selection on the CPU: the threshold is found by bisection, counting keys with vector compares; one pass then writes
// the indices in order. Keys are signed integers in the order of the scores.
#pragma once
#include <limits>

#include "core/simd.h"
#include "slicing/select.h"
#include "slicing/sketch_join_cpu.h"

namespace sic::cpu::SIC_ISA {

using slicing::SelectRow;
using slicing::Span;

template <class Key>
struct KeyVector;
template <>
struct KeyVector<int16_t> {
  typedef vs type;
};
template <>
struct KeyVector<int32_t> {
  typedef vi type;
};

// Keys in [begin, end) that are at least `threshold`.
template <class Key>
int64_t count_at_least(const Key* keys, int64_t begin, int64_t end, Key threshold) {
  typedef typename KeyVector<Key>::type V;
  constexpr int64_t lanes = kBytes / sizeof(Key);
  int64_t count = 0, i = begin;
  const V t = V{} + threshold;
  while (i + lanes <= end) {
    const int64_t stop = std::min(end - lanes, i + 16384 * lanes);  // lane counters stay below 2^15
    V sum = {};
    for (; i <= stop; i += lanes) sum -= load_as<V>(keys + i) >= t;
    for (int l = 0; l < lanes; ++l) count += sum[l];
  }
  for (; i < end; ++i) count += keys[i] >= threshold;
  return count;
}

// low and high widened to hold the keys in [begin, end).
template <class Key>
void widen_range(const Key* keys, int64_t begin, int64_t end, Key& low, Key& high) {
  typedef typename KeyVector<Key>::type V;
  constexpr int64_t lanes = kBytes / sizeof(Key);
  V least = V{} + low, most = V{} + high;
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const V x = load_as<V>(keys + i);
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  for (int l = 0; l < lanes; ++l) low = least[l] < low ? least[l] : low, high = most[l] > high ? most[l] : high;
  for (; i < end; ++i) low = keys[i] < low ? keys[i] : low, high = keys[i] > high ? keys[i] : high;
}

// Calls body(begin, end) for the units between the forced spans.
template <class Body>
void for_free(const SelectRow& row, Body body) {
  int32_t at = 0;
  for (int32_t i = 0; i < row.span_count; ++i) {
    if (at < row.spans[i].begin) body(at, row.spans[i].begin);
    at = row.spans[i].end;
  }
  if (at < row.visible) body(at, row.visible);
}

// The largest t with measure(t) >= wanted, given that measure(lowest key) >= wanted; measure falls as t grows.
template <class Key, class Measure>
Key bisect(Key low, Key high, Measure reaches) {
  int64_t lo = low, hi = high;  // reaches(lo) holds
  while (lo < hi) {
    const int64_t mid = lo + (hi - lo + 1) / 2;
    if (reaches(static_cast<Key>(mid)))
      lo = mid;
    else
      hi = mid - 1;
  }
  return static_cast<Key>(lo);
}

template <class Key>
struct Cut {
  Key threshold = std::numeric_limits<Key>::max();
  int64_t ties = 0;  // keys equal to the threshold to take, lowest index first
  bool none = true;
};

// The best `wanted` free keys.
template <class Key>
Cut<Key> cut_by_count(const Key* keys, const SelectRow& row, int64_t wanted) {
  Cut<Key> cut;
  if (wanted <= 0) return cut;
  const auto count = [&](Key t) {
    int64_t n = 0;
    for_free(row, [&](int32_t b, int32_t e) { n += count_at_least(keys, b, e, t); });
    return n;
  };
  Key low = std::numeric_limits<Key>::max(), high = std::numeric_limits<Key>::min();
  for_free(row, [&](int32_t b, int32_t e) { widen_range(keys, b, e, low, high); });
  cut.none = false;
  cut.threshold = bisect(low, high, [&](Key t) { return count(t) >= wanted; });
  cut.ties = wanted - (cut.threshold == high ? 0 : count(static_cast<Key>(cut.threshold + 1)));
  return cut;
}

template <class Key>
bool takes(const Cut<Key>& cut, Key key, int64_t& ties) {
  if (cut.none || key < cut.threshold) return false;
  return key > cut.threshold || ties-- > 0;
}

struct Ignore {
  void operator()(int32_t, unsigned, const int32_t*) const {}
};

// Free units of [begin, end) that pass the cut, ascending. `ties` counts down. also(i, mask, to) sees what is written:
// the units i + (bits of mask), to `to` and on; up to 16 slots beyond them may be overwritten.
template <class Key, class Also = Ignore>
int32_t* write_free(const Key* keys, int32_t begin, int32_t end, const Cut<Key>& cut, int64_t& ties, int32_t* out,
                    const int32_t* out_end, Also also = {}) {
  (void)out_end;
  if (cut.none) return out;
  int32_t i = begin;
#if defined(__AVX512BW__)
  const __m512i threshold = _mm512_set1_epi32(cut.threshold);
  for (; i + 16 <= end && out + 16 <= out_end; i += 16) {
    __m512i x;
    if constexpr (sizeof(Key) == 2)
      x = _mm512_cvtepi16_epi32(load_as<__m256i>(keys + i));
    else
      x = load_as<__m512i>(keys + i);
    __mmask16 chosen = _mm512_cmpgt_epi32_mask(x, threshold), equal = _mm512_cmpeq_epi32_mask(x, threshold);
    while (equal && ties > 0) chosen |= equal & -equal, equal &= equal - 1, --ties;
    if (!chosen) continue;
    const __m512i index =
        _mm512_add_epi32(_mm512_set1_epi32(i), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    store_as(out, _mm512_maskz_compress_epi32(chosen, index));
    also(i, static_cast<unsigned>(chosen), out);
    out += __builtin_popcount(chosen);
  }
#endif
  for (; i < end; ++i) {
    if (!takes(cut, keys[i], ties)) continue;
    *out = i;
    also(i, 1u, out++);
  }
  return out;
}

// The shortest prefix, in the order of the keys, that brings the chosen weight to top_p of the whole.
template <class Key, class Weight>
int64_t nucleus(const Key* keys, const SelectRow& row, Weight weight, int64_t most) {
  const auto w = [&](int64_t i) { return static_cast<uint64_t>(static_cast<uint32_t>(weight(i))); };
  uint64_t all = 0, chosen = 0;
  for (int32_t i = 0; i < row.visible; ++i) all += w(i);
  for (int32_t s = 0; s < row.span_count; ++s)
    for (int32_t i = row.spans[s].begin; i < row.spans[s].end; ++i) chosen += w(i);
  if (all == 0) return most;  // nothing but NaN: no prefix is better than another
  const double target = row.top_p * static_cast<double>(all);
  if (static_cast<double>(chosen) >= target || most <= 0) return 0;
  const auto weight_from = [&](int64_t t) {
    uint64_t sum = chosen;
    for_free(row, [&](int32_t b, int32_t e) {
      for (int32_t i = b; i < e; ++i) sum += keys[i] >= t ? w(i) : 0;
    });
    return sum;
  };
  using Limits = std::numeric_limits<Key>;
  const Key t =
      bisect(Limits::min(), Limits::max(), [&](Key k) { return static_cast<double>(weight_from(k)) >= target; });
  int64_t n = 0, tied = 0;
  uint64_t each = 0;
  for_free(row, [&](int32_t b, int32_t e) {
    for (int32_t i = b; i < e; ++i) n += keys[i] > t, tied += keys[i] == t, each = keys[i] == t ? w(i) : each;
  });
  uint64_t sum = weight_from(int64_t{t} + 1);
  while (tied-- > 0 && static_cast<double>(sum) < target) sum += each, ++n;
  return std::min(n, most);
}

// Forced units and those that pass the cut, ascending; the rest of the K slots is -1.
template <class Key>
void write_selection(const Key* keys, const SelectRow& row, const Cut<Key>& cut, int32_t* out, int64_t K,
                     int32_t* count) {
  const int32_t* end = out + K;
  int32_t *p = out, at = 0;
  int64_t ties = cut.ties;
  for (int32_t s = 0; s <= row.span_count; ++s) {
    const int32_t begin = s < row.span_count ? row.spans[s].begin : row.visible,
                  stop = s < row.span_count ? row.spans[s].end : row.visible;
    p = write_free(keys, at, begin, cut, ties, p, end);
    for (int32_t i = begin; i < stop; ++i) *p++ = i;
    at = stop;
  }
  *count = static_cast<int32_t>(p - out);
  std::fill(p, out + K, -1);
}

// 16-bit scores in 1/256 nat: the whole selection of a row.
inline void select_scores(const int16_t* scores, const SelectRow& row, int32_t* out, int64_t K, int32_t* count) {
  int64_t wanted = row.count() - row.forced;
  if (row.top_p < 1) {
    const int32_t top = scores_max(scores, row.visible);
    wanted = nucleus(scores, row, [&](int64_t i) { return exp_weight(scores[i] - top); }, wanted);
  }
  write_selection(scores, row, cut_by_count(scores, row, wanted), out, K, count);
}

}  // namespace sic::cpu::SIC_ISA
