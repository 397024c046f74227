// Single machine instructions, for nvcc. Every function here has a twin of the same name in simt/instructions.h;
// nothing else in the library holds inline assembly.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace sic::gpu {

// ---- memory ----

// Read once: past the first-level cache, and never written by the kernel that reads it.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}
// Read by several threads or blocks; never written by the kernel that reads it.
__device__ __forceinline__ uint4 load_cached16(const void* p) { return __ldg(static_cast<const uint4*>(p)); }
__device__ __forceinline__ void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes in the background, zeros if !valid (then nothing is read). Both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same for 4 or 8 bytes.
template <int kBytes>
__device__ __forceinline__ void cp_async_small(void* shared, const void* global, bool valid = true) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(kBytes),
               "r"(valid ? kBytes : 0)
               : "memory");
}
// Closes a group of copies; wait<n> until all but the thread's last n groups have arrived, for this thread alone.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- clusters of blocks; a launch without them, or on a device before sm_90, has clusters of one ----

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size = 1;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return static_cast<int>(size);
}
// A barrier of all threads of the cluster. What any of them wrote before, all see after.
__device__ __forceinline__ void cluster_sync() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
// Where block `rank` of the cluster has what this one has at p, in its shared memory. To be touched between the first
// barrier of the cluster and the last.
template <class T>
__device__ __forceinline__ T* peer_shared(T* p, int rank) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  T* peer;
  asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(p), "r"(rank));
  return peer;
#else
  return p;
#endif
}

// ---- matrix fragments ----

// d += a * b, PTX fragment layouts, a by rows and b by columns.
__device__ __forceinline__ void mma_f16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_s8_16832(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// An 8x8 matrix of 16-bit elements, one row in four lanes: returns the lane's part of the transpose.
__device__ __forceinline__ uint32_t transpose8x8_b16(uint32_t row) {
  uint32_t column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}
// Four 8x8 matrices of 16-bit elements from shared memory: lane 8 m + i gives the address of row i of matrix m (16-byte
// aligned), and receives its two elements of each, transposed by the second form.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&d)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&d)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// ---- arithmetic ----

// 2^x, relative error about 2^-22; subnormals are zero.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even, the first in the low half. A NaN stays a NaN.
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  uint32_t v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ float2 unpack_f16x2(uint32_t v) {
  float2 f;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
      : "=f"(f.x), "=f"(f.y)
      : "r"(v));
  return f;
}

// Pairs of half-precision numbers, each result rounded once.
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}

}  // namespace sic::gpu
