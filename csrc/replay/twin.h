// A record in a mapped file that is either before or after an update, whenever the process is killed.
//
// It has two copies with sequence numbers and checksums. An update marks the older copy as being written, writes it,
// and then marks it as written: a process that dies in between leaves that mark, and the other copy holds. A copy that
// is neither whole nor so marked was damaged by something else, and then nothing says which state was the last: an
// error, not the other copy.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "core/crc32c.h"
#include "replay/pool_error.h"

namespace sic::replay {

template <class T>
struct Twin {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  // Far from each other, so that no damaged byte makes one the other.
  static constexpr uint64_t kWriting = 0x2e474e4954495257, kWritten = 0x2e4e455454495257;  // "WRITING.", "WRITTEN."

  struct Copy {
    uint64_t mark;
    uint32_t crc, zero;
    uint64_t sequence;
    T value;

    // Over all that follows it.
    uint32_t right_crc() const { return crc32c(&zero, sizeof(Copy) - offsetof(Copy, zero)); }
    bool is_whole() const { return mark == kWritten && crc == right_crc(); }
  } copies[2];

  // Both copies: before anything refers to the record.
  void init(const T& value) {
    for (uint64_t i : {0, 1}) write(copies[i], i + 1, value);
  }

  const T& load(const std::string& what) const {
    for (const Copy& copy : copies)
      if (!copy.is_whole() && copy.mark != kWriting) throw PoolError(what + " is damaged");
    if (copies[0].mark == kWriting && copies[1].mark == kWriting) throw PoolError(what + " is damaged");
    return peek();
  }
  // Unchecked.
  const T& peek() const { return copies[newest()].value; }

  void store(const T& value) {
    const int last = newest();
    write(copies[1 - last], copies[last].sequence + 1, value);
  }

 private:
  int newest() const {
    if (copies[0].mark != kWritten) return 1;
    return copies[1].mark == kWritten && copies[1].sequence > copies[0].sequence ? 1 : 0;
  }

  // A killed process has executed its stores up to some point of the program: so only the compiler must keep the order.
  static void write(Copy& copy, uint64_t sequence, const T& value) {
    Copy next;
    next.mark = kWriting;
    next.zero = 0;
    next.sequence = sequence;
    std::memcpy(&next.value, &value, sizeof value);
    next.crc = next.right_crc();
    *static_cast<volatile uint64_t*>(&copy.mark) = kWriting;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::memcpy(&copy, &next, sizeof next);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    *static_cast<volatile uint64_t*>(&copy.mark) = kWritten;
  }
};

}  // namespace sic::replay
