// Warp intrinsics: each gathers the lanes' values in a record and names the operation of warp_operations.cc.
#pragma once
#include <cstring>
#include <type_traits>

#include "simt/threads.h"

namespace sic::simt {

// ---- shuffles ----

struct ShuffleRecord {
  alignas(16) unsigned char value[16];
  alignas(16) unsigned char result[16];
  int argument;  // a lane, a distance or a mask
  int width;
};
extern const WarpOperation shuffle_index, shuffle_up, shuffle_down, shuffle_xor;

// Copies without the hooks of checked memory: registers, not memory, as far as the kernel is concerned.
void copy_registers(void* to, const void* from, size_t bytes);

template <class T>
__forceinline__ T shuffle(const WarpOperation& operation, unsigned mask, T value, int argument, int width, Site site) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>);
  ShuffleRecord record;
  record.argument = argument, record.width = width;
  copy_registers(record.value, &value, sizeof value);
  warp_operation(operation, mask, &record, site);
  copy_registers(&value, record.result, sizeof value);
  return value;
}

// ---- votes, reductions and matches of integers ----

struct IntegerRecord {
  uint64_t value;
  uint64_t result;
};
extern const WarpOperation ballot, vote_any, vote_all, match_any;
extern const WarpOperation reduce_add, reduce_min_signed, reduce_max_signed, reduce_min_unsigned, reduce_max_unsigned,
    reduce_and, reduce_or, reduce_xor;

__forceinline__ uint64_t integer_operation(const WarpOperation& operation, unsigned mask, uint64_t value, Site site) {
  IntegerRecord record{value, 0};
  warp_operation(operation, mask, &record, site);
  return record.result;
}

// ---- matrix fragments; the layouts are PTX's, see warp_operations.cc ----

struct MatrixRecord {
  uint32_t a[4], b[2];
  uint32_t d[4];  // float or int bits; sum and result
};
extern const WarpOperation mma_f16, mma_bf16, mma_s8;

struct TransposeRecord {
  uint32_t row[4];  // in: of movmatrix the first only
  uint32_t result[4];
};
extern const WarpOperation transpose_matrix, load_matrix, load_matrix_transposed;

}  // namespace sic::simt

template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIC_SIMT_SITE) {
  return ::sic::simt::shuffle(::sic::simt::shuffle_index, mask, value, source, width, site);
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, SIC_SIMT_SITE) {
  return ::sic::simt::shuffle(::sic::simt::shuffle_up, mask, value, static_cast<int>(distance), width, site);
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, SIC_SIMT_SITE) {
  return ::sic::simt::shuffle(::sic::simt::shuffle_down, mask, value, static_cast<int>(distance), width, site);
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SIC_SIMT_SITE) {
  return ::sic::simt::shuffle(::sic::simt::shuffle_xor, mask, value, lane_mask, width, site);
}

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate, SIC_SIMT_SITE) {
  return static_cast<unsigned>(::sic::simt::integer_operation(::sic::simt::ballot, mask, predicate != 0, site));
}
__forceinline__ int __any_sync(unsigned mask, int predicate, SIC_SIMT_SITE) {
  return static_cast<int>(::sic::simt::integer_operation(::sic::simt::vote_any, mask, predicate != 0, site));
}
__forceinline__ int __all_sync(unsigned mask, int predicate, SIC_SIMT_SITE) {
  return static_cast<int>(::sic::simt::integer_operation(::sic::simt::vote_all, mask, predicate != 0, site));
}
template <class T>
__forceinline__ unsigned __match_any_sync(unsigned mask, T value, SIC_SIMT_SITE) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  ::sic::simt::copy_registers(&bits, &value, sizeof value);
  return static_cast<unsigned>(::sic::simt::integer_operation(::sic::simt::match_any, mask, bits, site));
}

#define SIC_SIMT_REDUCE(name, T, operation)                                                                     \
  __forceinline__ T name(unsigned mask, T value, SIC_SIMT_SITE) {                                               \
    return static_cast<T>(::sic::simt::integer_operation(::sic::simt::operation, mask, uint32_t(value), site)); \
  }
SIC_SIMT_REDUCE(__reduce_add_sync, unsigned, reduce_add)
SIC_SIMT_REDUCE(__reduce_add_sync, int, reduce_add)
SIC_SIMT_REDUCE(__reduce_min_sync, unsigned, reduce_min_unsigned)
SIC_SIMT_REDUCE(__reduce_max_sync, unsigned, reduce_max_unsigned)
SIC_SIMT_REDUCE(__reduce_min_sync, int, reduce_min_signed)
SIC_SIMT_REDUCE(__reduce_max_sync, int, reduce_max_signed)
SIC_SIMT_REDUCE(__reduce_and_sync, unsigned, reduce_and)
SIC_SIMT_REDUCE(__reduce_or_sync, unsigned, reduce_or)
SIC_SIMT_REDUCE(__reduce_xor_sync, unsigned, reduce_xor)
#undef SIC_SIMT_REDUCE
