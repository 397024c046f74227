// Where the boundary hidden states of a layer lie: (fingerprint, digest of the tokens before, layer) -> block of a
// pool.
//
// Open addressing on the 36 bytes of the key, all of which are compared: never a nearest entry. Entries lie in the
// table, one cache line each. Thread-safe: every call is atomic.
#pragma once
#include <cstdint>
#include <cstring>
#include <mutex>

#include "core/check.h"
#include "core/spin_lock.h"
#include "core/tag_table.h"
#include "core/use_order.h"

namespace sic::replay {

struct SlotKey {
  uint8_t fingerprint[16];
  uint8_t prefix[16];
  int32_t layer;
};
static_assert(sizeof(SlotKey) == 36);

// A block, and whether it holds what a run of the model would have computed.
struct Slot {
  int64_t offset, nbytes;
  uint64_t generation;
  bool exact;
};

class SlotTable {
 public:
  // Memory for all entries is reserved, and used as they come. `hash_bits`: fewer, so that tests can make keys collide.
  explicit SlotTable(int64_t capacity, int hash_bits = 64);

  // Whether there is one; approximate ones count only if they are asked for. A hit is a use. `pin`: in the same step.
  bool lookup(const SlotKey& key, bool approximate, bool pin, Slot* slot);
  // Adds one, or puts it in the place of another, which is returned (generation 0: none). An error as check_insert()
  // says, or if the table is full: evict first.
  Slot insert(const SlotKey& key, const Slot& slot);
  // An error if there is one that may not be replaced: it is pinned, or exact where the new one would not be.
  void check_insert(const SlotKey& key, bool exact) const;
  // Removes the one that was used longest ago; false if all are pinned.
  bool evict(Slot* slot);
  // Of the entry with this key that has this generation; an error if there is none.
  void pin(const SlotKey& key, uint64_t generation);
  void unpin(const SlotKey& key, uint64_t generation);
  void remove(const SlotKey& key, uint64_t generation);  // not while it is pinned

  struct Stats {
    int64_t capacity, entries, pinned, approximate, hits, misses, collisions, insertions, evictions, bytes;
  };
  Stats stats() const;

 private:
  struct Entry;
  using Guard = std::lock_guard<SpinLock>;

  uint64_t hash_of(const SlotKey& key) const;
  Entry& entry(uint32_t i) const;
  // `collided`: set if another key has this hash.
  Entry* find(const SlotKey& key, uint64_t hash, uint32_t* number, bool* collided = nullptr) const;
  static void check_replace(const Entry* e, bool exact);
  Entry& expect(const char* op, const SlotKey& key, uint64_t generation, uint32_t* number);
  void drop(Entry& e, uint32_t number);

  const int64_t capacity_;
  const uint64_t hash_mask_;
  mutable SpinLock mutex_;
  TagTable table_;
  UseOrder order_;
  int64_t entries_ = 0, pinned_ = 0, approximate_ = 0;
  int64_t hits_ = 0, misses_ = 0, collisions_ = 0, insertions_ = 0, evictions_ = 0;
};

}  // namespace sic::replay
