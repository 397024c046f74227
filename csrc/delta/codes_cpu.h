// Code rows to float levels.
#pragma once
#include <array>

#include "core/simd.h"
#include "delta/levels.h"

namespace sic::cpu::SIC_ISA {

constexpr int kSlices = delta::kLanes / W;  // vectors that hold the 16 lanes of a channel group

// Levels by code: floats twice 16, those with the top bit clear and set; or bytes, each half in every 128-bit lane.
// What lies above the low field of a word would pick beyond a short table: it is repeated.
#if defined(__AVX512BW__)
using LevelTable = std::array<float, 32>;
#else
using LevelTable = std::array<int8_t, 2 * kBytes>;
#endif
template <int kBits>
constexpr LevelTable make_level_table() {
  LevelTable t{};
  if (kBits == 8) return t;
  const size_t codes = size_t{1} << delta::low_bits(kBits), half = t.size() / 2;
  for (size_t i = 0; i < t.size(); ++i)
    t[i] = delta::levels_of(kBits)
               .level[i % half % 16 % codes + (i >= half && delta::low_bits(kBits) < kBits ? codes : 0)];
  return t;
}
template <int kBits>
alignas(64) constexpr LevelTable kLevelTable = make_level_table<kBits>();

// Levels of code rows of kBits, W lanes from `lane` on at a time. What lies behind the last channel is any level.
template <int kBits>
class LevelReader {
 public:
  static constexpr int kWidth = delta::low_bits(kBits);
  static constexpr bool kMasked = kWidth != kBits;  // the top bit has a field of its own

  SIC_MEMBER_INLINE explicit LevelReader(int64_t D)
      : mask_at_(delta::low_field_bytes(D, kBits)), channels_(static_cast<int>(D)) {
    if constexpr (kWidth == 8) return;
#if defined(__AVX512BW__)
    low_ = load(kLevelTable<kBits>.data()), high_ = load(kLevelTable<kBits>.data() + 16);
#else
    low_ = load_as<vb>(kLevelTable<kBits>.data()), high_ = load_as<vb>(kLevelTable<kBits>.data() + kBytes);
#endif
  }

  // x[n]: levels of channel group n, for the kGroups groups of a whole row.
  template <int kGroups>
  SIC_MEMBER_INLINE void row(const uint8_t* row, int lane, vf* x) const {
    parts<0, kGroups, 0>(row, lane, x);
  }

  // The same for a row of any length; out has room for whole groups.
  void row(const uint8_t* row, float* out) const {
    const int groups = static_cast<int>(delta::lane_channels(channels_));
    int64_t at = 0;
    for (int first = 0, n; first < groups; first += n) {
      n = static_cast<int>(delta::part_channels(groups - first, kWidth));
      for (int lane = 0; lane < delta::kLanes; lane += W) part_of(n, row + at, row, first, lane, out);
      at += delta::kLanes * delta::word_bytes(n, kWidth);
    }
  }

 private:
  template <int kFirst, int kLeft, int kAt>
  SIC_MEMBER_INLINE void parts(const uint8_t* row, int lane, vf* x) const {
    constexpr int n = static_cast<int>(delta::part_channels(kLeft, kWidth));
    part<n>(row + kAt, row, kFirst, lane, x + kFirst);
    if constexpr (n < kLeft)
      parts<kFirst + n, kLeft - n, kAt + delta::kLanes* static_cast<int>(delta::word_bytes(n, kWidth))>(row, lane, x);
  }

  void part_of(int n, const uint8_t* words, const uint8_t* row, int first, int lane, float* out) const {
    const auto put = [&](auto count) __attribute__((always_inline)) {
      vf x[count()];
      part<count()>(words, row, first, lane, x);
      for (int i = 0; i < count(); ++i) store(out + delta::kLanes * (first + i) + lane, x[i]);
    };
    if (n == 1) return put(std::integral_constant<int, 1>());
    if (n == 2) return put(std::integral_constant<int, 2>());
    if (n == 4) return put(std::integral_constant<int, 4>());
    if constexpr (kWidth < 8)
      if (n == 8) return put(std::integral_constant<int, 8>());
    if constexpr (kWidth == 2) put(std::integral_constant<int, 16>());
  }

  // n channel groups from `first` on, whose low fields are in `words`.
  template <int n>
  SIC_MEMBER_INLINE void part(const uint8_t* words, const uint8_t* row, int first, int lane, vf* x) const {
    if constexpr (kWidth == 8) {
      SIC_UNROLL for (int i = 0; i < n; ++i) {
        const int at = delta::kLanes * i + lane, left = channels_ - delta::kLanes * first - at;
        x[i] = left >= W ? level8(words + at) : level8_of(words + at, left);
      }
    } else {
      const vu w = load_words<static_cast<int>(delta::word_bytes(n, kWidth))>(words, lane);
      look_up<n>(w, row + mask_at_ + 2 * first, lane, x);
    }
  }

  template <int kWordBytes>
  SIC_INLINE vu load_words(const uint8_t* words, int lane) {
    const uint8_t* p = words + kWordBytes * lane;
    if constexpr (kWordBytes == 1) return widen(p);
    if constexpr (kWordBytes == 2) return widen(reinterpret_cast<const uint16_t*>(p));
    return load_as<vu>(p);
  }
  SIC_INLINE vf level8(const uint8_t* p) { return __builtin_convertvector(vi(widen(p)) - 128, vf); }
  SIC_INLINE vf level8_of(const uint8_t* p, int left) {
    uint8_t codes[W] = {};
    if (left > 0) std::memcpy(codes, p, left);
    return level8(codes);
  }

#if defined(__AVX512BW__)
  template <int n>
  SIC_MEMBER_INLINE void look_up(vu w, const uint8_t* mask, int, vf* x) const {
    SIC_UNROLL for (int i = 0; i < n; ++i) {
      const __m512i index = __m512i(w >> (kWidth * i));
      vf level = vf(_mm512_permutexvar_ps(index, low_));
      if constexpr (kMasked) {
        uint16_t top;
        std::memcpy(&top, mask + 2 * i, sizeof top);
        level = vf(_mm512_mask_permutexvar_ps(level, top, index, high_));
      }
      x[i] = level;
    }
  }
  vf low_, high_;
#else
  // Byte m of a lane's word holds the fields of groups 8 / kWidth * m, ...: looked up together, then spread.
  template <int n>
  SIC_MEMBER_INLINE void look_up(vu w, const uint8_t* mask, int lane, vf* x) const {
    constexpr int kPerByte = 8 / kWidth;
    constexpr uint8_t kField = (1 << kWidth) - 1;
    SIC_UNROLL for (int f = 0; f < kPerByte && f < n; ++f) {
      const vb index = bit_cast<vb>(w >> (kWidth * f)) & kField;
      const vi low = bit_cast<vi>(lookup16(low_, index));
      vi high = {};
      if constexpr (kMasked) high = bit_cast<vi>(lookup16(high_, index));
      SIC_UNROLL for (int m = 0; m * kPerByte + f < n; ++m) {
        const int group = m * kPerByte + f;
        vi level = (low << (24 - 8 * m)) >> 24;
        if constexpr (kMasked) level = top_bits(mask + 2 * group, lane) ? (high << (24 - 8 * m)) >> 24 : level;
        x[group] = __builtin_convertvector(level, vf);
      }
    }
  }
  // All ones in the lanes whose bit is set.
  SIC_INLINE vi top_bits(const uint8_t* mask, int lane) {
    uint16_t bits;
    std::memcpy(&bits, mask, sizeof bits);
    vi one;
    for (int i = 0; i < W; ++i) one[i] = 1 << i;
    return ((static_cast<int32_t>(bits >> lane) - vi{}) & one) != 0;
  }
  vb low_, high_;
#endif

  int64_t mask_at_;
  int channels_;
};

}  // namespace sic::cpu::SIC_ISA
