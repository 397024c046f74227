#include "replay/poison.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "replay/pool_error.h"

namespace sic::replay {

void Poison::remember(int64_t offset, int64_t bytes, std::string block) {
  ranges_[offset] = {offset + bytes, std::move(block)};
}

void Poison::fill(int64_t offset, int64_t bytes) noexcept {
  std::memset(memory_ + offset, kByte, static_cast<size_t>(bytes));
}

// The first range that ends behind the offset.
Poison::Ranges::const_iterator Poison::first_behind(int64_t offset) const {
  auto range = ranges_.upper_bound(offset);
  if (range != ranges_.begin() && std::prev(range)->second.end > offset) --range;
  return range;
}

void Poison::check(int64_t offset, int64_t bytes) const {
  const int64_t last = offset + bytes;
  for (auto r = first_behind(offset); r != ranges_.end() && r->first < last; ++r) {
    char* begin = memory_ + std::max(r->first, offset);
    char* end = memory_ + std::min(r->second.end, last);
    char* wrong = std::find_if(begin, end, [](char c) { return static_cast<unsigned char>(c) != kByte; });
    if (wrong == end) continue;
    const int64_t at = wrong - memory_;
    const auto found = static_cast<unsigned char>(*wrong);
    std::memset(begin, kByte, static_cast<size_t>(end - begin));
    throw PoolError("MemoryPool.alloc: written to after free: byte " + std::to_string(at) + " of the pool, once of " +
                    r->second.block + ", is " + std::to_string(found) + ", was " + std::to_string(kByte));
  }
}

void Poison::forget(int64_t offset, int64_t bytes) {
  const int64_t last = offset + bytes;
  for (auto r = first_behind(offset); r != ranges_.end() && r->first < last;) {
    const auto [begin, freed] = *r;
    r = ranges_.erase(r);
    if (begin < offset) ranges_[begin] = {offset, freed.block};
    if (freed.end > last) ranges_[last] = {freed.end, freed.block};
  }
}

}  // namespace sic::replay
