// Accesses on their way to the checks: hooks, atomics, asynchronous copies.
#include "simt/checker.h"

#include <link.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace sic::simt {

SharedMemory shared_memory;

std::recursive_mutex& lock() {
  static std::recursive_mutex mutex;
  return mutex;
}

namespace {

// Anchors: a variable of this module's thread-local segment, and one of its code.
thread_local char thread_anchor = 0;

struct Module {
  size_t anchor_offset = 0, thread_bytes = 0;  // in the thread-local segment
  std::vector<std::pair<uintptr_t, uintptr_t>> segments;
};

int find_module(dl_phdr_info* info, size_t, void* out) {
  const auto code = reinterpret_cast<uintptr_t>(&find_module);
  auto& m = *static_cast<Module*>(out);
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + h.p_vaddr;
    mine |= h.p_type == PT_LOAD && code >= begin && code < begin + h.p_memsz;
  }
  if (!mine) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + h.p_vaddr;
    if (h.p_type == PT_LOAD) m.segments.emplace_back(begin, begin + h.p_memsz);
    if (h.p_type != PT_TLS) continue;
    m.thread_bytes = h.p_memsz;
    m.anchor_offset = static_cast<size_t>(&thread_anchor - static_cast<char*>(info->dlpi_tls_data));
  }
  return 1;
}

const Module& module() {
  static const Module known = [] {
    thread_anchor = 1;  // the segment of a thread exists once it has been touched
    Module m;
    dl_iterate_phdr(find_module, &m);
    return m;
  }();
  return known;
}

}  // namespace

void SharedMemory::prepare(size_t dynamic_bytes) {
  const Module& m = module();
  if (!cells) {
    const size_t bytes = (kMaxSharedBytes + m.thread_bytes) * sizeof(Cell);
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void* block = std::aligned_alloc(4096, kMaxSharedBytes + 8192 - kMaxSharedBytes % 4096);
    if (p == MAP_FAILED || !block) throw std::bad_alloc();
    cells = static_cast<Cell*>(p);
    dynamic_ = reinterpret_cast<uintptr_t>(block);
  }
  dynamic_bytes_ = dynamic_bytes;
  thread_anchor = 1;
  static_ = reinterpret_cast<uintptr_t>(&thread_anchor) - m.anchor_offset;
  static_bytes_ = m.thread_bytes;
}

bool constant_memory(uintptr_t a, size_t n) {
  const auto arguments = reinterpret_cast<uintptr_t>(engine.call.arguments.get());
  if (a >= arguments && a + n <= arguments + engine.call.argument_bytes) return true;
  for (const auto& [begin, end] : module().segments)
    if (a >= begin && a + n <= end) return true;
  return false;
}

// ---- accesses that are calls ----

void note_atomic(void* p, size_t bytes, Site site) {
  if (!engine.current) return fault({site}, "atomic in host code");
  check_access(p, bytes, AccessKind::atomic, bytes, {site});
  block_order.atomic(p);
  maybe_yield();
}

void read_global(void* to, const void* from, size_t bytes, Site site) {
  check_access(from, bytes, AccessKind::cached_read, bytes, {site});
  if (shared_memory.offset(reinterpret_cast<uintptr_t>(from), bytes) != SharedMemory::kOutside)
    fault({site}, "global load of shared memory");
  std::memcpy(to, from, bytes);
}
void write_global(void* to, const void* from, size_t bytes, Site site) {
  check_access(to, bytes, AccessKind::write, bytes, {site});
  std::memcpy(to, from, bytes);
}
void read_shared(void* to, const void* from, size_t bytes, Site site) {
  if (shared_memory.offset(reinterpret_cast<uintptr_t>(from), bytes) == SharedMemory::kOutside)
    fault({site}, "shared load from elsewhere");
  check_access(from, bytes, AccessKind::read, bytes, {site});
  std::memcpy(to, from, bytes);
}

// ---- asynchronous copies ----

void copy_async(void* shared, const void* global, size_t bytes, bool valid, Site site) {
  const size_t offset = shared_memory.offset(reinterpret_cast<uintptr_t>(shared), bytes);
  if (offset == SharedMemory::kOutside) fault({site}, "cp.async to something that is not shared memory");
  check_access(shared, bytes, AccessKind::write, bytes, {site});
  if (valid) check_access(global, bytes, AccessKind::read, bytes, {site});
  for (size_t i = 0; i < bytes; ++i) mark_in_flight(shared_memory.cells[offset + i]);
  Thread& t = *engine.current;
  PendingCopy copy{shared, static_cast<uint32_t>(bytes), t.copy_group, {}};
  if (valid) std::memcpy(copy.data, global, bytes);
  t.copies.push_back(copy);
}

void copy_async_commit() { ++engine.current->copy_group; }

void copy_async_wait(int pending) {
  Thread& t = *engine.current;
  size_t kept = 0;
  for (const PendingCopy& copy : t.copies) {
    if (copy.group >= t.copy_group - pending) {
      t.copies[kept++] = copy;
      continue;
    }
    std::memcpy(copy.shared, copy.data, copy.bytes);
    const size_t offset = shared_memory.offset(reinterpret_cast<uintptr_t>(copy.shared), copy.bytes);
    for (size_t i = 0; i < copy.bytes; ++i) arrive(shared_memory.cells[offset + i]);
  }
  t.copies.resize(kept);
}

}  // namespace sic::simt
