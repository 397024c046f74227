#include "core/scratch.h"

#include <cstdlib>
#include <new>

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

}  // namespace

char* thread_scratch(int64_t bytes) {
  static thread_local ThreadBuffer buffer;
  if (bytes > buffer.size) {
    char* bigger = allocate(bytes);
    std::free(buffer.data);
    buffer.data = bigger;
    buffer.size = bytes;
  }
  return buffer.data;
}

CallScratch::CallScratch(const TensorView& workspace, int64_t bytes)
    : data_(workspace.given() ? workspace.as<char>() : allocate(bytes)), owned_(!workspace.given()) {}

CallScratch::~CallScratch() {
  if (owned_) std::free(data_);
}

}  // namespace sic
