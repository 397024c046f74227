// The nearest template of rows, by 8-bit integers.
#pragma once
#include "core/rows.h"
#include "delta/delta.h"
#include "delta/levels.h"
#include "slicing/sketch.h"

namespace sic::cpu::SIC_ISA {

// Rows that are coded side by side: none waits for another's results, and all share the loads of templates.
constexpr int kRowsAtOnce = 4;

// Templates of one head.
struct HeadTemplates {
  const f16_t* centres;
  const int8_t* search;
  const float *half_norm, *mean;
  float step, bound;
  int D, groups, quads;

  HeadTemplates(const delta::Templates& t, int64_t h) {
    const int64_t n = t.centres.shape[1];
    D = static_cast<int>(t.centres.shape[2]);
    groups = static_cast<int>(t.search.shape[1]), quads = static_cast<int>(t.search.shape[2]);
    centres = t.centres.as<const f16_t>() + h * n * D;
    search = t.search.as<const int8_t>() + h * groups * quads * 64;
    half_norm = t.half_norm.as<const float>() + h * groups * delta::kLanes;
    mean = t.mean.as<const float>() + h * D;
    step = t.step.as<const float>()[h], bound = t.bound.as<const float>()[h];
  }
};

// A row as integers, and its dot products with all templates.
struct SearchRoom {
  alignas(64) int8_t q[delta::kMaxDim + 64];
  alignas(64) int32_t dots[delta::kMaxTemplates];
  float unit;  // what one of the integers stands for
};

// Vector d of a row of n floats, zeros behind its end.
template <class T>
SIC_INLINE vf load_part(const T* row, int d, int n) {
  return d + W <= n ? load(row + d) : d < n ? load_first(row + d, n - d) : vf{};
}

// The nearest integers, ties to even, of |x| < 2^22.
SIC_INLINE vi nearest_integers(vf x) {
  return bit_cast<vi>(x + splat(12582912.0f)) - 0x4b400000;  // 1.5 * 2^23, and its bits
}

// x less the mean, as integers within +-127. x, temp: padded with zeros.
inline void to_search_integers(const HeadTemplates& t, const float* x, float* temp, SearchRoom& room) {
  vf largest = {};
  for (int d = 0; d < t.D; d += W) {
    const vf v = load(x + d) - load_part(t.mean, d, t.D);
    store(temp + d, v);
    largest = max(abs(v), largest);
  }
  const float top = reduce_max(largest);
  const bool usable = top >= slicing::kSmallestQuery && top <= std::numeric_limits<float>::max();
  const vf inverse = splat(usable ? 127.0f / top : 0.0f);
  for (int d = 0; d < 4 * t.quads; d += W) {
    const vf v = max(min(load(temp + d) * inverse, splat(127.0f)), splat(-127.0f));
    const vi level = usable ? nearest_integers(v) : vi{};
    typedef int8_t vq __attribute__((vector_size(W)));
    store_as(room.q + d, __builtin_convertvector(level, vq));
  }
  room.unit = usable ? top / 127.0f : 0.0f;
}

// ---- dots[16 g + i] = q . template 16 g + i; q by quads of channels ----

inline void dot_templates(const HeadTemplates& t, SearchRoom& room) {
  for (int g = 0; g < t.groups; ++g) {
    int32_t sum[delta::kLanes] = {};
    const int8_t* p = t.search + int64_t{64} * g * t.quads;
    for (int j = 0; j < t.quads; ++j, p += 64)
      for (int i = 0; i < delta::kLanes; ++i)
        for (int c = 0; c < 4; ++c) sum[i] += room.q[4 * j + c] * p[4 * i + c];
    std::memcpy(room.dots + delta::kLanes * g, sum, sizeof sum);
  }
}

#if defined(__AVX512BW__)
#define SIC_VNNI __attribute__((target("avx512vnni")))
// With 8-bit dot products. Theirs are of unsigned by signed bytes: q . (t + 128), less 128 times q's sum.
template <int kRows, int kGroups>
SIC_VNNI inline void dot_groups_vnni(const int8_t* t, int quads, const int32_t* less, SearchRoom* rooms, int first) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i sum[kRows][kGroups];
  SIC_UNROLL for (int r = 0; r < kRows; ++r) SIC_UNROLL for (int i = 0; i < kGroups; ++i) sum[r][i] =
      _mm512_set1_epi32(-less[r]);
  for (int j = 0; j < quads; ++j) {
    __m512i x[kRows];
    SIC_UNROLL for (int r = 0; r < kRows; ++r) {
      int32_t quad;
      std::memcpy(&quad, rooms[r].q + 4 * j, sizeof quad);
      x[r] = _mm512_set1_epi32(quad);
    }
    SIC_UNROLL for (int i = 0; i < kGroups; ++i) {
      const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(t + 64 * (i * quads + j)), flip);
      SIC_UNROLL for (int r = 0; r < kRows; ++r) sum[r][i] = _mm512_dpbusd_epi32(sum[r][i], bytes, x[r]);
    }
  }
  SIC_UNROLL for (int r = 0; r < kRows; ++r) SIC_UNROLL for (int i = 0; i < kGroups; ++i)
      _mm512_storeu_si512(rooms[r].dots + first + delta::kLanes * i, sum[r][i]);
}
template <int kRows, int kGroups>
SIC_VNNI inline void dot_templates_vnni(const HeadTemplates& t, SearchRoom* rooms) {
  int32_t less[kRows] = {};
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < 4 * t.quads; ++j) less[r] += 128 * rooms[r].q[j];
  int g = 0;
  for (; g + kGroups <= t.groups; g += kGroups)
    dot_groups_vnni<kRows, kGroups>(t.search + int64_t{64} * g * t.quads, t.quads, less, rooms, delta::kLanes * g);
  for (; g < t.groups; ++g)
    dot_groups_vnni<kRows, 1>(t.search + int64_t{64} * g * t.quads, t.quads, less, rooms, delta::kLanes * g);
}
#endif

inline void dot_templates(const HeadTemplates& t, int rows, SearchRoom* rooms) {
#if defined(__AVX512BW__)
  static const bool vnni = __builtin_cpu_supports("avx512vnni");
  if (vnni && rows == kRowsAtOnce) return dot_templates_vnni<kRowsAtOnce, 4>(t, rooms);
  for (int r = 0; vnni && r < rows; ++r) dot_templates_vnni<1, 8>(t, rooms + r);
  if (vnni) return;
#endif
  for (int r = 0; r < rows; ++r) dot_templates(t, rooms[r]);
}

// The template whose score is best, the first of equals. The scores take the place of the dot products.
inline int best_template(const HeadTemplates& t, SearchRoom& room) {
  const vf factor = splat(room.unit * t.step);
  const int n = delta::kLanes * t.groups;
  vf best = splat(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < n; i += W) {
    const vf score = __builtin_convertvector(load_as<vi>(room.dots + i), vf) * factor - load(t.half_norm + i);
    store_as(room.dots + i, score);
    best = max(score, best);
  }
  const float top = reduce_max(best);
  int id = 0;
  while (id < n - W && !any(load_as<vf>(room.dots + id) == splat(top))) id += W;
  const vi equal = load_as<vf>(room.dots + id) == splat(top);
  for (int i = 0; i < W; ++i)
    if (equal[i]) return id + i;
  return 0;
}

}  // namespace sic::cpu::SIC_ISA
