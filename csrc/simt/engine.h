// Inside the emulator: the threads of the running cluster of blocks, and how they take turns. A launch without clusters
// has clusters of one block.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "simt/context.h"
#include "simt/simt.h"
#include "simt/testing.h"

namespace sic::simt {

constexpr int kMaxThreads = 1024, kWarp = 32;  // of a block
constexpr int kMaxCluster = 8, kMaxFibers = kMaxCluster * kMaxThreads;
constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr uint64_t kPatience = uint64_t{1} << 24;

// Where kernel code called the emulator: as written, and the return address, which tells the lines that were inlined.
struct Place {
  Site site;
  const void* pc = nullptr;
};

enum class State : uint8_t { fresh, ready, running, at_barrier, at_cluster_barrier, at_warp_operation, done };

// A cp.async between its issue and the wait that makes it visible.
struct PendingCopy {
  void* shared;
  uint32_t bytes;
  int group;
  unsigned char data[16];
};

struct Thread {
  uint3 index;
  int linear, lane;         // in its block, in its warp
  int block, number, warp;  // in the cluster: block b has threads kMaxThreads * b, .. and their warps
  State state;
  uint32_t time;  // of the warp's clock, when this thread last took part in a warp barrier
  int stack;
  Context context;
  const WarpOperation* operation;  // what it waits for, or did last
  unsigned mask;
  void* record;
  Place place;
  int copy_group;  // open now
  std::vector<PendingCopy> copies;
};

struct Warp {
  unsigned born, alive, waiting;
  bool uniform;                  // all who wait wait for the same
  uint32_t clock;                // counts warp barriers since the last block barrier
  uint32_t full_time;            // the clock at the last barrier of the whole warp
  bool partial;                  // known is in use: some barrier was of a part of the warp
  uint32_t known[kWarp][kWarp];  // [a][b]: what b did before this time, a may rely on

  void restart_clock() {
    clock = full_time = 0;
    partial = false;
  }
};

// A block of the running cluster.
struct Block {
  uint3 index;
  uint32_t epoch;  // when its last barrier ended: what its threads did before, they may rely on
  int arrived, ended;
  BarrierKind barrier_kind;
  Place barrier_place;
  int barrier_value, barrier_result;
  const Thread* visitor;  // of another block, in its shared memory, since the cluster's last barrier
  Place visit;
};

// The running cluster; one at a time in the process.
struct Engine {
  Thread* current = nullptr;  // nullptr: no kernel code is running
  bool hooks = false;         // whether its accesses are checked: not while the emulator itself works for it
  char* stack = nullptr;      // of the current thread
  uint64_t patience = 0;      // the count of accesses up to which it may run before it waits or ends
  std::array<Thread, kMaxFibers> threads{};
  std::array<Warp, kMaxFibers / kWarp> warps{};
  std::array<Block, kMaxCluster> blocks{};
  KernelCall call;
  uintptr_t arguments = 0;     // where call has them
  int arrived = 0, ended = 0;  // at the cluster's barrier; of all its threads
  Place barrier_place;
  std::string error;  // the first fault
  Counters counters{};
};
extern Engine engine;

inline Block& block_of(const Thread& t) { return engine.blocks[static_cast<size_t>(t.block)]; }

// Whether the caller is kernel code: other threads of the process may be in host code at the same time.
__forceinline__ bool in_kernel() {
  const auto* frame = static_cast<const char*>(__builtin_frame_address(0));
  return static_cast<size_t>(frame - engine.stack) < StackPool::kBytes;
}

// Runs all blocks; throws Error for the first fault. The caller holds the lock.
void run_kernel(const KernelCall& call);

// Containers of the emulator may share compiled code with kernel files, hooks and all.
class HooksOff {
 public:
  HooksOff() : before_(engine.hooks) { engine.hooks = false; }
  ~HooksOff() { engine.hooks = before_; }

 private:
  bool before_;
};

// Ends the kernel: run_kernel throws. In host code of a kernel file it returns, and the next launch throws. `other` is
// a second place to name, if it is one.
[[gnu::format(printf, 2, 3)]] void fault(const Place& place, const char* format, ...);
[[gnu::format(printf, 3, 4)]] void fault_between(const Place& place, const Place& other, const char* format, ...);
[[noreturn]] void throw_fault();
std::string launch_error(const void* entry, const char* why);

void leave_kernel();  // back in host code
void stop_kernel();   // from a fiber, which is abandoned
bool on_other_stack(const void* p);
// Lets another thread run first, in the random schedule.
void maybe_yield();

}  // namespace sic::simt
