// One row to its code: nearest template, residual, levels, scale.
#pragma once
#include <cmath>

#include "core/rows.h"
#include "delta/levels.h"
#include "delta/rotation_cpu.h"

namespace sic::cpu::SIC_ISA {

constexpr float kMaxScale = 65504;  // of half precision

// ---- nearest template ----

// dots[16 g + i] = q . template 16 g + i, for `groups` groups of 16 templates; q by quads of channels.
inline void dot_templates(const int8_t* search, int groups, int quads, const int8_t* q, int32_t* dots) {
  for (int g = 0; g < groups; ++g) {
    int32_t sum[delta::kLanes] = {};
    const int8_t* t = search + int64_t{64} * g * quads;
    for (int j = 0; j < quads; ++j, t += 64)
      for (int i = 0; i < delta::kLanes; ++i)
        for (int c = 0; c < 4; ++c) sum[i] += q[4 * j + c] * t[4 * i + c];
    std::memcpy(dots + delta::kLanes * g, sum, sizeof sum);
  }
}

#if defined(__AVX512BW__)
#define SIC_VNNI __attribute__((target("avx512vnni")))
// The same with 8-bit dot products. Theirs are of unsigned by signed bytes: q . (t + 128), less 128 times q's sum.
template <int kGroups>
SIC_VNNI inline void dot_groups_vnni(const int8_t* t, int quads, const int8_t* q, int32_t less, int32_t* dots) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i sum[kGroups];
  SIC_UNROLL for (int i = 0; i < kGroups; ++i) sum[i] = _mm512_set1_epi32(-less);
  for (int j = 0; j < quads; ++j) {
    int32_t quad;
    std::memcpy(&quad, q + 4 * j, sizeof quad);
    const __m512i x = _mm512_set1_epi32(quad);
    SIC_UNROLL for (int i = 0; i < kGroups; ++i) sum[i] =
        _mm512_dpbusd_epi32(sum[i], _mm512_xor_si512(_mm512_loadu_si512(t + 64 * (i * quads + j)), flip), x);
  }
  SIC_UNROLL for (int i = 0; i < kGroups; ++i) _mm512_storeu_si512(dots + delta::kLanes * i, sum[i]);
}
SIC_VNNI inline void dot_templates_vnni(const int8_t* search, int groups, int quads, const int8_t* q, int32_t* dots) {
  int32_t sum = 0;
  for (int j = 0; j < 4 * quads; ++j) sum += q[j];
  int g = 0;
  for (; g + 8 <= groups; g += 8)
    dot_groups_vnni<8>(search + int64_t{64} * g * quads, quads, q, 128 * sum, dots + delta::kLanes * g);
  for (; g < groups; ++g)
    dot_groups_vnni<1>(search + int64_t{64} * g * quads, quads, q, 128 * sum, dots + delta::kLanes * g);
}
#endif

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

// Vector d of a row of n floats, zeros behind its end.
template <class T>
SIC_INLINE vf load_part(const T* row, int d, int n) {
  return d + W <= n ? load(row + d) : d < n ? load_first(row + d, n - d) : vf{};
}

// The nearest integers, ties to even, of |x| < 2^22.
SIC_INLINE vi nearest_integers(vf x) {
  return bit_cast<vi>(x + splat(12582912.0f)) - 0x4b400000;  // 1.5 * 2^23, and its bits
}

// x less the mean, as integers within +-127; returns what one of them stands for. x, temp: padded with zeros.
inline float to_search_integers(const HeadTemplates& t, const float* x, float* temp, int8_t* q) {
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
    store_as(q + d, __builtin_convertvector(level, vq));
  }
  return usable ? top / 127.0f : 0.0f;
}

// The template whose score is best, the first of equals.
inline int nearest_template(const HeadTemplates& t, const float* x, float* temp) {
  alignas(64) int8_t q[delta::kMaxDim + 64];
  const float factor = to_search_integers(t, x, temp, q) * t.step;
  alignas(64) int32_t dots[delta::kMaxTemplates];
#if defined(__AVX512BW__)
  static const bool vnni = __builtin_cpu_supports("avx512vnni");
  (vnni ? dot_templates_vnni : dot_templates)(t.search, t.groups, t.quads, q, dots);
#else
  dot_templates(t.search, t.groups, t.quads, q, dots);
#endif
  vf best = splat(-std::numeric_limits<float>::infinity());
  vi id = {}, here;
  for (int i = 0; i < W; ++i) here[i] = i;
  for (int i = 0; i < delta::kLanes * t.groups; i += W, here += W) {
    const vf score = __builtin_convertvector(load_as<vi>(dots + i), vf) * splat(factor) - load(t.half_norm + i);
    const vi better = score > best;
    best = bit_cast<vf>((better & bit_cast<vi>(score)) | (~better & bit_cast<vi>(best)));
    id = (better & here) | (~better & id);
  }
  const vi first = bit_cast<vi>(best == splat(reduce_max(best)));
  return reduce((first & id) | (~first & delta::kMaxTemplates), [](int a, int b) { return a < b ? a : b; }) &
         (delta::kMaxTemplates - 1);
}

// ---- levels ----

// Codes of the n residuals y (a multiple of W), and the sizes of their levels.
template <int kBits>
inline void quantise(const float* y, float units, int n, float* size, int32_t* codes) {
  constexpr const delta::Levels& levels = delta::levels_of(kBits);
  constexpr int h = 1 << (kBits - 1);
  for (int d = 0; d < n; d += W) {
    const vf u = load(y + d) * splat(units), a = abs(u);
    vf level = splat(levels.level[h]);
    vi m = {};
    for (int i = 0; i + 1 < h; ++i) {
      const int low = levels.level[h + i], high = levels.level[h + i + 1];
      const vi above = a >= splat(0.5f * static_cast<float>(low + high));
      m -= above;
      level += bit_cast<vf>(above & bit_cast<vi>(splat(static_cast<float>(high - low))));
    }
    store(size + d, level);
    const vi negative = u < vf{};
    store_as(codes + d, (negative & (h - 1 - m)) | (~negative & (h + m)));
  }
}
template <>
inline void quantise<8>(const float* y, float units, int n, float* size, int32_t* codes) {
  for (int d = 0; d < n; d += W) {
    const vf u = load(y + d) * splat(units), a = min(abs(u), splat(float{delta::kMaxLevel8}));
    const vi level = nearest_integers(a), negative = u < vf{};
    store(size + d, __builtin_convertvector(level, vf));
    store_as(codes + d, 128 + ((negative & -level) | (~negative & level)));
  }
}
inline void quantise(int bits, const float* y, float units, int n, float* size, int32_t* codes) {
  switch (bits) {
    case 2:
      return quantise<2>(y, units, n, size, codes);
    case 3:
      return quantise<3>(y, units, n, size, codes);
    case 4:
      return quantise<4>(y, units, n, size, codes);
    case 5:
      return quantise<5>(y, units, n, size, codes);
    default:
      return quantise<8>(y, units, n, size, codes);
  }
}

// ---- packing ----

// One part of a field: `count` channels of each lane, from codes 16 apart.
template <class Word>
inline uint8_t* pack_part(const int32_t* codes, int count, int width, uint8_t* out) {
  const uint32_t mask = (1u << width) - 1;
  uint32_t words[delta::kLanes] = {};
  for (int i = 0; i < count; ++i)
    for (int l = 0; l < delta::kLanes; ++l)
      words[l] |= (static_cast<uint32_t>(codes[delta::kLanes * i + l]) & mask) << (width * i);
  for (int l = 0; l < delta::kLanes; ++l) {
    const Word word = static_cast<Word>(words[l]);
    std::memcpy(out + l * sizeof(Word), &word, sizeof word);
  }
  return out + delta::kLanes * sizeof(Word);
}

// codes: whole groups of 16, zeros behind D.
inline void pack_codes(const int32_t* codes, int D, int bits, uint8_t* out) {
  const int width = delta::low_bits(bits), bytes = static_cast<int>(delta::code_bytes(D, bits));
  uint8_t* const begin = out;
  if (width == 8) {
    for (int d = 0; d < D; ++d) out[d] = static_cast<uint8_t>(codes[d]);
    out += D;
  }
  for (int64_t at = 0, n; width < 8 && at < delta::lane_channels(D); at += n) {
    n = delta::part_channels(delta::lane_channels(D) - at, width);
    const int32_t* from = codes + delta::kLanes * at;
    const int count = static_cast<int>(n);
    switch (delta::word_bytes(n, width)) {
      case 1:
        out = pack_part<uint8_t>(from, count, width, out);
        break;
      case 2:
        out = pack_part<uint16_t>(from, count, width, out);
        break;
      default:
        out = pack_part<uint32_t>(from, count, width, out);
    }
  }
  if (width < bits)
    for (int d = 0; d < D; d += 8) {
      unsigned byte = 0;
      for (int c = 0; c < 8 && d + c < D; ++c) byte |= static_cast<unsigned>(codes[d + c] >> width) << c;
      *out++ = static_cast<uint8_t>(byte);
    }
  std::memset(out, 0, begin + bytes - out);
}

// ---- a row ----

struct RowCode {
  uint16_t scale = 0;  // half precision
  uint8_t id = 0;
  bool fits = true;  // else it is to be kept raw
};

// Work space of one row: floats of D and its padding, each a whole number of vectors.
struct RowRoom {
  static constexpr int kRow = delta::kMaxDim + 64;
  alignas(64) float x[kRow], y[kRow], size[kRow], temp[kRow];
  alignas(64) int32_t codes[kRow];
};

// Zeros in place of what is no number; whether there was none.
inline bool keep_finite(float* x, int D) {
  vi odd = {};
  for (int d = 0; d < D; d += W) odd |= vi(abs(load(x + d)) <= splat(std::numeric_limits<float>::max())) == 0;
  if (!reduce(odd, [](int a, int b) { return a | b; })) return true;
  for (int d = 0; d < D; ++d) x[d] = std::isfinite(x[d]) ? x[d] : 0.0f;
  return false;
}

// room.y <- the rotated residual of room.x, zeros behind it.
inline void residual(const HeadTemplates& t, int id, int64_t rotation, RowRoom& room) {
  const int D = t.D;
  const f16_t* centre = t.centres + int64_t{id} * D;
  for (int d = 0; d < D; d += W) store(room.y + d, load(room.x + d) - load_part(centre, d, D));
  rotation == 0 ? rotate(room.y, D) : rotate_strided(room.y, D, static_cast<int>(rotation));
  for (int d = D; d < D + delta::kLanes; ++d) room.y[d] = 0;
}

// The scale by least squares, and whether the row is well enough represented by it. used: whether any code is.
inline void fit_scale(const HeadTemplates& t, float square, bool used, RowRoom& room, RowCode& row) {
  vf levels = {};  // exact in any order: integers below 2^24
  for (int d = 0; d < t.D; d += W) {
    const vf size = load(room.size + d);
    store(room.temp + d, abs(load(room.y + d)) * size);
    levels += size * size;
  }
  const float along = tree_sum(room.temp, t.D), sum = reduce_add(levels);
  f16_t stored;
  from_float(used && along > 0 ? along / sum : 0.0f, stored);
  const float s = to_float(stored), error = (square - (s + s) * along) + (s * s) * sum;
  row.fits = row.fits && s <= kMaxScale && square <= std::numeric_limits<float>::max() && !(error > t.bound);
  if (!(s <= kMaxScale)) from_float(kMaxScale, stored);
  row.scale = stored.bits;
}

// room.x: the row (a key without its position) and zeros behind it. rotation: 0 for that of values, else the keys'.
inline RowCode code_row(const HeadTemplates& t, int bits, int64_t rotation, RowRoom& room, uint8_t* codes) {
  const int D = t.D, padded = (D + delta::kLanes - 1) / delta::kLanes * delta::kLanes;
  RowCode row;
  row.fits = keep_finite(room.x, D);
  const int id = nearest_template(t, room.x, room.temp);
  row.id = static_cast<uint8_t>(id);
  residual(t, id, rotation, room);
  vf largest = {};
  for (int d = 0; d < D; d += W) {
    const vf y = load(room.y + d);
    store(room.temp + d, y * y);
    largest = max(abs(y), largest);
  }
  const float square = tree_sum(room.temp, D);
  const float size = delta::starts_at_largest(bits) ? reduce_max(largest) : std::sqrt(square / static_cast<float>(D));
  const bool used = size >= delta::kSmallestStart && size <= std::numeric_limits<float>::max();
  if (!used) std::fill(room.y, room.y + padded, 0.0f);
  quantise(bits, room.y, used ? delta::start_of(bits) / size : 0.0f, padded, room.size, room.codes);
  for (int d = D; d < padded; ++d) room.codes[d] = 0, room.size[d] = 0;
  pack_codes(room.codes, D, bits, codes);
  fit_scale(t, square, used, room, row);
  return row;
}

}  // namespace sic::cpu::SIC_ISA
