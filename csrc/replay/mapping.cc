#include "replay/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "replay/pool_error.h"

namespace sic::replay {
namespace {

char* map(int64_t bytes, int flags, int descriptor) {
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (p == MAP_FAILED) fail_system("MemoryPool: cannot map " + std::to_string(bytes) + " bytes", errno);
  return static_cast<char*>(p);
}

// Of a file the pages must go from the file too.
int drop_pages(char* begin, size_t bytes, bool shared) {
#if defined(MADV_REMOVE)
  return madvise(begin, bytes, shared ? MADV_REMOVE : MADV_DONTNEED);
#else
  errno = ENOTSUP;
  return shared ? -1 : madvise(begin, bytes, MADV_FREE);
#endif
}

}  // namespace

std::shared_ptr<Mapping> Mapping::anonymous(int64_t bytes) {
  return std::shared_ptr<Mapping>(
      new Mapping(map(bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1), bytes, false));
}

std::shared_ptr<Mapping> Mapping::of_file(int descriptor, int64_t bytes) {
  return std::shared_ptr<Mapping>(new Mapping(map(bytes, MAP_SHARED, descriptor), bytes, true));
}

Mapping::~Mapping() { munmap(data_, static_cast<size_t>(bytes_)); }

int64_t Mapping::give_back(int64_t offset, int64_t bytes) const {
  const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  const int64_t first = (offset + page - 1) / page * page, last = (offset + bytes) / page * page;
  if (first >= last) return 0;
  if (drop_pages(data_ + first, static_cast<size_t>(last - first), shared_) != 0)
    fail_system("MemoryPool.trim: the pages of freed blocks cannot be given back", errno);
  return last - first;
}

}  // namespace sic::replay
