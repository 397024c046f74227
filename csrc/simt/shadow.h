// Cells for any address, made when first asked for and kept: time tells what still counts.
#pragma once
#include <cstdint>
#include <unordered_map>

#include "simt/race.h"

namespace sic::simt {

class ShadowMap {
 public:
  static constexpr uintptr_t kPage = 1 << 16;

  // Of the page of an address.
  const Cells& page(uintptr_t address) {
    const uintptr_t number = address / kPage;
    Recent& recent = recent_[number % kRecent];
    if (recent.number != number || !recent.cells.words) recent = {number, find(number)};
    return recent.cells;
  }
  // Calls body(cells, offset, bytes) for each page that the bytes lie in, until it returns false.
  template <class Body>
  void for_pages(uintptr_t address, size_t n, Body body) {
    while (n > 0) {
      const uintptr_t offset = address % kPage;
      const size_t part = n < kPage - offset ? n : kPage - offset;
      if (!body(page(address), offset, part)) return;
      address += part, n -= part;
    }
  }

  bool large() const { return pages_.size() > kLarge; }
  void clear();

 private:
  struct Recent {
    uintptr_t number = 0;
    Cells cells;
  };
  static constexpr size_t kRecent = 64, kLarge = 256;
  Cells find(uintptr_t number);

  Recent recent_[kRecent];
  std::unordered_map<uintptr_t, Cells> pages_;
};

// Blank cells for so many bytes; the system gives them memory when they are touched.
Cells map_cells(size_t bytes);

}  // namespace sic::simt
