// CUDA's arithmetic and bit intrinsics. Files that include this are compiled with -ffp-contract=off.
#pragma once
#include <math.h>

#include <cmath>
#include <limits>

#include "simt/language.h"

// ---- bits as numbers ----

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }

// ---- rounded once ----

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// ---- conversions: out of range saturates, NaN becomes 0 ----

namespace sic::simt {
template <class T>
inline T saturating(double whole) {
  using Limits = std::numeric_limits<T>;
  if (!(whole == whole)) return 0;
  if (whole <= static_cast<double>(Limits::min())) return Limits::min();
  return whole >= static_cast<double>(Limits::max()) ? Limits::max() : static_cast<T>(whole);
}
}  // namespace sic::simt
#define SIC_SIMT_CONVERSIONS(name, T)                                                                     \
  inline T __float2##name##_rn(float x) { return ::sic::simt::saturating<T>(std::nearbyint(double(x))); } \
  inline T __float2##name##_rz(float x) { return ::sic::simt::saturating<T>(std::trunc(double(x))); }     \
  inline T __float2##name##_rd(float x) { return ::sic::simt::saturating<T>(std::floor(double(x))); }     \
  inline T __float2##name##_ru(float x) { return ::sic::simt::saturating<T>(std::ceil(double(x))); }      \
  inline float __##name##2float_rn(T x) { return static_cast<float>(x); }
SIC_SIMT_CONVERSIONS(int, int)
SIC_SIMT_CONVERSIONS(uint, unsigned)
SIC_SIMT_CONVERSIONS(ll, long long)
SIC_SIMT_CONVERSIONS(ull, unsigned long long)
#undef SIC_SIMT_CONVERSIONS

// ---- fast functions: as exact as the host has them, so compare with a tolerance ----

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __saturatef(float x) { return x >= 0.0f ? (x <= 1.0f ? x : 1.0f) : 0.0f; }

// ---- bits ----

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
// Byte i of the result is byte (selector >> 4 i & 7) of the eight bytes a, b; with bit 3 set, that byte's sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i & 15;
    unsigned byte = bytes >> 8 * (pick & 7) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * i;
  }
  return r;
}

// ---- integers ----

inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ typedef unsigned __int128 wide;
  return static_cast<unsigned long long>(static_cast<wide>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
  unsigned sum = static_cast<unsigned>(c);
  for (int i = 0; i < 32; i += 8)
    sum += static_cast<unsigned>(static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i));
  return static_cast<int>(sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}

#define SIC_SIMT_MIN_MAX(T)                        \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
SIC_SIMT_MIN_MAX(int)
SIC_SIMT_MIN_MAX(unsigned)
SIC_SIMT_MIN_MAX(long)
SIC_SIMT_MIN_MAX(unsigned long)
SIC_SIMT_MIN_MAX(long long)
SIC_SIMT_MIN_MAX(unsigned long long)
#undef SIC_SIMT_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
