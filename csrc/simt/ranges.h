// Inside the emulator: the table of memory on offer.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "simt/memory.h"

namespace sic::simt {

struct Range {
  struct Axis {
    uint64_t stride, count;  // bytes
  };

  int id = 0;
  uintptr_t begin = 0, end = 0;
  uintptr_t data = 0;  // the first element, which negative strides put elsewhere than at the begin
  std::string name;
  bool writable = false, garbage = false;
  bool shadowed = false;   // written by some kernel, through this range or another
  uint32_t since = 0;      // garbage: the first epoch whose writes count
  std::vector<Axis> axes;  // of a tensor with gaps, the widest stride first
  uint64_t row = 0;        // bytes at the innermost level

  bool contains(uintptr_t a, size_t n) const;
};

class RangeTable {
 public:
  int add(Range range);
  void remove(int id);
  void allow_writes(uintptr_t data);
  void forget_garbage();

  // Before a launch.
  void prepare() {
    if (!prepared_) find_overlaps();
  }
  // The range that allows the access; else one that contains it, to be named in a fault; else nullptr.
  const Range* find(uintptr_t a, size_t n, bool write) {
    const Range*& last = write ? last_write_ : last_read_;
    return last && last->contains(a, n) ? last : search(a, n, write);
  }
  // The one that ends or begins closest to an address that none contains; nullptr: none is near.
  const Range* nearest(uintptr_t a, size_t n) const;

  std::vector<Range>::const_iterator begin() const { return ranges_.begin(); }
  std::vector<Range>::const_iterator end() const { return ranges_.end(); }

 private:
  const Range* search(uintptr_t a, size_t n, bool write);
  void find_overlaps();
  void changed();

  std::vector<Range> ranges_;
  const Range *last_read_ = nullptr, *last_write_ = nullptr;
  bool prepared_ = true;
  int next_id_ = 1;
};
extern RangeTable ranges;

}  // namespace sic::simt
