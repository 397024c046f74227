#include "simt/checker.h"

#include <algorithm>

#include "simt/ranges.h"
#include "simt/shadow.h"

namespace sic::simt {
namespace {

ShadowMap shadow;

const char* verb(AccessKind kind) {
  return kind == AccessKind::write ? "write" : kind == AccessKind::atomic ? "atomic" : "read";
}

const char* text(Violation violation) {
  switch (violation) {
    case Violation::none:
      break;
    case Violation::read_after_write:
      return "read after write";
    case Violation::write_after_write:
      return "write after write";
    case Violation::write_after_read:
      return "write after read";
    case Violation::never_written:
      return "read of what was never written";
    case Violation::in_flight:
      return "access to the target of a cp.async before its wait";
    case Violation::stale_cache:
      return "cached read (ld.global.nc) of what the same launch writes";
  }
  return "";
}

void fault_conflict(const Conflict& c, const char* where, size_t offset, const Place& place) {
  const char* what = text(c.violation);
  if (c.violation == Violation::never_written) return fault(place, "%s: %s, byte %zu", what, where, offset);
  const int number = c.thread / kMaxThreads;
  const bool of_cluster = c.peers || number != engine.current->block, other_block = c.other_cluster || of_cluster;
  const char* race = c.violation <= Violation::write_after_read ? other_block ? "race between blocks: " : "race: " : "";
  if (of_cluster && !c.other_cluster)
    return fault(place, "%s%s: %s, byte %zu, with thread %d of block %d of the cluster%s", race, what, where, offset,
                 c.thread % kMaxThreads, number, c.peers ? ", among others" : "");
  fault(place, "%s%s: %s, byte %zu, with thread %d%s", race, what, where, offset, c.thread % kMaxThreads,
        c.other_cluster ? " of another block" : "");
}

// Other blocks of the cluster can be relied upon to run between the cluster's first barrier and its last.
void check_visit(const Thread& t, int rank, const Place& place) {
  if (clock.phase == clock.cluster)
    return fault(place,
                 "race between blocks: access to shared memory of block %d of the cluster, which may not have begun",
                 rank);
  Block& peer = engine.blocks[static_cast<size_t>(rank)];
  if (!peer.visitor) peer.visitor = &t, peer.visit = place;
}

void check_shared(size_t offset, size_t n, AccessKind kind, const Place& place) {
  const Thread& t = *engine.current;
  const bool dynamic = offset < SharedMemory::kDynamic;
  if (!dynamic && engine.call.cluster > 1)
    return fault(place, "a __shared__ variable in a cluster: the emulator has dynamic shared memory only");
  const int rank = dynamic ? static_cast<int>(offset / SharedMemory::kSlot) : t.block;
  if (rank != t.block) check_visit(t, rank, place);
  const Conflict c = visit(shared_memory.cells(), offset, n, kind, clock.cluster, clock.cluster);
  if (c.violation == Violation::none) return;
  const char* where = !dynamic          ? "shared memory"
                      : rank == t.block ? "dynamic shared memory"
                                        : "dynamic shared memory of a peer";
  fault_conflict(c, where, dynamic ? c.offset % SharedMemory::kSlot : c.offset - SharedMemory::kDynamic, place);
}

void check_range(const Range& r, uintptr_t a, size_t n, AccessKind kind, const Place& place) {
  if (writes(kind) && !r.writable) return fault(place, "%s to read-only %s", verb(kind), r.name.c_str());
  if (!r.shadowed) return;
  shadow.for_pages(a, n, [&](const Cells& cells, size_t offset, size_t part) {
    const Conflict c = visit(cells, offset, part, kind, clock.launch, r.garbage ? r.since : 0);
    if (c.violation == Violation::none) return true;
    fault_conflict(c, r.name.c_str(), a + (c.offset - offset) - r.begin, place);
    return false;
  });
}

bool in_arguments(uintptr_t a, size_t n) {
  return a >= engine.arguments && a + n <= engine.arguments + engine.call.argument_bytes;
}

void fault_outside(uintptr_t a, size_t n, AccessKind kind, const Place& place) {
  if (shared_memory.past_dynamic(a))
    return fault(place, "%s of %zu bytes out of bounds: past the end of dynamic shared memory", verb(kind), n);
  if (on_other_stack(reinterpret_cast<const void*>(a)))
    return fault(place, "%s of %zu bytes in another thread's local memory", verb(kind), n);
  const Range* r = ranges.nearest(a, n);
  if (!r) return fault(place, "%s of %zu bytes out of bounds: outside of every buffer", verb(kind), n);
  const char* name = r->name.c_str();
  if (a + n > r->end)
    fault(place, "%s of %zu bytes out of bounds: ends %zu bytes past the end of %s", verb(kind), n,
          static_cast<size_t>(a + n - r->end), name);
  else if (a < r->begin)
    fault(place, "%s of %zu bytes out of bounds: %zu bytes before %s", verb(kind), n, static_cast<size_t>(r->begin - a),
          name);
  else
    fault(place, "%s of %zu bytes out of bounds: between the rows of %s, byte %zu", verb(kind), n, name,
          static_cast<size_t>(a - r->begin));
}

}  // namespace

std::recursive_mutex& mutex() {
  static std::recursive_mutex m;
  return m;
}

void prepare_memory() {
  if (shadow.large()) {
    shadow.clear();
    ranges.forget_garbage();  // what had been written is no longer known
  }
  ranges.prepare();
}

void check_access(const void* p, size_t n, AccessKind kind, size_t alignment, const Place& place) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  if (a & (alignment - 1)) return fault(place, "misaligned %s of %zu bytes", verb(kind), n);
  const size_t offset = shared_memory.offset(a, n);
  if (offset != SharedMemory::kOutside) return check_shared(offset, n, kind, place);
  if (!writes(kind) && in_arguments(a, n)) return;
  if (const Range* r = ranges.find(a, n, writes(kind))) return check_range(*r, a, n, kind, place);
  if (writes(kind) || !module_memory(a, n)) fault_outside(a, n, kind, place);
}

bool host_may_access(const void* p, size_t n, bool write) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  return std::any_of(ranges.begin(), ranges.end(),
                     [&](const Range& r) { return a >= r.begin && a + n <= r.end && (!write || r.writable); });
}

void note_host_write(const void* p, size_t n) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  ++clock.epoch;
  for (const Range& r : ranges) {
    const uintptr_t begin = std::max(r.begin, a), end = std::min(r.end, a + n);
    if (!r.garbage || begin >= end) continue;
    shadow.for_pages(begin, end - begin, [](const Cells& cells, size_t offset, size_t part) {
      settle(cells, offset, part);
      return true;
    });
  }
}

}  // namespace sic::simt
