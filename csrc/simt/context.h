// Switching stacks: what fibers are made of.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) || defined(SIC_SIMT_UCONTEXT)
#define SIC_SIMT_USE_UCONTEXT 1
#include <ucontext.h>
#endif

namespace sic::simt {

// A point of execution that is not running. Made by prepare(), or by a switch away from running code.
struct Context {
#if SIC_SIMT_USE_UCONTEXT
  ucontext_t machine;
#else
  void* stack_pointer = nullptr;
#endif
};

// The next switch to `context` calls entry on this stack; entry never returns.
void prepare(Context& context, char* stack, size_t bytes, void (*entry)());
// Continues `to`; returns when somebody switches to `from`.
void switch_context(Context& from, Context& to);

// Stacks of one size, each with an unreadable page below it, so that an overflow stops at once.
class StackPool {
 public:
  static constexpr size_t kBytes = 128 << 10;
  StackPool() = default;
  ~StackPool();
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;

  // Room for n stacks; throws sic::Error where the system has no memory. Stacks handed out before become invalid.
  void reserve(int n);
  char* stack(int i) const { return memory_ + static_cast<size_t>(i) * kStride + kGuard; }
  // The tops are staggered: at equal page offsets all stacks would compete for the same few cache sets.
  size_t bytes(int i) const { return kBytes - static_cast<size_t>(i % 32) * 64; }
  // Which stack an address lies in, or -1.
  int owner(const void* p) const {
    const size_t offset = static_cast<size_t>(static_cast<const char*>(p) - memory_);
    return offset < static_cast<size_t>(count_) * kStride ? static_cast<int>(offset / kStride) : -1;
  }

 private:
  static constexpr size_t kGuard = 4096, kStride = kBytes + kGuard;
  char* memory_ = nullptr;
  int count_ = 0;
};

}  // namespace sic::simt
