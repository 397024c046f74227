#include "replay/pool_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

namespace sic::replay {
namespace {

constexpr char kMagic[8] = {'S', 'I', 'C', 'P', 'O', 'O', 'L', '\n'};
constexpr uint32_t kVersion = 2;
constexpr int64_t kRootOffset = 1024, kTableOffset = 4096, kPlaceBytes = 512;
constexpr int64_t kDataAlignment = 65536;  // the largest page of any system
constexpr int64_t kMostNames = int64_t{1} << 24;
constexpr uint64_t kMostAttachments = (uint64_t{1} << 23) - 1;  // generations stay below 2^63

constexpr int64_t data_offset_of(int64_t max_names) {
  const int64_t table_end = kTableOffset + max_names * kPlaceBytes;
  return (table_end + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
}

int64_t total(const std::vector<Part>& parts) {
  int64_t bytes = 0;
  for (const Part& p : parts) bytes += p.bytes;
  return bytes;
}

template <size_t kRoom>
void put_text(char (&to)[kRoom], const std::string& text) {
  std::memset(to, 0, kRoom);
  std::memcpy(to, text.data(), text.size());
}

template <size_t kRoom>
std::string text_of(const char (&from)[kRoom]) {
  return {from, strnlen(from, kRoom)};
}

void write_at(int descriptor, const void* data, size_t bytes, int64_t offset, const std::string& path) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = pwrite(descriptor, p, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system("MemoryPool: cannot write to " + path, errno);
    p += n, offset += n, bytes -= static_cast<size_t>(n);
  }
}

// A file that is only made if all of it succeeds.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(path), draft_(path + ".new-XXXXXX") {
    descriptor_ = mkostemp(draft_.data(), O_CLOEXEC);
    if (descriptor_ < 0) fail_system("MemoryPool: cannot create " + draft_, errno);
  }
  ~NewFile() {
    unlink(draft_.c_str());
    close(descriptor_);
  }
  int descriptor() const { return descriptor_; }
  // It gets its name, unless another file has it.
  void publish() const {
    if (link(draft_.c_str(), path_.c_str()) != 0) fail_system("MemoryPool: cannot create " + path_, errno);
  }

 private:
  const std::string& path_;
  std::string draft_;
  int descriptor_;
};

// A mapped page for which the disk has no room ends the process, so it is better to know before.
void require_room(const NewFile& file, int64_t bytes, const std::string& path) {
  struct statvfs s;
  if (fstatvfs(file.descriptor(), &s) != 0) fail_system("MemoryPool: cannot examine the disk of " + path, errno);
  const auto free = static_cast<int64_t>(s.f_bavail) * static_cast<int64_t>(s.f_frsize);
  Check("MemoryPool")
      .require(free >= bytes, "backing", "a disk with " + std::to_string(free) + " free bytes", std::to_string(bytes));
}

}  // namespace

PoolIdentity new_identity() {
  PoolIdentity identity;
  if (getentropy(identity.data(), identity.size()) != 0) fail_system("MemoryPool: cannot get random bytes", errno);
  return identity;
}

// ---- what lies in the file ----

struct PoolFile::Header {
  char magic[8];
  uint32_t version;
  uint32_t crc;  // of all that follows
  uint64_t file_bytes, pool_bytes, data_offset;
  uint32_t max_names, parts;
  PoolIdentity identity;
  struct {
    char name[kMostPartName + 1];
    uint64_t bytes;
  } part[kMostParts];

  uint32_t right_crc() const { return crc32c(&file_bytes, sizeof(Header) - offsetof(Header, file_bytes)); }
};

struct PoolFile::Root {
  uint64_t attachments;
  uint64_t places;  // of the table that were ever used; those behind them hold nothing
  uint64_t process;
};

struct PoolFile::Entry {
  uint64_t generation, offset, nbytes;
  int64_t shape[kMostRank];
  uint32_t rank;
  char dtype[kMostTypeName + 1];
  char name[kMostName + 1];
};

Twin<PoolFile::Root>& PoolFile::root() const {
  static_assert(sizeof(Header) <= kRootOffset && kRootOffset + sizeof(Twin<Root>) <= kTableOffset);
  return *reinterpret_cast<Twin<Root>*>(mapping_->data() + kRootOffset);
}

Twin<PoolFile::Entry>& PoolFile::entry(uint32_t place) const {
  static_assert(sizeof(Twin<Entry>) == kPlaceBytes);
  return reinterpret_cast<Twin<Entry>*>(mapping_->data() + kTableOffset)[place];
}

// ---- opening ----

std::unique_ptr<PoolFile> PoolFile::create(const std::string& path, const std::vector<Part>& parts, int64_t max_names) {
  const Check check("MemoryPool");
  check.require(max_names >= 1 && max_names <= kMostNames, "max_names", std::to_string(max_names), "1 to 2^24");
  Header h = {};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  h.version = kVersion;
  h.identity = new_identity();
  h.max_names = static_cast<uint32_t>(max_names);
  h.parts = static_cast<uint32_t>(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    put_text(h.part[i].name, parts[i].name);
    h.part[i].bytes = static_cast<uint64_t>(parts[i].bytes);
  }
  h.pool_bytes = static_cast<uint64_t>(total(parts));
  h.data_offset = static_cast<uint64_t>(data_offset_of(max_names));
  h.file_bytes = h.pool_bytes + h.data_offset;
  h.crc = h.right_crc();

  Twin<Root> root = {};
  root.init({0, 0, static_cast<uint64_t>(getpid())});
  {
    const NewFile file(path);
    const auto bytes = static_cast<int64_t>(h.file_bytes);
    require_room(file, bytes, path);
    if (ftruncate(file.descriptor(), bytes) != 0) fail_system("MemoryPool: cannot size " + path, errno);
    write_at(file.descriptor(), &h, sizeof h, 0, path);
    write_at(file.descriptor(), &root, sizeof root, kRootOffset, path);
    file.publish();
  }
  return open(path);
}

std::unique_ptr<PoolFile> PoolFile::open(const std::string& path) {
  std::unique_ptr<PoolFile> file = lock(path);
  file->read_header();
  file->mapping_ = Mapping::of_file(file->descriptor_, file->file_bytes_);
  file->attach();
  return file;
}

std::unique_ptr<PoolFile> PoolFile::lock(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0)
    Check("MemoryPool.attach").fail("path", path + " (" + std::strerror(errno) + ")", "the file of a pool");
  std::unique_ptr<PoolFile> file(new PoolFile(path, descriptor));
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return file;
  if (errno != EWOULDBLOCK) fail_system("MemoryPool.attach: cannot lock " + path, errno);
  Twin<Root> root = {};  // read while the other may write it: good enough for a message
  const bool known = pread(descriptor, &root, sizeof root, kRootOffset) == sizeof root;
  throw PoolError("MemoryPool.attach: " + path + " is in use" +
                  (known ? " by process " + std::to_string(root.peek().process) : std::string()) +
                  " (or one that it forked): one process at a time, close() it there first");
}

PoolFile::PoolFile(std::string path, int descriptor)
    : path_(std::move(path)), descriptor_(descriptor), process_(getpid()) {}

PoolFile::~PoolFile() {
  if (process_ == getpid()) flock(descriptor_, LOCK_UN);
  close(descriptor_);
}

void PoolFile::read_header() {
  const auto require = [&](bool ok, const std::string& what) {
    if (!ok) throw PoolError("MemoryPool.attach: " + path_ + ": " + what);
  };
  Header h;
  struct stat s;
  if (fstat(descriptor_, &s) != 0) fail_system("MemoryPool.attach: cannot examine " + path_, errno);
  require(pread(descriptor_, &h, sizeof h, 0) == sizeof h && std::memcmp(h.magic, kMagic, sizeof kMagic) == 0,
          "not the file of a pool");
  require(h.version == kVersion,
          "version " + std::to_string(h.version) + ", this library reads version " + std::to_string(kVersion));
  require(h.crc == h.right_crc(), "the header is damaged");
  require(static_cast<uint64_t>(s.st_size) == h.file_bytes,
          std::to_string(s.st_size) + " bytes, " + std::to_string(h.file_bytes) + " were written: it was cut");
  require(h.parts >= 1 && h.parts <= kMostParts && h.max_names <= kMostNames, "the header is damaged");
  for (uint32_t i = 0; i < h.parts; ++i)
    parts_.push_back({text_of(h.part[i].name), static_cast<int64_t>(h.part[i].bytes)});
  require(h.data_offset == static_cast<uint64_t>(data_offset_of(h.max_names)) &&
              h.pool_bytes == static_cast<uint64_t>(total(parts_)) && h.file_bytes == h.pool_bytes + h.data_offset,
          "the header is damaged");
  identity_ = h.identity;
  max_names_ = h.max_names;
  data_offset_ = static_cast<int64_t>(h.data_offset);
  file_bytes_ = static_cast<int64_t>(h.file_bytes);
}

void PoolFile::attach() {
  const std::string what = "MemoryPool.attach: " + path_ + ": the root";
  Root r = root().load(what);
  if (r.places > static_cast<uint64_t>(max_names_)) throw PoolError(what + " is damaged");
  if (++r.attachments > kMostAttachments) throw PoolError(what + " has no generations left: make a new file");
  r.process = static_cast<uint64_t>(process_);
  root().store(r);
  attachments_ = r.attachments;
  free_.reserve(r.places);
  for (uint32_t place = 0; place < r.places; ++place) read_place(place);
}

// ---- the table ----

void PoolFile::read_place(uint32_t place) {
  const std::string what = "MemoryPool.attach: " + path_ + ": place " + std::to_string(place) + " of the table";
  const Entry& e = entry(place).load(what);
  if (e.rank > kMostRank) throw PoolError(what + " is damaged");
  if (e.name[0] == 0) {
    free_.push_back(place);
    return;
  }
  records_.push_back({place,
                      {text_of(e.name), text_of(e.dtype), std::vector<int64_t>(e.shape, e.shape + e.rank),
                       static_cast<int64_t>(e.offset), static_cast<int64_t>(e.nbytes), e.generation}});
}

uint32_t PoolFile::take_place() {
  if (free_.empty()) {
    Root r = root().load("MemoryPool: the root");
    if (r.places == static_cast<uint64_t>(max_names_))
      throw PoolFull("MemoryPool.alloc: name: " + std::to_string(max_names_) + " blocks have names, of " +
                     std::to_string(max_names_) + " (max_names)");
    if (free_.capacity() <= r.places) free_.reserve(2 * r.places + 16);  // clear() allocates nothing
    entry(static_cast<uint32_t>(r.places)).init({});
    free_.push_back(static_cast<uint32_t>(r.places++));
    root().store(r);
  }
  const uint32_t place = free_.back();
  free_.pop_back();
  return place;
}

void PoolFile::set(uint32_t place, const BlockRecord& record) {
  Entry e = {};
  e.generation = record.generation;
  e.offset = static_cast<uint64_t>(record.offset);
  e.nbytes = static_cast<uint64_t>(record.nbytes);
  std::copy(record.shape.begin(), record.shape.end(), e.shape);
  e.rank = static_cast<uint32_t>(record.shape.size());
  put_text(e.dtype, record.dtype);
  put_text(e.name, record.name);
  entry(place).store(e);
}

void PoolFile::clear(uint32_t place) noexcept {
  entry(place).store({});
  free_.push_back(place);
}

}  // namespace sic::replay
