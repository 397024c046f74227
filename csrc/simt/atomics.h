// Atomics and loads with cache hints.
#pragma once
#include <type_traits>

#include "simt/warp.h"

namespace sic::simt {

// Checks the access and remembers that it was atomic; threads take turns, so the update itself needs no more.
void note_atomic(void* p, size_t bytes, Site site);

template <class T, class Update>
__forceinline__ T update_atomically(T* p, Site site, Update update) {
  note_atomic(p, sizeof(T), site);
  T old;
  copy_registers(&old, p, sizeof old);
  const T fresh = update(old);
  copy_registers(p, &fresh, sizeof fresh);
  return old;
}

}  // namespace sic::simt

#define SIC_SIMT_ATOMIC(name, expression)                                                                   \
  template <class T>                                                                                        \
  __forceinline__ T name(T* p, std::type_identity_t<T> value, SIC_SIMT_SITE) {                              \
    return ::sic::simt::update_atomically(p, site, [&](T old) -> T { return static_cast<T>(expression); }); \
  }
SIC_SIMT_ATOMIC(atomicAdd, old + value)
SIC_SIMT_ATOMIC(atomicSub, old - value)
SIC_SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIC_SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIC_SIMT_ATOMIC(atomicAnd, (old & value))
SIC_SIMT_ATOMIC(atomicOr, old | value)
SIC_SIMT_ATOMIC(atomicXor, old ^ value)
SIC_SIMT_ATOMIC(atomicExch, (static_cast<void>(old), value))
SIC_SIMT_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
SIC_SIMT_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef SIC_SIMT_ATOMIC

template <class T>
__forceinline__ T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value, SIC_SIMT_SITE) {
  return ::sic::simt::update_atomically(p, site, [&](T old) { return old == expected ? value : old; });
}

template <class T>
__forceinline__ T __ldg(const T* p) {
  return *p;
}
template <class T>
__forceinline__ T __ldcs(const T* p) {
  return *p;
}
template <class T>
__forceinline__ T __ldcg(const T* p) {
  return *p;
}
template <class T>
__forceinline__ void __stcs(T* p, std::type_identity_t<T> value) {
  *p = value;
}
template <class T>
__forceinline__ void __stcg(T* p, std::type_identity_t<T> value) {
  *p = value;
}
