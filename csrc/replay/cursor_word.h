// The progress word of a run: where it goes on, in one 64-bit store that a process, or a device, makes after its work.
//
//   bits 63..52  check     CRC over the rest: a torn, damaged or never written word is seen
//        51..40  epoch     the number of the run, its low bits
//        39..28  layer     the segment that runs next
//        27..0   position  the first token of the chunk that it runs on
#pragma once
#include <atomic>
#include <cstdint>

#include "core/dtype.h"

namespace sic::replay {

constexpr int kCheckBits = 12, kEpochBits = 12, kLayerBits = 12, kPositionBits = 28;
constexpr uint64_t kEpochs = uint64_t{1} << kEpochBits, kLayers = uint64_t{1} << kLayerBits,
                   kPositions = uint64_t{1} << kPositionBits;

struct Place {
  uint64_t epoch = 0, layer = 0, position = 0;
};

// CRC-12 (polynomial 0x80f) of the 52 low bits, most significant first. Not 0 for a word of zeros.
SIC_HD inline uint64_t check_of(uint64_t bits) {
  uint32_t crc = 0xa5a;
  for (int i = 51; i >= 0; --i) {
    const uint32_t top = (crc >> 11) ^ static_cast<uint32_t>(bits >> i & 1);
    crc = (crc << 1 & 0xfff) ^ (top & 1 ? 0x80f : 0);
  }
  return crc;
}

// Fields beyond their bits are cut off: callers check once what a plan can reach.
SIC_HD inline uint64_t pack(const Place& p) {
  const uint64_t bits = (p.epoch & (kEpochs - 1)) << (kLayerBits + kPositionBits) |
                        (p.layer & (kLayers - 1)) << kPositionBits | (p.position & (kPositions - 1));
  return check_of(bits) << (64 - kCheckBits) | bits;
}

// False: not a word that pack() made.
inline bool unpack(uint64_t word, Place* place) {
  const uint64_t bits = word & ((uint64_t{1} << (64 - kCheckBits)) - 1);
  if (word >> (64 - kCheckBits) != check_of(bits)) return false;
  *place = {bits >> (kLayerBits + kPositionBits), bits >> kPositionBits & (kLayers - 1), bits & (kPositions - 1)};
  return true;
}

// What lies in memory that outlives the writer. The time comes first, so that a word never has an older one than its
// own.
struct Progress {
  std::atomic<uint64_t> word, stamp;

  void mark(const Place& place, uint64_t now) {
    stamp.store(now, std::memory_order_relaxed);
    word.store(pack(place), std::memory_order_release);
  }
};
static_assert(sizeof(Progress) == 16 && std::atomic<uint64_t>::is_always_lock_free);

}  // namespace sic::replay
