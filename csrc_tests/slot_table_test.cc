// The table of slots: exact keys, order of eviction, pins, collisions, threads.
#include "replay/slot_table.h"

#include <gtest/gtest.h>

#include <list>
#include <map>
#include <random>
#include <thread>
#include <vector>

namespace sic::replay {
namespace {

SlotKey key(uint8_t fingerprint, uint8_t prefix, int32_t layer) {
  SlotKey k = {};
  k.fingerprint[15] = fingerprint, k.prefix[15] = prefix, k.layer = layer;
  return k;
}

Slot slot(uint64_t generation, bool exact = true) {
  return {static_cast<int64_t>(generation) * 256, 64, generation, exact};
}

uint64_t found(SlotTable& table, const SlotKey& k, bool approximate = false, bool pin = false) {
  Slot s{};
  return table.lookup(k, approximate, pin, &s) ? s.generation : 0;
}

TEST(SlotTable, EveryByteOfTheKeyCounts) {
  SlotTable table(100);
  const SlotKey k = key(1, 2, 3);
  table.insert(k, slot(9));
  Slot s{};
  ASSERT_TRUE(table.lookup(k, false, false, &s));
  EXPECT_EQ(s.offset, 9 * 256);
  EXPECT_EQ(s.nbytes, 64);
  EXPECT_EQ(s.generation, 9u);
  EXPECT_TRUE(s.exact);
  for (size_t i = 0; i < sizeof(SlotKey); ++i) {
    SlotKey other = k;
    reinterpret_cast<uint8_t*>(&other)[i] ^= 1;
    EXPECT_EQ(found(table, other), 0u) << i;
  }
}

TEST(SlotTable, ApproximateOnlyWhereAskedFor) {
  SlotTable table(10);
  table.insert(key(1, 1, 1), slot(1, false));
  EXPECT_EQ(found(table, key(1, 1, 1)), 0u);
  EXPECT_EQ(found(table, key(1, 1, 1), true), 1u);
  EXPECT_EQ(table.stats().approximate, 1);
  EXPECT_EQ(table.insert(key(1, 1, 1), slot(2)).generation, 1u);
  EXPECT_EQ(table.stats().approximate, 0);
  EXPECT_EQ(found(table, key(1, 1, 1)), 2u);
  EXPECT_THROW(table.insert(key(1, 1, 1), slot(3, false)), ArgumentError);
  EXPECT_EQ(found(table, key(1, 1, 1)), 2u);
}

TEST(SlotTable, TheOldestThatIsNotPinnedGoes) {
  SlotTable table(10);
  for (uint8_t i = 1; i <= 4; ++i) table.insert(key(0, i, 0), slot(i));
  found(table, key(0, 1, 0));                              // used
  EXPECT_EQ(found(table, key(0, 2, 0), false, true), 2u);  // pinned
  table.pin(key(0, 2, 0), 2);
  Slot s{};
  ASSERT_TRUE(table.evict(&s));
  EXPECT_EQ(s.generation, 3u);
  table.unpin(key(0, 2, 0), 2);
  EXPECT_THROW(table.remove(key(0, 2, 0), 2), ArgumentError);
  EXPECT_THROW(table.insert(key(0, 2, 0), slot(9)), ArgumentError);
  ASSERT_TRUE(table.evict(&s));
  EXPECT_EQ(s.generation, 4u);
  table.unpin(key(0, 2, 0), 2);  // the newest now
  EXPECT_THROW(table.unpin(key(0, 2, 0), 2), ArgumentError);
  EXPECT_THROW(table.pin(key(0, 2, 0), 3), ArgumentError);  // of another generation
  ASSERT_TRUE(table.evict(&s));
  EXPECT_EQ(s.generation, 1u);
  table.remove(key(0, 2, 0), 2);
  EXPECT_FALSE(table.evict(&s));
  EXPECT_EQ(table.stats().entries, 0);
  EXPECT_EQ(table.stats().pinned, 0);
}

// With 4 bits of hash most keys share one: they are told apart, and counted.
TEST(SlotTable, CollidingKeysAgainstAPlainModel) {
  SlotTable table(64, 4);
  std::map<int, uint64_t> model;
  std::list<int> order;  // oldest first
  std::mt19937 random(3);
  uint64_t generation = 0;
  for (int step = 0; step < 20000; ++step) {
    const int i = static_cast<int>(random() % 200);
    const SlotKey k = key(0, static_cast<uint8_t>(i), 5);
    if (random() % 2) {
      const bool there = model.count(i);
      ASSERT_EQ(found(table, k), there ? model[i] : 0);
      if (there) order.remove(i), order.push_back(i);
      continue;
    }
    if (!model.count(i) && model.size() == 64) {
      EXPECT_THROW(table.insert(k, slot(1)), ArgumentError);
      Slot s{};
      ASSERT_TRUE(table.evict(&s));
      ASSERT_EQ(s.generation, model[order.front()]);
      model.erase(order.front()), order.pop_front();
    }
    const uint64_t before = model.count(i) ? model[i] : 0;
    ASSERT_EQ(table.insert(k, slot(++generation)).generation, before);
    model[i] = generation;
    order.remove(i), order.push_back(i);
  }
  EXPECT_GT(table.stats().collisions, 1000);
  EXPECT_EQ(table.stats().entries, 64);
}

TEST(SlotTable, Threads) {
  SlotTable table(1000);
  std::vector<std::thread> threads;
  for (uint8_t t = 1; t <= 4; ++t)
    threads.emplace_back([&table, t] {
      for (int i = 0; i < 20000; ++i) {
        const SlotKey k = key(t, static_cast<uint8_t>(i % 200), 0);
        const auto generation = static_cast<uint64_t>(t) << 32 | static_cast<uint64_t>(i % 200);
        if (i < 200) table.insert(k, slot(generation));
        EXPECT_EQ(found(table, k, false, true), generation);
        table.unpin(k, generation);
      }
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(table.stats().entries, 800);
  EXPECT_EQ(table.stats().pinned, 0);
  EXPECT_EQ(table.stats().hits, 80000);
}

}  // namespace
}  // namespace sic::replay
