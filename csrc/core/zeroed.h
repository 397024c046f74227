// A large zeroed array whose pages the system lends as they are first touched, huge ones where it can: scattered reads
// of a large table otherwise miss the TLB at nearly every step.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "core/scratch.h"

namespace sic {

template <class T>
class Zeroed {
  static_assert(std::is_trivially_destructible_v<T> && std::is_trivially_copyable_v<T>);

 public:
  explicit Zeroed(int64_t size) : size_(size), memory_(std::calloc(bytes() / kLine + 2, kLine), &std::free) {
    if (!memory_) throw std::bad_alloc();
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<T*>((address + kLine - 1) / kLine * kLine);
    advise_huge_pages(data_, bytes());
  }

  T* data() const { return data_; }
  T& operator[](uint64_t i) const { return data_[i]; }
  uint64_t size() const { return static_cast<uint64_t>(size_); }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }

 private:
  static constexpr size_t kLine = 64;  // of the cache

  int64_t size_;
  std::unique_ptr<void, void (*)(void*)> memory_;
  T* data_;
};

}  // namespace sic
