#include "simt/ranges.h"

#include <algorithm>
#include <cstdlib>

#include "core/check.h"
#include "simt/checker.h"

namespace sic::simt {

RangeTable ranges;

bool Range::contains(uintptr_t a, size_t n) const {
  if (a < begin || a + n > end) return false;
  uint64_t offset = a - begin;
  for (const Axis& axis : axes) {
    const uint64_t i = offset / axis.stride;
    if (i >= axis.count) return false;
    offset -= i * axis.stride;
  }
  return offset + n <= row;
}

void RangeTable::changed() {
  prepared_ = false;
  last_read_ = last_write_ = nullptr;
}

int RangeTable::add(Range range) {
  range.id = next_id_++;
  range.since = ++clock.epoch;
  ranges_.push_back(std::move(range));
  changed();
  return ranges_.back().id;
}

void RangeTable::remove(int id) {
  const auto has_id = [id](const Range& r) { return r.id == id; };
  ranges_.erase(std::remove_if(ranges_.begin(), ranges_.end(), has_id), ranges_.end());
  changed();
}

void RangeTable::allow_writes(uintptr_t data) {
  for (Range& r : ranges_) r.writable |= r.data == data;
  changed();
}

void RangeTable::forget_garbage() {
  for (Range& r : ranges_) r.garbage = false;
}

void RangeTable::find_overlaps() {
  for (Range& r : ranges_) {
    r.shadowed = r.garbage;
    for (const Range& other : ranges_) r.shadowed |= other.writable && other.begin < r.end && r.begin < other.end;
  }
  prepared_ = true;
}

const Range* RangeTable::search(uintptr_t a, size_t n, bool write) {
  const Range* found = nullptr;
  for (const Range& r : ranges_) {
    if (!r.contains(a, n)) continue;
    found = &r;
    if (write ? r.writable : !r.garbage) break;
  }
  return (write ? last_write_ : last_read_) = found;
}

const Range* RangeTable::nearest(uintptr_t a, size_t n) const {
  const Range* found = nullptr;
  uintptr_t least = 1 << 20;
  for (const Range& r : ranges_) {
    const uintptr_t distance = a >= r.end ? a - r.end : a + n <= r.begin ? r.begin - a : 0;
    if (distance < least) found = &r, least = distance;
  }
  return found;
}

// ---- what the outside sees ----

namespace {

// The axes of v in bytes, merged where they leave no gap. Axes that interleave are not described: the whole span
// counts.
void describe_rows(const TensorView& v, Range& r) {
  std::vector<Range::Axis> axes;
  for (int i = 0; i < v.rank; ++i)
    if (v.shape[i] > 1 && v.stride[i] != 0)
      axes.push_back({static_cast<uint64_t>(std::abs(v.stride_bytes(i))), static_cast<uint64_t>(v.shape[i])});
  std::sort(axes.begin(), axes.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
  uint64_t span = r.row = static_cast<uint64_t>(itemsize(v.dtype));
  for (const Range::Axis& axis : axes) {
    if (axis.stride < span) {
      r.axes.clear();
      r.row = r.end - r.begin;
      return;
    }
    if (r.axes.empty() && axis.stride == r.row)
      r.row *= axis.count;
    else
      r.axes.insert(r.axes.begin(), axis);
    span += axis.stride * (axis.count - 1);
  }
}

// What an op checks as an output, its kernels may write.
[[maybe_unused]] const bool listens = [] {
  Check::on_output = [](const TensorView& v) { allow_writes(v.data); };
  return true;
}();

}  // namespace

int offer(const char* name, const void* data, size_t bytes, Access access, Contents contents) {
  const Lock hold;
  Range r;
  r.data = r.begin = reinterpret_cast<uintptr_t>(data), r.end = r.begin + bytes;
  r.name = name;
  r.writable = access == Access::read_write, r.garbage = contents == Contents::garbage;
  r.row = bytes;
  return bytes ? ranges.add(std::move(r)) : 0;
}

int offer(const char* name, const TensorView& v, Access access, Contents contents) {
  if (!v.given() || v.size() == 0) return 0;
  const Lock hold;
  Range r;
  r.data = r.begin = reinterpret_cast<uintptr_t>(v.data), r.end = r.begin + static_cast<uint64_t>(itemsize(v.dtype));
  for (int i = 0; i < v.rank; ++i) {
    const int64_t span = (v.shape[i] - 1) * v.stride_bytes(i);
    (span < 0 ? r.begin : r.end) += static_cast<uintptr_t>(span);
  }
  r.name = name;
  r.writable = access == Access::read_write, r.garbage = contents == Contents::garbage;
  describe_rows(v, r);
  return ranges.add(std::move(r));
}

void withdraw(int id) {
  const Lock hold;
  ranges.remove(id);
}

void allow_writes(const void* data) {
  const Lock hold;
  ranges.allow_writes(reinterpret_cast<uintptr_t>(data));
}

}  // namespace sic::simt
