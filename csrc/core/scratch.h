// Memory for the duration of a call.
#pragma once
#include <cstdint>

#include "core/tensor_view.h"

namespace sic {

// A per-thread buffer, 64-byte aligned, kept for the next call; valid until the thread asks for the same slot again.
enum class ScratchSlot { row, unit };  // of a task's inner loop, and of what lives across it
char* thread_scratch(int64_t bytes, ScratchSlot slot = ScratchSlot::row);

// The caller's workspace, or a block of the library's own: the calling thread's kept one (up to 64 MiB), else the heap.
class CallScratch {
 public:
  CallScratch(const TensorView& workspace, int64_t bytes);
  ~CallScratch();
  CallScratch(const CallScratch&) = delete;
  CallScratch& operator=(const CallScratch&) = delete;
  char* data() const { return data_; }

 private:
  enum class Source { workspace, kept, heap };
  char* data_;
  Source source_;
};

// Asks the system to back memory with huge pages (Linux, where it is allowed); false if it did not. Scattered rows of a
// large cache otherwise miss the TLB at nearly every read.
bool advise_huge_pages(void* data, int64_t bytes);

// Hands out aligned parts of one block, in order.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace sic
