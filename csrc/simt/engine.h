// Inside the emulator: the threads of the running block, and how they take turns.
#pragma once
#include <array>
#include <cstdarg>
#include <cstdint>
#include <string>
#include <vector>

#include "simt/context.h"
#include "simt/simt.h"
#include "simt/testing.h"

namespace sic::simt {

constexpr int kMaxThreads = 1024, kWarp = 32;
constexpr size_t kMaxSharedBytes = 227 * 1024;

enum class State : uint8_t { fresh, ready, running, at_barrier, at_warp_operation, done };

// A cp.async between its issue and the wait that makes it visible.
struct PendingCopy {
  void* shared;
  uint32_t bytes;
  int group;
  unsigned char data[16];
};

struct Thread {
  uint3 index;
  int linear, lane, warp;
  State state;
  uint32_t time;  // of the warp's clock, when this thread last took part in a warp barrier
  int stack;
  Context context;
  const WarpOperation* operation;  // what it waits for, or did last
  unsigned mask;
  void* record;
  Site site;
  int copy_group;  // open now
  std::vector<PendingCopy> copies;
};

struct Warp {
  unsigned born, alive, waiting;
  uint32_t clock;                // counts warp barriers since the last block barrier
  uint32_t full_time;            // the clock at the last barrier of the whole warp
  bool partial;                  // known is in use: some barrier was of a part of the warp
  uint32_t known[kWarp][kWarp];  // [a][b]: what b did before this time, a may rely on
};

// The running block; one at a time in the process.
struct Engine {
  Thread* current = nullptr;  // nullptr: no kernel code is running
  char* stack = nullptr;      // of the current thread
  std::array<Thread, kMaxThreads> threads{};
  std::array<Warp, kMaxThreads / kWarp> warps{};
  KernelCall call;
  uint3 block{};
  int arrived = 0, ended = 0;
  BarrierKind barrier_kind{};
  Site barrier_site;
  int barrier_value = 0, barrier_result = 0;
  void* dynamic_shared = nullptr;
  std::string error;  // the first fault
  Counters counters{};
};
extern Engine engine;

// Runs all blocks; throws Error for the first fault. The caller holds the lock.
void run_kernel(const KernelCall& call);

// Where a fault was seen: a call with a Site, or the return address of a hook.
struct Place {
  Site site;
  const void* pc = nullptr;
};
// Ends the kernel: run_kernel throws. In host code of a kernel file it returns, and the next launch throws.
[[gnu::format(printf, 2, 3)]] void fault(const Place& place, const char* format, ...);
[[noreturn]] void throw_fault();

void stop_kernel();  // from a fiber, which is abandoned
bool on_other_stack(const void* p);
// Lets another thread run first, in the random schedule.
void maybe_yield();

}  // namespace sic::simt
