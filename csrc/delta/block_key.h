// What a block of tokens is known by: namespace, parent, tokens and salt; its name outside of the process, and the hash
// that the table is probed with.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "delta/blake2b.h"

namespace sic::delta {

// A namespace or a salt: absent, text or bytes, all distinct. Borrowed.
struct Label {
  enum class Kind : uint8_t { absent, text, bytes };
  Kind kind = Kind::absent;
  const char* data = nullptr;
  size_t size = 0;
};

// Token ids, contiguous: 4 bytes each where all fit, else 8. Borrowed.
struct Tokens {
  const void* data = nullptr;
  int64_t count = 0;
  int width = 4;

  size_t bytes() const { return static_cast<size_t>(count) * static_cast<size_t>(width); }
  Tokens part(int64_t first, int64_t n) const { return {static_cast<const char*>(data) + first * width, n, width}; }
};
inline Tokens tokens_of(const int32_t* ids, int64_t count) { return {ids, count, 4}; }
// As 4-byte ids in `room` (for `count` of them) where all fit, else as they are.
Tokens tokens_of(const int64_t* ids, int64_t count, int32_t* room);

// A block's place in the index, as long as it lives; never given twice. 0: none.
using Handle = uint64_t;

struct BlockKey {
  Label space;  // the namespace
  Handle parent = 0;
  Tokens tokens;
  Label salt;
};

// The name of a block: a digest of its namespace, salt, tokens and the name of its parent, the same in every process
// and on every machine. Its message (integers little-endian):
//   u8 1 | namespace: u8 kind, u32 size, bytes | salt: likewise | parent: u8 size, name (size 0: none) |
//   tokens: u8 width, u32 count, ids
// 16 tokens, with namespace and salt of up to 15 bytes together, are one block of BLAKE2b.
class BlockDigest {
 public:
  static constexpr size_t kMostBytes = 32;
  static constexpr const char* kDefaultKey = "sic_kernels.BlockIndex";
  using Function = std::function<std::string(const std::string& message)>;

  // "blake2b": 32 bytes. "blake2b-<bits>", 8 to 64 in steps of 8: shorter, and the table is probed with it, so that
  // unequal blocks can be made to collide. `key`: BLAKE2b's, at most 64 bytes; a secret one makes names unguessable.
  explicit BlockDigest(const std::string& name = "blake2b", const std::string& key = kDefaultKey);
  // 1 to 32 bytes of the caller's; the table is probed with the first 8 of them.
  explicit BlockDigest(Function function) : function_(std::move(function)), probes_(true) {}

  struct Name {
    uint8_t bytes[kMostBytes] = {};
    uint8_t size = 0;
    std::string text() const { return {reinterpret_cast<const char*>(bytes), size}; }
  };
  Name operator()(const BlockKey& key, const Name& parent) const;

  // Whether the table is probed with names and not with a hash of its own.
  bool probes() const { return probes_; }
  bool is_native() const { return !function_; }

 private:
  Function function_;
  Blake2b start_{kMostBytes};  // with the key's block behind it
  bool probes_ = false;
};

// A 64-bit hash of a key, parent handle included: sums of products with secret random numbers, so that no choice of
// tokens makes the table slow. A fraction of BLAKE2b's time; hits are verified, so it need not be more.
class ProbeHash {
 public:
  ProbeHash();
  uint64_t operator()(const BlockKey& key) const;
  // The first 8 bytes of a name, spread over all bits (short names have few).
  uint64_t operator()(const BlockDigest::Name& name) const;

 private:
  uint64_t secret_[16];
};

}  // namespace sic::delta
