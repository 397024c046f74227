// The threads of a cluster of blocks as fibers: who runs next, barriers, operations of a warp.
#include "simt/engine.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "simt/block_order.h"
#include "simt/checker.h"
#include "simt/run_queue.h"

namespace sic::simt {

Engine engine;

namespace {

RunQueue ready;
StackPool stacks;
int free_stacks[kMaxFibers];
int free_count = 0;
Context host;       // whoever launched
Context abandoned;  // of a fiber that will not go on
Schedule schedule = Schedule::forward;

Thread& self() { return *engine.current; }
Thread& thread(int i) { return engine.threads[static_cast<size_t>(i)]; }
Warp& warp_of(const Thread& t) { return engine.warps[static_cast<size_t>(t.warp)]; }
int block_threads() {
  const dim3 size = engine.call.block;
  return static_cast<int>(size.x * size.y * size.z);
}
int cluster_blocks() { return static_cast<int>(engine.call.cluster); }
template <class Body>
void for_threads(Body body) {
  const int blocks = cluster_blocks(), threads = block_threads();
  for (int b = 0; b < blocks; ++b)
    for (int i = 0; i < threads; ++i) body(thread(b * kMaxThreads + i));
}
bool same_site(const Place& a, const Place& b) {
  return a.site.line == b.site.line && (a.site.file == b.site.file || !std::strcmp(a.site.file, b.site.file));
}

// ---- fibers: a stack runs one thread after another, and belongs to one while it waits ----

void run_threads();

void run_as(Thread& next) {
  next.state = State::running;
  engine.current = &next;
  engine.patience = engine.counters.accesses + kPatience;
}

// Goes to the next thread that can run; to the host if there is none.
void leave(Context& from) {
  ++engine.counters.switches;
  if (ready.empty()) {
    leave_kernel();
    return switch_context(from, host);
  }
  Thread& next = thread(ready.take());
  if (next.state == State::fresh) {
    next.stack = free_stacks[--free_count];
    prepare(next.context, stacks.stack(next.stack), stacks.bytes(next.stack), run_threads);
  }
  engine.stack = stacks.stack(next.stack);
  run_as(next);
  engine.hooks = true;
  if (&from != &next.context) switch_context(from, next.context);
}

void end_thread() {
  Thread& t = self();
  if (!t.copies.empty()) fault({}, "a thread ends with a cp.async that it has not waited for");
  Block& b = block_of(t);
  if (b.arrived) fault(b.barrier_place, "divergent barrier: thread %d ends while others wait", t.linear);
  if (engine.arrived) fault(engine.barrier_place, "divergent barrier of the cluster: a thread ends while others wait");
  t.state = State::done;
  ++b.ended, ++engine.ended;
  Warp& w = warp_of(t);
  w.alive &= ~(1u << t.lane);
  for (unsigned m = w.waiting; m; m &= m - 1) {
    const Thread& waiting = thread(t.warp * kWarp + __builtin_ctz(m));
    if (waiting.mask >> t.lane & 1)
      fault(waiting.place, "%s waits for lane %d, which has ended", waiting.operation->name, t.lane);
  }
}

// The main function of every stack.
void run_threads() {
  for (;;) {
    try {
      engine.call.run(engine.call.arguments.get());
    } catch (const std::exception& e) {
      fault({}, "exception in kernel code: %s", e.what());
    } catch (...) {
      fault({}, "exception in kernel code");
    }
    const int stack = self().stack;
    end_thread();
    if (ready.empty() || thread(ready.peek()).state != State::fresh) {
      free_stacks[free_count++] = stack;
      leave(abandoned);
    }
    Thread& next = thread(ready.take());
    next.stack = stack;
    run_as(next);
  }
}

// ---- barriers of the block, and of the cluster ----

void go_on(Thread& t) {
  t.time = 0;
  t.state = State::ready;
  if (t.lane == 0) warp_of(t).restart_clock();
}

void release_barrier(int block, int threads) {
  Block& b = engine.blocks[static_cast<size_t>(block)];
  b.barrier_result = b.barrier_value;
  b.arrived = 0;
  b.epoch = ++clock.epoch;
  const int first = block * kMaxThreads;
  for (int i = 0; i < threads; ++i) go_on(thread(first + i));
  ready.push_block(first, threads);
}

void check_barrier(const Thread& t, BarrierKind kind) {
  const Block& b = block_of(t);
  if (b.ended) fault(t.place, "divergent barrier: %d threads of the block have ended", b.ended);
  if (b.arrived && (kind != b.barrier_kind || !same_site(t.place, b.barrier_place)))
    fault_between(t.place, b.barrier_place, "divergent barrier: threads of the block wait at two places");
}

void begin_phase() {
  clock.phase = ++clock.epoch;
  for (int b = 0; b < cluster_blocks(); ++b) {
    Block& block = engine.blocks[static_cast<size_t>(b)];
    block.epoch = clock.phase;
    block.visitor = nullptr;
  }
}

void release_cluster(int threads) {
  engine.arrived = 0;
  begin_phase();
  for_threads(go_on);
  ready.push_cluster(cluster_blocks(), threads);
}

void check_cluster_barrier(const Thread& t) {
  if (engine.ended) fault(t.place, "divergent barrier of the cluster: %d of its threads have ended", engine.ended);
  if (engine.arrived && !same_site(t.place, engine.barrier_place))
    fault_between(t.place, engine.barrier_place, "divergent barrier: threads of the cluster wait at two places");
}

// ---- operations of a warp ----

void combine_nothing(void* const*, unsigned) {}
const WarpOperation warp_barrier_operation{"__syncwarp", combine_nothing};

template <class Body>
void for_lanes(const Thread& t, unsigned mask, Body body) {
  for (; mask; mask &= mask - 1) body(thread(t.warp * kWarp + __builtin_ctz(mask)));
}

// The lanes of mask have met: what any of them did or knew, all know from now on.
void order_lanes(const Thread& t, unsigned mask) {
  Warp& w = warp_of(t);
  ++w.clock;
  if (mask == w.born) {
    w.full_time = w.clock;
  } else {
    if (!w.partial) std::memset(w.known, 0, sizeof w.known);
    w.partial = true;
    uint32_t joined[kWarp] = {};
    for_lanes(t, mask, [&](const Thread& lane) {
      for (int i = 0; i < kWarp; ++i) joined[i] = std::max(joined[i], w.known[lane.lane][i]);
    });
    for_lanes(t, mask, [&](const Thread& lane) { joined[lane.lane] = w.clock; });
    for_lanes(t, mask, [&](const Thread& lane) { std::memcpy(w.known[lane.lane], joined, sizeof joined); });
  }
  for_lanes(t, mask, [&](Thread& lane) { lane.time = w.clock; });
}

void check_mask(const Thread& t) {
  const Warp& w = warp_of(t);
  const char* name = t.operation->name;
  if (!(t.mask >> t.lane & 1)) fault(t.place, "%s: lane %d is not in its own mask %08x", name, t.lane, t.mask);
  if (t.mask & ~w.born) fault(t.place, "%s: mask %08x names lanes that the block does not have", name, t.mask);
  if (t.mask & ~w.alive)
    fault(t.place, "%s: mask %08x names lanes that have ended, %08x", name, t.mask, t.mask & ~w.alive);
}

bool agree(const Thread& a, const Thread& b) {
  return a.operation == b.operation && a.mask == b.mask &&
         (a.operation == &warp_barrier_operation || same_site(a.place, b.place));
}

// Joins those who wait; whether everybody in the mask is there. Lanes that wait for others only are none of t's
// business.
bool join(const Thread& t) {
  Warp& w = warp_of(t);
  bool all_there = ((w.waiting | 1u << t.lane) & t.mask) == t.mask;
  if (!w.waiting) w.uniform = true;
  if (!w.uniform || (w.waiting && !agree(t, thread(t.warp * kWarp + __builtin_ctz(w.waiting))))) {
    w.uniform = false;
    for_lanes(t, w.waiting, [&](const Thread& other) {
      if (agree(t, other) || !(t.mask >> other.lane & 1)) return;
      all_there = false;
      if (other.mask >> t.lane & 1)  // each waits for the other
        fault_between(
            t.place, other.place,
            "lanes of a warp meet in different operations: lane %d in %s, mask %08x; lane %d in %s, mask %08x", t.lane,
            t.operation->name, t.mask, other.lane, other.operation->name, other.mask);
    });
  }
  w.waiting |= 1u << t.lane;
  return all_there;
}

void meet(const WarpOperation& operation, unsigned mask, void* record, const Place& place) {
  Thread& t = self();
  t.operation = &operation, t.mask = mask, t.record = record, t.place = place;
  check_mask(t);
  if (!join(t)) {
    t.state = State::at_warp_operation;
    return leave(t.context);
  }
  void* records[kWarp];
  for_lanes(t, mask, [&](const Thread& lane) { records[lane.lane] = lane.record; });
  operation.combine(records, mask);
  if (&operation == &warp_barrier_operation) order_lanes(t, mask);
  warp_of(t).waiting &= ~mask;
  // The last to arrive goes on, the others are next.
  const unsigned others = mask & ~(1u << t.lane);
  for_lanes(t, others, [](Thread& lane) { lane.state = State::ready; });
  ready.push_lanes(t.warp * kWarp, others);
}

// ---- clusters of blocks ----

void begin_block(int block, int threads) {
  Block& b = engine.blocks[static_cast<size_t>(block)];
  b.arrived = b.ended = 0;
  const dim3 size = engine.call.block;
  for (int i = 0; i < threads; ++i) {
    const int number = block * kMaxThreads + i;
    Thread& t = thread(number);
    const auto n = static_cast<unsigned>(i);
    t.index = {n % size.x, n / size.x % size.y, n / size.x / size.y};
    t.linear = i, t.lane = i % kWarp;
    t.block = block, t.number = number, t.warp = number / kWarp;
    t.state = State::fresh;
    t.time = 0, t.copy_group = 0;
    if (t.lane != 0) continue;
    Warp& w = warp_of(t);
    const int lanes = std::min(kWarp, threads - i);
    w.born = w.alive = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    w.waiting = 0;
    w.restart_clock();
  }
}

// first: of its blocks, in the order of the grid.
void begin_cluster(uint64_t first, int threads) {
  const dim3 grid = engine.call.grid;
  begin_phase();
  clock.cluster = clock.phase;
  block_order.begin_block();
  engine.arrived = engine.ended = 0;
  for (int b = 0; b < cluster_blocks(); ++b) {
    const uint64_t n = first + static_cast<uint64_t>(b);
    engine.blocks[static_cast<size_t>(b)].index = {static_cast<unsigned>(n % grid.x),
                                                   static_cast<unsigned>(n / grid.x % grid.y),
                                                   static_cast<unsigned>(n / grid.x / grid.y)};
    begin_block(b, threads);
  }
  ready.reset(schedule);
  ready.push_cluster(cluster_blocks(), threads);
}

// Nobody can go on, yet somebody waits.
void fail_deadlock() {
  int waiting = 0;
  const Thread *first = nullptr, *second = nullptr;
  for_threads([&](const Thread& t) {
    if (t.state == State::done) return;
    ++waiting;
    if (!first) first = &t;
    if (!second && (t.state != first->state || !same_site(t.place, first->place))) second = &t;
  });
  if (!second) second = first;
  const auto what = [](const Thread& t) {
    return t.state == State::at_barrier           ? "the block"
           : t.state == State::at_cluster_barrier ? "the cluster"
                                                  : t.operation->name;
  };
  fault_between(first->place, second->place, "deadlock of %d threads: thread %d waits for %s, thread %d for %s",
                waiting, first->linear, what(*first), second->linear, what(*second));
}

// What a block does in another's shared memory must be over before that one may end.
void check_visits() {
  for (int b = 0; b < cluster_blocks(); ++b) {
    const Block& block = engine.blocks[static_cast<size_t>(b)];
    if (block.visitor)
      fault(block.visit, "access to shared memory of block %d of the cluster, which may have ended: no barrier follows",
            b);
  }
}

void run_cluster(uint64_t first, int threads) {
  begin_cluster(first, threads);
  leave(host);
  if (engine.error.empty() && engine.ended < threads * cluster_blocks()) fail_deadlock();
  if (engine.error.empty()) check_visits();
}

uint64_t greatest_common_divisor(uint64_t a, uint64_t b) { return b ? greatest_common_divisor(b, a % b) : a; }

// Forward, backward, or in an order that jumps about and visits every cluster once.
void run_clusters(int threads) {
  const dim3 grid = engine.call.grid;
  const uint64_t clusters = uint64_t{grid.x} * grid.y * grid.z / engine.call.cluster;
  const uint64_t offset = ready.next_random();
  uint64_t step = ready.next_random() % clusters + 1;
  while (greatest_common_divisor(step, clusters) != 1) ++step;
  for (uint64_t i = 0; i < clusters && engine.error.empty(); ++i) {
    const uint64_t n = schedule == Schedule::forward   ? i
                       : schedule == Schedule::reverse ? clusters - 1 - i
                                                       : (i * step + offset) % clusters;
    run_cluster(n * engine.call.cluster, threads);
  }
}

}  // namespace

void set_schedule(Schedule s, uint32_t seed) {
  const Lock hold;
  schedule = s;
  ready.seed(seed);
}

void run_kernel(const KernelCall& call) {
  engine.call = call;
  engine.arguments = reinterpret_cast<uintptr_t>(call.arguments.get());
  engine.error.clear();
  const int threads = block_threads();
  const int fibers = threads * cluster_blocks();
  stacks.reserve(fibers);
  free_count = 0;
  for (int i = fibers - 1; i >= 0; --i) free_stacks[free_count++] = i;
  prepare_memory();
  shared_memory.prepare(cluster_blocks(), call.shared_bytes);
  clock.launch = ++clock.epoch;
  block_order.begin_launch();
  ++engine.counters.launches;
  engine.counters.threads += static_cast<uint64_t>(threads) * call.grid.x * call.grid.y * call.grid.z;
  run_clusters(threads);
  for_threads([](Thread& t) { t.copies.clear(); });
  if (!engine.error.empty()) throw_fault();
  engine.call = {};
}

void leave_kernel() {
  engine.current = nullptr;
  engine.hooks = false;
  engine.stack = nullptr;
}

void stop_kernel() {
  leave_kernel();
  switch_context(abandoned, host);
}

bool on_other_stack(const void* p) {
  const int owner = stacks.owner(p);
  return owner >= 0 && owner != self().stack;
}

uint3 thread_index() { return self().index; }
uint3 block_index() { return block_of(self()).index; }
dim3 block_size() { return engine.call.block; }
dim3 grid_size() { return engine.call.grid; }
void* dynamic_shared() { return shared_memory.dynamic(self().block); }
int cluster_rank() { return self().block; }
int cluster_size() { return cluster_blocks(); }

int block_barrier(BarrierKind kind, int predicate, Site site) {
  Thread& t = self();
  t.place = {site, __builtin_return_address(0)};
  check_barrier(t, kind);
  Block& b = block_of(t);
  if (b.arrived == 0) {
    b.barrier_kind = kind, b.barrier_place = t.place;
    b.barrier_value = kind == BarrierKind::all;
  }
  const int vote = predicate != 0;
  if (kind == BarrierKind::count)
    b.barrier_value += vote;
  else if (kind == BarrierKind::all)
    b.barrier_value &= vote;
  else
    b.barrier_value |= vote;
  t.state = State::at_barrier;
  const int threads = block_threads();
  if (++b.arrived == threads) release_barrier(t.block, threads);
  leave(t.context);
  return b.barrier_result;
}

void cluster_barrier(Site site) {
  Thread& t = self();
  t.place = {site, __builtin_return_address(0)};
  check_cluster_barrier(t);
  if (engine.arrived == 0) engine.barrier_place = t.place;
  t.state = State::at_cluster_barrier;
  const int threads = block_threads();
  if (++engine.arrived == threads * cluster_blocks()) release_cluster(threads);
  leave(t.context);
}

void* peer_memory(void* p, int rank, Site site) {
  const Place place{site, __builtin_return_address(0)};
  const HooksOff off;
  const int own = shared_memory.block(reinterpret_cast<uintptr_t>(p));
  if (own != self().block) fault(place, "the address for a peer is not in the block's own dynamic shared memory");
  if (rank < 0 || rank >= cluster_blocks()) fault(place, "the cluster has no block %d", rank);
  return static_cast<char*>(p) + (rank - own) * static_cast<ptrdiff_t>(SharedMemory::kSlot);
}

void warp_operation(const WarpOperation& operation, unsigned mask, void* record, Site site) {
  meet(operation, mask, record, {site, __builtin_return_address(0)});
}
void warp_barrier(unsigned mask, Site site) {
  meet(warp_barrier_operation, mask, nullptr, {site, __builtin_return_address(0)});
}

void device_fence() {
  {
    const HooksOff off;
    block_order.fence();
  }
  maybe_yield();
}

void maybe_yield() {
  if (!ready.random() || ready.empty()) return;
  Thread& t = self();
  t.state = State::ready;
  ready.push_back(t.number);
  leave(t.context);
}

}  // namespace sic::simt
