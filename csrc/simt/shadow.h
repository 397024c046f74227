// What the emulator remembers of every byte that a kernel may write: who touched it last, and when.
//
// Time is a number that grows at every block barrier, every block and every launch, so old entries need no clearing.
// Within one such epoch only barriers of a warp order its lanes; their clock is kept beside it.
#pragma once
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "simt/engine.h"

namespace sic::simt {

struct Clock {
  uint32_t epoch = 1;   // now
  uint32_t block = 1;   // when the running block began
  uint32_t launch = 1;  // when the launch began
};
extern Clock clock;

enum class AccessKind : uint8_t {
  read,
  cached_read,  // through a cache that does not see writes of the same launch
  write,
  atomic,
};

struct Cell {
  uint32_t write_epoch, write_time;
  uint32_t read_epoch, read_time;
  uint32_t readers;  // lanes of read_warp
  uint16_t writer;   // thread of its block
  uint8_t read_warp;
  uint8_t flags;
};

enum CellFlags : uint8_t {
  kAtomic = 1,            // the last write was atomic
  kSeveralAtomics = 2,    // of several threads, in the same epoch
  kAtomicsOfBlocks = 4,   // and of other blocks, in the same launch
  kSeveralReadWarps = 8,  // in read_epoch
  kReadByBlocks = 16,     // also by other blocks of the launch
  kInFlight = 32,         // the target of a copy that has not been waited for
};

// What a kernel did wrong; `other` is the thread it collides with.
struct Conflict {
  const char* what = nullptr;
  int thread = -1;
  uint32_t epoch = 0;
};

// Checks an access of the current thread to one byte and records it. `horizon`: what lies before it cannot collide
// (block start in shared memory, launch start elsewhere).
Conflict visit(Cell& cell, AccessKind kind, uint32_t horizon);
void mark_in_flight(Cell& cell);
void arrive(Cell& cell);  // a copy has been waited for: written now, by the current thread

// Cells of any address, made when first asked for and kept.
class ShadowMap {
 public:
  Cell* cells(uintptr_t address) {
    const uintptr_t page = address / kPage;
    Known& known = known_[page % kKnown];
    if (known.page != page || !known.cells) known = {page, find(page)};
    return known.cells + address % kPage;
  }
  static constexpr uintptr_t kPage = 4096;
  bool large() const { return pages_.size() > kLarge; }
  void clear();

 private:
  struct Known {
    uintptr_t page = 0;
    Cell* cells = nullptr;
  };
  static constexpr size_t kKnown = 256, kLarge = 4096;
  Cell* find(uintptr_t page);

  Known known_[kKnown];
  std::unordered_map<uintptr_t, Cell*> pages_;
};

// Blocks of one launch run in any order, so what one wrote another may not read; unless it went through an atomic with
// a device fence on both sides, as the last block of a reduction does it.
class BlockOrder {
 public:
  void begin_launch();
  void begin_block();
  void fence();
  void atomic(const void* p);
  // Whether an access made by another block is known to have happened before the running one's.
  bool ordered(uint32_t epoch, int thread) const;
  bool ordered_after_all() const;

 private:
  struct Release {
    uint32_t epoch;
    int thread;
  };
  using Releases = std::map<size_t, Release>;  // by block, in the order they ran
  size_t block_at(uint32_t epoch) const;

  std::vector<uint32_t> starts_;  // epochs
  std::unordered_map<const void*, Releases> published_;
  std::unordered_map<int, Releases> observed_;  // by thread of the running block
  Releases acquired_;
  std::unordered_map<int, Release> fences_;
};
extern BlockOrder block_order;

}  // namespace sic::simt
