// Codes to levels in registers, and keys of half precision from them.
//
// A lane has the codes of four neighbouring channels of one key, or of two channels of four values, in eight channel
// groups. Fields are brought together first, so that a look-up (byte_perm of a table) makes four levels that belong
// together. Levels come as bytes of level + 128; 0x64 in front of one makes it the half 1024 + 128 + level, exactly.
#pragma once
#include "delta/attention_cuda.h"

namespace sic::gpu {

constexpr int kCodedDim = 128, kCodedGroups = 8;  // channels of a head, channel groups of a word
constexpr uint32_t kLevelOffset = 0x64806480u;    // 1152, what a level is too large by

// Four levels from a code on.
constexpr uint32_t level_bytes(int bits, int first) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(delta::levels_of(bits).level[first + i] + 128) << 8 * i;
  return word;
}
template <int kBits, int kFirst>
constexpr uint32_t kLevelBytes = level_bytes(kBits, kFirst);

// Codes 0-7 (below 0) and 8-15 of four nibbles each, chosen by the nibbles' top bits.
__device__ __forceinline__ uint32_t look_up(uint32_t codes, uint32_t index, uint32_t top) {
  const uint32_t below = byte_perm(kLevelBytes<4, 0>, kLevelBytes<4, 4>, index);
  const uint32_t above = byte_perm(kLevelBytes<4, 8>, kLevelBytes<4, 12>, index);
  const uint32_t chosen = __byte_perm(codes << 4, codes, top);  // a nibble's top bit, eight times
  return (chosen & above) | (~chosen & below);
}

// 4 bits. level[n]: group n of the words 0 to 3, a byte each.
__device__ __forceinline__ void unpack(const uint32_t (&word)[4], uint32_t (&level)[kCodedGroups]) {
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  const uint32_t even[2] = {(word[0] & kLow) | (word[1] << 4 & ~kLow), (word[2] & kLow) | (word[3] << 4 & ~kLow)};
  const uint32_t odd[2] = {(word[0] >> 4 & kLow) | (word[1] & ~kLow), (word[2] >> 4 & kLow) | (word[3] & ~kLow)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Groups 4 i and 4 i + 2, then 4 i + 1 and 4 i + 3; those of one group side by side.
    const uint32_t select = i == 0 ? 0x5140 : 0x7362;
    const uint32_t pair[2] = {byte_perm(even[0], even[1], select), byte_perm(odd[0], odd[1], select)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t index = pair[j] & 0x77777777u;
      level[4 * i + j] = look_up(pair[j], index, 0xd9c8);
      level[4 * i + 2 + j] = look_up(pair[j], index >> 16, 0xfbea);
    }
  }
}

// Four codes of 2 bits at bit 2 n of the halves of a and b, each the low bits of a nibble.
__device__ __forceinline__ uint32_t select_pairs(uint32_t a, uint32_t b, int n) {
  const uint32_t v = a >> 2 * n & 0x00030003u, w = b >> 2 * n & 0x00030003u;
  return byte_perm(v | v >> 12, w | w >> 12, 0x0040);
}
// top: the third bits of four codes, each the highest of a byte.
__device__ __forceinline__ uint32_t look_up_3(uint32_t select, uint32_t top) {
  const uint32_t chosen = __byte_perm(top, 0, 0xba98);
  return (chosen & byte_perm(kLevelBytes<3, 4>, 0, select)) | (~chosen & byte_perm(kLevelBytes<3, 0>, 0, select));
}

// ---- a lane's share of rows, by bits: what it loads, and the levels of it ----
//
// Keys: level[n] has channels 16 n + 4 c + 0 to 3 of one token. Values: even[n] and odd[n] have channels 16 n + 2 g and
// the next of four tokens.

template <int kBits>
struct LaneCodes;

template <>
struct LaneCodes<4> {
  struct Key {
    uint4 low;
    __device__ __forceinline__ void load(const char* row, int c) { low = load16(row + 16 * c); }
    __device__ __forceinline__ void levels(int, uint32_t (&level)[kCodedGroups]) const {
      const uint32_t words[4] = {low.x, low.y, low.z, low.w};
      unpack(words, level);
    }
  };
  struct Values {
    uint2 low[4];
    __device__ __forceinline__ void load(int token, const char* row, int g) {
      low[token] = __ldg(reinterpret_cast<const uint2*>(row) + g);
    }
    __device__ __forceinline__ void levels(int, uint32_t (&even)[kCodedGroups], uint32_t (&odd)[kCodedGroups]) const {
      const uint32_t first[4] = {low[0].x, low[1].x, low[2].x, low[3].x};
      const uint32_t second[4] = {low[0].y, low[1].y, low[2].y, low[3].y};
      unpack(first, even);
      unpack(second, odd);
    }
  };
};

template <>
struct LaneCodes<2> {
  struct Key {
    uint2 low;
    __device__ __forceinline__ void load(const char* row, int c) {
      low = __ldg(reinterpret_cast<const uint2*>(row) + c);
    }
    __device__ __forceinline__ void levels(int, uint32_t (&level)[kCodedGroups]) const {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n) level[n] = byte_perm(kLevelBytes<2, 0>, 0, select_pairs(low.x, low.y, n));
    }
  };
  struct Values {
    uint32_t low[4];
    __device__ __forceinline__ void load(int token, const char* row, int g) {
      low[token] = __ldg(reinterpret_cast<const uint32_t*>(row) + g);
    }
    // The selectors of channel 2 g + odd.
    __device__ __forceinline__ uint32_t select(int n, int odd) const {
      const uint32_t halves = odd ? 0x7632 : 0x5410;
      return select_pairs(byte_perm(low[0], low[1], halves), byte_perm(low[2], low[3], halves), n);
    }
    __device__ __forceinline__ void levels(int, uint32_t (&even)[kCodedGroups], uint32_t (&odd)[kCodedGroups]) const {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n) {
        even[n] = byte_perm(kLevelBytes<2, 0>, 0, select(n, 0));
        odd[n] = byte_perm(kLevelBytes<2, 0>, 0, select(n, 1));
      }
    }
  };
};

// The third bits are a mask behind the others.
template <>
struct LaneCodes<3> {
  static constexpr int kMaskAt = 2 * kCodedDim / 8;
  struct Mask {
    uint32_t word[4];
    __device__ __forceinline__ void load(const char* row) {
      const uint4 v = load_cached16(row + kMaskAt);
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
    __device__ __forceinline__ uint32_t from(int n, int channel) const { return word[n / 2] >> (n % 2 * 16 + channel); }
  };
  struct Key {
    LaneCodes<2>::Key two;
    Mask mask;
    __device__ __forceinline__ void load(const char* row, int c) {
      two.load(row, c);
      mask.load(row);
    }
    __device__ __forceinline__ void levels(int c, uint32_t (&level)[kCodedGroups]) const {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n)  // bits 0 to 3 become bits 7, 15, 23, 31
        level[n] = look_up_3(select_pairs(two.low.x, two.low.y, n), (mask.from(n, 4 * c) & 15) * 0x10204080u);
    }
  };
  struct Values {
    LaneCodes<2>::Values two;
    Mask mask[4];
    __device__ __forceinline__ void load(int token, const char* row, int g) {
      two.load(token, row, g);
      mask[token].load(row);
    }
    __device__ __forceinline__ uint32_t level(int n, int channel, int odd) const {
      uint32_t top = 0;
#pragma unroll
      for (int t = 0; t < 4; ++t) top |= (mask[t].from(n, channel + odd) & 1) << (8 * t + 7);
      return look_up_3(two.select(n, odd), top);
    }
    __device__ __forceinline__ void levels(int g, uint32_t (&even)[kCodedGroups], uint32_t (&odd)[kCodedGroups]) const {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n) even[n] = level(n, 2 * g, 0), odd[n] = level(n, 2 * g, 1);
    }
  };
};

// Codes are levels + 128 already.
template <>
struct LaneCodes<8> {
  struct Key {
    uint32_t word[kCodedGroups];
    __device__ __forceinline__ void load(const char* row, int c) {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n) word[n] = __ldg(reinterpret_cast<const uint32_t*>(row) + 4 * n + c);
    }
    __device__ __forceinline__ void levels(int, uint32_t (&level)[kCodedGroups]) const {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n) level[n] = word[n];
    }
  };
  struct Values {
    uint16_t pair[4][kCodedGroups];
    __device__ __forceinline__ void load(int token, const char* row, int g) {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n) pair[token][n] = __ldg(reinterpret_cast<const uint16_t*>(row) + 8 * n + g);
    }
    __device__ __forceinline__ void levels(int, uint32_t (&even)[kCodedGroups], uint32_t (&odd)[kCodedGroups]) const {
#pragma unroll
      for (int n = 0; n < kCodedGroups; ++n) {
        const uint32_t low = pair[0][n] | static_cast<uint32_t>(pair[1][n]) << 16;
        const uint32_t high = pair[2][n] | static_cast<uint32_t>(pair[3][n]) << 16;
        even[n] = byte_perm(low, high, 0x6420), odd[n] = byte_perm(low, high, 0x7531);
      }
    }
  };
};

// The first or last two of four levels as halves, 1152 too large.
__device__ __forceinline__ uint32_t widen_levels(uint32_t level, int which) {
  return byte_perm(level, 0x64646464u, which == 0 ? 0x4140 : 0x4342);
}

// ---- keys: x[n][u] holds channels 16 n + 4 c + 2 u and the next, of lane c of four ----

using KeyWords = uint32_t[kCodedGroups][2];

// The Hadamard transform over channels `stride` apart, without its norm.
__device__ __forceinline__ void rotate_words(KeyWords& x, int stride) {
  constexpr uint32_t kMinus = 0xbc00bc00u, kPlus = 0x3c003c00u, kPlusMinus = 0xbc003c00u;
  const auto exchange = [](uint32_t& a, uint32_t& b) {
    const uint32_t sum = add_f16x2(a, b);
    b = fma_f16x2(b, kMinus, a), a = sum;
  };
  const auto across = [&](int lanes) {
    const uint32_t sign = lane_id() & lanes ? kMinus : kPlus;
#pragma unroll
    for (int n = 0; n < kCodedGroups; ++n)
#pragma unroll
      for (int u = 0; u < 2; ++u) x[n][u] = fma_f16x2(x[n][u], sign, __shfl_xor_sync(kFullWarp, x[n][u], lanes));
  };
  if (stride <= 1) {
#pragma unroll
    for (int n = 0; n < kCodedGroups; ++n)
#pragma unroll
      for (int u = 0; u < 2; ++u) x[n][u] = fma_f16x2(x[n][u], kPlusMinus, byte_perm(x[n][u], 0, 0x1032));
  }
  if (stride <= 2) {
#pragma unroll
    for (int n = 0; n < kCodedGroups; ++n) exchange(x[n][0], x[n][1]);
  }
  if (stride <= 4) across(1);
  if (stride <= 8) across(2);
#pragma unroll
  for (int h = 1; h < kCodedGroups; h *= 2) {
    if (stride > 16 * h) continue;
#pragma unroll
    for (int n = 0; n < kCodedGroups; ++n)
#pragma unroll
      for (int u = 0; u < 2; ++u)
        if (!(n & h)) exchange(x[n][u], x[n + h][u]);
  }
}

// Groups n and n + 4 as complex numbers, turned by angles of which the lane has word u of group n.
__device__ __forceinline__ void turn_words(uint32_t& x, uint32_t& y, uint32_t cosine, uint32_t sine) {
  const uint32_t re = fma_f16x2(x, cosine, mul_f16x2(y, sine ^ 0x80008000u));
  y = fma_f16x2(x, sine, mul_f16x2(y, cosine)), x = re;
}

}  // namespace sic::gpu
