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

// Hands out aligned parts of one aligned block, in order. Without a block it measures.
class Carver {
 public:
  explicit Carver(void* base, int64_t alignment = 64) : base_(static_cast<char*>(base)), alignment_(alignment) {}
  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + alignment_ - 1) / alignment_ * alignment_;
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t alignment_, used_ = 0;
};

}  // namespace sic
