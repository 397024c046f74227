// The threads that can run, in the order of the schedule.
#pragma once
#include <cstdint>
#include <random>
#include <utility>

#include "simt/engine.h"

namespace sic::simt {

// Forward and reverse run one warp as far as it gets before the next, so that nothing holds which the program does not
// order; random picks anybody.
class RunQueue {
 public:
  void reset(Schedule schedule) {
    schedule_ = schedule;
    head_ = count_ = 0;
    picked_ = false;
  }
  void seed(uint32_t seed) { random_.seed(seed); }
  uint64_t next_random() { return random_(); }
  bool empty() const { return count_ == 0; }
  bool random() const { return schedule_ == Schedule::random; }

  // The next thread; stays the next until it is taken.
  int peek() {
    if (random() && !picked_) {
      std::swap(at(0), at(static_cast<int>(random_() % static_cast<uint32_t>(count_))));
      picked_ = true;
    }
    return at(0);
  }
  int take() {
    const int thread = peek();
    picked_ = false;
    head_ = (head_ + 1) % kSize, --count_;
    return thread;
  }
  void push_back(int thread) { at(count_++) = static_cast<uint16_t>(thread); }
  // Threads first to first + n - 1, at the end.
  void push_block(int first, int n) {
    for (int i = 0; i < n; ++i) push_back(first + (schedule_ == Schedule::reverse ? n - 1 - i : i));
  }
  // Threads 0 to n - 1 of each block, at the end.
  void push_cluster(int blocks, int n) {
    for (int b = 0; b < blocks; ++b) push_block((schedule_ == Schedule::reverse ? blocks - 1 - b : b) * kMaxThreads, n);
  }
  // Lanes of a warp, before everybody else.
  void push_lanes(int first, unsigned mask) {
    picked_ = false;
    while (mask) {
      const int lane = schedule_ == Schedule::reverse ? __builtin_ctz(mask) : 31 - __builtin_clz(mask);
      mask &= ~(1u << lane);
      head_ = (head_ + kSize - 1) % kSize, ++count_;
      at(0) = static_cast<uint16_t>(first + lane);
    }
  }

 private:
  static constexpr int kSize = kMaxFibers;  // nobody waits twice
  uint16_t& at(int i) { return ring_[(head_ + i) % kSize]; }

  Schedule schedule_ = Schedule::forward;
  uint16_t ring_[kSize];
  int head_ = 0, count_ = 0;
  bool picked_ = false;
  std::minstd_rand random_{1};
};

}  // namespace sic::simt
