// The used and free extents of one part of a pool: best fit, coalescing, O(log n). Works on offsets; no memory is
// touched.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace sic::replay {

struct Named;

class Extents {
  using BySize = std::set<std::pair<int64_t, int64_t>>;  // (size, offset) of the free ones

 public:
  // Two free extents never touch each other: they are one then.
  struct Extent {
    Extent(int64_t offset, int64_t size);

    int64_t size;
    uint64_t generation = 0;  // 0: free
    int64_t asked = 0;        // bytes, of which `size` is the next multiple of the unit
    Named* named = nullptr;
    bool used_before = false;  // a free one: its pages may hold memory

   private:
    friend class Extents;
    BySize::node_type node;  // its place in the order of sizes while it is used: so freeing it allocates nothing
  };
  using ByOffset = std::map<int64_t, Extent>;
  using Place = ByOffset::iterator;

  // `used_before`: whether its pages may hold memory already.
  Extents(int64_t begin, int64_t size, bool used_before);

  // At a multiple of `alignment` in the smallest free extent of enough size, lowest offset first; if that has no room
  // at such a place, in the smallest that has wherever it begins; if there is none, in any that has room. end(): no
  // room. Offsets and sizes are multiples of one unit; up to that alignment the first rule decides. The caller then
  // sets a generation.
  Place take(int64_t size, int64_t alignment);
  // A given place; end() if it is not free.
  Place take_at(int64_t offset, int64_t size);
  void give(Place used) noexcept;

  // The used extent that begins there, or end().
  Place find(int64_t offset);
  Place end() { return by_offset_.end(); }

  int64_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  int64_t count_free() const { return static_cast<int64_t>(by_size_.size()); }

  // visit(offset, extent) for all of them, in order.
  template <class Visit>
  void for_each(Visit visit) {
    for (auto& [offset, extent] : by_offset_) visit(offset, extent);
  }

 private:
  Place split(Place free, int64_t offset, int64_t size);
  void join_with_next(Place free) noexcept;
  void enlist(Place free) noexcept;
  void delist(Place free) noexcept;

  ByOffset by_offset_;  // all, without gaps
  BySize by_size_;
};

}  // namespace sic::replay
