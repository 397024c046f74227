#include "simt/memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "core/check.h"
#include "simt/checker.h"

namespace sic::simt {
namespace {

// Rows of one tensor: nested axes, the widest stride first.
struct Axis {
  uint64_t stride, count;
};

struct Range {
  int id;
  uintptr_t begin, end;
  std::string name;
  bool writable, garbage;
  bool shadowed;   // some kernel may write here
  uint32_t since;  // garbage: what was written before does not count
  std::vector<Axis> axes;
  uint64_t row;  // bytes at the innermost level

  bool contains(uintptr_t a, size_t n) const {
    if (a < begin || a + n > end) return false;
    uint64_t offset = a - begin;
    for (const Axis& axis : axes) {
      const uint64_t i = offset / axis.stride;
      if (i >= axis.count) return false;
      offset -= i * axis.stride;
    }
    return offset + n <= row;
  }
};

std::vector<Range> ranges;
int next_id = 1;
bool overlaps_known = true;
int last_read = -1, last_write = -1;  // positions in ranges that answered last

void changed() {
  overlaps_known = false;
  last_read = last_write = -1;
}

void find_overlaps() {
  for (Range& r : ranges) {
    r.shadowed = r.writable || r.garbage;
    for (const Range& other : ranges) r.shadowed |= other.writable && other.begin < r.end && r.begin < other.end;
  }
  overlaps_known = true;
}

// The range that allows the access, or the best one to name in an error; -1: none contains it.
int find_range(uintptr_t a, size_t n, bool write) {
  int& last = write ? last_write : last_read;
  if (last >= 0 && ranges[last].contains(a, n)) return last;
  int found = -1;
  for (int i = 0; i < static_cast<int>(ranges.size()); ++i) {
    if (!ranges[i].contains(a, n)) continue;
    found = i;
    if (write ? ranges[i].writable : !ranges[i].garbage) {
      last = i;
      return i;
    }
  }
  return found;
}

ShadowMap shadow;

// The nested axes of v in bytes; false if they interleave, and only the whole span can be described.
bool nested_axes(const TensorView& v, Range& r) {
  r.row = static_cast<uint64_t>(itemsize(v.dtype));
  std::vector<Axis> axes;
  for (int i = 0; i < v.rank; ++i)
    if (v.shape[i] > 1 && v.stride[i] != 0)
      axes.push_back({static_cast<uint64_t>(std::abs(v.stride_bytes(i))), static_cast<uint64_t>(v.shape[i])});
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  uint64_t span = r.row;
  for (const Axis& axis : axes) {
    if (axis.stride < span) return false;
    if (r.axes.empty() && axis.stride == r.row)
      r.row *= axis.count;
    else
      r.axes.push_back(axis);
    span = axis.stride * (axis.count - 1) + span;
  }
  std::reverse(r.axes.begin(), r.axes.end());
  return true;
}

int add(Range r) {
  r.id = next_id++;
  r.since = clock.epoch;
  ranges.push_back(std::move(r));
  changed();
  return ranges.back().id;
}

}  // namespace

int offer(const char* name, const void* data, size_t bytes, Access access, Contents contents) {
  std::lock_guard<std::recursive_mutex> hold(lock());
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return add({0,
              begin,
              begin + bytes,
              name,
              access == Access::read_write,
              contents == Contents::garbage,
              false,
              0,
              {},
              bytes});
}

int offer(const char* name, const TensorView& v, Access access, Contents contents) {
  if (!v.given() || v.size() == 0) return 0;
  std::lock_guard<std::recursive_mutex> hold(lock());
  Range r{0,
          reinterpret_cast<uintptr_t>(v.data),
          0,
          name,
          access == Access::read_write,
          contents == Contents::garbage,
          false,
          0,
          {},
          0};
  r.end = r.begin + static_cast<uint64_t>(itemsize(v.dtype));
  for (int i = 0; i < v.rank; ++i) {
    const int64_t span = (v.shape[i] - 1) * v.stride_bytes(i);
    if (span < 0)
      r.begin += static_cast<uint64_t>(span);
    else
      r.end += static_cast<uint64_t>(span);
  }
  if (!nested_axes(v, r)) r.axes.clear(), r.row = r.end - r.begin;
  return add(std::move(r));
}

void withdraw(int id) {
  std::lock_guard<std::recursive_mutex> hold(lock());
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(), [id](const Range& r) { return r.id == id; }), ranges.end());
  changed();
}

void allow_writes(const void* data) {
  std::lock_guard<std::recursive_mutex> hold(lock());
  for (Range& r : ranges)
    if (r.begin == reinterpret_cast<uintptr_t>(data)) r.writable = true;
  changed();
}

// What an op checks as an output, its kernels may write.
[[maybe_unused]] const bool listens = [] {
  Check::on_output = [](const TensorView& v) { allow_writes(v.data); };
  return true;
}();

void prepare_memory() {
  if (!overlaps_known) find_overlaps();
  if (!shadow.large()) return;
  shadow.clear();
  for (Range& r : ranges) r.garbage = false;  // what was known of it is gone
}

// ---- checks ----

namespace {

const char* verb(AccessKind kind) {
  return kind == AccessKind::write ? "write" : kind == AccessKind::atomic ? "atomic" : "read";
}

void fault_outside(uintptr_t a, size_t n, AccessKind kind, const Place& place) {
  const Range* nearest = nullptr;
  int64_t distance = 1 << 16;
  for (const Range& r : ranges) {
    const int64_t d = a >= r.end    ? static_cast<int64_t>(a - r.end)
                      : a < r.begin ? static_cast<int64_t>(r.begin - a)
                                    : 0;
    if (d < distance || (a < r.end && a + n > r.end)) nearest = &r, distance = d;
  }
  if (!nearest) return fault(place, "%s of %zu bytes outside of every buffer", verb(kind), n);
  const char* name = nearest->name.c_str();
  if (a >= nearest->end || a + n > nearest->end)
    fault(place, "%s of %zu bytes out of bounds: ends %zu bytes past the end of %s", verb(kind), n,
          static_cast<size_t>(a + n - nearest->end), name);
  else if (a < nearest->begin)
    fault(place, "%s of %zu bytes out of bounds: %zu bytes before %s", verb(kind), n,
          static_cast<size_t>(nearest->begin - a), name);
  else
    fault(place, "%s of %zu bytes between the rows of %s, at byte %zu", verb(kind), n, name,
          static_cast<size_t>(a - nearest->begin));
}

void fault_conflict(const Conflict& c, const char* where, size_t offset, const Place& place) {
  if (c.epoch < clock.block)
    fault(place, "race between blocks: %s of %s, byte %zu, with thread %d of another block", c.what, where, offset,
          c.thread);
  else if (c.epoch == clock.epoch || c.thread >= 0)
    fault(place, "race: %s of %s, byte %zu, with thread %d", c.what, where, offset, c.thread);
}

void check_shared(size_t offset, size_t n, AccessKind kind, const Place& place) {
  Cell* cells = shared_memory.cells + offset;
  for (size_t i = 0; i < n; ++i) {
    const bool reads = kind != AccessKind::write;
    const Conflict conflict = visit(cells[i], kind, clock.block);
    if (conflict.what) return fault_conflict(conflict, "shared memory", shared_memory.label(offset + i), place);
    if (reads && cells[i].write_epoch < clock.block)
      return fault(place, "read of shared memory that was never written, byte %zu", shared_memory.label(offset + i));
  }
}

void check_range(Range& r, uintptr_t a, size_t n, AccessKind kind, const Place& place) {
  const bool writes = kind == AccessKind::write || kind == AccessKind::atomic;
  if (writes && !r.writable) return fault(place, "%s to read-only %s", verb(kind), r.name.c_str());
  if (!r.shadowed) return;
  for (size_t i = 0; i < n; ++i) {
    Cell& cell = *shadow.cells(a + i);
    if (r.garbage && kind != AccessKind::write && cell.write_epoch <= r.since)
      return fault(place, "read of %s before anything was written there, byte %zu", r.name.c_str(),
                   static_cast<size_t>(a + i - r.begin));
    const Conflict conflict = visit(cell, kind, clock.launch);
    if (conflict.what) return fault_conflict(conflict, r.name.c_str(), static_cast<size_t>(a + i - r.begin), place);
  }
}

}  // namespace

void check_access(const void* p, size_t n, AccessKind kind, size_t alignment, const Place& place) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  if (a & (alignment - 1)) return fault(place, "misaligned %s of %zu bytes", verb(kind), n);
  const size_t offset = shared_memory.offset(a, n);
  if (offset != SharedMemory::kOutside) return check_shared(offset, n, kind, place);
  const bool writes = kind == AccessKind::write || kind == AccessKind::atomic;
  const int found = find_range(a, n, writes);
  if (found >= 0) return check_range(ranges[found], a, n, kind, place);
  if (!writes && constant_memory(a, n)) return;
  if (shared_memory.near_dynamic(a))
    return fault(place, "%s of %zu bytes past the end of dynamic shared memory", verb(kind), n);
  fault_outside(a, n, kind, place);
}

void note_written(const void* p, size_t n) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  ++clock.epoch;
  for (const Range& r : ranges) {
    if (!r.garbage) continue;
    const uintptr_t end = std::min<uintptr_t>(r.end, a + n);
    for (uintptr_t i = std::max(r.begin, a); i < end; ++i) {
      Cell& cell = *shadow.cells(i);
      cell.write_epoch = clock.epoch, cell.flags = 0;
    }
  }
}

const char* host_access_problem(const void* p, size_t n, bool write) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  const char* problem = "memory that no kernel may touch";
  for (const Range& r : ranges) {
    if (a < r.begin || a + n > r.end) continue;
    if (!write || r.writable) return nullptr;
    problem = "read-only memory";
  }
  return problem;
}

Cell* global_cells(const void* p) { return shadow.cells(reinterpret_cast<uintptr_t>(p)); }

}  // namespace sic::simt
