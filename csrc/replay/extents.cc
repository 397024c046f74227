#include "replay/extents.h"

#include <iterator>

namespace sic::replay {
namespace {

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

Extents::Extent::Extent(int64_t offset, int64_t extent_size) : size(extent_size) {
  BySize maker{{extent_size, offset}};
  node = maker.extract(maker.begin());
}

Extents::Extents(int64_t begin, int64_t size, bool used_before) {
  const Place all = by_offset_.emplace(begin, Extent(begin, size)).first;
  all->second.used_before = used_before;
  enlist(all);
}

Extents::Place Extents::take(int64_t size, int64_t alignment) {
  const auto fits = [&](BySize::iterator i) { return round_up(i->second, alignment) - i->second + size <= i->first; };
  auto best = by_size_.lower_bound({size, 0});
  if (best != by_size_.end() && !fits(best)) {
    best = by_size_.lower_bound({size + alignment, 0});
    if (best == by_size_.end()) {  // then few can have room: those just large enough
      best = by_size_.lower_bound({size, 0});
      while (best != by_size_.end() && !fits(best)) ++best;
    }
  }
  if (best == by_size_.end()) return end();
  return split(by_offset_.find(best->second), round_up(best->second, alignment), size);
}

Extents::Place Extents::take_at(int64_t offset, int64_t size) {
  Place holder = by_offset_.upper_bound(offset);
  if (holder == by_offset_.begin()) return end();
  --holder;
  const int64_t last = holder->first + holder->second.size;
  if (holder->second.generation != 0 || offset + size > last) return end();
  return split(holder, offset, size);
}

// What the split adds is made first, for that may fail; from then on nothing can.
Extents::Place Extents::split(Place free, int64_t offset, int64_t size) {
  const int64_t begin = free->first, end = begin + free->second.size;
  ByOffset added;
  if (offset > begin) added.emplace(offset, Extent(offset, size));
  if (offset + size < end) added.emplace(offset + size, Extent(offset + size, end - offset - size));
  for (auto& [at, extent] : added) extent.used_before = free->second.used_before;

  delist(free);
  free->second.size = offset > begin ? offset - begin : size;
  by_offset_.merge(added);
  if (offset > begin) enlist(free);
  const Place taken = offset > begin ? std::next(free) : free, rest = std::next(taken);
  if (offset + size < end) enlist(rest);
  return taken;
}

void Extents::give(Place used) noexcept {
  Extent& extent = used->second;
  extent.generation = 0;
  extent.named = nullptr;
  extent.used_before = true;
  join_with_next(used);
  if (used != by_offset_.begin() && std::prev(used)->second.generation == 0) {
    used = std::prev(used);
    delist(used);
    join_with_next(used);
  }
  enlist(used);
}

// `free` is not in the order of sizes; the next extent goes, if it is free.
void Extents::join_with_next(Place free) noexcept {
  const Place next = std::next(free);
  if (next == end() || next->second.generation != 0) return;
  if (next->second.node.empty()) delist(next);
  free->second.size += next->second.size;
  free->second.used_before |= next->second.used_before;
  by_offset_.erase(next);
}

Extents::Place Extents::find(int64_t offset) {
  const Place found = by_offset_.find(offset);
  return found == end() || found->second.generation == 0 ? end() : found;
}

void Extents::enlist(Place free) noexcept {
  free->second.node.value() = {free->second.size, free->first};
  by_size_.insert(std::move(free->second.node));
}

void Extents::delist(Place free) noexcept { free->second.node = by_size_.extract({free->second.size, free->first}); }

}  // namespace sic::replay
