// What a running kernel asks of the emulator: who it is, barriers and fences, and operations of a warp.
#pragma once
#include "simt/language.h"

namespace sic::simt {

// A place in kernel source: where the call stands.
struct Site {
  const char* file = nullptr;
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};
#define SIC_SIMT_SITE ::sic::simt::Site site = ::sic::simt::Site::here()

// Constant within one thread of a kernel, so that the compiler may keep them in registers across switches.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();
__attribute__((const)) void* dynamic_shared();
__attribute__((const)) int cluster_rank();
__attribute__((const)) int cluster_size();

enum class BarrierKind { plain, count, all, any };
int block_barrier(BarrierKind kind, int predicate, Site site);
void cluster_barrier(Site site);  // orders memory too, of all blocks of the cluster
// Where another block of the cluster has what this one has at p, in its dynamic shared memory.
void* peer_memory(void* p, int rank, Site site);

// An operation that lanes of a warp carry out together. Each lane brings a record on its own stack; when the last lane
// of the mask has arrived, combine reads and writes the records of them all (lanes outside of the mask have none).
struct WarpOperation {
  const char* name;
  void (*combine)(void* const* records, unsigned mask);
};
void warp_operation(const WarpOperation& operation, unsigned mask, void* record, Site site);
void warp_barrier(unsigned mask, Site site);  // the only one that orders memory

// Needed on both sides of an atomic through which one block hands data to another.
void device_fence();

// Memory changes while a thread waits: nothing may stay in a register.
__forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

}  // namespace sic::simt

#define threadIdx (::sic::simt::thread_index())
#define blockIdx (::sic::simt::block_index())
#define blockDim (::sic::simt::block_size())
#define gridDim (::sic::simt::grid_size())

__forceinline__ int sic_simt_barrier(::sic::simt::BarrierKind kind, int predicate, ::sic::simt::Site site) {
  ::sic::simt::forget_memory();
  const int result = ::sic::simt::block_barrier(kind, predicate, site);
  ::sic::simt::forget_memory();
  return result;
}
__forceinline__ void __syncthreads(SIC_SIMT_SITE) { sic_simt_barrier(::sic::simt::BarrierKind::plain, 0, site); }
__forceinline__ int __syncthreads_count(int predicate, SIC_SIMT_SITE) {
  return sic_simt_barrier(::sic::simt::BarrierKind::count, predicate, site);
}
__forceinline__ int __syncthreads_and(int predicate, SIC_SIMT_SITE) {
  return sic_simt_barrier(::sic::simt::BarrierKind::all, predicate, site);
}
__forceinline__ int __syncthreads_or(int predicate, SIC_SIMT_SITE) {
  return sic_simt_barrier(::sic::simt::BarrierKind::any, predicate, site);
}
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu, SIC_SIMT_SITE) {
  ::sic::simt::forget_memory();
  ::sic::simt::warp_barrier(mask, site);
  ::sic::simt::forget_memory();
}
__forceinline__ void __threadfence() { ::sic::simt::device_fence(); }
__forceinline__ void __threadfence_system() { ::sic::simt::device_fence(); }
__forceinline__ void __threadfence_block() {}
