// Rows to codes: nearest template, residual, levels, scale.
#pragma once
#include <array>
#include <cmath>

#include "core/rows.h"
#include "delta/levels.h"
#include "delta/nearest_cpu.h"
#include "delta/rotation_cpu.h"

namespace sic::cpu::SIC_ISA {

constexpr float kMaxScale = 65504;  // of half precision

// ---- levels ----

// What lies between level m and the one below, half-way: a size from there on is of level m or a higher one.
template <int kBits>
constexpr auto make_steps() {
  constexpr int h = 1 << (kBits - 1);
  std::array<float, 2 * W> t{};
  for (int m = 1; m < h; ++m)
    t[m] = 0.5f * static_cast<float>(delta::levels_of(kBits).level[h + m - 1] + delta::levels_of(kBits).level[h + m]);
  for (int m = 0; m < h; ++m) t[W + m] = delta::levels_of(kBits).level[h + m];
  return t;
}

// The levels that are nearest to sizes a: their numbers among the h that are not negative, and what they are.
template <int kBits>
SIC_INLINE vi nearest_level(vf a, vf& level) {
  constexpr int h = 1 << (kBits - 1);
  vi m = {};
#if defined(__AVX512BW__)
  static constexpr auto kSteps = make_steps<kBits>();
  const vf steps = load(kSteps.data()), levels = load(kSteps.data() + W);
  SIC_UNROLL for (int half = h / 2; half > 0; half /= 2) {
    const __m512i higher = __m512i(m) | _mm512_set1_epi32(half);
    const __mmask16 above = _mm512_cmp_ps_mask(__m512(a), _mm512_permutexvar_ps(higher, __m512(steps)), _CMP_GE_OQ);
    m = vi(_mm512_mask_mov_epi32(__m512i(m), above, higher));
  }
  level = vf(_mm512_permutexvar_ps(__m512i(m), __m512(levels)));
#else
  constexpr const delta::Levels& t = delta::levels_of(kBits);
  level = splat(t.level[h]);
  for (int i = 0; i + 1 < h; ++i) {
    const int low = t.level[h + i], high = t.level[h + i + 1];
    const vi above = a >= splat(0.5f * static_cast<float>(low + high));
    m -= above;
    level += bit_cast<vf>(above & bit_cast<vi>(splat(static_cast<float>(high - low))));
  }
#endif
  return m;
}

// Codes of the n residuals y (a multiple of W), and the sizes of their levels.
template <int kBits>
inline void quantise(const float* y, float units, int n, float* size, int32_t* codes) {
  constexpr int h = 1 << (kBits - 1);
  for (int d = 0; d < n; d += W) {
    const vf u = load(y + d) * splat(units);
    vf level;
    const vi m = nearest_level<kBits>(abs(u), level), negative = u < vf{};
    store(size + d, level);
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
  typedef Word Words __attribute__((vector_size(W * sizeof(Word))));
  const uint32_t mask = (1u << width) - 1;
  for (int lane = 0; lane < delta::kLanes; lane += W) {
    vu words = {};
    for (int i = 0; i < count; ++i) words |= (load_as<vu>(codes + delta::kLanes * i + lane) & mask) << (width * i);
    store_as(out + lane * sizeof(Word), __builtin_convertvector(words, Words));
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
struct RowRooms {
  RowRoom row[kRowsAtOnce];
  SearchRoom search[kRowsAtOnce];
};

// Zeros in place of what is no number; whether there was none.
inline bool keep_finite(float* x, int D) {
  vi odd = {};
  for (int d = 0; d < D; d += W) odd |= vi(abs(load(x + d)) <= splat(std::numeric_limits<float>::max())) == 0;
  if (!any(odd)) return true;
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

// room.y to levels; the scale with them.
inline void code_levels(const HeadTemplates& t, int bits, RowRoom& room, RowCode& row) {
  const int D = t.D, padded = (D + delta::kLanes - 1) / delta::kLanes * delta::kLanes;
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
  fit_scale(t, square, used, room, row);
}

// n rows: rooms.row[r].x (a key without its position) and zeros behind it. rotation: 0 for that of values, else the
// keys'. Step by step over all of them, since each step is a chain.
inline void code_rows(const HeadTemplates& t, int bits, int64_t rotation, int n, RowRooms& rooms, uint8_t* const* codes,
                      RowCode* rows) {
  for (int r = 0; r < n; ++r) {
    rows[r].fits = keep_finite(rooms.row[r].x, t.D);
    to_search_integers(t, rooms.row[r].x, rooms.row[r].temp, rooms.search[r]);
  }
  dot_templates(t, n, rooms.search);
  for (int r = 0; r < n; ++r) {
    const int id = best_template(t, rooms.search[r]);
    prefetch_row(t.centres + int64_t{id} * t.D, t.D * int64_t{sizeof(f16_t)});
    rows[r].id = static_cast<uint8_t>(id);
  }
  for (int r = 0; r < n; ++r) residual(t, rows[r].id, rotation, rooms.row[r]);
  for (int r = 0; r < n; ++r) code_levels(t, bits, rooms.row[r], rows[r]);
  for (int r = 0; r < n; ++r) pack_codes(rooms.row[r].codes, t.D, bits, codes[r]);
}

}  // namespace sic::cpu::SIC_ISA
