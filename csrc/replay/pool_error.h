// What can go wrong with a pool besides bad arguments.
#pragma once
#include <cstring>
#include <string>

#include "core/check.h"

namespace sic::replay {

// The pool's file or memory is not what it should be: damaged, in use by another process, written to after free,
// closed.
class PoolError : public Error {
 public:
  using Error::Error;
};

// No room: for the block in its part, or for one more name.
class PoolFull : public Error {
 public:
  using Error::Error;
};

// `what: message of the system`.
[[noreturn]] inline void fail_system(const std::string& what, int code) {
  throw PoolError(what + ": " + std::strerror(code));
}

}  // namespace sic::replay
