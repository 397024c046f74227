// Blocks of reserved memory in parts with hard quotas, named by offsets and generations, never by addresses.
//
// The allocator works on offsets: the memory is the pool's own (pages that the system lends as they are touched), a
// mapped file's that outlives the process (pool_file.h), or lies elsewhere (on a device). Best fit with coalescing.
// Every block has a generation that no other block of the pool ever has, nor ever had: freed, foreign and stale ones
// are refused, always. Thread-safe: every call is atomic. A call that fails has changed nothing.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "replay/extents.h"
#include "replay/mapping.h"
#include "replay/poison.h"
#include "replay/pool_error.h"
#include "replay/pool_file.h"

namespace sic::replay {

// A block as others refer to it.
struct BlockRef {
  int64_t offset;  // of the pool's memory
  uint64_t generation;
};

struct Named {
  uint32_t place = 0;  // in the file's table
  BlockRecord record;
};

class MemoryPool {
 public:
  static constexpr int64_t kUnit = 256;  // bytes: of every quota, offset and size
  static constexpr int64_t kMostAlignment = 4096;

  struct Options {
    bool has_memory = true;  // false: it lies elsewhere
    bool poison = false;     // freed memory is filled, and checked when it is given out again
  };
  MemoryPool(const std::vector<Part>& parts, const Options& options);
  // A new file, or one that is there.
  static std::unique_ptr<MemoryPool> create(const std::string& path, const std::vector<Part>& parts, int64_t max_names,
                                            bool poison);
  static std::unique_ptr<MemoryPool> attach(const std::string& path, bool poison);

  struct Request {
    int part = 0;
    int64_t nbytes = 0;
    int64_t alignment = kUnit;
    std::string name, dtype;     // a block with a name is found by it again, and in a file it stays
    std::vector<int64_t> shape;  // what is in it, for named ones
  };
  BlockRef alloc(const Request& request);  // PoolFull if the part has no room
  void free(BlockRef block);
  // Gives a block a name, or another one; "" takes it away. In a file a block thus begins to stay at a moment, for
  // example when it has been filled.
  void rename(BlockRef block, const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape);
  bool is_alive(BlockRef block) const;
  int part_of(BlockRef block) const;

  BlockRecord named(const std::string& name) const;  // with an empty name if there is none
  std::vector<BlockRecord> all_named() const;        // in the order in which they were allocated

  // Gives the pages that freed blocks may have touched back to the system; how many bytes.
  int64_t trim();
  // Unlocks the file. The memory stays mapped as long as someone holds it; every later call is an error.
  void close();

  struct PartStats {
    int64_t quota, used, peak, largest_free, blocks, free_extents, allocations;
  };
  std::vector<PartStats> stats() const;
  int64_t used() const;

  const PoolIdentity& identity() const { return identity_; }  // a file's: kept over its attachments
  const std::vector<Part>& parts() const { return parts_; }
  int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  uint64_t attachments() const { return attachments_; }
  int64_t max_names() const { return max_names_; }
  std::shared_ptr<Mapping> memory() const;              // null: elsewhere, or closed
  int64_t data_offset() const { return data_offset_; }  // of the pool in that mapping

 private:
  struct Room {
    Room(int64_t begin_offset, int64_t bytes, bool used_before)
        : begin(begin_offset),
          end(begin + bytes),
          touched(used_before ? end : begin),
          extents(begin, bytes, used_before) {}
    int64_t begin, end;
    int64_t touched;  // nothing behind it was in a block since it was trimmed
    Extents extents;
    int64_t used = 0, peak = 0, blocks = 0, allocations = 0;
  };
  using Guard = std::lock_guard<std::mutex>;

  MemoryPool(std::unique_ptr<PoolFile> file, bool poison);
  void lay_out(bool used_before);
  void take_back(uint32_t place, const BlockRecord& record);
  void start_poison();

  // The rest runs under the lock.
  void require_open(const char* op) const;
  Room* room_at(int64_t offset) const;
  Extents::Place find(BlockRef block, Room** room) const;
  Extents::Place expect(const char* op, BlockRef block, Room** room) const;
  void check_request(const Request& request) const;
  void check_name(const char* op, const std::string& name, const std::string& dtype, size_t rank) const;
  [[noreturn]] void fail_full(const Request& request) const;
  void set_name(const Extents::Place& block, BlockRecord record);
  void drop_name(Named* named) noexcept;
  std::string described(const Extents::Place& block) const;

  PoolIdentity identity_;
  std::vector<Part> parts_;
  int64_t bytes_ = 0, data_offset_ = 0, max_names_ = 0;
  std::string path_;
  uint64_t attachments_ = 1;
  uint64_t next_generation_ = 0;

  mutable std::mutex mutex_;
  bool closed_ = false;
  int process_ = 0;  // that may change the file
  std::unique_ptr<PoolFile> file_;
  std::shared_ptr<Mapping> memory_;
  std::unique_ptr<Poison> poison_;
  mutable std::vector<Room> rooms_;  // by part
  std::unordered_map<std::string, std::unique_ptr<Named>> names_;
};

}  // namespace sic::replay
