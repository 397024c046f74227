// What a test can set and see of the emulator.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "simt/cuda_api.h"
#include "simt/memory.h"

namespace sic::simt {

// The order in which threads, and the blocks of a grid, take turns. A correct kernel gives the same result in each.
enum class Schedule { forward, reverse, random };
void set_schedule(Schedule schedule, uint32_t seed = 1);

// What the fake device claims to have; launchers may size their grids by it.
void set_multiprocessors(int count);
void set_shared_memory(int bytes);  // dynamic shared memory that a block may have
void set_clusters(bool on);         // whether it launches clusters of blocks

// Every cudaGraphNodeSetEnabled after so many more fails with this error; cudaSuccess: none does.
void break_switches(cudaError_t error, int after = 0);

// Since the process started.
struct Counters {
  uint64_t launches, threads, switches, accesses;  // graph launches count each kernel that they run
  uint64_t graph_launches, copies, fills;
  uint64_t allocations, frees, live_bytes;  // of device memory and of pinned host memory; the last of registered too
  uint64_t synchronisations;                // of the host with the device
  uint64_t live_graphs;                     // graphs, and executables made of them
};
Counters counters();

// Device memory of a test, exactly as large as asked for.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count, const char* name = "buffer", Access access = Access::read_write,
                  Contents contents = Contents::given)
      : data_(static_cast<T*>(std::aligned_alloc(256, (count * sizeof(T) + 255) / 256 * 256 + 256))), count_(count) {
    if (!data_) throw std::bad_alloc();
    offered_ = Offered(offer(name, data_.get(), count * sizeof(T), access, contents));
  }
  T* data() const { return data_.get(); }
  size_t size() const { return count_; }
  T& operator[](size_t i) const { return data_.get()[i]; }
  T* begin() const { return data_.get(); }
  T* end() const { return data_.get() + count_; }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t count_;
  Offered offered_;
};

}  // namespace sic::simt
