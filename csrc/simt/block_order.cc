#include "simt/block_order.h"

#include <algorithm>

#include "simt/engine.h"
#include "simt/race.h"

namespace sic::simt {

BlockOrder block_order;

void BlockOrder::begin_launch() {
  starts_.clear();
  published_.clear();
}

void BlockOrder::begin_block() {
  starts_.push_back(clock.cluster);
  fences_.clear();
  observed_.clear();
  acquired_.clear();
}

void BlockOrder::fence() {
  const int thread = engine.current->number;
  const auto observed = observed_.find(thread);
  if (observed != observed_.end()) {
    acquired_.insert(observed->second.begin(), observed->second.end());
    observed_.erase(observed);
  }
  fences_[thread] = {block_of(*engine.current).epoch, thread};
}

void BlockOrder::atomic(const void* p) {
  if (fences_.empty() && published_.empty()) return;
  const int thread = engine.current->number;
  const auto published = published_.find(p);
  if (published != published_.end()) observed_[thread].insert(published->second.begin(), published->second.end());
  const auto fence = fences_.find(thread);
  if (fence == fences_.end()) return;
  Releases& releases = published_[p];
  releases.insert(acquired_.begin(), acquired_.end());
  releases[starts_.size() - 1] = fence->second;
}

bool BlockOrder::after(uint32_t epoch, int thread) const {
  if (acquired_.empty()) return false;
  const auto next = std::upper_bound(starts_.begin(), starts_.end(), epoch);
  const auto release = acquired_.find(static_cast<size_t>(next - starts_.begin()) - 1);
  if (release == acquired_.end()) return false;
  const Release& r = release->second;
  return epoch < r.epoch || (epoch == r.epoch && thread == r.thread);
}

bool BlockOrder::after_all() const { return acquired_.size() + 1 >= starts_.size(); }

}  // namespace sic::simt
