// The memory of this module itself: its constants, and the thread-local segment that __shared__ variables live in.
#include <link.h>

#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "simt/checker.h"
#include "simt/shadow.h"

namespace sic::simt {

SharedMemory shared_memory;

namespace {

thread_local char anchor = 0;  // in the segment

struct Module {
  std::vector<std::pair<uintptr_t, uintptr_t>> segments;
  size_t thread_bytes = 0, anchor_offset = 0;
};

int find_module(dl_phdr_info* info, size_t, void* out) {
  const auto code = reinterpret_cast<uintptr_t>(&find_module);
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    mine |= h.p_type == PT_LOAD && code - (info->dlpi_addr + h.p_vaddr) < h.p_memsz;
  }
  if (!mine) return 0;
  auto& m = *static_cast<Module*>(out);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + h.p_vaddr;
    if (h.p_type == PT_LOAD) m.segments.emplace_back(begin, begin + h.p_memsz);
    if (h.p_type != PT_TLS) continue;
    m.thread_bytes = h.p_memsz;
    m.anchor_offset = static_cast<size_t>(&anchor - static_cast<char*>(info->dlpi_tls_data));
  }
  return 1;
}

// The segment of a thread exists once something in it has been touched.
const char* touched_anchor() {
  anchor = 1;
  return &anchor;
}

const Module& module() {
  static const Module known = [] {
    Module m;
    touched_anchor();
    dl_iterate_phdr(find_module, &m);
    return m;
  }();
  return known;
}

}  // namespace

void SharedMemory::prepare(int blocks, size_t dynamic_bytes) {
  const Module& m = module();
  if (!cells_.words) {
    void* slots = std::aligned_alloc(4096, kDynamic);
    if (!slots) throw std::bad_alloc();
    dynamic_ = reinterpret_cast<uintptr_t>(slots);
    cells_ = map_cells(kDynamic + m.thread_bytes);
  }
  slots_bytes_ = static_cast<size_t>(blocks) * kSlot;
  dynamic_bytes_ = dynamic_bytes;
  static_ = reinterpret_cast<uintptr_t>(touched_anchor()) - m.anchor_offset;
  static_bytes_ = m.thread_bytes;
}

bool module_memory(uintptr_t a, size_t n) {
  for (const auto& [begin, end] : module().segments)
    if (a >= begin && a + n <= end) return true;
  return false;
}

}  // namespace sic::simt
