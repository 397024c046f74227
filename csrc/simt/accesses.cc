// Accesses that kernels make through calls: atomics, wide loads and stores, asynchronous copies.
#include <cstring>

#include "simt/block_order.h"
#include "simt/checker.h"

#define SIC_SIMT_HERE \
  Place { site, __builtin_return_address(0) }

namespace sic::simt {
namespace {

bool is_shared(const void* p) {
  return shared_memory.offset(reinterpret_cast<uintptr_t>(p), 1) != SharedMemory::kOutside;
}
bool is_own_shared(const void* p) {
  const int block = shared_memory.block(reinterpret_cast<uintptr_t>(p));
  return is_shared(p) && (block < 0 || block == engine.current->block);
}

}  // namespace

void note_atomic(void* p, size_t bytes, Site site) {
  {
    const HooksOff off;
    count_access(SIC_SIMT_HERE);
    check_access(p, bytes, AccessKind::atomic, bytes, SIC_SIMT_HERE);
    block_order.atomic(p);
  }
  maybe_yield();
}

void read_global(void* to, const void* from, size_t bytes, Site site) {
  const HooksOff off;
  if (is_shared(from)) fault(SIC_SIMT_HERE, "global load of shared memory");
  check_access(from, bytes, AccessKind::cached_read, bytes, SIC_SIMT_HERE);
  std::memcpy(to, from, bytes);
}

void write_any(void* to, const void* from, size_t bytes, Site site) {
  const HooksOff off;
  check_access(to, bytes, AccessKind::write, bytes, SIC_SIMT_HERE);
  std::memcpy(to, from, bytes);
}

void read_shared(void* to, const void* from, size_t bytes, Site site) {
  const HooksOff off;
  if (!is_own_shared(from)) fault(SIC_SIMT_HERE, "shared load of something else");
  check_access(from, bytes, AccessKind::read, bytes, SIC_SIMT_HERE);
  std::memcpy(to, from, bytes);
}

void copy_async(void* shared, const void* global, size_t bytes, bool valid, Site site) {
  const HooksOff off;
  if (!is_own_shared(shared)) fault(SIC_SIMT_HERE, "cp.async to something that is not shared memory");
  check_access(shared, bytes, AccessKind::write, bytes, SIC_SIMT_HERE);
  if (valid) check_access(global, bytes, AccessKind::read, bytes, SIC_SIMT_HERE);
  depart(shared_memory.cells(), shared_memory.offset(reinterpret_cast<uintptr_t>(shared), bytes), bytes);
  Thread& t = *engine.current;
  PendingCopy copy{shared, static_cast<uint32_t>(bytes), t.copy_group, {}};
  if (valid) std::memcpy(copy.data, global, bytes);
  t.copies.push_back(copy);
}

void copy_async_commit() { ++engine.current->copy_group; }

void copy_async_wait(int pending) {
  const HooksOff off;
  Thread& t = *engine.current;
  size_t kept = 0;
  for (const PendingCopy& copy : t.copies) {
    if (copy.group >= t.copy_group - pending) {
      t.copies[kept++] = copy;
      continue;
    }
    std::memcpy(copy.shared, copy.data, copy.bytes);
    const size_t offset = shared_memory.offset(reinterpret_cast<uintptr_t>(copy.shared), copy.bytes);
    arrive(shared_memory.cells(), offset, copy.bytes);
  }
  t.copies.resize(kept);
}

}  // namespace sic::simt
