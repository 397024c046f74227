// The functions of core/gpu_ptx.cuh, for kernels that run under the emulator.
#pragma once
#include "core/dtype.h"
#include "simt/atomics.h"
#include "simt/intrinsics.h"
#include "simt/warp.h"

namespace sic::simt {

// Each checked, then made. Global reads are cached: they may not follow a write by the same launch.
void read_global(void* to, const void* from, size_t bytes, Site site);
void write_any(void* to, const void* from, size_t bytes, Site site);
void read_shared(void* to, const void* from, size_t bytes, Site site);
void copy_async(void* shared, const void* global, size_t bytes, bool valid, Site site);
void copy_async_commit();
void copy_async_wait(int pending);

}  // namespace sic::simt

namespace sic::gpu {

__forceinline__ uint4 load16(const void* p, SIC_SIMT_SITE) {
  uint4 v;
  simt::read_global(&v, p, 16, site);
  return v;
}
__forceinline__ uint4 load_cached16(const void* p, SIC_SIMT_SITE) { return load16(p, site); }
__forceinline__ void store16(void* p, uint4 v, SIC_SIMT_SITE) { simt::write_any(p, &v, 16, site); }

__forceinline__ void cp_async16(void* shared, const void* global, bool valid = true, SIC_SIMT_SITE) {
  simt::copy_async(shared, global, 16, valid, site);
}
template <int kBytes>
__forceinline__ void cp_async_small(void* shared, const void* global, bool valid = true, SIC_SIMT_SITE) {
  static_assert(kBytes == 4 || kBytes == 8);
  simt::copy_async(shared, global, kBytes, valid, site);
}
__forceinline__ void cp_async_commit() { simt::copy_async_commit(); }
template <int kPending>
__forceinline__ void cp_async_wait() {
  simt::forget_memory();
  simt::copy_async_wait(kPending);
  simt::forget_memory();
}

__forceinline__ void multiply_fragments(const simt::WarpOperation& operation, void* d, const uint32_t (&a)[4],
                                        const uint32_t (&b)[2], simt::Site site) {
  simt::MatrixRecord record;
  simt::copy_registers(record.a, a, sizeof a);
  simt::copy_registers(record.b, b, sizeof b);
  simt::copy_registers(record.d, d, sizeof record.d);
  simt::warp_operation(operation, 0xffffffffu, &record, site);
  simt::copy_registers(d, record.d, sizeof record.d);
}
__forceinline__ void mma_f16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIC_SIMT_SITE) {
  multiply_fragments(simt::mma_f16, d, a, b, site);
}
__forceinline__ void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIC_SIMT_SITE) {
  multiply_fragments(simt::mma_bf16, d, a, b, site);
}
__forceinline__ void mma_s8_16832(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIC_SIMT_SITE) {
  multiply_fragments(simt::mma_s8, d, a, b, site);
}
__forceinline__ uint32_t transpose8x8_b16(uint32_t row, SIC_SIMT_SITE) {
  simt::TransposeRecord record;
  simt::copy_registers(record.row, &row, sizeof row);
  simt::warp_operation(simt::transpose_matrix, 0xffffffffu, &record, site);
  simt::copy_registers(&row, record.result, sizeof row);
  return row;
}
__forceinline__ void load_matrices(const simt::WarpOperation& operation, uint32_t (&d)[4], const void* shared_row,
                                   simt::Site site) {
  simt::TransposeRecord record;
  simt::read_shared(record.row, shared_row, 16, site);
  simt::warp_operation(operation, 0xffffffffu, &record, site);
  simt::copy_registers(d, record.result, sizeof d);
}
__forceinline__ void load_matrix_x4(uint32_t (&d)[4], const void* shared_row, SIC_SIMT_SITE) {
  load_matrices(simt::load_matrix, d, shared_row, site);
}
__forceinline__ void load_matrix_x4_transposed(uint32_t (&d)[4], const void* shared_row, SIC_SIMT_SITE) {
  load_matrices(simt::load_matrix_transposed, d, shared_row, site);
}

__forceinline__ int cluster_rank() { return simt::cluster_rank(); }
__forceinline__ int cluster_size() { return simt::cluster_size(); }
__forceinline__ void cluster_sync(SIC_SIMT_SITE) {
  simt::forget_memory();
  simt::cluster_barrier(site);
  simt::forget_memory();
}
template <class T>
__forceinline__ T* peer_shared(T* p, int rank, SIC_SIMT_SITE) {
  return static_cast<T*>(simt::peer_memory(p, rank, site));
}

inline float ex2(float x) {
  const float y = std::exp2(std::fabs(x) < 0x1p-126f ? 0.0f : x);
  return y < 0x1p-126f ? 0.0f : y;
}

template <class T>
uint32_t pack_pair(float low, float high) {
  T a, b;
  from_float(low, a);
  from_float(high, b);
  return a.bits | static_cast<uint32_t>(b.bits) << 16;
}
inline uint32_t pack_bf16x2(float low, float high) { return pack_pair<bf16_t>(low, high); }
inline uint32_t pack_f16x2(float low, float high) { return pack_pair<f16_t>(low, high); }
inline float2 unpack_f16x2(uint32_t v) {
  return {to_float(f16_t{static_cast<uint16_t>(v)}), to_float(f16_t{static_cast<uint16_t>(v >> 16)})};
}

inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
  const float2 x = unpack_f16x2(a), y = unpack_f16x2(b);
  return pack_f16x2(x.x + y.x, x.y + y.y);
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  const float2 x = unpack_f16x2(a), y = unpack_f16x2(b);
  return pack_f16x2(x.x * y.x, x.y * y.y);
}
// Products and sums are exact in double; from there to half precision by way of float.
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const float2 x = unpack_f16x2(a), y = unpack_f16x2(b), z = unpack_f16x2(c);
  return pack_f16x2(static_cast<float>(double{x.x} * y.x + z.x), static_cast<float>(double{x.y} * y.y + z.y));
}

}  // namespace sic::gpu
