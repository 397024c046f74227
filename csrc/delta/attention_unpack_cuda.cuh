// 4-bit codes to levels in registers, and keys of half precision from them.
//
// A lane's codes are four words of eight channel groups each: of four neighbouring channels of one key, or of one
// channel of four values. Nibbles are brought together first, so that a look-up (byte_perm of a table of eight) makes
// four levels that belong together. Levels come as bytes of level + 128; 0x6400 in front of one makes it the half
// 1024 + 128 + level, exactly.
#pragma once
#include "delta/attention_cuda.h"

namespace sic::gpu {

constexpr int kCodedDim = 128, kCodedGroups = 8;  // channels of a head, channel groups of a word
constexpr uint32_t kLevelOffset = 0x64806480u;    // 1152, what a level is too large by

constexpr uint32_t level_bytes(int first) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(delta::kLevels4.level[first + i] + 128) << 8 * i;
  return word;
}

constexpr uint32_t kLevels0 = level_bytes(0), kLevels4 = level_bytes(4), kLevels8 = level_bytes(8),
                   kLevels12 = level_bytes(12);  // of codes from 0, 4, 8, 12

// Codes 0-7 (below 0) and 8-15 of four nibbles each, chosen by the nibbles' top bits.
__device__ __forceinline__ uint32_t look_up(uint32_t codes, uint32_t index, uint32_t top) {
  const uint32_t below = byte_perm(kLevels0, kLevels4, index), above = byte_perm(kLevels8, kLevels12, index);
  const uint32_t chosen = __byte_perm(codes << 4, codes, top);  // a nibble's top bit, eight times
  return (chosen & above) | (~chosen & below);
}

// level[n]: group n of the words 0 to 3, a byte each.
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
