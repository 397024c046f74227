// Random numbers that follow from where they are used: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random
// numbers: as easy as 1, 2, 3; 2011).
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace sic::replay {

struct Philox {
  uint32_t x[4];
};

// The block of four numbers at a counter.
SIC_HD SIC_FLAT inline Philox philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(a), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// The numbers of one (seed, position, layer), in blocks of four.
class Stream {
 public:
  SIC_HD SIC_FLAT explicit Stream(const int64_t* key)
      : seed_(static_cast<uint64_t>(key[0])),
        position_(static_cast<uint64_t>(key[1])),
        layer_(static_cast<uint32_t>(key[2])) {}
  SIC_HD SIC_FLAT Philox operator[](uint32_t block) const {
    return philox(block, layer_, static_cast<uint32_t>(position_), static_cast<uint32_t>(position_ >> 32),
                  static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32));
  }

 private:
  uint64_t seed_, position_;
  uint32_t layer_;
};

// From [0, 1): the 24 high bits, all of which a float holds.
SIC_HD SIC_FLAT inline float unit_float(uint32_t bits) { return static_cast<float>(bits >> 8) * (1.0f / 16777216.0f); }

}  // namespace sic::replay
