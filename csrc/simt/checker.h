// Inside the emulator: the checks that every access goes through.
#pragma once
#include <mutex>

#include "simt/engine.h"
#include "simt/race.h"

namespace sic::simt {

// Everything that the outside may call holds this lock: kernels, the fake runtime, the table of memory.
std::recursive_mutex& mutex();
struct Lock {
  std::lock_guard<std::recursive_mutex> hold{mutex()};
};

// Shared memory of the running cluster: a slot for the dynamic part of each block, then the thread-local segment of
// this module, which holds every __shared__ variable (so that clusters cannot have any). Offsets count through them
// all.
class SharedMemory {
 public:
  static constexpr size_t kOutside = ~size_t{0};
  static constexpr size_t kSlot = 256 * 1024, kDynamic = kMaxCluster * kSlot;
  static_assert(kSlot > kMaxSharedBytes);

  // For the thread that launches.
  void prepare(int blocks, size_t dynamic_bytes);
  size_t offset(uintptr_t a, size_t n) const {
    if (a - dynamic_ < slots_bytes_) return (a - dynamic_) % kSlot + n <= dynamic_bytes_ ? a - dynamic_ : kOutside;
    if (a - static_ < static_bytes_) return a + n <= static_ + static_bytes_ ? kDynamic + (a - static_) : kOutside;
    return kOutside;
  }
  // Whose dynamic shared memory an address is in, in the cluster; -1: none's.
  int block(uintptr_t a) const { return offset(a, 1) < kDynamic ? static_cast<int>((a - dynamic_) / kSlot) : -1; }
  bool past_dynamic(uintptr_t a) const { return a - dynamic_ < kDynamic; }
  const Cells& cells() const { return cells_; }
  void* dynamic(int block) const { return reinterpret_cast<void*>(dynamic_ + static_cast<size_t>(block) * kSlot); }

 private:
  Cells cells_;
  uintptr_t dynamic_ = 0, static_ = 0;
  size_t slots_bytes_ = 0, dynamic_bytes_ = 0, static_bytes_ = 0;
};
extern SharedMemory shared_memory;

bool module_memory(uintptr_t a, size_t n);  // what this module itself consists of, constants among it

void prepare_memory();  // before a launch

// A fault for a thread that goes on and on: it waits for something that does not come.
inline void count_access(const Place& place) {
  if (++engine.counters.accesses > engine.patience)
    fault(place, "%llu accesses without a barrier: does it spin?", static_cast<unsigned long long>(kPatience));
}

// A fault unless the current thread may make this access now. alignment 1: any address will do.
void check_access(const void* p, size_t n, AccessKind kind, size_t alignment, const Place& place);

// For copies and fills that the runtime makes.
bool host_may_access(const void* p, size_t n, bool write);
void note_host_write(const void* p, size_t n);

}  // namespace sic::simt
