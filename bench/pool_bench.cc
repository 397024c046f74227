// Processor time of the pool and of slots, in C++: the median and the quickest of some rounds. Exits with 1 where
// something is not found, or not given back, as it should be.
//
//   cmake -G Ninja -B build/bench -DSIC_BENCH=ON -DSIC_CUDA=OFF -DSIC_ISAS=plain
//   cmake --build build/bench --target pool_bench && build/bench/pool_bench
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "replay/memory_pool.h"
#include "replay/slot_table.h"

namespace {

using sic::replay::BlockRef;
using sic::replay::MemoryPool;
using sic::replay::Slot;
using sic::replay::SlotKey;
using sic::replay::SlotTable;

constexpr int kSlots = 10000, kLookups = 200000, kHeld = 1000, kCalls = 20000, kRounds = 31;
constexpr int64_t kPoolBytes = 64 << 20;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "pool_bench: %s\n", what);
  std::exit(1);
}

// Times a function that makes this many calls.
template <class Round>
void report(const char* what, int calls, Round round) {
  std::vector<double> ns;
  for (int i = 0; i < kRounds; ++i) {
    const std::clock_t begin = std::clock();
    round();
    ns.push_back(1e9 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / calls);
  }
  std::sort(ns.begin(), ns.end());
  std::printf("%s: %.1f ns, quickest %.1f ns\n", what, ns[kRounds / 2], ns[0]);
}

std::vector<SlotKey> keys(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<SlotKey> all(kSlots);
  for (SlotKey& k : all) {
    const uint64_t prefix[2] = {random(), random()};
    k = {};
    k.layer = 3;
    std::memcpy(k.prefix, prefix, sizeof(prefix));
  }
  return all;
}

// Keys in a random order; whether each is there, or none of them, as it should be.
void look_up(const char* what, SlotTable& table, const std::vector<SlotKey>& known, bool there) {
  std::mt19937 random(0);
  std::vector<SlotKey> asked(kLookups);
  for (SlotKey& k : asked) k = known[random() % known.size()];
  report(what, kLookups, [&] {
    int found = 0;
    for (const SlotKey& k : asked) {
      Slot slot;
      found += table.lookup(k, false, false, &slot);
    }
    require(found == (there ? kLookups : 0), what);
  });
}

void slots() {
  SlotTable table(16384);
  const std::vector<SlotKey> present = keys(1), absent = keys(2);
  for (uint64_t i = 0; i < kSlots; ++i) table.insert(present[i], {static_cast<int64_t>(i) * 4096, 4096, i + 1, true});
  look_up("slot look-up among 10 000, present (target 100 ns)", table, present, true);
  look_up("slot look-up among 10 000, absent (target 100 ns)", table, absent, false);
}

// Blocks of 1 byte to 16 KiB.
void blocks() {
  MemoryPool pool({{"a", kPoolBytes}}, {});
  std::mt19937 random(0);
  std::vector<BlockRef> held;
  MemoryPool::Request request;
  report("alloc or free at random, up to 1000 blocks held", kCalls, [&] {
    for (int i = 0; i < kCalls; ++i) {
      const bool more = held.size() < kHeld && (held.empty() || random() % 2);
      if (more) {
        request.nbytes = 1 + random() % (16 << 10);
        held.push_back(pool.alloc(request));
        continue;
      }
      std::swap(held[random() % held.size()], held.back());
      pool.free(held.back());
      held.pop_back();
    }
  });
  for (const BlockRef& block : held) pool.free(block);
  require(pool.used() == 0, "blocks are left");
}

void named_blocks() {
  const auto path = std::filesystem::temp_directory_path() / ("sic_pool_bench_" + std::to_string(getpid()));
  const std::unique_ptr<MemoryPool> pool = MemoryPool::create(path.string(), {{"a", kPoolBytes}}, 1024, false);
  std::filesystem::remove(path);  // the mapping keeps it
  MemoryPool::Request request;
  request.nbytes = 4096, request.name = "a name", request.dtype = "uint8", request.shape = {4096};
  report("named alloc and free in a file", kCalls, [&] {
    for (int i = 0; i < kCalls; ++i) pool->free(pool->alloc(request));
  });
  require(pool->used() == 0 && pool->all_named().empty(), "named blocks are left");
}

}  // namespace

int main() {
  slots();
  blocks();
  named_blocks();
}
