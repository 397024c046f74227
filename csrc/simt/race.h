// What the emulator remembers of memory that kernels may write: who touched it last and when. From it follows whether
// an access races with another, or reads what was never written.
//
// Time is a number that grows at every barrier of a block or a cluster, every cluster and every launch, so old entries
// need no clearing. A thread's accesses count as made when the last barrier of its block ended: those of the same block
// are ordered across that, those of other blocks of the cluster only across its barriers. Within one such epoch only
// barriers of a warp order its lanes; their clock is kept beside it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sic::simt {

struct Clock {
  uint32_t epoch = 1;    // now
  uint32_t phase = 1;    // when the last barrier of the running cluster ended, or
  uint32_t cluster = 1;  // when it began
  uint32_t launch = 1;   // when the launch began
};
extern Clock clock;

enum class AccessKind : uint8_t {
  read,
  cached_read,  // through a cache that does not see writes of the same launch
  write,
  atomic,
};
inline bool writes(AccessKind kind) { return kind == AccessKind::write || kind == AccessKind::atomic; }

// The last write and the last reads. Blank (all zero) before the first.
struct Cell {
  uint32_t write_epoch, write_time;
  uint32_t read_epoch, read_time;
  uint32_t readers;  // lanes of read_warp
  uint16_t writer;   // its number in the cluster
  uint8_t read_warp;
  uint8_t flags;
};

// One cell for every four bytes; where single bytes of them are touched, one for each byte.
struct Cells {
  Cell* words = nullptr;
  Cell* bytes = nullptr;
};

enum class Violation : uint8_t {
  none,
  read_after_write,
  write_after_write,
  write_after_read,
  never_written,
  in_flight,    // the target of a cp.async before its wait
  stale_cache,  // a cached read of what the same launch wrote
};

struct Conflict {
  Violation violation = Violation::none;
  int thread = 0;  // the other one's number in its cluster
  bool other_cluster = false;
  bool peers = false;  // threads of several blocks of the cluster
  size_t offset = 0;
};

// Checks an access of the current thread to bytes [offset, offset + n) and records it. What happened before `horizon`
// cannot collide: the start of the cluster in shared memory, of the launch elsewhere. Reads of what was not written at
// `written_since` or later violate; 0: everything has been written.
Conflict visit(const Cells& cells, size_t offset, size_t n, AccessKind kind, uint32_t horizon, uint32_t written_since);

// After visit: an asynchronous write that is still on its way, and its arrival.
void depart(const Cells& cells, size_t offset, size_t n);
void arrive(const Cells& cells, size_t offset, size_t n);
// Written by the host, before everything that follows.
void settle(const Cells& cells, size_t offset, size_t n);

}  // namespace sic::simt
