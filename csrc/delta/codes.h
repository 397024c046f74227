// The coded form, the part that every backend shares: fields of a code row, levels, tags.
//
// A code of b bits is split into fields: 2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 8 = 8 bits, low bits first.
// Fields of 2 and 4 bits: channels lie in 16 lanes, d = 16 n + lane. The n of a row are split into parts, powers of two
// of at most 32 bits; a part is one word a lane, lane after lane, its n-th channel at bit w n. So a vector load brings
// 16 lanes, a shift the next 16 channels, and no value crosses a lane. A field of 1 bit is a mask in channel order, a
// field of 8 bits a byte a channel.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace sic::delta {

constexpr int kLanes = 16;
constexpr int kMaxTemplates = 256;      // an id is a byte
constexpr int kMaxDim = 1024;           // integer dots stay exact in float
constexpr uint16_t kRawScale = 0x7e00;  // a tag's k_scale that says: the row is raw, its code row begins with the entry
constexpr int kRopeBlock = 64;          // positions that share a row of hi

// Beside every code row; the scales are half precision.
struct Tag {
  uint16_t k_scale, v_scale;
  uint8_t k_id, v_id;
};
constexpr int kTagBytes = 6;
static_assert(sizeof(Tag) == kTagBytes);

constexpr bool bits_allowed(int64_t bits) { return (bits >= 2 && bits <= 5) || bits == 8; }
// The first field's width; what is left is one bit or none.
constexpr SIC_HD int low_bits(int bits) { return bits == 3 ? 2 : bits == 5 ? 4 : bits; }
constexpr SIC_HD int64_t lane_channels(int64_t D) { return (D + kLanes - 1) / kLanes; }
// Channels a lane in the part that begins where `left` are left, and bytes of its words.
constexpr SIC_HD int64_t part_channels(int64_t left, int width) {
  int64_t n = 1;
  while (2 * n <= left && 2 * n * width <= 32) n *= 2;
  return n;
}
constexpr SIC_HD int64_t word_bytes(int64_t channels, int width) { return (channels * width + 7) / 8; }
constexpr SIC_HD int64_t low_field_bytes(int64_t D, int bits) {
  const int width = low_bits(bits);
  if (width == 8) return D;
  int64_t bytes = 0;
  for (int64_t left = lane_channels(D), n = 0; left > 0; left -= n)
    n = part_channels(left, width), bytes += kLanes * word_bytes(n, width);
  return bytes;
}
constexpr SIC_HD int64_t code_bytes(int64_t D, int bits) {
  const int64_t mask = low_bits(bits) == bits ? 0 : (D + 7) / 8;
  return (low_field_bytes(D, bits) + mask + 3) / 4 * 4;
}

}  // namespace sic::delta
