// The threads of a block as fibers: who runs next, barriers, operations of a warp.
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
int free_stacks[kMaxThreads];
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
  if (engine.arrived) fault(engine.barrier_place, "divergent barrier: thread %d ends while others wait", t.linear);
  t.state = State::done;
  ++engine.ended;
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

// ---- barriers of the block ----

void release_barrier(int threads) {
  engine.barrier_result = engine.barrier_value;
  engine.arrived = 0;
  ++clock.epoch;
  for (int i = 0; i < threads; ++i) {
    Thread& t = thread(i);
    t.time = 0;
    t.state = State::ready;
    if (t.lane == 0) warp_of(t).restart_clock();
  }
  ready.push_block(threads);
}

void check_barrier(const Thread& t, BarrierKind kind) {
  if (engine.ended) fault(t.place, "divergent barrier: %d threads of the block have ended", engine.ended);
  if (engine.arrived && (kind != engine.barrier_kind || !same_site(t.place, engine.barrier_place)))
    fault_between(t.place, engine.barrier_place, "divergent barrier: threads of the block wait at two places");
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

// ---- blocks ----

void begin_block(int threads) {
  clock.block = ++clock.epoch;
  block_order.begin_block();
  engine.arrived = engine.ended = 0;
  const dim3 size = engine.call.block;
  for (int i = 0; i < threads; ++i) {
    Thread& t = thread(i);
    const auto n = static_cast<unsigned>(i);
    t.index = {n % size.x, n / size.x % size.y, n / size.x / size.y};
    t.linear = i, t.lane = i % kWarp, t.warp = i / kWarp;
    t.state = State::fresh;
    t.time = 0, t.copy_group = 0;
    if (t.lane != 0) continue;
    Warp& w = warp_of(t);
    const int lanes = std::min(kWarp, threads - i);
    w.born = w.alive = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    w.waiting = 0;
    w.restart_clock();
  }
  ready.reset(schedule);
  ready.push_block(threads);
}

// Nobody can go on, yet somebody waits.
void fail_deadlock(int threads) {
  int waiting = 0;
  const Thread *first = nullptr, *second = nullptr;
  for (int i = 0; i < threads; ++i) {
    const Thread& t = thread(i);
    if (t.state == State::done) continue;
    ++waiting;
    if (!first) first = &t;
    if (!second && (t.state != first->state || !same_site(t.place, first->place))) second = &t;
  }
  if (!second) second = first;
  const auto what = [](const Thread& t) { return t.state == State::at_barrier ? "the block" : t.operation->name; };
  fault_between(first->place, second->place, "deadlock of %d threads: thread %d waits for %s, thread %d for %s",
                waiting, first->linear, what(*first), second->linear, what(*second));
}

void run_block(int threads) {
  begin_block(threads);
  leave(host);
  if (engine.error.empty() && engine.ended < threads) fail_deadlock(threads);
}

uint64_t greatest_common_divisor(uint64_t a, uint64_t b) { return b ? greatest_common_divisor(b, a % b) : a; }

// Forward, backward, or in an order that jumps about and visits every block once.
void run_blocks(int threads) {
  const dim3 grid = engine.call.grid;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const uint64_t offset = ready.next_random();
  uint64_t step = ready.next_random() % blocks + 1;
  while (greatest_common_divisor(step, blocks) != 1) ++step;
  for (uint64_t i = 0; i < blocks && engine.error.empty(); ++i) {
    const uint64_t n = schedule == Schedule::forward   ? i
                       : schedule == Schedule::reverse ? blocks - 1 - i
                                                       : (i * step + offset) % blocks;
    engine.block = {static_cast<unsigned>(n % grid.x), static_cast<unsigned>(n / grid.x % grid.y),
                    static_cast<unsigned>(n / grid.x / grid.y)};
    run_block(threads);
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
  stacks.reserve(threads);
  free_count = 0;
  for (int i = threads - 1; i >= 0; --i) free_stacks[free_count++] = i;
  prepare_memory();
  shared_memory.prepare(call.shared_bytes);
  clock.launch = ++clock.epoch;
  block_order.begin_launch();
  ++engine.counters.launches;
  engine.counters.threads += static_cast<uint64_t>(threads) * call.grid.x * call.grid.y * call.grid.z;
  run_blocks(threads);
  for (int i = 0; i < threads; ++i) thread(i).copies.clear();
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
uint3 block_index() { return engine.block; }
dim3 block_size() { return engine.call.block; }
dim3 grid_size() { return engine.call.grid; }
void* dynamic_shared() { return shared_memory.dynamic(); }

int block_barrier(BarrierKind kind, int predicate, Site site) {
  Thread& t = self();
  t.place = {site, __builtin_return_address(0)};
  check_barrier(t, kind);
  if (engine.arrived == 0) {
    engine.barrier_kind = kind, engine.barrier_place = t.place;
    engine.barrier_value = kind == BarrierKind::all;
  }
  const int vote = predicate != 0;
  if (kind == BarrierKind::count)
    engine.barrier_value += vote;
  else if (kind == BarrierKind::all)
    engine.barrier_value &= vote;
  else
    engine.barrier_value |= vote;
  t.state = State::at_barrier;
  const int threads = block_threads();
  if (++engine.arrived == threads) release_barrier(threads);
  leave(t.context);
  return engine.barrier_result;
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
  ready.push_back(t.linear);
  leave(t.context);
}

}  // namespace sic::simt
