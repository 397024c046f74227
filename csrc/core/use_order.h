// Entries in the order of their last use: which one is to go next. O(1) for a use; 8 bytes an entry.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/zeroed.h"

namespace sic {

// Entries are in a doubly linked list, from oldest to newest, or out of it:
//   off      not there at all (pinned, or no entry)
//   parked   found to be the oldest when it could not go, because of its children; older than all that is in the list
//   waiting  parked, and its children have gone since: in a heap, by the order in which entries were parked
// So a step over an entry with children is taken once, not at every eviction, and the order stays exact.
// Uses are noted, and the list is changed for many at once: its cache misses then overlap.
class UseOrder {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};

  // Fewer than 2^30 entries. The last link is the list's end and its beginning.
  explicit UseOrder(int64_t capacity) : links_(capacity + 1), end_(static_cast<uint32_t>(capacity)) {
    for (uint64_t i = 0; i < end_; ++i) links_[i] = Link::off();
    links_[end_] = {end_, end_};
  }

  void use(uint32_t i) {
    used_[used_count_++] = i;
    if (used_count_ == kMostUsed) settle();
  }

  void leave(uint32_t i) {
    settle();
    unlink(i);
    links_[i] = Link::off();
  }

  // Before two calls of may_go(), which then allocate nothing.
  void make_room() {
    if (waiting_.size() + 2 > waiting_.capacity()) waiting_.reserve(2 * waiting_.size() + 16);
  }

  // The last child of an entry has gone.
  void may_go(uint32_t i) {
    settle();
    if (!links_[i].is_parked()) return;
    waiting_.emplace_back(links_[i].order(), i);
    links_[i] = Link::waiting(links_[i].order());
    std::push_heap(waiting_.begin(), waiting_.end(), std::greater<>());
  }

  // The oldest entry for which can_go holds, or kNone. It stays where it is.
  template <class CanGo>
  uint32_t oldest(CanGo can_go) {
    settle();
    for (; !waiting_.empty(); pop_waiting()) {
      const auto [order, i] = waiting_.front();
      if (!links_[i].is_waiting() || links_[i].order() != order) continue;  // used or removed since
      if (can_go(i)) return i;
      links_[i] = Link::parked(order);
    }
    while (links_[end_].newer != end_) {
      const uint32_t i = links_[end_].newer;
      if (can_go(i)) return i;
      unlink(i);
      links_[i] = Link::parked(++parked_);
    }
    return kNone;
  }

  int64_t bytes() const {
    return links_.bytes() + static_cast<int64_t>(waiting_.capacity() * sizeof(std::pair<uint64_t, uint32_t>));
  }

 private:
  // The neighbours of an entry in the list; else the two highest bits say what it is, and the others in what order it
  // was parked.
  struct Link {
    uint32_t older, newer;

    static Link off() { return {0, kOff << 30}; }
    static Link parked(uint64_t order) { return numbered(kParked, order); }
    static Link waiting(uint64_t order) { return numbered(kWaiting, order); }
    bool is_listed() const { return newer >> 30 == 0; }
    bool is_parked() const { return newer >> 30 == kParked; }
    bool is_waiting() const { return newer >> 30 == kWaiting; }
    uint64_t order() const { return uint64_t{newer & 0x3fffffff} << 32 | older; }

   private:
    static constexpr uint32_t kParked = 1, kWaiting = 2, kOff = 3;
    static Link numbered(uint32_t kind, uint64_t order) {
      return {static_cast<uint32_t>(order), kind << 30 | static_cast<uint32_t>(order >> 32)};
    }
  };

  void unlink(uint32_t i) {
    const Link link = links_[i];
    if (!link.is_listed()) return;
    links_[link.older].newer = link.newer;
    links_[link.newer].older = link.older;
  }

  __attribute__((noinline)) void settle() {
    for (uint32_t n = 0; n < used_count_; ++n) __builtin_prefetch(&links_[used_[n]], 1);
    for (uint32_t n = 0; n < used_count_; ++n) {
      const Link link = links_[used_[n]];
      if (!link.is_listed()) continue;
      __builtin_prefetch(&links_[link.older], 1);
      __builtin_prefetch(&links_[link.newer], 1);
    }
    for (uint32_t n = 0; n < used_count_; ++n) {
      const uint32_t i = used_[n];
      unlink(i);
      const uint32_t newest = links_[end_].older;
      links_[i] = {newest, end_};
      links_[newest].newer = i;
      links_[end_].older = i;
    }
    used_count_ = 0;
  }

  void pop_waiting() {
    std::pop_heap(waiting_.begin(), waiting_.end(), std::greater<>());
    waiting_.pop_back();
  }

  static constexpr uint32_t kMostUsed = 64;

  Zeroed<Link> links_;
  uint32_t end_;
  uint32_t used_count_ = 0;
  uint32_t used_[kMostUsed];
  uint64_t parked_ = 0;  // so far
  std::vector<std::pair<uint64_t, uint32_t>> waiting_;
};

}  // namespace sic
