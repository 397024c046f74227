#include "replay/slot_table.h"

#include <string>

namespace sic::replay {
namespace {

constexpr int64_t kMostEntries = int64_t{1} << 24;

int64_t checked(int64_t capacity) {
  Check("SlotStore")
      .require(capacity >= 1 && capacity <= kMostEntries, "capacity", std::to_string(capacity), "1 to 2^24 entries");
  return capacity;
}

uint64_t load64(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// The high half of a product depends on all bits of both.
uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
}

}  // namespace

struct alignas(64) SlotTable::Entry {
  SlotKey key;
  uint32_t pins;
  uint64_t offset, generation;
  uint64_t nbytes : 63, exact : 1;

  bool holds(const SlotKey& other) const { return std::memcmp(&key, &other, sizeof key) == 0; }
  Slot slot() const { return {static_cast<int64_t>(offset), static_cast<int64_t>(nbytes), generation, exact == 1}; }
};

SlotTable::SlotTable(int64_t capacity, int hash_bits)
    : capacity_(checked(capacity)),
      hash_mask_(hash_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1),
      table_(capacity_, sizeof(Entry)),
      order_(table_.places()) {}

// Both digests are random already; the constants (of pi) keep what callers choose apart.
uint64_t SlotTable::hash_of(const SlotKey& k) const {
  const uint64_t layer = static_cast<uint32_t>(k.layer);
  const uint64_t a = mix(load64(k.prefix) ^ 0x243f6a8885a308d3, load64(k.prefix + 8) ^ 0x13198a2e03707344);
  const uint64_t b = mix(load64(k.fingerprint) ^ 0xa4093822299f31d0, load64(k.fingerprint + 8) ^ 0x082efa98ec4e6c89);
  return mix(a ^ layer ^ 0x452821e638d01377, b ^ 0xbe5466cf34e90c6c) & hash_mask_;
}

inline SlotTable::Entry& SlotTable::entry(uint32_t i) const { return *reinterpret_cast<Entry*>(table_.record(i)); }

// Entries under the same tag are other keys one time in 256; only then the other's hash is worth computing.
inline SlotTable::Entry* SlotTable::find(const SlotKey& key, uint64_t hash, uint32_t* number, bool* collided) const {
  const auto place = table_.find(hash, [&](char* record) {
    const Entry& e = *reinterpret_cast<Entry*>(record);
    if (e.holds(key)) return true;
    if (collided && hash_of(e.key) == hash) *collided = true;
    return false;
  });
  *number = place.number;
  return reinterpret_cast<Entry*>(place.record);
}

bool SlotTable::lookup(const SlotKey& key, bool approximate, bool pin, Slot* slot) {
  const uint64_t hash = hash_of(key);
  table_.prefetch(hash);
  const Guard lock(mutex_);
  uint32_t number;
  bool collided = false;
  Entry* e = find(key, hash, &number, &collided);
  collisions_ += collided;
  if (!e || !(e->exact || approximate)) {
    ++misses_;
    return false;
  }
  ++hits_;
  if (pin && ++e->pins == 1) {
    order_.leave(number);
    ++pinned_;
  }
  if (e->pins == 0) order_.use(number);
  *slot = e->slot();
  return true;
}

void SlotTable::check_replace(const Entry* e, bool exact) {
  if (!e) return;
  const Check check("SlotStore.put");
  check.require(e->pins == 0, "key", "one whose slot is pinned", "a slot that may be replaced");
  check.require(exact || !e->exact, "exact", "False", "True: there is an exact slot with this key");
}

void SlotTable::check_insert(const SlotKey& key, bool exact) const {
  const Guard lock(mutex_);
  uint32_t number;
  check_replace(find(key, hash_of(key), &number), exact);
}

Slot SlotTable::insert(const SlotKey& key, const Slot& slot) {
  const uint64_t hash = hash_of(key);
  const Guard lock(mutex_);
  uint32_t number;
  Entry* e = find(key, hash, &number);
  check_replace(e, slot.exact);
  Slot before = {};
  if (e) {
    before = e->slot();
    approximate_ -= !before.exact;
  } else {
    Check("SlotStore.put")
        .require(entries_ < capacity_, "capacity", std::to_string(entries_) + " entries", "room for one more");
    const auto place = table_.insert(hash);
    number = place.number;
    e = &entry(number);
    ++entries_;
  }
  *e = {key, 0, static_cast<uint64_t>(slot.offset), slot.generation, static_cast<uint64_t>(slot.nbytes), slot.exact};
  approximate_ += !slot.exact;
  order_.use(number);
  ++insertions_;
  return before;
}

bool SlotTable::evict(Slot* slot) {
  const Guard lock(mutex_);
  const uint32_t i = order_.oldest([](uint32_t) { return true; });
  if (i == UseOrder::kNone) return false;
  *slot = entry(i).slot();
  drop(entry(i), i);
  ++evictions_;
  return true;
}

void SlotTable::drop(Entry& e, uint32_t number) {
  order_.leave(number);
  table_.erase(hash_of(e.key), number);
  approximate_ -= !e.exact;
  --entries_;
}

SlotTable::Entry& SlotTable::expect(const char* op, const SlotKey& key, uint64_t generation, uint32_t* number) {
  Entry* e = find(key, hash_of(key), number);
  Check(op).require(e && e->generation == generation, "slot", "one that is not in the store",
                    "a slot of this store: it was evicted, replaced or removed");
  return *e;
}

void SlotTable::pin(const SlotKey& key, uint64_t generation) {
  const Guard lock(mutex_);
  uint32_t number;
  Entry& e = expect("SlotStore.pin", key, generation, &number);
  if (++e.pins > 1) return;
  order_.leave(number);
  ++pinned_;
}

void SlotTable::unpin(const SlotKey& key, uint64_t generation) {
  const Guard lock(mutex_);
  uint32_t number;
  Entry& e = expect("SlotStore.unpin", key, generation, &number);
  Check("SlotStore.unpin").require(e.pins > 0, "slot", "one that is not pinned", "a pinned one");
  if (--e.pins > 0) return;
  order_.use(number);
  --pinned_;
}

void SlotTable::remove(const SlotKey& key, uint64_t generation) {
  const Guard lock(mutex_);
  uint32_t number;
  Entry& e = expect("SlotStore.remove", key, generation, &number);
  Check("SlotStore.remove").require(e.pins == 0, "slot", "one that is pinned", "one that is not");
  drop(e, number);
}

SlotTable::Stats SlotTable::stats() const {
  const Guard lock(mutex_);
  return {capacity_, entries_,    pinned_,     approximate_, hits_,
          misses_,   collisions_, insertions_, evictions_,   table_.bytes() + order_.bytes()};
}

}  // namespace sic::replay
