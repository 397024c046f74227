// A hash table with its entries in it, under one-byte tags. An entry stays where it was put, so its place serves as its
// number.
//
// A bucket is 12 places. Its 16 bytes hold a one-byte tag for each, compared at once, and how many entries went past
// the bucket because it was full: that count ends a search, so there are no tombstones, and a table sized for its
// capacity is never rebuilt. Within its bucket a hash has a home, which three in four get: a search asks memory for the
// tags and for the likely entry together, and so waits once where a table of entry numbers would wait twice.
#pragma once
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/dtype.h"
#include "core/zeroed.h"

namespace sic {

class TagTable {
 public:
  struct Place {
    uint32_t number;
    char* record;  // null: none
  };

  // Records are zero where there was no entry yet; `record_bytes`: a multiple of 64.
  TagTable(int64_t capacity, uint64_t record_bytes)
      : record_bytes_(record_bytes),
        buckets_(buckets_for(capacity)),
        mask_(buckets_.size() - 1),
        records_(static_cast<int64_t>(places() * record_bytes)) {}

  uint32_t places() const { return static_cast<uint32_t>(mask_ + 1) * kPlaces; }
  uint64_t record_bytes() const { return record_bytes_; }
  int64_t bytes() const { return buckets_.bytes() + records_.bytes(); }
  char* record(uint32_t number) const { return records_.data() + number * record_bytes_; }

  // Asks memory for what a search will read. GCC would drop the call of a function that does nothing else.
  SIC_FLAT void prefetch(uint64_t hash) const {
    const uint64_t b = hash & mask_;
    const char* likely = record(number(b, home(hash)));
    __builtin_prefetch(&buckets_[b]);
    __builtin_prefetch(likely);
    __builtin_prefetch(likely + 64);
  }

  // The first place with the hash's tag for which same(record) holds.
  template <class Same>
  Place find(uint64_t hash, Same same) const {
    const uint8_t tag = tag_of(hash);
    const uint32_t at_home = 1u << home(hash);
    uint64_t b = hash & mask_;
    for (uint64_t step = 1; step <= mask_ + 1; b = (b + step++) & mask_) {
      const Bucket& here = buckets_[b];
      for (uint32_t m = here.matches(tag); m != 0;) {
        const uint32_t i = choose(m, at_home);
        const uint32_t found = number(b, i);
        if (same(record(found))) return {found, record(found)};
        m &= ~(1u << i);
      }
      if (here.passed == 0) break;
    }
    return {0, nullptr};
  }

  // Takes a place. There is one: the table has more than `capacity`.
  Place insert(uint64_t hash) {
    uint64_t b = hash & mask_;
    for (uint64_t step = 1;; b = (b + step++) & mask_) {
      Bucket& here = buckets_[b];
      const uint32_t free = here.matches(0);
      if (free != 0) {
        const uint32_t i = choose(free, 1u << home(hash));
        here.tag[i] = tag_of(hash);
        return {number(b, i), record(number(b, i))};
      }
      ++here.passed;
    }
  }

  // Frees a place that was taken for this hash.
  void erase(uint64_t hash, uint32_t number) {
    uint64_t b = hash & mask_;
    for (uint64_t step = 1; b != number / kPlaces; b = (b + step++) & mask_) --buckets_[b].passed;
    buckets_[b].tag[number % kPlaces] = 0;
  }

 private:
  static constexpr uint32_t kPlaces = 12;

  struct alignas(16) Bucket {
    uint8_t tag[kPlaces];  // 0: free
    uint32_t passed;

    // A bit for each place with the tag.
    uint32_t matches(uint8_t wanted) const {
#if defined(__SSE2__)
      const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(this));
      const __m128i equal = _mm_cmpeq_epi8(all, _mm_set1_epi8(static_cast<char>(wanted)));
      return static_cast<uint32_t>(_mm_movemask_epi8(equal)) & ((1u << kPlaces) - 1);
#else
      uint32_t bits = 0;
      for (uint32_t i = 0; i < kPlaces; ++i) bits |= static_cast<uint32_t>(tag[i] == wanted) << i;
      return bits;
#endif
    }
  };
  static_assert(sizeof(Bucket) == 16, "one vector");

  // At most three quarters full: one bucket in eight has then been passed.
  static int64_t buckets_for(int64_t capacity) {
    int64_t n = 1;
    while (n * kPlaces * 3 / 4 < capacity) n *= 2;
    return n;
  }
  static uint32_t number(uint64_t bucket, uint32_t i) { return static_cast<uint32_t>(bucket) * kPlaces + i; }
  // Bits that neither the bucket nor the home is made of.
  static uint8_t tag_of(uint64_t hash) {
    const auto top = static_cast<uint8_t>(hash >> 56);
    return top ? top : 1;
  }
  static uint32_t home(uint64_t hash) { return static_cast<uint32_t>((hash >> 40 & 0xffff) * kPlaces >> 16); }
  // One of the places m, home if it is among them; without a branch, which would be mispredicted one time in four.
  static uint32_t choose(uint32_t m, uint32_t at_home) {
    return static_cast<uint32_t>(__builtin_ctz(m & at_home ? m & at_home : m));
  }

  const uint64_t record_bytes_;
  Zeroed<Bucket> buckets_;
  const uint64_t mask_;
  Zeroed<char> records_;
};

}  // namespace sic
