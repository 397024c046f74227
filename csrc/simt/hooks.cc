// What g++ calls in files compiled with -fsanitize=thread and -fsanitize=bounds,alignment,...: our own functions under
// the names of the sanitizers' libraries, which are not linked. Hidden, so that a process with real sanitizers keeps
// its own.
#include "simt/checker.h"

#define SIC_HOOK extern "C" __attribute__((visibility("hidden")))
#define SIC_CALLER __builtin_return_address(0)

namespace {

using namespace sic::simt;

// A thread's own stack is its registers and local memory.
__forceinline__ bool watched(const void* p) {
  return engine.hooks && in_kernel() &&
         static_cast<size_t>(static_cast<const char*>(p) - engine.stack) >= StackPool::kBytes;
}

__forceinline__ void access(const void* p, size_t n, AccessKind kind, size_t alignment, const void* pc) {
  if (!watched(p)) return;
  count_access({{}, pc});
  engine.hooks = false;  // what the checks compute with may have been compiled with hooks
  check_access(p, n, kind, alignment, {{}, pc});
  engine.hooks = true;
}

}  // namespace

#define SIC_ACCESS_HOOKS(n)                                                                          \
  SIC_HOOK void __tsan_read##n(void* p) { access(p, n, AccessKind::read, n, SIC_CALLER); }           \
  SIC_HOOK void __tsan_write##n(void* p) { access(p, n, AccessKind::write, n, SIC_CALLER); }         \
  SIC_HOOK void __tsan_unaligned_read##n(void* p) { access(p, n, AccessKind::read, 1, SIC_CALLER); } \
  SIC_HOOK void __tsan_unaligned_write##n(void* p) { access(p, n, AccessKind::write, 1, SIC_CALLER); }
SIC_ACCESS_HOOKS(1)
SIC_ACCESS_HOOKS(2)
SIC_ACCESS_HOOKS(4)
SIC_ACCESS_HOOKS(8)
SIC_ACCESS_HOOKS(16)
SIC_HOOK void __tsan_read_range(void* p, size_t n) { access(p, n, AccessKind::read, 1, SIC_CALLER); }
SIC_HOOK void __tsan_write_range(void* p, size_t n) { access(p, n, AccessKind::write, 1, SIC_CALLER); }
SIC_HOOK void __tsan_init() {}
SIC_HOOK void __tsan_func_entry(void*) {}
SIC_HOOK void __tsan_func_exit(void*) {}
SIC_HOOK void __tsan_vptr_update(void**, void*) {}
SIC_HOOK void __tsan_vptr_read(void**) {}

// Atomics of the C++ language: host code of the kernel files has them (guards of static variables, shared pointers).
#define SIC_ATOMIC_HOOKS(bits, T)                                                                                  \
  SIC_HOOK T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
  SIC_HOOK void __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); } \
  SIC_HOOK T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                                             \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                            \
  }                                                                                                                \
  SIC_HOOK T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                                            \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                             \
  }                                                                                                                \
  SIC_HOOK T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                                            \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                             \
  }                                                                                                                \
  SIC_HOOK int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {          \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
  }                                                                                                                \
  SIC_HOOK int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {            \
    return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                  \
  }
SIC_ATOMIC_HOOKS(8, unsigned char)
SIC_ATOMIC_HOOKS(16, unsigned short)
SIC_ATOMIC_HOOKS(32, unsigned)
SIC_ATOMIC_HOOKS(64, unsigned long)
SIC_HOOK void __tsan_atomic_thread_fence(int) {}
SIC_HOOK void __tsan_atomic_signal_fence(int) {}

// ---- undefined behaviour; the first member of every record says where ----

namespace {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

struct TypeMismatch {
  SourceLocation location;
  const void* type;
  unsigned char log_alignment, kind;
};

Place place_of(const SourceLocation& location) { return {{location.file, static_cast<int>(location.line)}, nullptr}; }

}  // namespace

SIC_HOOK void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, uintptr_t p) {
  const size_t alignment = size_t{1} << data->log_alignment;
  if (p & (alignment - 1))
    fault(place_of(data->location), "misaligned access: needs a multiple of %zu bytes", alignment);
}
SIC_HOOK void __ubsan_handle_out_of_bounds(const SourceLocation* location, uintptr_t index) {
  fault(place_of(*location), "array index %zd is out of bounds", static_cast<ssize_t>(index));
}
SIC_HOOK void __ubsan_handle_shift_out_of_bounds(const SourceLocation* location, uintptr_t, uintptr_t distance) {
  fault(place_of(*location), "undefined shift by %zd", static_cast<ssize_t>(distance));
}
SIC_HOOK void __ubsan_handle_divrem_overflow(const SourceLocation* location, uintptr_t, uintptr_t) {
  fault(place_of(*location), "integer division by zero or overflow");
}
SIC_HOOK void __ubsan_handle_vla_bound_not_positive(const SourceLocation* location, uintptr_t) {
  fault(place_of(*location), "array of no elements");
}
