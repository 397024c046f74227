#include "simt/shadow.h"

#include <sys/mman.h>

#include <new>

namespace sic::simt {
namespace {

size_t mapped_bytes(size_t bytes) { return (bytes / 4 + bytes) * sizeof(Cell); }

}  // namespace

Cells map_cells(size_t bytes) {
  bytes = (bytes + 3) / 4 * 4;
  void* p =
      mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  Cell* cells = static_cast<Cell*>(p);
  return {cells, cells + bytes / 4};
}

Cells ShadowMap::find(uintptr_t number) {
  Cells& cells = pages_[number];
  if (!cells.words) cells = map_cells(kPage);
  return cells;
}

void ShadowMap::clear() {
  for (const auto& [number, cells] : pages_) munmap(cells.words, mapped_bytes(kPage));
  pages_.clear();
  for (Recent& recent : recent_) recent = {};
}

}  // namespace sic::simt
