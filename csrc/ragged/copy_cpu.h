// Copies and fills of rows, as bytes.
//
// An output that no cache keeps is written past the caches: an ordinary store first reads the line that it changes, a
// third of all traffic of a copy.
#pragma once
#include <cstring>

#include "core/simd.h"
#include "ragged/layout.h"

namespace sic::cpu::SIC_ISA {

constexpr int64_t kTaskBytes = int64_t{256} << 10;
constexpr int64_t kStreamBytes = int64_t{8} << 20;  // outputs from so many bytes on go past the caches
constexpr int64_t kLeastStreamed = 512;             // shorter runs do not: their ends are ordinary stores

// To an address that is a multiple of the vector's size.
SIC_INLINE void store_past_caches(char* p, vb v) {
#if defined(__AVX512BW__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bit_cast<__m512i>(v));
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bit_cast<__m256i>(v));
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), bit_cast<__m128i>(v));
#else
  store_as(p, v);
#endif
}
// Before another thread may read what was stored so.
SIC_INLINE void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

SIC_INLINE int64_t bytes_to_alignment(const char* p) { return -reinterpret_cast<intptr_t>(p) & (kBytes - 1); }

SIC_INLINE void copy_bytes(char* to, const char* from, int64_t n, bool past_caches) {
  if (!past_caches || n < kLeastStreamed) {
    std::memcpy(to, from, n);
    return;
  }
  const int64_t head = bytes_to_alignment(to);
  std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + 4 * kBytes <= n; i += 4 * kBytes) {
    const vb a = load_as<vb>(from + i), b = load_as<vb>(from + i + kBytes), c = load_as<vb>(from + i + 2 * kBytes),
             d = load_as<vb>(from + i + 3 * kBytes);
    store_past_caches(to + i, a), store_past_caches(to + i + kBytes, b);
    store_past_caches(to + i + 2 * kBytes, c), store_past_caches(to + i + 3 * kBytes, d);
  }
  std::memcpy(to + i, from + i, n - i);
}

// Elements of `item` bytes, the same one everywhere; n is a whole number of them.
SIC_INLINE void fill_bytes(char* to, int64_t fill, int64_t item, int64_t n, bool past_caches) {
  char pattern[2 * kBytes];
  for (int64_t i = 0; i < 2 * kBytes; i += item) std::memcpy(pattern + i, &fill, item);
  int64_t i = past_caches && n >= kLeastStreamed ? bytes_to_alignment(to) : 0;
  std::memcpy(to, pattern, i);
  const vb v = load_as<vb>(pattern + i % item);  // the vector may begin within an element
  if (past_caches && n >= kLeastStreamed)
    for (; i + kBytes <= n; i += kBytes) store_past_caches(to + i, v);
  for (; i + kBytes <= n; i += kBytes) store_as(to + i, v);
  std::memcpy(to + i, pattern + i % item, n - i);
}

// n rows; strides in bytes.
SIC_INLINE void copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t row, int64_t n,
                          bool past_caches) {
  if (n == 0) return;  // there may be no memory to copy from
  if (to_stride == row && from_stride == row) return copy_bytes(to, from, n * row, past_caches);
  for (int64_t i = 0; i < n; ++i) copy_bytes(to + i * to_stride, from + i * from_stride, row, past_caches);
}
SIC_INLINE void fill_rows(char* to, int64_t to_stride, int64_t fill, int64_t item, int64_t row, int64_t n,
                          bool past_caches) {
  if (to_stride == row) return fill_bytes(to, fill, item, n * row, past_caches);
  for (int64_t i = 0; i < n; ++i) fill_bytes(to + i * to_stride, fill, item, row, past_caches);
}

// Rows that a task takes: of the shape alone.
SIC_INLINE int64_t rows_per_task(int64_t row_bytes) {
  return row_bytes >= kTaskBytes ? 1 : kTaskBytes / (row_bytes < 1 ? 1 : row_bytes);
}

}  // namespace sic::cpu::SIC_ISA
