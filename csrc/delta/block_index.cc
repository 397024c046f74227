#include "delta/block_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sic::delta {
namespace {

using Guard = std::lock_guard<SpinLock>;

constexpr int64_t kMostEntries = int64_t{1} << 29;         // so that their places have 30 bits
constexpr uint64_t kMostTokens = (uint64_t{1} << 31) - 1;  // of a block
constexpr uint64_t kMostLabel = ~uint32_t{0};              // bytes
constexpr uint32_t kMostPins = ~uint32_t{0};
constexpr int64_t kAtOnce = 256;  // evictions under one lock: others wait, maybe with the interpreter's lock in hand

int bits_for(int64_t capacity) {
  int bits = 0;
  while (int64_t{1} << bits < capacity) ++bits;
  return bits;
}

int64_t checked(const BlockIndex::Options& o) {
  const Check check("BlockIndex");
  check.require(o.capacity >= 1 && o.capacity <= kMostEntries, "capacity", std::to_string(o.capacity),
                "1 to 2^29 entries");
  check.require(o.block_size >= 1 && o.block_size <= 65536, "block_size", std::to_string(o.block_size), "1 to 65536");
  return o.capacity;
}

uint64_t generations(int handle_bits, int number_bits) {
  Check("BlockIndex")
      .require(handle_bits >= number_bits + 2 && handle_bits <= 63, "handle_bits", std::to_string(handle_bits),
               std::to_string(number_bits + 2) + " to 63");
  return uint64_t{1} << (handle_bits - number_bits);
}

// Where one id of a sequence needs 8 bytes, those of most blocks still fit in 4.
Tokens block_of(const Tokens& tokens, int64_t first, int64_t n, std::vector<int32_t>& room) {
  const Tokens part = tokens.part(first, n);
  if (part.width == 4) return part;
  room.resize(static_cast<size_t>(n));
  return tokens_of(static_cast<const int64_t*>(part.data), n, room.data());
}

[[noreturn]] __attribute__((noinline)) void fail_key(const char* op, const BlockKey& key) {
  const Check check(op);
  const auto text = [](const Label& l) { return std::to_string(l.size) + " bytes"; };
  check.require(key.space.size <= kMostLabel, "namespace", text(key.space), "less than 2^32 bytes");
  check.require(key.salt.size <= kMostLabel, "salt", text(key.salt), "less than 2^32 bytes");
  check.fail("tokens", std::to_string(key.tokens.count) + " tokens", "1 to 2^31 - 1 tokens");
}

inline void check_key(const char* op, const BlockKey& key) {
  const bool tokens = static_cast<uint64_t>(key.tokens.count) - 1 < kMostTokens;
  if (!(tokens && (key.space.size | key.salt.size) <= kMostLabel)) fail_key(op, key);
}

}  // namespace

// ---- labels ----

uint32_t LabelStore::acquire(const Label& label) {
  if (label.kind == Label::Kind::absent) return 0;
  std::string name(1, static_cast<char>(label.kind));
  if (label.size) name.append(label.data, label.size);
  const auto known = ids_.find(name);
  if (known != ids_.end()) {
    ++texts_[known->second].uses;
    return known->second;
  }
  if (free_.empty()) {
    texts_.emplace_back();
    free_.reserve(texts_.capacity());  // release() allocates nothing
    free_.push_back(static_cast<uint32_t>(texts_.size() - 1));
  }
  const uint32_t id = free_.back();
  texts_[id] = {label.kind, 1, &ids_.emplace(std::move(name), id).first->first};
  bytes_ += texts_[id].memory();
  free_.pop_back();
  return id;
}

void LabelStore::release(uint32_t id) {
  Text& text = texts_[id];
  if (id == 0 || --text.uses > 0) return;
  bytes_ -= text.memory();
  ids_.erase(ids_.find(*text.name));
  text = Text();
  free_.push_back(id);
}

// ---- entries ----

struct alignas(64) BlockIndex::Entry {
  uint64_t probe;
  Handle parent;
  uint64_t generation;  // odd while alive
  int64_t value;
  uint32_t space, salt;
  uint32_t shape;  // of the tokens
  uint32_t children;
  uint32_t number;  // its place in the table
  uint32_t pins;
  char* far;  // the tokens, if they are longer than the room behind this struct

  bool alive() const { return generation & 1; }
  size_t token_bytes() const { return size_t{shape >> 1} * (shape & 1 ? 8 : 4); }
  static uint32_t shape_of(const Tokens& t) { return static_cast<uint32_t>(t.count) << 1 | (t.width == 8); }
};

BlockIndex::BlockIndex(const Options& options, BlockDigest digest)
    : capacity_(checked(options)),
      digest_(std::move(digest)),
      table_(capacity_, sizeof(Entry) + (static_cast<uint64_t>(options.block_size) * 4 + 63) / 64 * 64),
      number_bits_(bits_for(table_.places())),
      last_generation_(generations(options.handle_bits, number_bits_) - 1),
      names_(table_.places()),
      order_(table_.places()) {}

BlockIndex::~BlockIndex() {
  if (far_bytes_ == 0) return;
  for (uint32_t i = 0; i < table_.places(); ++i) delete[] entry(i).far;
}

inline BlockIndex::Entry& BlockIndex::entry(uint32_t i) const { return *reinterpret_cast<Entry*>(table_.record(i)); }

const char* BlockIndex::tokens_of(const Entry& e) const {
  return e.far ? e.far : reinterpret_cast<const char*>(&e) + sizeof(Entry);
}

inline Handle BlockIndex::handle_of(const Entry& e) const { return e.generation << number_bits_ | e.number; }

bool BlockIndex::is_alive(Handle handle) const {
  const uint32_t i = number_of(handle);
  return i < table_.places() && entry(i).alive() && handle_of(entry(i)) == handle;
}

uint32_t BlockIndex::number_of(Handle handle) const {
  return static_cast<uint32_t>(handle & ((uint64_t{1} << number_bits_) - 1));
}

BlockIndex::Entry& BlockIndex::expect(const char* op, Handle handle) const {
  if (!is_alive(handle)) Check(op).fail("handle", std::to_string(handle), "the handle of a block that is in the index");
  return entry(number_of(handle));
}

inline bool BlockIndex::same(const Entry& e, const BlockKey& key) const {
  return e.parent == key.parent && e.shape == Entry::shape_of(key.tokens) && labels_.equal(e.space, key.space) &&
         labels_.equal(e.salt, key.salt) &&
         equal_bytes(tokens_of(e), static_cast<const char*>(key.tokens.data), key.tokens.bytes());
}

inline BlockIndex::Entry* BlockIndex::find(uint64_t probe, const BlockKey& key, bool* collided) const {
  const auto place = table_.find(probe, [&](char* record) {
    const Entry& e = *reinterpret_cast<Entry*>(record);
    __builtin_prefetch(&e + 1);
    if (e.probe != probe) return false;
    if (same(e, key)) return true;
    *collided = true;
    return false;
  });
  return reinterpret_cast<Entry*>(place.record);
}

inline void BlockIndex::use(Entry& e, bool pin) {
  if (pin && e.pins == kMostPins)
    Check("BlockIndex").fail("pin", "a block that is pinned " + std::to_string(e.pins) + " times", "fewer pins");
  if (pin && ++e.pins == 1) {
    order_.leave(e.number);
    ++pinned_;
  }
  if (e.pins == 0) order_.use(e.number);
}

void BlockIndex::make_room(std::vector<int64_t>* evicted) {
  while (entries_ + retired_ >= capacity_) {
    if (evict_oldest(evicted)) continue;
    throw IndexFull("BlockIndex.insert: capacity: got " + std::to_string(capacity_) + " entries, of which " +
                    std::to_string(pinned_) + " are pinned and the others have descendants that are, expected " +
                    "an entry that can be evicted");
  }
}

bool BlockIndex::evict_oldest(std::vector<int64_t>* values) {
  const uint32_t i = order_.oldest([&](uint32_t j) { return entry(j).children == 0; });
  if (i == UseOrder::kNone) return false;
  order_.make_room();
  if (values) values->push_back(entry(i).value);
  drop(entry(i));
  ++evictions_;
  return true;
}

// After make_room() of the order: nothing here may fail half-way.
int64_t BlockIndex::drop(Entry& e) {
  order_.leave(e.number);
  labels_.release(e.space);
  labels_.release(e.salt);
  if (e.far) far_bytes_ -= static_cast<int64_t>(e.token_bytes());
  delete[] e.far;
  e.far = nullptr;
  if (e.parent) child_gone(e.parent);
  --entries_;
  if (++e.generation < last_generation_) {
    table_.erase(e.probe, e.number);
  } else {  // its handles are used up: the place stays taken, by what equals no key
    e.probe = ~e.probe;
    e.shape = 0;
    ++retired_;
  }
  return e.value;
}

void BlockIndex::child_gone(Handle parent) {
  const uint32_t i = number_of(parent);
  if (--entry(i).children == 0) order_.may_go(i);
}

// ---- keys ----

// Not under the lock: it takes time, and a caller's function may call the index.
BlockDigest::Name BlockIndex::name_of(const BlockKey& key) const {
  BlockDigest::Name parent;
  if (key.parent) {
    const Guard lock(mutex_);
    if (is_alive(key.parent)) parent = names_[number_of(key.parent)];
  }
  return digest_(key, parent);
}

// ---- calls ----

Handle BlockIndex::insert(const BlockKey& key, int64_t value, bool pin, std::vector<int64_t>* evicted) {
  check_key("BlockIndex.insert", key);
  const BlockDigest::Name name = name_of(key);
  const uint64_t probe = digest_.probes() ? probe_(name) : probe_(key);
  std::unique_ptr<char[]> far;
  if (key.tokens.bytes() > table_.record_bytes() - sizeof(Entry)) far.reset(new char[key.tokens.bytes()]);

  const Guard lock(mutex_);
  Entry* parent = nullptr;
  if (key.parent) {
    const Check check("BlockIndex.insert");
    if (!is_alive(key.parent))
      check.fail("parent_handle", std::to_string(key.parent), "None, or the handle of a block that is in the index");
    parent = &entry(number_of(key.parent));
    if (!labels_.equal(parent->space, key.space))
      check.fail("parent_handle", std::to_string(key.parent) + " of another namespace", "one of the same namespace");
  }
  bool collided = false;
  Entry* e = find(probe, key, &collided);
  if (!e) {
    order_.make_room();              // for the parent, if the rest fails
    if (parent) ++parent->children;  // first, or it could be evicted for its child
    try {
      make_room(evicted);
      e = &add(key, probe, name, value, std::move(far));
    } catch (...) {
      if (parent) child_gone(key.parent);
      throw;
    }
  }
  use(*e, pin);
  return handle_of(*e);
}

BlockIndex::Entry& BlockIndex::add(const BlockKey& key, uint64_t probe, const BlockDigest::Name& name, int64_t value,
                                   std::unique_ptr<char[]> far) {
  const uint32_t space = labels_.acquire(key.space);  // what may throw comes first
  uint32_t salt = 0;
  try {
    salt = labels_.acquire(key.salt);
  } catch (...) {
    labels_.release(space);
    throw;
  }
  const auto place = table_.insert(probe);
  Entry& e = *reinterpret_cast<Entry*>(place.record);
  e.number = place.number;
  e.probe = probe;
  e.parent = key.parent;
  ++e.generation;
  e.value = value;
  e.space = space;
  e.salt = salt;
  e.shape = Entry::shape_of(key.tokens);
  e.children = 0;
  e.pins = 0;
  e.far = far.release();
  if (e.far) far_bytes_ += static_cast<int64_t>(e.token_bytes());
  std::memcpy(const_cast<char*>(tokens_of(e)), key.tokens.data, key.tokens.bytes());
  names_[place.number] = name;
  ++entries_;
  ++insertions_;
  return e;
}

Handle BlockIndex::lookup(const BlockKey& key, bool pin) {
  check_key("BlockIndex.lookup", key);
  const uint64_t probe = digest_.probes() ? probe_(name_of(key)) : probe_(key);
  table_.prefetch(probe);
  const Guard lock(mutex_);
  bool collided = false;
  Entry* e = find(probe, key, &collided);
  if (!e) {
    ++misses_;
    collisions_ += collided;
    return 0;
  }
  ++hits_;
  use(*e, pin);
  return handle_of(*e);
}

std::vector<Handle> BlockIndex::match(const Label& space, const Tokens& tokens, int64_t block_size, const Label& salt,
                                      bool pin) {
  Check("BlockIndex.match").require(block_size >= 1, "block_size", std::to_string(block_size), "at least 1");
  std::vector<Handle> chain;
  std::vector<int32_t> room;
  try {
    for (int64_t first = 0; block_size <= tokens.count - first; first += block_size) {
      const Handle parent = chain.empty() ? 0 : chain.back();
      chain.reserve(chain.size() + 1);
      const Handle found = lookup({space, parent, block_of(tokens, first, block_size, room), salt}, pin);
      if (!found) break;
      chain.push_back(found);
    }
  } catch (...) {
    if (pin)
      for (Handle h : chain) unpin(h);
    throw;
  }
  return chain;
}

void BlockIndex::pin(Handle handle) {
  const Guard lock(mutex_);
  use(expect("BlockIndex.pin", handle), true);
}

void BlockIndex::unpin(Handle handle) {
  const Guard lock(mutex_);
  Entry& e = expect("BlockIndex.unpin", handle);
  if (e.pins == 0) Check("BlockIndex.unpin").fail("handle", std::to_string(handle) + " without pins", "a pinned block");
  if (--e.pins > 0) return;
  --pinned_;
  order_.use(e.number);
}

int64_t BlockIndex::evict(int64_t n, std::vector<int64_t>* values) {
  Check("BlockIndex.evict").require(n >= 0, "n", std::to_string(n), "0 or more");
  int64_t done = 0;
  for (bool more = true; more && done < n;) {
    const Guard lock(mutex_);
    for (int64_t end = std::min(n, done + kAtOnce); more && done < end; done += more) more = evict_oldest(values);
  }
  return done;
}

int64_t BlockIndex::remove(Handle handle) {
  const Guard lock(mutex_);
  Entry& e = expect("BlockIndex.remove", handle);
  const Check check("BlockIndex.remove");
  if (e.pins || e.children)
    check.fail("handle",
               std::to_string(handle) + " with " + std::to_string(e.pins) + " pins and " + std::to_string(e.children) +
                   " children",
               "a block without either");
  order_.make_room();
  ++removals_;
  return drop(e);
}

int64_t BlockIndex::clear() {
  int64_t done = 0;
  for (bool more = true; more;) {
    const Guard lock(mutex_);
    if (done == 0)
      Check("BlockIndex.clear").require(pinned_ == 0, "pins", std::to_string(pinned_) + " pinned blocks", "none");
    for (int64_t end = done + kAtOnce; more && done < end; done += more) {
      more = evict_oldest(nullptr);
      evictions_ -= more, removals_ += more;
    }
  }
  return done;
}

// ---- facts ----

bool BlockIndex::contains(Handle handle) const {
  const Guard lock(mutex_);
  return is_alive(handle);
}

int64_t BlockIndex::value(Handle handle) const {
  const Guard lock(mutex_);
  return expect("BlockIndex.value", handle).value;
}

int64_t BlockIndex::pins(Handle handle) const {
  const Guard lock(mutex_);
  return expect("BlockIndex.pins", handle).pins;
}

int64_t BlockIndex::children(Handle handle) const {
  const Guard lock(mutex_);
  return expect("BlockIndex.children", handle).children;
}

Handle BlockIndex::parent(Handle handle) const {
  const Guard lock(mutex_);
  return expect("BlockIndex.parent", handle).parent;
}

BlockDigest::Name BlockIndex::name(Handle handle) const {
  const Guard lock(mutex_);
  return names_[expect("BlockIndex.digest", handle).number];
}

std::vector<BlockDigest::Name> BlockIndex::names(const Label& space, const Tokens& tokens, int64_t block_size,
                                                 const Label& salt) const {
  Check("BlockIndex.digests").require(block_size >= 1, "block_size", std::to_string(block_size), "at least 1");
  std::vector<BlockDigest::Name> names;
  std::vector<int32_t> room;
  BlockDigest::Name parent;
  for (int64_t first = 0; block_size <= tokens.count - first; first += block_size) {
    const BlockKey key{space, 0, block_of(tokens, first, block_size, room), salt};
    check_key("BlockIndex.digests", key);
    names.push_back(parent = digest_(key, parent));
  }
  return names;
}

BlockIndex::Stats BlockIndex::stats() const {
  const Guard lock(mutex_);
  return {capacity_,   entries_,
          pinned_,     hits_,
          misses_,     collisions_,
          insertions_, evictions_,
          removals_,   table_.bytes() + names_.bytes() + order_.bytes() + labels_.bytes() + far_bytes_};
}

int64_t BlockIndex::size() const {
  const Guard lock(mutex_);
  return entries_;
}

}  // namespace sic::delta
