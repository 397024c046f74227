// The CUDA C++ language for g++: keywords and built-in vector types. Needs no CUDA toolkit.
#pragma once
#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
// A block runs on one thread of the process, so what a block shares may live in thread-local storage.
#define __shared__ thread_local
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

// The alignments are CUDA's: they decide how wide an access may be.
#define SIC_SIMT_VECTORS(T, name, align2, align4)                    \
  struct name##1 { T x; };                                           \
  struct alignas(align2) name##2 { T x, y; };                        \
  struct name##3 { T x, y, z; };                                     \
  struct alignas(align4) name##4 { T x, y, z, w; };                  \
  inline name##1 make_##name##1(T x) { return {x}; }                 \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

SIC_SIMT_VECTORS(signed char, char, 2, 4)
SIC_SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIC_SIMT_VECTORS(short, short, 4, 8)
SIC_SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIC_SIMT_VECTORS(int, int, 8, 16)
SIC_SIMT_VECTORS(unsigned, uint, 8, 16)
SIC_SIMT_VECTORS(float, float, 8, 16)
SIC_SIMT_VECTORS(long long, longlong, 16, 16)
SIC_SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIC_SIMT_VECTORS(double, double, 16, 16)
#undef SIC_SIMT_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}  // NOLINT: converts, as CUDA's
};

constexpr int warpSize = 32;
