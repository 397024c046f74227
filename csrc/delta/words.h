// Short byte strings, a word at a time: the standard functions cost more than the work where keys are compared and
// hashed between two cache misses.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sic::delta {

inline uint64_t load64(const char* p) {
  uint64_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline uint64_t load32(const char* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// n <= 16 bytes as two words that overlap in the middle: with n they determine every byte.
struct Ends {
  uint64_t first = 0, last = 0;
  Ends(const char* p, size_t n) {
    if (n >= 8) {
      first = load64(p), last = load64(p + n - 8);
    } else if (n >= 4) {
      first = load32(p), last = load32(p + n - 4);
    } else if (n > 0) {
      first = static_cast<uint8_t>(p[0]);
      last = static_cast<uint64_t>(static_cast<uint8_t>(p[n / 2])) << 8 | static_cast<uint8_t>(p[n - 1]);
    }
  }
};

inline bool equal_bytes(const char* a, const char* b, size_t n) {
  typedef uint64_t Pair __attribute__((vector_size(16)));
  if (n != 64) {
    if (n > 16) return std::memcmp(a, b, n) == 0;
    const Ends x(a, n), y(b, n);
    return ((x.first ^ y.first) | (x.last ^ y.last)) == 0;
  }
  Pair x[4], y[4];  // 16 tokens
  std::memcpy(x, a, sizeof x);
  std::memcpy(y, b, sizeof y);
  const Pair differ = (x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3]);
  return (differ[0] | differ[1]) == 0;
}

}  // namespace sic::delta
