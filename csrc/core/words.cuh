// Words of 1 to 16 bytes, as kernels move what they need not understand.
#pragma once
#include <type_traits>

#include "core/gpu.cuh"

namespace sic::gpu {

template <class Word>
__device__ __forceinline__ Word load_word(const char* p) {
  if constexpr (sizeof(Word) == 16) {
    return load16(p);
  } else {
    return *reinterpret_cast<const Word*>(p);
  }
}
template <class Word>
__device__ __forceinline__ void store_word(char* p, Word w) {
  if constexpr (sizeof(Word) == 16) {
    store16(p, w);
  } else {
    *reinterpret_cast<Word*>(p) = w;
  }
}

// Calls body(a word) with the widest of at most `bytes`, a power of two.
template <class Body>
void with_word(int64_t bytes, Body body) {
  if (bytes >= 16) return body(uint4{});
  if (bytes == 8) return body(uint2{});
  if (bytes == 4) return body(uint32_t{});
  if (bytes == 2) return body(uint16_t{});
  body(uint8_t{});
}

}  // namespace sic::gpu
