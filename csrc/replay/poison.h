// Freed memory filled with a pattern: what changed in it when it is given out again was written after it was freed.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace sic::replay {

class Poison {
 public:
  static constexpr unsigned char kByte = 0xFB;  // as a float16, bfloat16 or float32: a huge negative number

  explicit Poison(char* memory) : memory_(memory) {}
  Poison(const Poison&) = delete;
  Poison& operator=(const Poison&) = delete;

  // These bytes are poisoned from now on: fill() them next. `block` is for the message.
  void remember(int64_t offset, int64_t bytes, std::string block);
  void fill(int64_t offset, int64_t bytes) noexcept;
  // PoolError that names the block whose memory was changed; that memory is poisoned anew, so that an error is reported
  // once.
  void check(int64_t offset, int64_t bytes) const;
  // These bytes are no longer known to be poisoned: in use, or given back to the system.
  void forget(int64_t offset, int64_t bytes);

 private:
  struct Freed {
    int64_t end;
    std::string block;
  };
  using Ranges = std::map<int64_t, Freed>;  // apart from each other
  Ranges::const_iterator first_behind(int64_t offset) const;

  char* memory_;
  Ranges ranges_;
};

}  // namespace sic::replay
