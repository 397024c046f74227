#include "core/scratch.h"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sic {
namespace {

constexpr size_t kAlign = 64;

char* allocate(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + kAlign - 1) / kAlign * kAlign;
  void* p = std::aligned_alloc(kAlign, size ? size : kAlign);
  if (!p) throw std::bad_alloc();
  return static_cast<char*>(p);
}

struct ThreadBuffer {
  char* data = nullptr;
  int64_t size = 0;
  ~ThreadBuffer() { std::free(data); }
};

void grow(ThreadBuffer& buffer, int64_t bytes) {
  if (bytes <= buffer.size) return;
  char* bigger = allocate(bytes);
  std::free(buffer.data);
  buffer.data = bigger;
  buffer.size = bytes;
}

}  // namespace

char* thread_scratch(int64_t bytes, ScratchSlot slot) {
  static thread_local ThreadBuffer buffers[2];
  ThreadBuffer& buffer = buffers[static_cast<int>(slot)];
  grow(buffer, bytes);
  return buffer.data;
}

// Fresh memory costs a page fault every 4 KiB, more than many ops take: each thread keeps its last block.
constexpr int64_t kKeptBytes = int64_t{64} << 20;

namespace {
struct KeptBlock : ThreadBuffer {
  bool taken = false;
};
KeptBlock& kept_block() {
  static thread_local KeptBlock block;
  return block;
}
}  // namespace

CallScratch::CallScratch(const TensorView& workspace, int64_t bytes) : data_(nullptr), source_(Source::workspace) {
  KeptBlock& kept = kept_block();
  if (workspace.given()) {
    data_ = workspace.as<char>();
  } else if (kept.taken || bytes > kKeptBytes) {
    data_ = allocate(bytes);
    source_ = Source::heap;
  } else {
    grow(kept, bytes);
    data_ = kept.data;
    source_ = Source::kept;
    kept.taken = true;
  }
}

CallScratch::~CallScratch() {
  if (source_ == Source::heap) std::free(data_);
  if (source_ == Source::kept) kept_block().taken = false;
}

bool advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  (void)data, (void)bytes;
  return false;
#endif
}

}  // namespace sic
