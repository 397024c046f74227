// Prefix-block index: (namespace, parent, tokens, salt) -> handle, for the prefix caching of KV blocks.
//
// A hit is verified: namespace, parent, salt and every token are compared, so equal hashes of unequal blocks are
// misses, which are counted, and both blocks can be held. Blocks form chains: one with children is not evicted before
// them, a pinned one never. Every call is atomic, but match, evict and clear, which are so step by step; the digest
// runs outside of the lock.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/check.h"
#include "core/spin_lock.h"
#include "core/tag_table.h"
#include "core/use_order.h"
#include "core/zeroed.h"
#include "delta/block_key.h"
#include "delta/words.h"

namespace sic::delta {

// Nothing can be evicted: every entry is pinned or has pinned descendants.
class IndexFull : public Error {
 public:
  using Error::Error;
};

// Texts kept once and counted: the namespaces and salts of the entries.
class LabelStore {
 public:
  LabelStore() : texts_(1) {}  // 0: absent
  uint32_t acquire(const Label& label);
  void release(uint32_t id);
  bool equal(uint32_t id, const Label& label) const {
    if (label.kind == Label::Kind::absent) return id == 0;
    const Text& t = texts_[id];
    return t.kind == label.kind && t.name->size() == label.size + 1 &&
           equal_bytes(t.name->data() + 1, label.data, label.size);
  }
  int64_t bytes() const { return bytes_; }

 private:
  struct Text {
    Label::Kind kind = Label::Kind::absent;
    uint32_t uses = 0;
    const std::string* name = nullptr;  // its key in ids_: the kind, then the bytes
    int64_t memory() const { return static_cast<int64_t>(sizeof(Text) + sizeof *name + name->size()); }
  };

  std::vector<Text> texts_;
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, uint32_t> ids_;  // by kind and bytes
  int64_t bytes_ = 0;
};

class BlockIndex {
 public:
  struct Options {
    int64_t capacity = 0;     // entries; memory for all of them is reserved, and used as they come
    int64_t block_size = 16;  // tokens kept beside their entry; those of longer blocks cost one more cache miss
    int handle_bits = 63;     // the lower ones number the entry, the others its generation
  };
  explicit BlockIndex(const Options& options, BlockDigest digest = BlockDigest());
  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  // The handle of the block, which is new (with this value) or there already (and keeps its value). A full index evicts
  // first, and appends what was freed to `evicted`. `pin`: the handle is pinned once more, in the same step.
  Handle insert(const BlockKey& key, int64_t value, bool pin = false, std::vector<int64_t>* evicted = nullptr);
  // The handle, or 0.
  Handle lookup(const BlockKey& key, bool pin = false);
  // The longest chain of blocks that begin `tokens`; the rest after the last full block is not looked at.
  std::vector<Handle> match(const Label& space, const Tokens& tokens, int64_t block_size, const Label& salt,
                            bool pin = false);

  void pin(Handle handle);
  void unpin(Handle handle);  // as a use: the entry is the newest then
  // Removes up to n entries, those used longest ago first, and appends their values; how many there were.
  int64_t evict(int64_t n, std::vector<int64_t>* values = nullptr);
  int64_t remove(Handle handle);  // its value; an error while it is pinned or has children
  int64_t clear();                // how many it dropped; an error while any is pinned, others may insert meanwhile

  bool contains(Handle handle) const;
  int64_t value(Handle handle) const;
  int64_t pins(Handle handle) const;
  int64_t children(Handle handle) const;
  Handle parent(Handle handle) const;
  BlockDigest::Name name(Handle handle) const;
  // The names of the full blocks of a sequence, whether they are in the index or not.
  std::vector<BlockDigest::Name> names(const Label& space, const Tokens& tokens, int64_t block_size,
                                       const Label& salt) const;

  struct Stats {
    int64_t capacity, entries, pinned, hits, misses, collisions, insertions, evictions, removals, bytes;
  };
  Stats stats() const;
  int64_t size() const;
  const BlockDigest& digest() const { return digest_; }

 private:
  struct Entry;

  BlockDigest::Name name_of(const BlockKey& key) const;

  // The rest runs under the lock.
  Entry& entry(uint32_t i) const;
  Entry* find(uint64_t probe, const BlockKey& key, bool* collided) const;
  const char* tokens_of(const Entry& e) const;
  Handle handle_of(const Entry& e) const;
  uint32_t number_of(Handle handle) const;
  bool is_alive(Handle handle) const;
  Entry& expect(const char* op, Handle handle) const;
  bool same(const Entry& e, const BlockKey& key) const;
  void use(Entry& e, bool pin);
  void make_room(std::vector<int64_t>* evicted);
  Entry& add(const BlockKey& key, uint64_t probe, const BlockDigest::Name& name, int64_t value,
             std::unique_ptr<char[]> far);
  bool evict_oldest(std::vector<int64_t>* values);
  int64_t drop(Entry& e);
  void child_gone(Handle parent);

  const int64_t capacity_;
  const BlockDigest digest_;
  const ProbeHash probe_;

  mutable SpinLock mutex_;
  TagTable table_;
  const int number_bits_;  // of a handle
  const uint64_t last_generation_;
  Zeroed<BlockDigest::Name> names_;  // by place in the table
  UseOrder order_;
  LabelStore labels_;
  int64_t entries_ = 0, pinned_ = 0, retired_ = 0, far_bytes_ = 0;
  int64_t hits_ = 0, misses_ = 0, collisions_ = 0, insertions_ = 0, evictions_ = 0, removals_ = 0;
};

}  // namespace sic::delta
