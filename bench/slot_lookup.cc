// Processor time of a slot's look-up among 10 000, in C++: the median and the quickest of some rounds.
//
//   cmake -G Ninja -B build/bench -DSIC_BENCH=ON -DSIC_CUDA=OFF -DSIC_ISAS=plain
//   cmake --build build/bench --target slot_lookup && build/bench/slot_lookup
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "replay/slot_table.h"

namespace {

using sic::replay::Slot;
using sic::replay::SlotKey;
using sic::replay::SlotTable;

constexpr int kSlots = 10000, kLookups = 200000, kRounds = 31;
constexpr double kTargetNs = 100;

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

// Looks the keys up in a random order; whether each was there, or none of them, as it should be.
bool report(const char* what, SlotTable& table, const std::vector<SlotKey>& known, bool there) {
  std::mt19937 random(0);
  std::vector<SlotKey> asked(kLookups);
  for (SlotKey& k : asked) k = known[random() % known.size()];
  std::vector<double> ns;
  for (int round = 0; round < kRounds; ++round) {
    int64_t found = 0;
    const std::clock_t begin = std::clock();
    for (const SlotKey& k : asked) {
      Slot slot;
      found += table.lookup(k, false, false, &slot);
    }
    ns.push_back(1e9 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / kLookups);
    if (found != (there ? kLookups : 0)) {
      std::fprintf(stderr, "slot_lookup: %s: got %lld of %d\n", what, static_cast<long long>(found), kLookups);
      return false;
    }
  }
  std::sort(ns.begin(), ns.end());
  const double median = ns[kRounds / 2];
  std::printf("slot look-up among %d, %s: %.1f ns, quickest %.1f ns (target <= %.0f ns: %s)\n", kSlots, what, median,
              ns[0], kTargetNs, median <= kTargetNs ? "yes" : "no");
  return true;
}

}  // namespace

int main() {
  SlotTable table(16384);
  const std::vector<SlotKey> present = keys(1), absent = keys(2);
  for (uint64_t i = 0; i < kSlots; ++i) table.insert(present[i], {static_cast<int64_t>(i) * 4096, 4096, i + 1, true});
  return report("present", table, present, true) && report("absent", table, absent, false) ? 0 : 1;
}
