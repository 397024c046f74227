#include "delta/block_key.h"

#include <cstring>
#include <random>

#include "core/check.h"
#include "delta/words.h"

namespace sic::delta {

Tokens tokens_of(const int64_t* ids, int64_t count, int32_t* room) {
  int64_t lost = 0;
  for (int64_t i = 0; i < count; ++i) {
    room[i] = static_cast<int32_t>(ids[i]);
    lost |= ids[i] ^ room[i];
  }
  if (lost) return {ids, count, 8};
  return {room, count, 4};
}

// ---- names ----

namespace {

class Message {
 public:
  Message(const BlockKey& key, const BlockDigest::Name& parent) {
    text_.reserve(64 + key.space.size + key.salt.size);
    text_ += '\1';
    label(key.space);
    label(key.salt);
    text_ += static_cast<char>(parent.size);
    text_ += parent.text();
    text_ += static_cast<char>(key.tokens.width);
    number(static_cast<uint32_t>(key.tokens.count));
  }
  const std::string& before_tokens() const { return text_; }

 private:
  void label(const Label& l) {
    text_ += static_cast<char>(l.kind);
    number(static_cast<uint32_t>(l.size));
    if (l.size) text_.append(l.data, l.size);
  }
  template <class T>
  void number(T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    text_.append(bytes, sizeof value);
  }

  std::string text_;
};

}  // namespace

BlockDigest::BlockDigest(const std::string& name, const std::string& key) : probes_(name != "blake2b") {
  const Check check("BlockIndex");
  check.require(key.size() <= Blake2b::kMostBytes, "key", std::to_string(key.size()) + " bytes", "at most 64");
  size_t bytes = kMostBytes;
  if (probes_)
    for (bytes = 8; bytes > 0 && name != "blake2b-" + std::to_string(8 * bytes);) --bytes;
  check.require(bytes > 0, "digest", "'" + name + "'", "blake2b, blake2b-8, -16, ... -64, or a function of bytes");
  start_ = Blake2b(bytes, key.data(), key.size());
}

BlockDigest::Name BlockDigest::operator()(const BlockKey& key, const Name& parent) const {
  const Message message(key, parent);
  Name name;
  if (function_) {
    std::string whole = message.before_tokens();
    whole.append(static_cast<const char*>(key.tokens.data), key.tokens.bytes());
    const std::string given = function_(whole);
    Check("BlockIndex")
        .require(!given.empty() && given.size() <= kMostBytes, "digest", std::to_string(given.size()) + " bytes",
                 "1 to 32 from the function");
    name.size = static_cast<uint8_t>(given.size());
    std::memcpy(name.bytes, given.data(), given.size());
    return name;
  }
  Blake2b state = start_;
  state.update(message.before_tokens().data(), message.before_tokens().size());
  state.update(key.tokens.data, key.tokens.bytes());
  name.size = static_cast<uint8_t>(state.digest_bytes());
  state.finish(name.bytes);
  return name;
}

// ---- the probe ----

namespace {

// All 128 bits of a product, folded to 64.
inline uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr size_t kStripe = 64;  // bytes whose products are independent of each other: 16 tokens

inline uint64_t stripe(const char* p, const uint64_t* secret) {
  uint64_t sum = 0;
  for (int i = 0; i < 8; i += 2) sum += fold(load64(p + 8 * i) ^ secret[i], load64(p + 8 * i + 8) ^ secret[i + 1]);
  return sum;
}

// Of any length; the end is padded with zeros, so the caller hashes the length too.
uint64_t long_text(const char* p, size_t n, const uint64_t* secret) {
  uint64_t h = 0;
  for (; n > kStripe; p += kStripe, n -= kStripe) h = fold(h ^ stripe(p, secret), secret[8]);
  char last[kStripe] = {};
  std::memcpy(last, p, n);
  return fold(h ^ stripe(last, secret), secret[8]);
}

inline uint64_t text(const char* p, size_t n, const uint64_t* secret) {
  if (n == kStripe) return stripe(p, secret);
  if (n > 16) return long_text(p, n, secret);
  const Ends ends(p, n);
  return fold(ends.first ^ secret[0], ends.last ^ secret[1]);
}

}  // namespace

ProbeHash::ProbeHash() {
  std::random_device random;
  for (uint64_t& s : secret_) s = (uint64_t{random()} << 32 | random()) | 1;
}

uint64_t ProbeHash::operator()(const BlockKey& key) const {
  const auto kind = [](const Label& l) { return static_cast<uint64_t>(l.kind); };
  const uint64_t sizes = static_cast<uint64_t>(key.tokens.bytes()) ^ uint64_t { key.space.size } << 24 ^
                         uint64_t { key.salt.size } << 42 ^ kind(key.space) << 60 ^ kind(key.salt) << 62;
  uint64_t sum = fold(key.parent ^ secret_[0], sizes ^ secret_[1]);
  if (key.space.size) sum += text(key.space.data, key.space.size, secret_ + 2);
  if (key.salt.size) sum += text(key.salt.data, key.salt.size, secret_ + 5);
  sum += text(static_cast<const char*>(key.tokens.data), key.tokens.bytes(), secret_ + 7);
  return fold(sum, secret_[1]);
}

uint64_t ProbeHash::operator()(const BlockDigest::Name& name) const {
  uint64_t first;
  std::memcpy(&first, name.bytes, sizeof first);
  return fold(first ^ secret_[0], secret_[1]);
}

}  // namespace sic::delta
