// The key sketch on the CPU: rotation, packing of keys, integer queries and the scan.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "core/paged.h"
#include "core/rows.h"
#include "core/simd.h"
#include "slicing/rotation_cpu.h"
#include "slicing/sketch.h"

namespace sic::cpu::SIC_ISA {

// The same as tree_sum() for one block of kVectors vectors.
template <int kVectors>
SIC_INLINE float tree_sum_block(const float* v) {
  vf x[kVectors];
  SIC_UNROLL for (int i = 0; i < kVectors; ++i) x[i] = load(v + W * i);
  SIC_UNROLL for (int h = kVectors / 2; h > 0; h /= 2) SIC_UNROLL for (int i = 0; i < h; ++i) x[i] += x[i + h];
  return reduce_add(x[0]);
}

// Sum in the sketch's order: halves of each block, then the blocks. Destroys v.
inline float tree_sum(float* v, int D) {
  if (D == 8 * W) return tree_sum_block<8>(v);
  if (D == 4 * W) return tree_sum_block<4>(v);
  float total = 0;
  for (int at = 0, n; at < D; at += n) {
    n = slicing::rotation_block(D - at);
    float* const x = v + at;
    int h = n / 2;
    for (; h >= W; h /= 2)
      for (int i = 0; i < h; i += W) store(x + i, load(x + i) + load(x + i + h));
    if (2 * h == W) {
      x[0] = reduce_add(load(x));
    } else {
      for (; h > 0; h /= 2)
        for (int i = 0; i < h; ++i) x[i] += x[i + h];
    }
    total = at == 0 ? x[0] : total + x[0];
  }
  return total;
}

// ---- keys ----

// Writes the sketch of one key into its page.
class SketchWriter {
 public:
  SketchWriter(int64_t page, int D, int planes) : page_(page), D_(D), planes_(planes) {}

  // x: the key less the centre (D floats, destroyed); temp: D floats; page_bits: this page and head.
  void write(float* x, float* temp, uint8_t* page_bits, bf16_t* page_norm, int64_t token) const {
    rotate(x, D_);
    for (int d = 0; d < D_; ++d) temp[d] = std::fabs(x[d]);
    const float total = tree_sum(temp, D_);
    const float threshold = planes_ == 2 ? total * (slicing::kOuterThreshold / static_cast<float>(D_)) : INFINITY;
    pack(x, threshold, page_bits, token);
    for (int d = 0; d < D_; ++d) temp[d] = x[d] * x[d];
    const float square = tree_sum(temp, D_);
    float weight = total;
    if (planes_ == 2) {
      for (int d = 0; d < D_; ++d) temp[d] = std::fabs(x[d]) * (std::fabs(x[d]) >= threshold ? 3.0f : 1.0f);
      weight = tree_sum(temp, D_);
    }
    from_float(weight == 0 ? 0.0f : square / weight, page_norm[token]);
  }

 private:
  void pack(const float* y, float threshold, uint8_t* page_bits, int64_t token) const {
    const int64_t first = token / slicing::kTokenBlock * slicing::kTokenBlock;
    const int64_t width = page_ - first < slicing::kTokenBlock ? page_ - first : slicing::kTokenBlock;
    const int64_t row_bytes = slicing::sketch_row_bytes(D_);
    uint8_t* sign = page_bits + first * row_bytes + token % slicing::kTokenBlock;
    uint8_t* outer = sign + slicing::sketch_plane_bytes(page_, D_);
    for (int64_t j = 0; j < row_bytes; ++j) {
      unsigned b0 = 0, b1 = 0;
      const int n = D_ - 8 * j < 8 ? static_cast<int>(D_ - 8 * j) : 8;
      for (int c = 0; c < n; ++c) {
        const float v = y[8 * j + c];
        const bool positive = v >= 0, large = std::fabs(v) >= threshold;
        b0 |= unsigned(positive) << c;
        b1 |= unsigned(positive == large) << c;
      }
      sign[j * width] = static_cast<uint8_t>(b0);
      if (planes_ == 2) outer[j * width] = static_cast<uint8_t>(b1);
    }
  }

  int64_t page_;
  int D_, planes_;
};

// ---- queries ----

// Integer queries of several heads as look-up tables. For 4 channels and each of the 16 sign patterns they hold half of
// sum (+-q) + sum |q|: at most 124, so that two entries, and those of most queries by fours, add up within a byte.
struct QueryTables {
  static constexpr int kRowsAtOnce = kBytes / 16;

  int heads, row_bytes, padded_rows;
  uint8_t* tables;  // [heads][2][padded_rows][16]: low, then high nibbles
  float* factor;    // [heads][4], four times the same: of a 2-plane dot; nats * 256 per unit of norm
  int32_t* bias;    // [heads][4], likewise: sum |q|
  int32_t* peak;    // [heads]: the largest sum of what two vectors of rows look up for one token

  static int padded(int row_bytes) { return (row_bytes + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce; }
  static int64_t bytes(int64_t heads, int64_t D) {
    return heads * (2 * 16 * padded(slicing::sketch_row_bytes(D)) + 36) + 128;
  }

  QueryTables(char* memory, int heads_, int D)
      : heads(heads_), row_bytes(static_cast<int>(slicing::sketch_row_bytes(D))), padded_rows(padded(row_bytes)) {
    tables = reinterpret_cast<uint8_t*>(memory);
    factor = reinterpret_cast<float*>(memory + (int64_t{32} * heads * padded_rows + 63) / 64 * 64);
    bias = reinterpret_cast<int32_t*>(factor + 4 * heads);
    peak = bias + 4 * heads;
  }
  const uint8_t* low(int head) const { return tables + int64_t{32} * head * padded_rows; }
  const uint8_t* high(int head) const { return low(head) + 16 * padded_rows; }

  // x: the query (D floats, destroyed).
  void set(int head, float* x, int D, float scale) {
    rotate(x, D);
    float top = 0;
    bool finite = true;
    for (int d = 0; d < D; ++d) {
      finite = finite && std::isfinite(x[d]);
      top = std::fabs(x[d]) > top ? std::fabs(x[d]) : top;
    }
    const bool usable = finite && top >= slicing::kSmallestQuery;
    const float inverse = usable ? slicing::kQueryLevels / top : 0.0f;
    const float unit = usable ? top / slicing::kQueryLevels * scale * slicing::kScoreSteps : 0.0f;
    int8_t q[slicing::kSketchMaxDim + 8] = {};
    for (int d = 0; usable && d < D; ++d) q[d] = static_cast<int8_t>(std::nearbyint(x[d] * inverse));
    uint8_t* out = tables + int64_t{32} * head * padded_rows;
    std::memset(out, 0, 32 * padded_rows);
    int32_t sums[slicing::kSketchMaxDim / 8 + 2 * kRowsAtOnce] = {};
    for (int j = 0; j < row_bytes; ++j)
      sums[j] = fill(q + 8 * j, out + 16 * j) + fill(q + 8 * j + 4, out + 16 * (padded_rows + j));
    int32_t all = 0, most = 0;
    for (int j = 0; j < row_bytes; ++j) {
      all += sums[j];
      if (j / kRowsAtOnce % 2 == 0) most = std::max(most, sums[j] + sums[j + kRowsAtOnce]);
    }
    for (int i = 0; i < 4; ++i) factor[4 * head + i] = unit, bias[4 * head + i] = all;
    peak[head] = most;
  }

 private:
  // Returns the sum of |q|.
  static int fill(const int8_t* q, uint8_t* table) {
    int least = 0, all = 0;
    for (int c = 0; c < 4; ++c) least -= q[c] < 0 ? q[c] : 0, all += std::abs(q[c]);
    table[0] = static_cast<uint8_t>(least);
    for (int c = 0; c < 4; ++c)
      for (int i = 0; i < 1 << c; ++i) table[i + (1 << c)] = static_cast<uint8_t>(table[i] + q[c]);
    return all;
  }
};

// ---- the scan ----

typedef int16_t v_scores __attribute__((vector_size(2 * W)));

SIC_INLINE vi load_scores(const int16_t* s) {
#if defined(__AVX512BW__)
  return vi(_mm512_cvtepi16_epi32(load_as<__m256i>(s)));
#elif defined(__AVX2__)
  return vi(_mm256_cvtepi16_epi32(load_as<__m128i>(s)));
#else
  return __builtin_convertvector(load_as<v_scores>(s), vi);
#endif
}
// The low 16 bits of each lane.
SIC_INLINE v_scores narrow(vi v) {
#if defined(__AVX512BW__)
  return v_scores(_mm512_cvtepi32_epi16(__m512i(v)));
#else
  return __builtin_convertvector(v, v_scores);
#endif
}
SIC_INLINE void store_scores(int16_t* s, vi v) { store_as(s, narrow(v)); }
SIC_INLINE vi round_to_int(vf x) {
  const vf magic = splat(12582912.0f);
  return bit_cast<vi>(x + magic) - bit_cast<vi>(magic);
}

typedef uint16_t v8h __attribute__((vector_size(16)));
typedef int16_t v_block __attribute__((vector_size(2 * slicing::kTokenBlock)));  // one value for each token of a block

// Lanes [i, i + W) of a block, widened. Kept in registers: a wide load of two narrow stores would stall.
SIC_INLINE vi widen_lanes(v_block v, int i) {
#if defined(__AVX512BW__)
  (void)i;
  return vi(_mm512_cvtepi16_epi32(__m256i(v)));
#elif defined(__AVX2__)
  return vi(
      _mm256_cvtepi16_epi32(i == 0 ? _mm256_castsi256_si128(__m256i(v)) : _mm256_extracti128_si256(__m256i(v), 1)));
#else
  vi wide;
  for (int l = 0; l < W; ++l) wide[l] = v[i + l];
  return wide;
#endif
}

SIC_INLINE v8h add_lanes(vh v) {
#if defined(__AVX512BW__)
  const __m256i half = _mm256_add_epi16(_mm512_castsi512_si256(__m512i(v)), _mm512_extracti64x4_epi64(__m512i(v), 1));
  return v8h(_mm_add_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
#elif defined(__AVX2__)
  return v8h(_mm_add_epi16(_mm256_castsi256_si128(__m256i(v)), _mm256_extracti128_si256(__m256i(v), 1)));
#else
  return v8h(v);
#endif
}

// The upper byte of each 16-bit lane. A multiplication by (0, 1): the shifter is busy with the look-ups.
SIC_INLINE vh odd_bytes(vh v) {
#if defined(__AVX512BW__)
  return vh(_mm512_maddubs_epi16(__m512i(v), _mm512_set1_epi16(0x0100)));
#else
  return v >> 8;
#endif
}

// dots[r][i] = sum over channels of q_r * (2 bit - 1), for the 16 tokens of one plane block.
template <int R>
SIC_INLINE void plane_dots(const QueryTables& q, int head, const uint8_t* block, v_block* dots) {
  // A 16-bit lane holds two tokens' bytes. `both` sums them together modulo 2^16, `odd` the upper byte alone.
  vh both[R] = {}, odd[R] = {};
  const int64_t head_stride = int64_t{32} * q.padded_rows, high_offset = int64_t{16} * q.padded_rows;
  const uint8_t* tables = q.low(head);
  const auto add = [&](vb bits, const uint8_t* table) __attribute__((always_inline)) {
    const vb low = bits & 15, high = bit_cast<vb>(bit_cast<vh>(bits) >> 4) & 15;
    SIC_UNROLL for (int r = 0; r < R; ++r) {
      const vh sum = bit_cast<vh>(lookup16(load_as<vb>(table + r * head_stride), low) +
                                  lookup16(load_as<vb>(table + r * head_stride + high_offset), high));
      both[r] += sum;
      odd[r] += odd_bytes(sum);
    }
  };
  int j = 0;
  for (; j + QueryTables::kRowsAtOnce <= q.row_bytes; j += QueryTables::kRowsAtOnce)
    add(load_as<vb>(block + 16 * j), tables + 16 * j);
  if (j < q.row_bytes) {
    uint8_t rest[kBytes] = {};
    std::memcpy(rest, block + 16 * j, 16 * (q.row_bytes - j));
    add(load_as<vb>(rest), tables + 16 * j);
  }
  SIC_UNROLL for (int r = 0; r < R; ++r) {
    const v8h upper = add_lanes(odd[r]), lower = add_lanes(both[r]) - (upper << 8);
    const uint16_t bias = static_cast<uint16_t>(q.bias[4 * (head + r)]);
    const v8h even = lower + lower - bias, uneven = upper + upper - bias;
    const v8h halves[2] = {__builtin_shuffle(even, uneven, v8h{0, 8, 1, 9, 2, 10, 3, 11}),
                           __builtin_shuffle(even, uneven, v8h{4, 12, 5, 13, 6, 14, 7, 15})};
#if defined(__AVX2__)
    dots[r] = v_block(_mm256_set_m128i(__m128i(halves[1]), __m128i(halves[0])));
#else
    std::memcpy(&dots[r], halves, sizeof halves);
#endif
  }
}

// Scores in 1/256 nat of W tokens: round(dot * norm * factor), within +-32767.
SIC_INLINE v_scores scale_dots(vi dots, vf norm, float factor) {
  const vf s = __builtin_convertvector(dots, vf) * norm * splat(factor);
  const vf limit = splat(-slicing::kScoreMin);
  return narrow(round_to_int(min(max(s, splat(slicing::kScoreMin)), limit)));
}

#if defined(__AVX512BW__)
// The same for four heads with the tail shared: a 128-bit lane is a head all the way. Bit for bit what one head gives.
struct FourHeads {
  const uint8_t* tables;
  int64_t head_stride, high_offset;
  int row_bytes;
  bool by_fours;  // four entries fit a byte
  vi bias;
  vf factor;

  SIC_MEMBER_INLINE FourHeads(const QueryTables& q, int head)
      : tables(q.low(head)),
        head_stride(int64_t{32} * q.padded_rows),
        high_offset(int64_t{16} * q.padded_rows),
        row_bytes(q.row_bytes),
        by_fours(q.peak[head] <= 255 && q.peak[head + 1] <= 255 && q.peak[head + 2] <= 255 && q.peak[head + 3] <= 255),
        bias(load_as<vi>(q.bias + 4 * head)),
        factor(load(q.factor + 4 * head)) {}

  // dots[i]: of tokens [4 i, 4 i + 4).
  SIC_MEMBER_INLINE void dots(const uint8_t* block, vi* dots) const {
    vh both[4] = {}, odd[4] = {};
    int j = 0;
    if (by_fours)
      for (; j + 2 * QueryTables::kRowsAtOnce <= row_bytes; j += 2 * QueryTables::kRowsAtOnce)
        add<2>(block + 16 * j, tables + 16 * j, both, odd);
    for (; j + QueryTables::kRowsAtOnce <= row_bytes; j += QueryTables::kRowsAtOnce)
      add<1>(block + 16 * j, tables + 16 * j, both, odd);
    if (j < row_bytes) {
      uint8_t rest[kBytes] = {};
      std::memcpy(rest, block + 16 * j, 16 * (row_bytes - j));
      add<1>(rest, tables + 16 * j, both, odd);
    }
    const vh upper = add_lanes_of_four(odd), lower = add_lanes_of_four(both) - (upper << 8);
    const vh even = lower + lower, uneven = upper + upper;
    const __m512i zero = _mm512_setzero_si512(), first = _mm512_unpacklo_epi16(__m512i(even), __m512i(uneven)),
                  last = _mm512_unpackhi_epi16(__m512i(even), __m512i(uneven));
    dots[0] = vi(_mm512_unpacklo_epi16(first, zero)) - bias, dots[1] = vi(_mm512_unpackhi_epi16(first, zero)) - bias;
    dots[2] = vi(_mm512_unpacklo_epi16(last, zero)) - bias, dots[3] = vi(_mm512_unpackhi_epi16(last, zero)) - bias;
  }

  // Scores of the 16 tokens of a block, as scale_dots makes them; rows of scores are `stride` apart.
  SIC_MEMBER_INLINE static void put(const vi* dots, vf norm, vf factor, int16_t* scores, int64_t stride) {
    vi rounded[4];
    const vf norms[4] = {vf(_mm512_shuffle_f32x4(norm, norm, 0x00)), vf(_mm512_shuffle_f32x4(norm, norm, 0x55)),
                         vf(_mm512_shuffle_f32x4(norm, norm, 0xaa)), vf(_mm512_shuffle_f32x4(norm, norm, 0xff))};
    SIC_UNROLL for (int i = 0; i < 4; ++i) {
      const vf s = __builtin_convertvector(dots[i], vf) * norms[i] * factor;
      rounded[i] = vi(_mm512_cvtps_epi32(min(splat(-slicing::kScoreMin), s)));  // NaN becomes the least integer
    }
    SIC_UNROLL for (int half = 0; half < 2; ++half) {
      const __m512i packed =
          _mm512_max_epi16(_mm512_packs_epi32(__m512i(rounded[2 * half]), __m512i(rounded[2 * half + 1])),
                           _mm512_set1_epi16(slicing::kScoreMin));
      store_as(scores + 8 * half, _mm512_castsi512_si128(packed));
      store_as(scores + 8 * half + stride, _mm512_extracti32x4_epi32(packed, 1));
      store_as(scores + 8 * half + 2 * stride, _mm512_extracti32x4_epi32(packed, 2));
      store_as(scores + 8 * half + 3 * stride, _mm512_extracti32x4_epi32(packed, 3));
    }
  }

 private:
  // Vectors: of rows, whose entries are added as bytes.
  template <int Vectors>
  SIC_MEMBER_INLINE void add(const uint8_t* block, const uint8_t* table, vh* both, vh* odd) const {
    vb low[Vectors], high[Vectors];
    SIC_UNROLL for (int v = 0; v < Vectors; ++v) {
      const vb bits = load_as<vb>(block + kBytes * v);
      low[v] = bits & 15, high[v] = bit_cast<vb>(bit_cast<vh>(bits) >> 4) & 15;
    }
    SIC_UNROLL for (int r = 0; r < 4; ++r) {
      const uint8_t* own = table + r * head_stride;
      vb sum = {};
      SIC_UNROLL for (int v = 0; v < Vectors; ++v) sum +=
          lookup16(load_as<vb>(own + kBytes * v), low[v]) +
          lookup16(load_as<vb>(own + kBytes * v + high_offset), high[v]);
      both[r] += bit_cast<vh>(sum);
      odd[r] += odd_bytes(bit_cast<vh>(sum));
    }
  }

  // Lane r of the result is the sum of the lanes of v[r].
  SIC_MEMBER_INLINE static vh add_lanes_of_four(const vh* v) {
    const auto shuffle = [](vh a, vh b, auto how) __attribute__((always_inline)) {
      return vh(_mm512_shuffle_i64x2(__m512i(a), __m512i(b), decltype(how)::value));
    };
    constexpr std::integral_constant<int, 0x44> low;
    constexpr std::integral_constant<int, 0xee> high;
    constexpr std::integral_constant<int, 0x88> even;
    constexpr std::integral_constant<int, 0xdd> odd;
    const vh a = shuffle(v[0], v[1], low) + shuffle(v[0], v[1], high),
             b = shuffle(v[2], v[3], low) + shuffle(v[2], v[3], high);
    return shuffle(a, b, even) + shuffle(a, b, odd);
  }
};
#endif

// Scores of token blocks for up to all heads of a group.
class SketchScan {
 public:
  // Pages lie anywhere: the hardware cannot guess the next one. Those of one head are multiples of the page stride
  // apart and share a few sets of the first-level cache, so what is fetched early is fetched again shortly before its
  // use.
  static constexpr int64_t kEarly = 256, kLate = 32, kPageBytesAhead = 1024;  // tokens; bytes of a plane

  SketchScan(const QueryTables& q, int64_t page, int D, int planes) : q_(q), page_(page), D_(D), planes_(planes) {}

  // One block of `width` tokens starting at `token` of a page; rows of first/second are `stride` apart.
  // first: scores of plane 0. second (may be null): of both planes.
  SIC_MEMBER_INLINE void block(const uint8_t* page_bits, const bf16_t* page_norm, int64_t token, int width,
                               int16_t* first, int16_t* second, int64_t stride) const {
    const int64_t offset = token * q_.row_bytes, plane = slicing::sketch_plane_bytes(page_, D_);
    const uint8_t* planes[2] = {page_bits + offset, page_bits + plane + offset};
    if (width == slicing::kTokenBlock) return scores<true>(planes, page_norm + token, width, first, second, stride);
    // The short block at the end of a page: spread to the width of a full one.
    uint8_t padded[2][slicing::kSketchMaxDim / 8 * slicing::kTokenBlock];
    bf16_t norm[slicing::kTokenBlock] = {};
    std::memcpy(norm, page_norm + token, width * sizeof(bf16_t));
    for (int p = 0; p < (second ? 2 : 1); ++p) {
      for (int j = 0; j < q_.row_bytes; ++j)
        std::memcpy(padded[p] + slicing::kTokenBlock * j, planes[p] + width * j, width);
      planes[p] = padded[p];
    }
    scores<false>(planes, norm, width, first, second, stride);
  }

  // Tokens [begin, end) of one sequence and head; position p goes to [p - origin] of each row.
  void range(const CacheRows& bits, const TensorView& norm, int64_t h, int64_t begin, int64_t end, int64_t origin,
             int16_t* first, int16_t* second, int64_t stride) const {
    const int64_t early = (kEarly + page_ - 1) / page_, late = (kLate + page_ - 1) / page_;
    for (int64_t pos = begin; pos < end;) {
      const int64_t page = bits.split.index(static_cast<uint32_t>(pos)), token = pos - page * page_;
      const int64_t id = bits.table[static_cast<uint32_t>(page)];
      const int64_t block_start = token / slicing::kTokenBlock * slicing::kTokenBlock;
      const int width =
          static_cast<int>(page_ - block_start < slicing::kTokenBlock ? page_ - block_start : slicing::kTokenBlock);
      const auto* page_bits = reinterpret_cast<const uint8_t*>(bits.base) + id * bits.page_stride;
      const auto* page_norm = norm.as<const bf16_t>() + id * norm.stride[0] + h * norm.stride[1];
      if (token == 0) {
        fetch(bits, norm, h, page + early, end, second != nullptr);
        fetch(bits, norm, h, page + late, end, second != nullptr);
      }
      const int64_t at = pos - origin;
      block(page_bits, page_norm, block_start, width, first ? first + at : nullptr, second ? second + at : nullptr,
            stride);
      pos += width;
    }
  }

 private:
  SIC_MEMBER_INLINE void fetch(const CacheRows& bits, const TensorView& norm, int64_t h, int64_t page, int64_t end,
                               bool both) const {
    if (page * page_ >= end) return;
    const int64_t id = bits.table[static_cast<uint32_t>(page)], plane = slicing::sketch_plane_bytes(page_, D_),
                  bytes = plane < kPageBytesAhead ? plane : kPageBytesAhead;
    const char* page_bits = bits.base + id * bits.page_stride;
    prefetch_row(page_bits, bytes);
    if (both) prefetch_row(page_bits + plane, bytes);
    prefetch(norm.as<const bf16_t>() + id * norm.stride[0] + h * norm.stride[1]);
  }

  template <bool Full>
  SIC_MEMBER_INLINE void scores(const uint8_t* const* planes, const bf16_t* norm, int width, int16_t* first,
                                int16_t* second, int64_t stride) const {
    int head = 0;
#if defined(__AVX512BW__)
    for (; head + 4 <= q_.heads; head += 4) four_heads<Full>(head, planes, norm, width, first, second, stride);
#else
    for (; head + 4 <= q_.heads; head += 4) heads<4, Full>(head, planes, norm, width, first, second, stride);
#endif
    for (; head < q_.heads; ++head) heads<1, Full>(head, planes, norm, width, first, second, stride);
  }

#if defined(__AVX512BW__)
  template <bool Full>
  SIC_MEMBER_INLINE void four_heads(int head, const uint8_t* const* planes, const bf16_t* norm, int width,
                                    int16_t* first, int16_t* second, int64_t stride) const {
    const FourHeads four(q_, head);
    vi dots[4], more[4];
    const vf n = load(norm);
    const auto put = [&](vf factor, int16_t* rows) {
      if (Full) return FourHeads::put(dots, n, factor, rows + head * stride, stride);
      int16_t scores[4][slicing::kTokenBlock];
      FourHeads::put(dots, n, factor, scores[0], slicing::kTokenBlock);
      for (int r = 0; r < 4; ++r) std::memcpy(rows + (head + r) * stride, scores[r], width * sizeof(int16_t));
    };
    four.dots(planes[0], dots);
    if (first) put(four.factor * splat(planes_ == 2 ? slicing::kOnePlaneGain : 1.0f), first);
    if (!second) return;
    four.dots(planes[1], more);
    SIC_UNROLL for (int i = 0; i < 4; ++i) dots[i] += dots[i] + more[i];
    put(four.factor, second);
  }
#endif

  template <int R, bool Full>
  void heads(int head, const uint8_t* const* planes, const bf16_t* norm, int width, int16_t* first, int16_t* second,
             int64_t stride) const {
    v_block dots[2][R] = {};
    plane_dots<R>(q_, head, planes[0], dots[0]);
    if (second) plane_dots<R>(q_, head, planes[1], dots[1]);
    const float gain = planes_ == 2 ? slicing::kOnePlaneGain : 1.0f;
    SIC_UNROLL for (int r = 0; r < R; ++r) {
      const float factor = q_.factor[4 * (head + r)];
      const int64_t row = (head + r) * stride;
      SIC_UNROLL for (int i = 0; i < slicing::kTokenBlock; i += W) {
        const vi a = widen_lanes(dots[0][r], i);
        const vf n = load(norm + i);
        if (first) put<Full>(first + row, i, width, scale_dots(a, n, factor * gain));
        if (second) put<Full>(second + row, i, width, scale_dots(a + a + widen_lanes(dots[1][r], i), n, factor));
      }
    }
  }

  // Lanes [i, i + W) of a row of `width` tokens.
  template <bool Full>
  SIC_MEMBER_INLINE void put(int16_t* row, int i, int width, v_scores s) const {
    if (Full) return store_as(row + i, s);
    for (int l = 0; l < W && i + l < width; ++l) row[i + l] = s[l];
  }

  const QueryTables& q_;
  int64_t page_;
  int D_, planes_;
};

}  // namespace sic::cpu::SIC_ISA
