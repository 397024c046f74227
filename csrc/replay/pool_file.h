// The file behind a pool: a header that never changes, a table of named blocks, and the memory itself.
//
//   0       header: identity, sizes and parts, with a checksum
//   1024    root (a twin): how often the file was attached, how many places of the table are in use
//   4096    table: max_names places of 512 bytes, each a twin
//   ...     the pool's memory, at a multiple of 64 KiB
//
// docs/replay_pool.md has every byte. One process at a time: the file is locked while it is open. Not thread-safe.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "replay/mapping.h"
#include "replay/twin.h"

namespace sic::replay {

struct Part {
  std::string name;
  int64_t bytes;
};

// Tells a pool from every other one: offsets and generations are the same in all new ones.
using PoolIdentity = std::array<uint8_t, 16>;
PoolIdentity new_identity();  // random

constexpr int kMostParts = 8;
constexpr size_t kMostPartName = 23, kMostName = 123, kMostTypeName = 15;  // bytes
constexpr int kMostRank = 8;

// What a named block is.
struct BlockRecord {
  std::string name;   // "": the place is free
  std::string dtype;  // a name, such as "float32"
  std::vector<int64_t> shape;
  int64_t offset = 0, nbytes = 0;  // of the pool's memory
  uint64_t generation = 0;
};

class PoolFile {
 public:
  // A new file; one of that name is an error. Sparse: only pages that were written take room.
  static std::unique_ptr<PoolFile> create(const std::string& path, const std::vector<Part>& parts, int64_t max_names);
  static std::unique_ptr<PoolFile> open(const std::string& path);
  ~PoolFile();  // unlocks, also for processes that this one forked; who holds the mapping keeps the memory
  PoolFile(const PoolFile&) = delete;
  PoolFile& operator=(const PoolFile&) = delete;

  const std::string& path() const { return path_; }
  const PoolIdentity& identity() const { return identity_; }
  const std::vector<Part>& parts() const { return parts_; }
  int64_t max_names() const { return max_names_; }
  int process() const { return process_; }               // that opened it
  uint64_t attachments() const { return attachments_; }  // this one included
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  int64_t data_offset() const { return data_offset_; }

  // The named blocks that the file had when it was opened, each with its place; once.
  std::vector<std::pair<uint32_t, BlockRecord>> take_records() { return std::move(records_); }
  // A free place; PoolFull if there is none. Nothing of it is in the file until set() writes a record there.
  uint32_t take_place();
  void set(uint32_t place, const BlockRecord& record);
  void clear(uint32_t place) noexcept;                                  // the block and its name are gone
  void give_place(uint32_t place) noexcept { free_.push_back(place); }  // one that was taken and not set

 private:
  struct Header;
  struct Root;
  struct Entry;

  PoolFile(std::string path, int descriptor);
  static std::unique_ptr<PoolFile> lock(const std::string& path);
  void read_header();
  void attach();
  Twin<Root>& root() const;
  Twin<Entry>& entry(uint32_t place) const;
  void read_place(uint32_t place);

  std::string path_;
  int descriptor_, process_;
  PoolIdentity identity_ = {};
  std::vector<Part> parts_;
  int64_t max_names_ = 0, data_offset_ = 0, file_bytes_ = 0;
  uint64_t attachments_ = 0;
  std::shared_ptr<Mapping> mapping_;
  std::vector<std::pair<uint32_t, BlockRecord>> records_;
  std::vector<uint32_t> free_;  // places; has room for all that are in use
};

}  // namespace sic::replay
