// Inside the emulator: the checks that every access goes through.
#pragma once
#include <mutex>

#include "simt/memory.h"
#include "simt/shadow.h"

namespace sic::simt {

// One lock for everything: kernels, the fake runtime and the table of memory.
std::recursive_mutex& lock();

// Shared memory of the running block: the dynamic part, then the thread-local segment of this module, which holds every
// __shared__ variable.
class SharedMemory {
 public:
  static constexpr size_t kOutside = ~size_t{0};
  Cell* cells = nullptr;

  // For the thread that launches.
  void prepare(size_t dynamic_bytes);
  size_t offset(uintptr_t a, size_t n) const {
    if (a - dynamic_ < dynamic_bytes_) return a + n <= dynamic_ + dynamic_bytes_ ? a - dynamic_ : kOutside;
    if (a - static_ < static_bytes_)
      return a + n <= static_ + static_bytes_ ? kMaxSharedBytes + (a - static_) : kOutside;
    return kOutside;
  }
  bool near_dynamic(uintptr_t a) const { return a - dynamic_ < kMaxSharedBytes + 4096; }
  // An offset as a person counts: from the start of the part.
  size_t label(size_t offset) const { return offset < kMaxSharedBytes ? offset : offset - kMaxSharedBytes; }
  char* dynamic() const { return reinterpret_cast<char*>(dynamic_); }

 private:
  uintptr_t dynamic_ = 0, static_ = 0;
  size_t dynamic_bytes_ = 0, static_bytes_ = 0;
};
extern SharedMemory shared_memory;

// Kernel arguments, and this module's own constants.
bool constant_memory(uintptr_t a, size_t n);

void prepare_memory();  // before a launch
// alignment 1: any address will do.
void check_access(const void* p, size_t n, AccessKind kind, size_t alignment, const Place& place);
// For copies and fills that the runtime makes: why they may not be, or nullptr; and that they have been.
const char* host_access_problem(const void* p, size_t n, bool write);
void note_written(const void* p, size_t n);
Cell* global_cells(const void* p);

std::string launch_error(const void* entry, const char* why);

}  // namespace sic::simt
