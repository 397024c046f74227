#include "replay/memory_pool.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace sic::replay {
namespace {

// 2^40 blocks each time that a file is attached, and 2^23 times: a generation is a number below 2^63.
constexpr int kGenerationBits = 40;

int64_t rounded(int64_t nbytes) { return (nbytes + MemoryPool::kUnit - 1) / MemoryPool::kUnit * MemoryPool::kUnit; }

void check_parts(const std::vector<Part>& parts) {
  const Check check("MemoryPool");
  check.require(!parts.empty() && parts.size() <= kMostParts, "parts", std::to_string(parts.size()),
                "1 to " + std::to_string(kMostParts) + " names");
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [name, bytes] = parts[i];
    const bool fits = !name.empty() && name.size() <= kMostPartName && name.find('\0') == std::string::npos;
    check.require(fits, "parts", "'" + name + "'", "a name of 1 to " + std::to_string(kMostPartName) + " bytes");
    for (size_t j = 0; j < i; ++j) check.require(parts[j].name != name, "parts", "'" + name + "' twice", "other names");
    check.require(bytes > 0 && bytes % MemoryPool::kUnit == 0, "quota", std::to_string(bytes) + " bytes for " + name,
                  "a multiple of " + std::to_string(MemoryPool::kUnit));
  }
}

}  // namespace

// ---- making ----

MemoryPool::MemoryPool(const std::vector<Part>& parts, const Options& options)
    : identity_(new_identity()), parts_(parts) {
  check_parts(parts_);
  Check("MemoryPool")
      .require(options.has_memory || !options.poison, "poison", "True", "False where the memory is not the CPU's");
  lay_out(false);
  if (options.has_memory) memory_ = Mapping::anonymous(bytes_);
  if (options.poison) start_poison();
}

std::unique_ptr<MemoryPool> MemoryPool::create(const std::string& path, const std::vector<Part>& parts,
                                               int64_t max_names, bool poison) {
  check_parts(parts);
  return std::unique_ptr<MemoryPool>(new MemoryPool(PoolFile::create(path, parts, max_names), poison));
}

std::unique_ptr<MemoryPool> MemoryPool::attach(const std::string& path, bool poison) {
  return std::unique_ptr<MemoryPool>(new MemoryPool(PoolFile::open(path), poison));
}

MemoryPool::MemoryPool(std::unique_ptr<PoolFile> file, bool poison)
    : identity_(file->identity()),
      parts_(file->parts()),
      data_offset_(file->data_offset()),
      max_names_(file->max_names()),
      path_(file->path()),
      attachments_(file->attachments()),
      process_(file->process()),
      file_(std::move(file)),
      memory_(file_->mapping()) {
  lay_out(true);
  for (const auto& [place, record] : file_->take_records()) take_back(place, record);
  if (poison) start_poison();
}

void MemoryPool::lay_out(bool used_before) {
  rooms_.reserve(parts_.size());
  for (const Part& part : parts_) {
    rooms_.emplace_back(bytes_, part.bytes, used_before);
    bytes_ += part.bytes;
  }
  next_generation_ = attachments_ << kGenerationBits;
}

void MemoryPool::start_poison() { poison_ = std::make_unique<Poison>(memory_->data() + data_offset_); }

// A named block that the file had.
void MemoryPool::take_back(uint32_t place, const BlockRecord& record) {
  const auto require = [&](bool ok) {
    if (!ok) throw PoolError("MemoryPool.attach: " + path_ + ": the block '" + record.name + "' is damaged");
  };
  Room* room = record.offset >= 0 ? room_at(record.offset) : nullptr;
  require(room && record.offset % kUnit == 0 && record.nbytes > 0 && record.nbytes <= room->end - record.offset);
  require(record.generation >> kGenerationBits < attachments_ && record.generation > 0);
  require(names_.count(record.name) == 0);
  const Extents::Place block = room->extents.take_at(record.offset, rounded(record.nbytes));
  require(block != room->extents.end());
  block->second.generation = record.generation;
  block->second.asked = record.nbytes;
  const auto entry = names_.emplace(record.name, std::make_unique<Named>(Named{place, record})).first;
  block->second.named = entry->second.get();
  room->used += block->second.size;
  room->peak = room->used;
  ++room->blocks;
}

// ---- checks ----

void MemoryPool::require_open(const char* op) const {
  if (closed_) throw PoolError(std::string(op) + ": the pool is closed");
  if (file_ && process_ != getpid())
    throw PoolError(std::string(op) + ": the pool's file is used by process " + std::to_string(process_) +
                    ", which forked this one: one process at a time");
}

MemoryPool::Room* MemoryPool::room_at(int64_t offset) const {
  for (Room& room : rooms_)
    if (offset >= room.begin && offset < room.end) return &room;
  return nullptr;
}

Extents::Place MemoryPool::find(BlockRef block, Room** room) const {
  *room = room_at(block.offset);
  if (!*room) return {};
  const Extents::Place found = (*room)->extents.find(block.offset);
  if (found == (*room)->extents.end() || found->second.generation != block.generation) *room = nullptr;
  return found;
}

Extents::Place MemoryPool::expect(const char* op, BlockRef block, Room** room) const {
  const Extents::Place found = find(block, room);
  if (*room) return found;
  Check(op).fail("block", "offset " + std::to_string(block.offset) + ", generation " + std::to_string(block.generation),
                 "a block in use: this one was freed, or is another pool's");
}

void MemoryPool::check_request(const Request& r) const {
  const Check check("MemoryPool.alloc");
  check.require(r.part >= 0 && r.part < static_cast<int>(rooms_.size()), "part", std::to_string(r.part), "a part");
  check.require(r.nbytes > 0, "nbytes", std::to_string(r.nbytes), "at least 1");
  const bool power = r.alignment > 0 && (r.alignment & (r.alignment - 1)) == 0;
  check.require(power && r.alignment >= kUnit && r.alignment <= kMostAlignment, "alignment",
                std::to_string(r.alignment),
                "a power of two from " + std::to_string(kUnit) + " to " + std::to_string(kMostAlignment));
  if (!r.name.empty()) check_name("MemoryPool.alloc", r.name, r.dtype, r.shape.size());
}

void MemoryPool::check_name(const char* op, const std::string& name, const std::string& dtype, size_t rank) const {
  const Check check(op);
  const std::string quoted = "'" + name + "'";
  check.require(name.size() <= kMostName && name.find('\0') == std::string::npos, "name", quoted,
                "at most " + std::to_string(kMostName) + " bytes, none of them 0");
  check.require(names_.count(name) == 0, "name", quoted, "one that no other block has");
  check.require(dtype.size() <= kMostTypeName, "dtype", dtype, "a name of at most 15 bytes");
  check.require(rank <= kMostRank, "shape", std::to_string(rank) + " dimensions", "at most 8 of a named block");
}

void MemoryPool::fail_full(const Request& r) const {
  const Room& room = rooms_[static_cast<size_t>(r.part)];
  const auto text = [](int64_t n) { return std::to_string(n); };
  throw PoolFull("MemoryPool.alloc: no room for " + text(r.nbytes) + " bytes in part '" +
                 parts_[static_cast<size_t>(r.part)].name + "': quota " + text(room.end - room.begin) + ", in use " +
                 text(room.used) + " in " + text(room.blocks) + " blocks, free " +
                 text(room.end - room.begin - room.used) + " in " + text(room.extents.count_free()) +
                 " pieces, the largest " + text(room.extents.largest_free()));
}

// ---- blocks ----

BlockRef MemoryPool::alloc(const Request& request) {
  const Guard lock(mutex_);
  require_open("MemoryPool.alloc");
  check_request(request);
  Room& room = rooms_[static_cast<size_t>(request.part)];
  if (request.nbytes > room.end - room.begin) fail_full(request);
  const int64_t size = rounded(request.nbytes);
  const Extents::Place block = room.extents.take(size, request.alignment);
  if (block == room.extents.end()) fail_full(request);
  Extents::Extent& extent = block->second;
  extent.generation = next_generation_ + 1;
  extent.asked = request.nbytes;
  try {
    if (poison_) poison_->check(block->first, size);
    if (!request.name.empty())
      set_name(block, {request.name, request.dtype, request.shape, block->first, request.nbytes, extent.generation});
    if (poison_) poison_->forget(block->first, size);
  } catch (...) {
    if (extent.named) drop_name(extent.named);
    room.extents.give(block);
    throw;
  }
  room.used += size;
  room.peak = std::max(room.peak, room.used);
  room.touched = std::max(room.touched, block->first + size);
  ++room.blocks, ++room.allocations;
  return {block->first, ++next_generation_};
}

void MemoryPool::free(BlockRef ref) {
  const Guard lock(mutex_);
  require_open("MemoryPool.free");
  Room* room;
  const Extents::Place block = expect("MemoryPool.free", ref, &room);
  if (poison_) poison_->remember(block->first, block->second.size, described(block));
  if (block->second.named) drop_name(block->second.named);
  // Only now: a process that is killed in between must not leave a named block full of poison.
  if (poison_) poison_->fill(block->first, block->second.size);
  room->used -= block->second.size;
  --room->blocks;
  room->extents.give(block);
}

void MemoryPool::rename(BlockRef ref, const std::string& name, const std::string& dtype,
                        const std::vector<int64_t>& shape) {
  const Guard lock(mutex_);
  require_open("MemoryPool.rename");
  Room* room;
  const Extents::Place block = expect("MemoryPool.rename", ref, &room);
  Named* old = block->second.named;
  if (!name.empty()) {
    if (!old || old->record.name != name) check_name("MemoryPool.rename", name, dtype, shape.size());
    set_name(block, {name, dtype, shape, ref.offset, block->second.asked, ref.generation});
  } else if (old) {
    block->second.named = nullptr;
    drop_name(old);
  }
}

// What may fail comes first, then the file is changed, then the index.
void MemoryPool::set_name(const Extents::Place& block, BlockRecord record) {
  Named* old = block->second.named;
  auto named = std::make_unique<Named>(Named{old ? old->place : 0, std::move(record)});
  if (file_ && !old) named->place = file_->take_place();
  std::unique_ptr<Named>* by_name = nullptr;
  try {
    by_name = &names_[named->record.name];
  } catch (...) {
    if (file_ && !old) file_->give_place(named->place);
    throw;
  }
  if (file_) file_->set(named->place, named->record);
  if (old && old->record.name != named->record.name) names_.erase(names_.find(old->record.name));
  block->second.named = named.get();
  *by_name = std::move(named);  // in place of the old one, if the name is the same
}

void MemoryPool::drop_name(Named* named) noexcept {
  if (file_) file_->clear(named->place);
  names_.erase(names_.find(named->record.name));
}

std::string MemoryPool::described(const Extents::Place& block) const {
  const std::string name = block->second.named ? "'" + block->second.named->record.name + "'" : "without a name";
  return "the block " + name + " (offset " + std::to_string(block->first) + ", " + std::to_string(block->second.asked) +
         " bytes, generation " + std::to_string(block->second.generation) + ")";
}

bool MemoryPool::is_alive(BlockRef block) const {
  const Guard lock(mutex_);
  Room* room;
  if (closed_) return false;
  find(block, &room);
  return room != nullptr;
}

int MemoryPool::part_of(BlockRef block) const {
  const Room* room = room_at(block.offset);  // parts never change
  return room ? static_cast<int>(room - rooms_.data()) : -1;
}

BlockRecord MemoryPool::named(const std::string& name) const {
  const Guard lock(mutex_);
  require_open("MemoryPool.block");
  const auto found = names_.find(name);
  return found == names_.end() ? BlockRecord() : found->second->record;
}

std::vector<BlockRecord> MemoryPool::all_named() const {
  const Guard lock(mutex_);
  require_open("MemoryPool.blocks");
  std::vector<BlockRecord> all;
  all.reserve(names_.size());
  for (const auto& [name, named] : names_) all.push_back(named->record);
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.generation < b.generation; });
  return all;
}

// ---- the whole ----

int64_t MemoryPool::trim() {
  const Guard lock(mutex_);
  require_open("MemoryPool.trim");
  int64_t bytes = 0;
  if (!memory_) return bytes;
  for (Room& room : rooms_)
    room.extents.for_each([&](int64_t offset, Extents::Extent& extent) {
      if (extent.generation != 0 || !extent.used_before) return;
      if (poison_) poison_->forget(offset, extent.size);  // of the pages at its ends too: they are few
      const int64_t last = std::min(offset + extent.size, room.touched);
      if (last > offset) bytes += memory_->give_back(data_offset_ + offset, last - offset);
      extent.used_before = false;
      if (last == room.touched) room.touched = std::min(room.touched, offset);
    });
  return bytes;
}

void MemoryPool::close() {
  const Guard lock(mutex_);
  closed_ = true;
  poison_.reset();
  memory_.reset();
  file_.reset();
}

std::vector<MemoryPool::PartStats> MemoryPool::stats() const {
  const Guard lock(mutex_);
  require_open("MemoryPool.stats");
  std::vector<PartStats> all;
  for (const Room& room : rooms_)
    all.push_back({room.end - room.begin, room.used, room.peak, room.extents.largest_free(), room.blocks,
                   room.extents.count_free(), room.allocations});
  return all;
}

int64_t MemoryPool::used() const {
  const Guard lock(mutex_);
  int64_t bytes = 0;
  for (const Room& room : rooms_) bytes += room.used;
  return bytes;
}

std::shared_ptr<Mapping> MemoryPool::memory() const {
  const Guard lock(mutex_);
  return memory_;
}

}  // namespace sic::replay
