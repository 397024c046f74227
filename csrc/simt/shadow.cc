#include "simt/shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace sic::simt {

Clock clock;
BlockOrder block_order;

namespace {

// Whether an access of the running block happened before the current thread's next one.
bool ordered(uint32_t epoch, uint32_t time, int thread) {
  const Thread& t = *engine.current;
  if (epoch < clock.epoch || thread == t.linear) return true;
  if (thread / kWarp != t.warp) return false;
  const Warp& w = engine.warps[t.warp];
  return time < w.full_time || (w.partial && time < w.known[t.lane][thread % kWarp]);
}

Conflict against_write(const Cell& c, bool atomic, const char* what, uint32_t horizon) {
  if (c.write_epoch < horizon) return {};
  const bool both_atomic = atomic && (c.flags & kAtomic);
  if (both_atomic) return {};
  if ((c.flags & kAtomicsOfBlocks) && !block_order.ordered_after_all()) return {what, c.writer, c.write_epoch};
  if (c.write_epoch < clock.block) {
    if (!block_order.ordered(c.write_epoch, c.writer)) return {what, c.writer, c.write_epoch};
    return {};
  }
  const bool several = (c.flags & kSeveralAtomics) && c.write_epoch == clock.epoch;
  if (several || !ordered(c.write_epoch, c.write_time, c.writer)) return {what, c.writer, c.write_epoch};
  return {};
}

// Of the readers of c in the current epoch, one that is not known to have finished; -1: all have.
int unordered_reader(const Cell& c) {
  const int first = c.read_warp * kWarp;
  if (c.flags & kSeveralReadWarps) {
    // At least one of two warps is not the current thread's own.
    return first + __builtin_ctz(c.readers);
  }
  for (uint32_t m = c.readers; m; m &= m - 1) {
    const int thread = first + __builtin_ctz(m);
    if (!ordered(c.read_epoch, c.read_time, thread)) return thread;
  }
  return -1;
}

Conflict against_reads(const Cell& c, uint32_t horizon) {
  constexpr const char* kWhat = "write after read";
  if (c.read_epoch < horizon || c.read_epoch == 0) return {};
  if ((c.flags & kReadByBlocks) && !block_order.ordered_after_all())
    return {kWhat, c.read_warp * kWarp + __builtin_ctz(c.readers), c.read_epoch};
  const int thread = c.read_warp * kWarp + __builtin_ctz(c.readers);
  if (c.read_epoch < clock.block) {
    if (!block_order.ordered(c.read_epoch, thread)) return {kWhat, thread, c.read_epoch};
    return {};
  }
  if (c.read_epoch < clock.epoch) return {};
  const int reader = unordered_reader(c);
  return reader < 0 ? Conflict{} : Conflict{kWhat, reader, c.read_epoch};
}

void record_read(Cell& c, uint32_t horizon) {
  const Thread& t = *engine.current;
  const uint32_t lane = 1u << t.lane;
  if (c.read_epoch == clock.epoch) {
    if (c.read_warp != t.warp) {
      c.flags |= kSeveralReadWarps;
    } else if (c.readers == lane || unordered_reader(c) < 0) {
      // Whoever comes after this read also comes after the earlier ones.
      c.readers = lane, c.read_time = t.time;
    } else {
      c.readers |= lane;
      c.read_time = std::max(c.read_time, t.time);
    }
    return;
  }
  if (c.read_epoch < horizon)
    c.flags &= static_cast<uint8_t>(~(kSeveralReadWarps | kReadByBlocks));
  else if (c.read_epoch < clock.block)
    c.flags = static_cast<uint8_t>((c.flags & ~kSeveralReadWarps) | kReadByBlocks);
  else
    c.flags &= static_cast<uint8_t>(~kSeveralReadWarps);
  c.read_epoch = clock.epoch, c.read_time = t.time;
  c.readers = lane, c.read_warp = static_cast<uint8_t>(t.warp);
}

void record_write(Cell& c, bool atomic, uint32_t horizon) {
  const Thread& t = *engine.current;
  uint8_t flags = c.flags & (kSeveralReadWarps | kReadByBlocks);
  if (atomic) {
    flags |= kAtomic;
    if ((c.flags & kAtomic) && c.write_epoch >= horizon) {
      flags |= c.flags & (kSeveralAtomics | kAtomicsOfBlocks);
      if (c.write_epoch < clock.block) flags |= kAtomicsOfBlocks;
      if (c.write_epoch < clock.epoch)
        flags &= static_cast<uint8_t>(~kSeveralAtomics);
      else if (c.writer != t.linear)
        flags |= kSeveralAtomics;
    }
  }
  c.flags = flags;
  c.write_epoch = clock.epoch, c.write_time = t.time;
  c.writer = static_cast<uint16_t>(t.linear);
}

}  // namespace

Conflict visit(Cell& c, AccessKind kind, uint32_t horizon) {
  if ((c.flags & kInFlight) && c.write_epoch >= horizon)
    return {"access to the target of a cp.async before its wait", c.writer, c.write_epoch};
  const bool atomic = kind == AccessKind::atomic;
  if (kind == AccessKind::cached_read && c.write_epoch >= horizon)
    return {"cached (ld.global.nc) read of what the same launch wrote", c.writer, c.write_epoch};
  if (kind != AccessKind::write && kind != AccessKind::atomic) {
    const Conflict conflict = against_write(c, false, "read after write", horizon);
    if (!conflict.what) record_read(c, horizon);
    return conflict;
  }
  Conflict conflict = against_write(c, atomic, "write after write", horizon);
  if (!conflict.what) conflict = against_reads(c, horizon);
  if (!conflict.what) record_write(c, atomic, horizon);
  return conflict;
}

void mark_in_flight(Cell& c) { c.flags |= kInFlight; }
void arrive(Cell& c) {
  c.flags = 0;
  c.write_epoch = clock.epoch, c.write_time = engine.current->time;
  c.writer = static_cast<uint16_t>(engine.current->linear);
}

// ---- cells of addresses ----

Cell* ShadowMap::find(uintptr_t page) {
  Cell*& cells = pages_[page];
  if (!cells) {
    void* p = mmap(nullptr, kPage * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    cells = static_cast<Cell*>(p);
  }
  return cells;
}

void ShadowMap::clear() {
  for (auto& [page, cells] : pages_) munmap(cells, kPage * sizeof(Cell));
  pages_.clear();
  for (Known& known : known_) known = {};
}

// ---- order between blocks ----

void BlockOrder::begin_launch() {
  starts_.clear();
  published_.clear();
}
void BlockOrder::begin_block() {
  starts_.push_back(clock.epoch);
  observed_.clear();
  acquired_.clear();
  fences_.clear();
}

void BlockOrder::fence() {
  const int thread = engine.current->linear;
  const auto observed = observed_.find(thread);
  if (observed != observed_.end()) {
    acquired_.insert(observed->second.begin(), observed->second.end());
    observed_.erase(observed);
  }
  fences_[thread] = {clock.epoch, thread};
}

void BlockOrder::atomic(const void* p) {
  if (fences_.empty() && published_.empty()) return;
  const int thread = engine.current->linear;
  const auto published = published_.find(p);
  if (published != published_.end()) observed_[thread].insert(published->second.begin(), published->second.end());
  const auto fence = fences_.find(thread);
  if (fence == fences_.end()) return;
  Releases& releases = published_[p];
  releases.insert(acquired_.begin(), acquired_.end());
  releases[starts_.size() - 1] = fence->second;
}

size_t BlockOrder::block_at(uint32_t epoch) const {
  return static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), epoch) - starts_.begin()) - 1;
}
bool BlockOrder::ordered(uint32_t epoch, int thread) const {
  const auto release = acquired_.find(block_at(epoch));
  if (release == acquired_.end()) return false;
  return epoch < release->second.epoch || (epoch == release->second.epoch && thread == release->second.thread);
}
bool BlockOrder::ordered_after_all() const { return acquired_.size() + 1 >= starts_.size(); }

}  // namespace sic::simt
