// A lock for sections of some nanoseconds. On a free one it costs one atomic exchange and, unlike std::mutex, no second
// one to let go: the processor then overlaps the cache misses of consecutive sections, which take most of their time.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

namespace sic {

class SpinLock {
 public:
  void lock() {
    for (int tries = 0; taken_.exchange(true, std::memory_order_acquire); ++tries) wait(tries);
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  // The holder may have lost its core, or be in a long section: give way, then sleep.
  void wait(int tries) const {
    for (int i = 0; i < 100 && taken_.load(std::memory_order_relaxed); ++i) pause();
    if (tries > 100) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else if (tries > 2) {
      std::this_thread::yield();
    }
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }

  std::atomic<bool> taken_{false};
};

}  // namespace sic
