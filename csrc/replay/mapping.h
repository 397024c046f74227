// Memory that the system lends page by page: untouched it costs nothing.
#pragma once
#include <cstdint>
#include <memory>

namespace sic::replay {

class Mapping {
 public:
  // Private to the process and zero.
  static std::shared_ptr<Mapping> anonymous(int64_t bytes);
  // The first bytes of an open file, shared with it.
  static std::shared_ptr<Mapping> of_file(int descriptor, int64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Gives the whole pages within [offset, offset + bytes) back to the system; they read as zeros then. How many bytes
  // they are. PoolError where the system or the file system cannot.
  int64_t give_back(int64_t offset, int64_t bytes) const;

 private:
  Mapping(char* data, int64_t bytes, bool shared) : data_(data), bytes_(bytes), shared_(shared) {}

  char* data_;
  int64_t bytes_;
  bool shared_;
};

}  // namespace sic::replay
