#include "simt/race.h"

#include <algorithm>

#include "simt/block_order.h"
#include "simt/engine.h"

namespace sic::simt {

Clock clock;

namespace {

enum CellFlags : uint8_t {
  kAtomic = 1,            // the last write was atomic
  kSeveralAtomics = 2,    // by several threads in write_epoch
  kAtomicsOfBlocks = 4,   // and by other blocks of the launch
  kSeveralReadWarps = 8,  // in read_epoch
  kReadByBlocks = 16,     // also by other blocks of the launch
  kInFlight = 32,
  kSplit = 64,   // a word whose bytes have cells of their own
  kPeers = 128,  // read, or changed by atomics, by several blocks of the cluster since its last barrier
};
void drop(Cell& c, int flags) { c.flags &= static_cast<uint8_t>(~flags); }

// Calls body(cell, offset) for the cells of some bytes until it returns false.
template <class Body>
inline void for_cells(const Cells& cells, size_t offset, size_t n, bool overwrites, Body body) {
  for (const size_t end = offset + n; offset < end;) {
    Cell& word = cells.words[offset / 4];
    const size_t first = offset % 4, count = std::min(end - offset, 4 - first);
    Cell* bytes = cells.bytes + offset;
    if (count == 4 && !(word.flags & kSplit)) {
      if (!body(word, offset)) return;
    } else {
      if (!(word.flags & kSplit)) std::fill_n(bytes - first, 4, word);
      word.flags |= kSplit;
      for (size_t i = 0; i < count; ++i)
        if (!body(bytes[i], offset + i)) return;
      if (count == 4 && overwrites) word = bytes[0];  // all four alike again
    }
    offset += count;
  }
}

// ---- within a cluster ----

inline bool is_old(const Cell& c) { return c.read_epoch < clock.phase && c.write_epoch < clock.phase; }
inline bool read_by_peer(const Thread& t, const Cell& c) { return c.read_warp / (kMaxThreads / kWarp) != t.block; }

// Whether the thread's access at that time happened before t's next one.
inline bool ordered(const Thread& t, uint32_t epoch, uint32_t time, int thread) {
  if (epoch < clock.phase || thread == t.number) return true;
  if (thread / kMaxThreads != t.block) return false;
  if (epoch < block_of(t).epoch) return true;
  if (thread / kWarp != t.warp) return false;
  const Warp& w = engine.warps[static_cast<size_t>(t.warp)];
  return time < w.full_time || (w.partial && time < w.known[t.lane][thread % kWarp]);
}

// Of the readers in the block's current epoch one that may not have finished, or -1.
inline int unordered_reader(const Thread& t, const Cell& c) {
  const int first = c.read_warp * kWarp;
  if (c.flags & kSeveralReadWarps) return first + __builtin_ctz(c.readers);  // one of the two is not t's warp
  for (uint32_t m = c.readers; m; m &= m - 1) {
    const int thread = first + __builtin_ctz(m);
    if (!ordered(t, c.read_epoch, c.read_time, thread)) return thread;
  }
  return -1;
}

// ---- against what came before ----

inline Conflict with_writer(Violation violation, const Cell& c) {
  return {violation, c.writer, c.write_epoch < clock.cluster};
}

inline Conflict against_write(const Thread& t, const Cell& c, AccessKind kind, Violation violation, uint32_t horizon) {
  if (c.write_epoch < horizon) return {};
  if (c.flags & kInFlight) return with_writer(Violation::in_flight, c);
  if (kind == AccessKind::cached_read) return with_writer(Violation::stale_cache, c);
  if (c.flags & kAtomic) {
    if (kind == AccessKind::atomic) return {};
    const bool several = (c.flags & kSeveralAtomics) && c.write_epoch == block_of(t).epoch;
    const bool of_peers = (c.flags & kPeers) && c.write_epoch >= clock.phase;
    const bool of_blocks = (c.flags & kAtomicsOfBlocks) && !block_order.after_all();
    if (of_peers) return {violation, c.writer, false, true};
    if (several || of_blocks) return with_writer(violation, c);
  }
  const bool fine = c.write_epoch < clock.cluster ? block_order.after(c.write_epoch, c.writer)
                                                  : ordered(t, c.write_epoch, c.write_time, c.writer);
  return fine ? Conflict{} : with_writer(violation, c);
}

inline Conflict against_reads(const Thread& t, const Cell& c, uint32_t horizon) {
  if (c.read_epoch < horizon) return {};
  const int first = c.read_warp * kWarp + __builtin_ctz(c.readers);
  if ((c.flags & kReadByBlocks) && !block_order.after_all()) return {Violation::write_after_read, first, true};
  if (c.read_epoch < clock.cluster)
    return block_order.after(c.read_epoch, first) ? Conflict{} : Conflict{Violation::write_after_read, first, true};
  if (c.read_epoch < clock.phase) return {};
  if ((c.flags & kPeers) || read_by_peer(t, c)) return {Violation::write_after_read, first, false, true};
  if (c.read_epoch < block_of(t).epoch) return {};
  const int reader = unordered_reader(t, c);
  return reader < 0 ? Conflict{} : Conflict{Violation::write_after_read, reader, false};
}

// ---- the record ----

inline void record_read(const Thread& t, Cell& c, uint32_t horizon) {
  const uint32_t lane = 1u << t.lane, epoch = block_of(t).epoch;
  if (is_old(c)) drop(c, kPeers);
  const bool by_peer = c.read_epoch >= clock.phase && read_by_peer(t, c);
  if (by_peer) c.flags |= kPeers;
  if (c.read_epoch == epoch && !by_peer) {
    if (c.read_warp != t.warp) {
      c.flags |= kSeveralReadWarps;
    } else if (c.readers == lane || unordered_reader(t, c) < 0) {
      c.readers = lane, c.read_time = t.time;  // whoever comes after this read also comes after the earlier ones
    } else {
      c.readers |= lane;
      c.read_time = std::max(c.read_time, t.time);
    }
    return;
  }
  drop(c, c.read_epoch < horizon ? kSeveralReadWarps | kReadByBlocks : kSeveralReadWarps);
  if (c.read_epoch >= horizon && c.read_epoch < clock.cluster) c.flags |= kReadByBlocks;
  c.read_epoch = epoch, c.read_time = t.time;
  c.readers = lane, c.read_warp = static_cast<uint8_t>(t.warp);
}

inline void record_write(const Thread& t, Cell& c, bool atomic, uint32_t horizon) {
  const uint32_t epoch = block_of(t).epoch;
  if (is_old(c)) drop(c, kPeers);
  if (!atomic || !(c.flags & kAtomic) || c.write_epoch < horizon) {
    drop(c, kAtomic | kSeveralAtomics | kAtomicsOfBlocks | kInFlight);
    if (atomic) c.flags |= kAtomic;
  } else if (c.write_epoch >= clock.phase && c.writer / kMaxThreads != t.block) {
    c.flags |= kPeers;
  } else if (c.write_epoch < epoch) {
    drop(c, kSeveralAtomics);
    if (c.write_epoch < clock.cluster) c.flags |= kAtomicsOfBlocks;
  } else if (c.writer != t.number) {
    c.flags |= kSeveralAtomics;
  }
  c.write_epoch = epoch, c.write_time = t.time;
  c.writer = static_cast<uint16_t>(t.number);
}

}  // namespace

Conflict visit(const Cells& cells, size_t offset, size_t n, AccessKind kind, uint32_t horizon, uint32_t written_since) {
  const Thread& t = *engine.current;
  Conflict conflict;
  for_cells(cells, offset, n, writes(kind), [&](Cell& c, size_t at) __attribute__((always_inline)) {
    if (kind != AccessKind::write && c.write_epoch < written_since)
      conflict = {Violation::never_written};
    else
      conflict =
          against_write(t, c, kind, writes(kind) ? Violation::write_after_write : Violation::read_after_write, horizon);
    if (conflict.violation == Violation::none && writes(kind)) conflict = against_reads(t, c, horizon);
    conflict.offset = at;
    if (conflict.violation != Violation::none) return false;
    if (writes(kind))
      record_write(t, c, kind == AccessKind::atomic, horizon);
    else
      record_read(t, c, horizon);
    return true;
  });
  return conflict;
}

void depart(const Cells& cells, size_t offset, size_t n) {
  for_cells(cells, offset, n, true, [](Cell& c, size_t) {
    c.flags |= kInFlight;
    return true;
  });
}

void arrive(const Cells& cells, size_t offset, size_t n) {
  const Thread& t = *engine.current;
  for_cells(cells, offset, n, true, [&](Cell& c, size_t) {
    drop(c, kInFlight);
    c.write_epoch = block_of(t).epoch, c.write_time = t.time;
    c.writer = static_cast<uint16_t>(t.number);
    return true;
  });
}

void settle(const Cells& cells, size_t offset, size_t n) {
  for_cells(cells, offset, n, true, [](Cell& c, size_t) {
    c = {};
    c.write_epoch = clock.epoch;
    return true;
  });
}

}  // namespace sic::simt
