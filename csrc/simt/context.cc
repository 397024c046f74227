#include "simt/context.h"

#include <sys/mman.h>

#include <cstdint>
#include <string>

#include "core/check.h"

#if !SIC_SIMT_USE_UCONTEXT
// Saves the registers that a call must preserve on the old stack, and takes those of the new one.
extern "C" __attribute__((visibility("hidden"))) void sic_simt_switch(void** save, void* to);
asm(R"(
.text
.hidden sic_simt_switch
.globl sic_simt_switch
.type sic_simt_switch,@function
sic_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sic_simt_switch,.-sic_simt_switch
)");
#endif

namespace sic::simt {

#if SIC_SIMT_USE_UCONTEXT
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.machine);
  context.machine.uc_stack.ss_sp = stack;
  context.machine.uc_stack.ss_size = bytes;
  context.machine.uc_link = nullptr;
  makecontext(&context.machine, entry, 0);
}
void switch_context(Context& from, Context& to) { swapcontext(&from.machine, &to.machine); }
#else
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15});
  *--top = nullptr;                         // entry's own return address: never used, ends a backtrace
  *--top = reinterpret_cast<void*>(entry);  // where the first switch returns to
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
void switch_context(Context& from, Context& to) { sic_simt_switch(&from.stack_pointer, to.stack_pointer); }
#endif

void StackPool::reserve(int n) {
  if (n <= count_) return;
  if (memory_) munmap(memory_, static_cast<size_t>(count_) * kStride);
  count_ = 0;
  memory_ = nullptr;
  const size_t bytes = static_cast<size_t>(n) * kStride;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw Error("simt: no memory for " + std::to_string(n) + " stacks");
  memory_ = static_cast<char*>(p);
  count_ = n;
  for (int i = 0; i < n; ++i) mprotect(memory_ + static_cast<size_t>(i) * kStride, kGuard, PROT_NONE);
}

StackPool::~StackPool() {
  if (memory_) munmap(memory_, static_cast<size_t>(count_) * kStride);
}

}  // namespace sic::simt
