// The pool of csrc/replay: its allocator against a plain model, threads, the file under flipped bytes and torn updates.
#include "replay/memory_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "core/crc32c.h"

namespace sic::replay {
namespace {

constexpr int64_t kUnit = MemoryPool::kUnit;

MemoryPool pool_of(int64_t units, bool memory = false, bool poison = false) {
  return MemoryPool({{"a", units * kUnit}}, {memory, poison});
}

MemoryPool::Request request(int64_t nbytes, int64_t alignment = kUnit, const std::string& name = "") {
  MemoryPool::Request r;
  r.nbytes = nbytes, r.alignment = alignment, r.name = name, r.dtype = "uint8", r.shape = {nbytes};
  return r;
}

// A path that goes with the test.
class File {
 public:
  File() : path_(testing::TempDir() + "sic_pool_" + std::to_string(getpid())) { std::remove(path_.c_str()); }
  ~File() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }
  std::string read() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }
  // Its first bytes; the others stay.
  void overwrite(const std::string& bytes) const {
    std::fstream(path_, std::ios::binary | std::ios::in | std::ios::out) << bytes;
  }

 private:
  std::string path_;
};

// RFC 3720, B.4.
TEST(Crc32c, KnownAnswers) {
  std::string counted(32, 0);
  for (size_t i = 0; i < 32; ++i) counted[i] = static_cast<char>(i);
  EXPECT_EQ(crc32c(std::string(32, 0).data(), 32), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff').data(), 32), 0x62a8ab43u);
  EXPECT_EQ(crc32c(counted.data(), 32), 0x46dd794eu);
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);
}

// ---- the allocator ----

TEST(MemoryPool, BestFitTakesTheSmallestHoleThatIsLargeEnough) {
  MemoryPool pool = pool_of(20);
  std::vector<BlockRef> blocks;
  for (int64_t units : {3, 1, 2, 1, 4, 1}) blocks.push_back(pool.alloc(request(units * kUnit)));
  for (int i : {0, 2, 4}) pool.free(blocks[static_cast<size_t>(i)]);  // holes of 3, 2 and 4 at 0, 4 and 7
  EXPECT_EQ(pool.alloc(request(2 * kUnit)).offset, 4 * kUnit);
  EXPECT_EQ(pool.alloc(request(4 * kUnit)).offset, 7 * kUnit);
  EXPECT_EQ(pool.alloc(request(2 * kUnit)).offset, 0);
  EXPECT_EQ(pool.alloc(request(1)).offset, 2 * kUnit);
}

TEST(MemoryPool, FreedNeighboursBecomeOneHole) {
  for (const auto& order : {std::vector<size_t>{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}) {
    MemoryPool pool = pool_of(3);
    std::vector<BlockRef> blocks;
    for (int i = 0; i < 3; ++i) blocks.push_back(pool.alloc(request(kUnit)));
    EXPECT_THROW(pool.alloc(request(1)), PoolFull);
    for (size_t i : order) pool.free(blocks[i]);
    const auto s = pool.stats()[0];
    EXPECT_EQ(s.free_extents, 1);
    EXPECT_EQ(s.largest_free, 3 * kUnit);
    EXPECT_EQ(s.used, 0);
    EXPECT_EQ(s.peak, 3 * kUnit);
  }
}

TEST(MemoryPool, Alignment) {
  MemoryPool pool = pool_of(64);
  pool.alloc(request(1));
  EXPECT_EQ(pool.alloc(request(1, 4096)).offset, 4096);
  EXPECT_EQ(pool.alloc(request(1, 1024)).offset, 1024);
  EXPECT_EQ(pool.alloc(request(1)).offset, kUnit);  // the gaps are not lost
  for (int64_t wrong : {0, -256, 1, 128, 257, 384, 8192})
    EXPECT_THROW(pool.alloc(request(1, wrong)), ArgumentError) << wrong;
}

// A hole that is just large enough, though only because of where it begins, is found.
TEST(MemoryPool, AnAlignedHoleIsFoundAmongMisalignedOnes) {
  MemoryPool pool = pool_of(16 * 8);
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 16 * 8; ++i) blocks.push_back(pool.alloc(request(kUnit)));
  for (size_t i : {3, 5, 16, 21}) pool.free(blocks[i]);
  EXPECT_EQ(pool.alloc(request(1, 4096)).offset, 4096);
  EXPECT_THROW(pool.alloc(request(1, 4096)), PoolFull);
}

TEST(MemoryPool, OnlyBlocksInUseAreFreed) {
  MemoryPool pool = pool_of(8), other = pool_of(8);
  const BlockRef a = pool.alloc(request(kUnit));
  other.alloc(request(kUnit));
  const BlockRef foreign = other.alloc(request(kUnit));
  pool.free(a);
  const BlockRef b = pool.alloc(request(kUnit));
  EXPECT_EQ(a.offset, b.offset);
  EXPECT_FALSE(pool.is_alive(a));
  for (BlockRef wrong : {a, foreign, BlockRef{b.offset + 1, b.generation}, BlockRef{-256, b.generation},
                         BlockRef{1 << 20, b.generation}, BlockRef{b.offset, 0}})
    EXPECT_THROW(pool.free(wrong), ArgumentError) << wrong.offset;
  EXPECT_TRUE(pool.is_alive(b));
  pool.free(b);
  EXPECT_THROW(pool.free(b), ArgumentError);
  EXPECT_EQ(pool.used(), 0);
}

TEST(MemoryPool, AgainstAPlainModel) {
  std::mt19937 random(1);
  MemoryPool pool({{"a", 40 * kUnit}, {"b", 200 * kUnit}}, {false, false});
  std::map<int64_t, std::pair<int64_t, BlockRef>> used;  // offset -> size
  const int64_t begin[] = {0, 40 * kUnit}, end[] = {40 * kUnit, 240 * kUnit};
  for (int step = 0; step < 50000; ++step) {
    MemoryPool::Request r = request(1 + random() % (20 * kUnit), kUnit << random() % 5);
    r.part = static_cast<int>(random() % 2);
    const int64_t size = (r.nbytes + kUnit - 1) / kUnit * kUnit;
    if (random() % 2 && !used.empty()) {
      auto it = std::next(used.begin(), static_cast<int64_t>(random() % used.size()));
      pool.free(it->second.second);
      used.erase(it);
      continue;
    }
    int64_t smallest = 0;  // of the holes that have room
    for (int64_t at = begin[r.part]; at < end[r.part];) {
      const auto next = used.lower_bound(at);
      const int64_t last = next == used.end() || next->first > end[r.part] ? end[r.part] : next->first;
      const int64_t first = (at + r.alignment - 1) / r.alignment * r.alignment;
      if (first + size <= last && (smallest == 0 || last - at < smallest)) smallest = last - at;
      at = last == end[r.part] ? last : next->first + next->second.first;
    }
    try {
      const BlockRef block = pool.alloc(r);
      ASSERT_NE(smallest, 0);
      ASSERT_EQ(block.offset % r.alignment, 0);
      ASSERT_GE(block.offset, begin[r.part]);
      ASSERT_LE(block.offset + size, end[r.part]);
      const auto next = used.lower_bound(block.offset);
      ASSERT_TRUE(next == used.end() || next->first >= block.offset + size);
      ASSERT_TRUE(next == used.begin() || std::prev(next)->first + std::prev(next)->second.first <= block.offset);
      used[block.offset] = {size, block};
    } catch (const PoolFull&) {
      ASSERT_EQ(smallest, 0);
    }
  }
}

// Each thread writes its number into its blocks and finds it there at the end of them.
TEST(MemoryPool, AMillionRandomBlocksFromFourThreads) {
  constexpr int kThreads = 4, kSteps = 250000;
  MemoryPool pool({{"a", 24 << 20}, {"b", 9 << 20}, {"c", 3 << 20}}, {true, false});
  char* memory = pool.memory()->data();
  std::atomic<int> overlaps{0};
  const auto work = [&](int self) {
    struct Held {
      BlockRef block;
      int64_t nbytes;
    };
    std::mt19937 random(static_cast<unsigned>(self));
    std::vector<Held> held;
    const auto give = [&](size_t i) {
      const Held h = held[i];
      const char* p = memory + h.block.offset;
      overlaps += p[0] != self || p[h.nbytes / 2] != self || p[h.nbytes - 1] != self;
      pool.free(h.block);
      held[i] = held.back();
      held.pop_back();
    };
    for (int step = 0; step < kSteps; ++step) {
      if (held.size() > 200 || (random() % 2 && !held.empty())) {
        give(random() % held.size());
        continue;
      }
      MemoryPool::Request r = request(1 + random() % 20000, kUnit << random() % 5);
      r.part = static_cast<int>(random() % 3);
      try {
        const Held h{pool.alloc(r), r.nbytes};
        char* p = memory + h.block.offset;
        p[0] = p[r.nbytes / 2] = p[r.nbytes - 1] = static_cast<char>(self);
        held.push_back(h);
      } catch (const PoolFull&) {
      }
    }
    while (!held.empty()) give(held.size() - 1);
  };
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreads; ++t) threads.emplace_back(work, t);
  for (auto& t : threads) t.join();
  EXPECT_EQ(overlaps, 0);
  for (const auto& s : pool.stats()) {
    EXPECT_EQ(s.used, 0);
    EXPECT_EQ(s.blocks, 0);
    EXPECT_EQ(s.free_extents, 1);
    EXPECT_EQ(s.largest_free, s.quota);
    EXPECT_GT(s.allocations, 100000);
  }
}

TEST(MemoryPool, TrimGivesPagesBack) {
  MemoryPool pool = pool_of(1024, true);
  const BlockRef keep = pool.alloc(request(1)), block = pool.alloc(request(512 * kUnit));
  char* memory = pool.memory()->data();
  memory[keep.offset] = 7;
  memory[block.offset + 8192] = 7;
  EXPECT_EQ(pool.trim(), 0);  // nothing was freed
  pool.free(block);
  EXPECT_GT(pool.trim(), 490 * kUnit);
  EXPECT_EQ(memory[block.offset + 8192], 0);
  EXPECT_EQ(memory[keep.offset], 7);
  EXPECT_EQ(pool.trim(), 0);
}

// ---- poison ----

std::string message_of(MemoryPool& pool, const MemoryPool::Request& r) {
  try {
    pool.alloc(r);
  } catch (const PoolError& e) {
    return e.what();
  }
  return "";
}

TEST(MemoryPool, AWriteAfterFreeNamesTheBlock) {
  MemoryPool pool = pool_of(64, true, true);
  char* memory = pool.memory()->data();
  const BlockRef before = pool.alloc(request(3 * kUnit)), a = pool.alloc(request(2 * kUnit, kUnit, "hidden"));
  pool.free(before);
  pool.free(a);
  EXPECT_EQ(static_cast<unsigned char>(memory[a.offset + 300]), Poison::kByte);
  memory[a.offset + 300] = 0;
  const std::string said = message_of(pool, request(6 * kUnit));
  EXPECT_NE(said.find("'hidden'"), std::string::npos) << said;
  EXPECT_NE(said.find("byte 1068 of the pool"), std::string::npos) << said;
  EXPECT_EQ(pool.used(), 0);
  EXPECT_EQ(message_of(pool, request(6 * kUnit)), "");  // said once
}

TEST(MemoryPool, PoisonKnowsWhatIsFreshUsedAndGivenBack) {
  MemoryPool pool = pool_of(256, true, true);
  char* memory = pool.memory()->data();
  const BlockRef a = pool.alloc(request(128 * kUnit));
  memory[a.offset + 50000] = 1;
  pool.free(a);
  const BlockRef b = pool.alloc(request(16 * kUnit));
  memory[b.offset] = 1;
  EXPECT_GT(pool.trim(), 0);
  memory[b.offset + 4095] = 1;
  pool.free(b);
  EXPECT_EQ(message_of(pool, request(256 * kUnit)), "");
}

// ---- the file ----

TEST(PoolFile, NamedBlocksOutliveThePool) {
  const File file;
  BlockRef a, lost;
  {
    const auto pool = MemoryPool::create(file.path(), {{"a", 64 * kUnit}, {"b", 64 * kUnit}}, 10, false);
    MemoryPool::Request r = request(1000, 4096, "x");
    r.part = 1, r.dtype = "float32", r.shape = {25, 10};
    a = pool->alloc(r);
    pool->memory()->data()[pool->data_offset() + a.offset] = 42;
    lost = pool->alloc(request(100));
    EXPECT_THROW(MemoryPool::attach(file.path(), false), PoolError);  // in use
    EXPECT_THROW(MemoryPool::create(file.path(), {{"a", kUnit}}, 1, false), PoolError);
  }
  const auto pool = MemoryPool::attach(file.path(), false);
  EXPECT_EQ(pool->attachments(), 2u);
  EXPECT_EQ(pool->parts()[1].name, "b");
  const BlockRecord x = pool->named("x");
  EXPECT_EQ(x.offset, a.offset);
  EXPECT_EQ(x.generation, a.generation);
  EXPECT_EQ(x.dtype, "float32");
  EXPECT_EQ(x.shape, (std::vector<int64_t>{25, 10}));
  EXPECT_EQ(pool->memory()->data()[pool->data_offset() + x.offset], 42);
  EXPECT_FALSE(pool->is_alive(lost));
  EXPECT_EQ(pool->used(), 1024);
  EXPECT_GT(pool->alloc(request(1)).generation, lost.generation);
  pool->free(a);
  EXPECT_THROW(pool->free(a), ArgumentError);
}

TEST(PoolFile, EveryPoolHasAnIdentityThatItsFileKeeps) {
  const File file;
  const auto create = [&] { return MemoryPool::create(file.path(), {{"a", kUnit}}, 1, false)->identity(); };
  const PoolIdentity first = create();
  EXPECT_EQ(MemoryPool::attach(file.path(), false)->identity(), first);
  EXPECT_EQ(file.read().substr(48, 16), std::string(first.begin(), first.end()));
  std::remove(file.path().c_str());
  EXPECT_NE(create(), first);
  EXPECT_NE(pool_of(1).identity(), pool_of(1).identity());
}

// Its memory cannot be written: so it ends where the block would be filled with poison.
TEST(PoolFile, AProcessKilledWhileItPoisonsLeavesNoName) {
  const File file;
  MemoryPool::create(file.path(), {{"a", 64 * kUnit}}, 1, true)->alloc(request(4096, 4096, "x"));
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, [](int) { _exit(7); });
    const auto pool = MemoryPool::attach(file.path(), true);
    const BlockRecord x = pool->named("x");
    mprotect(pool->memory()->data() + pool->data_offset(), static_cast<size_t>(64 * kUnit), PROT_READ);
    pool->free({x.offset, x.generation});
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  EXPECT_TRUE(MemoryPool::attach(file.path(), true)->all_named().empty());
}

TEST(PoolFile, NamesAreGivenTakenAndLimited) {
  const File file;
  {
    const auto pool = MemoryPool::create(file.path(), {{"a", 64 * kUnit}}, 2, false);
    const BlockRef a = pool->alloc(request(10)), b = pool->alloc(request(10, kUnit, "b")), c = pool->alloc(request(10));
    pool->rename(a, "a", "uint8", {10});
    EXPECT_THROW(pool->rename(c, "c", "uint8", {10}), PoolFull);
    EXPECT_THROW(pool->alloc(request(10, kUnit, "c")), PoolFull);
    EXPECT_THROW(pool->rename(a, "b", "uint8", {10}), ArgumentError);
    EXPECT_THROW(pool->alloc(request(10, kUnit, std::string(124, 'n'))), ArgumentError);
    EXPECT_EQ(pool->used(), 3 * kUnit);  // none of them left anything
    pool->rename(b, "", "", {});
    pool->rename(c, "c", "uint8", {10});
    pool->rename(a, std::string(123, 'n'), "uint8", {5, 2});
    pool->rename(a, std::string(123, 'n'), "uint8", {2, 5});
  }
  const auto pool = MemoryPool::attach(file.path(), false);
  const auto all = pool->all_named();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].name, std::string(123, 'n'));
  EXPECT_EQ(all[0].shape, (std::vector<int64_t>{2, 5}));
  EXPECT_EQ(all[1].name, "c");
}

// An update that stopped after any number of bytes leaves what was there before.
TEST(PoolFile, TornUpdatesAreAsIfTheyHadNotBegun) {
  struct Value {
    uint64_t words[13];
  };
  using Record = Twin<Value>;
  Record whole;
  whole.init({{1}});
  whole.store({{2}});
  Record next = whole;
  next.store({{3}});
  const int older = next.copies[0].sequence > next.copies[1].sequence ? 0 : 1;
  for (size_t n = 0; n <= sizeof(Record::Copy); ++n) {
    Record torn = whole;
    std::memcpy(&torn.copies[older], &next.copies[older], n);
    torn.copies[older].mark = Record::kWriting;
    EXPECT_EQ(torn.load("it").words[0], 2u) << n;
    torn.store({{4}});  // and goes on from there
    EXPECT_EQ(torn.load("it").words[0], 4u) << n;
  }
  EXPECT_EQ(next.load("it").words[0], 3u);
}

// Any byte changed: refused, or of no importance. Nothing in between, and no crash.
TEST(PoolFile, FlippedBytesAreRefused) {
  const File file;
  {
    const auto pool = MemoryPool::create(file.path(), {{"a", 32 * kUnit}, {"b", 8 * kUnit}}, 6, false);
    pool->alloc(request(100, kUnit, "one"));
    pool->free(pool->alloc(request(100, kUnit, "gone")));
    pool->alloc(request(100, kUnit, "two"));
  }
  const std::string whole = file.read();
  const size_t header = 64 + 8 * 32, root = 1024, table = 4096;
  const auto in_use = [&](size_t i) {
    return i < header || (i >= root && i < root + 2 * 48) || (i >= table && i < table + 2 * 512);
  };
  for (size_t i = 0; i < table + 3 * 512; ++i) {
    std::string bytes = whole.substr(0, table + 3 * 512);
    bytes[i] = static_cast<char>(bytes[i] ^ (1 << i % 8));
    file.overwrite(bytes);
    try {
      const auto pool = MemoryPool::attach(file.path(), false);
      EXPECT_FALSE(in_use(i)) << i;
      EXPECT_EQ(pool->all_named().size(), 2u) << i;
    } catch (const PoolError&) {
    }
  }
  for (size_t size : {size_t{0}, size_t{7}, size_t{300}, table, whole.size() - 1}) {
    file.write(whole.substr(0, size));
    EXPECT_THROW(MemoryPool::attach(file.path(), false), PoolError) << size;
  }
}

TEST(PoolFile, WhatIsNoPoolIsRefused) {
  const File file;
  EXPECT_THROW(MemoryPool::attach(file.path(), false), ArgumentError);
  file.write(std::string(1 << 16, 'x'));
  EXPECT_THROW(MemoryPool::attach(file.path(), false), PoolError);
  EXPECT_THROW(MemoryPool(std::vector<Part>(), {}), ArgumentError);
  EXPECT_THROW(MemoryPool({{"a", 100}}, {}), ArgumentError);
  EXPECT_THROW(MemoryPool({{"a", 256}, {"a", 256}}, {}), ArgumentError);
  EXPECT_THROW(MemoryPool({{"a", 256}}, {false, true}), ArgumentError);
}

TEST(MemoryPool, AClosedPoolRefusesEverything) {
  MemoryPool pool = pool_of(8, true);
  const BlockRef a = pool.alloc(request(1));
  const auto memory = pool.memory();
  pool.close();
  memory->data()[a.offset] = 1;  // who holds the memory keeps it
  EXPECT_THROW(pool.alloc(request(1)), PoolError);
  EXPECT_THROW(pool.free(a), PoolError);
  EXPECT_THROW(pool.trim(), PoolError);
  EXPECT_FALSE(pool.is_alive(a));
}

}  // namespace
}  // namespace sic::replay
