// Vectors of the instruction set that this file is being compiled for (macro SIC_ISA: plain, avx2, avx512, neon).
//
// Written on GCC's vector extensions, which Clang shares: + - * < and shuffles are the language's own and mean the same
// everywhere; only what the language lacks (fused multiply-add, half precision, byte look-ups) has a case per set.
// Contraction is off in the whole project: a multiply and an add fuse only where fma() says so.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "core/dtype.h"

#ifndef SIC_ISA
#error "compile *_cpu.cc files once per instruction set with -DSIC_ISA=<name>"
#endif

namespace sic::cpu::SIC_ISA {

#if defined(__AVX512BW__)
constexpr int W = 16;  // float lanes
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int kBytes = 4 * W;

typedef float vf __attribute__((vector_size(kBytes)));
typedef int32_t vi __attribute__((vector_size(kBytes)));
typedef uint32_t vu __attribute__((vector_size(kBytes)));
typedef uint8_t vb __attribute__((vector_size(kBytes)));
typedef uint16_t vh __attribute__((vector_size(kBytes)));
typedef int16_t vs __attribute__((vector_size(kBytes)));
typedef uint16_t vh_half __attribute__((vector_size(kBytes / 2)));
typedef uint8_t vb_quarter __attribute__((vector_size(W)));

#define SIC_INLINE static inline __attribute__((always_inline))
#define SIC_MEMBER_INLINE inline __attribute__((always_inline))
// For short loops over arrays of vectors, which must become registers.
#define SIC_UNROLL _Pragma("GCC unroll 16")

template <class V, class T>
SIC_INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
SIC_INLINE void store_as(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
template <class To, class From>
SIC_INLINE To bit_cast(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To t;
  std::memcpy(&t, &v, sizeof t);
  return t;
}

SIC_INLINE vf splat(float x) { return x - vf{}; }
SIC_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512BW__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
// b where a is NaN, as maxps does.
SIC_INLINE vf max(vf a, vf b) {
#if defined(__AVX512BW__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
SIC_INLINE vf min(vf a, vf b) {
#if defined(__AVX512BW__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
SIC_INLINE vf abs(vf a) { return bit_cast<vf>(bit_cast<vi>(a) & 0x7fffffff); }

// ---- loads of every storage type, widened to float ----

SIC_INLINE vf load(const float* p) { return load_as<vf>(p); }
// Zero-extended to 32 bits. GCC 12 makes a chain of half-width moves of the portable form.
SIC_INLINE vu widen(const uint16_t* p) {
#if defined(__AVX512BW__)
  return vu(_mm512_cvtepu16_epi32(load_as<__m256i>(p)));
#elif defined(__AVX2__)
  return vu(_mm256_cvtepu16_epi32(load_as<__m128i>(p)));
#else
  return __builtin_convertvector(load_as<vh_half>(p), vu);
#endif
}
SIC_INLINE vu widen(const uint8_t* p) {
#if defined(__AVX512BW__)
  return vu(_mm512_cvtepu8_epi32(load_as<__m128i>(p)));
#elif defined(__AVX2__)
  return vu(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(load_as<vb_quarter>(p), vu);
#endif
}
SIC_INLINE vf load(const bf16_t* p) { return bit_cast<vf>(widen(&p->bits) << 16); }
SIC_INLINE vf load(const f16_t* p) {
#if defined(__AVX512BW__)
  return _mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(load_as<__m128i>(p));
#elif defined(__aarch64__)
  return vcvt_f32_f16(load_as<float16x4_t>(p));
#else
  const vu u = widen(&p->bits), magnitude = u & 0x7fff;
  const vf finite = bit_cast<vf>(magnitude << 13) * 0x1p112f;
  const vu bits = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : bit_cast<vu>(finite);
  return bit_cast<vf>(bits | (u & 0x8000) << 16);
#endif
}
SIC_INLINE vf load(const f8_t* p) {
  const vu u = widen(&p->bits), magnitude = u & 0x7f;
  const vf finite = bit_cast<vf>(magnitude << 20) * 0x1p120f;
  const vu bits = magnitude == 0x7f ? (magnitude | 0x7fc00000) : bit_cast<vu>(finite);
  return bit_cast<vf>(bits | (u & 0x80) << 24);
}
// The first n < W elements, zeros after them; reads nothing beyond.
template <class T>
SIC_INLINE vf load_first(const T* p, int n) {
  T buffer[W] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
SIC_INLINE void store_first(T* p, vf v, int n) {
  float buffer[W];
  store_as(buffer, v);
  for (int i = 0; i < n; ++i) from_float(buffer[i], p[i]);
}
SIC_INLINE void store(float* p, vf v) { store_as(p, v); }
template <class T>
SIC_INLINE void store(T* p, vf v) {
  store_first(p, v, W);
}
// The low half of each lane.
SIC_INLINE vh_half low_halves(vu v) {
#if defined(__AVX512BW__)
  return vh_half(_mm512_cvtepi32_epi16(__m512i(v)));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32(__m256i(v & 0xffff), __m256i(v & 0xffff));
  return vh_half(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  return __builtin_convertvector(v, vh_half);
#endif
}
// The nearest bf16 in the high half of each lane, rounded as from_float does.
SIC_INLINE vu nearest_bf16(vf v) {
  const vu u = bit_cast<vu>(v);
  return v == v ? u + 0x7fff + (u >> 16 & 1) : u | 0x400000;
}
// The bits of the nearest half-width number.
SIC_INLINE vh_half narrow(vf v, bf16_t) { return low_halves(nearest_bf16(v) >> 16); }
SIC_INLINE void store(bf16_t* p, vf v) { store_as(p, narrow(v, bf16_t{})); }
#if defined(__AVX2__) || defined(__aarch64__)
SIC_INLINE vh_half narrow(vf v, f16_t) {
  const vf number = v == v ? v : bit_cast<vf>((bit_cast<vu>(v) & 0x80000000) | 0x7fc00000);
#if defined(__AVX512BW__)
  return vh_half(_mm512_cvtps_ph(number, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return vh_half(_mm256_cvtps_ph(number, _MM_FROUND_TO_NEAREST_INT));
#else
  return bit_cast<vh_half>(vcvt_f16_f32(number));
#endif
}
SIC_INLINE void store(f16_t* p, vf v) { store_as(p, narrow(v, f16_t{})); }
#endif

#if defined(__AVX512BW__)
// The same of two vectors, in one register.
SIC_INLINE __m512i narrow(vf a, vf b, bf16_t) {
  alignas(64) static constexpr uint16_t kHighHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                           23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                           45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(__m512i(nearest_bf16(a)), load_as<__m512i>(kHighHalves), __m512i(nearest_bf16(b)));
}
SIC_INLINE __m512i narrow(vf a, vf b, f16_t) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(__m256i(narrow(a, f16_t{}))), __m256i(narrow(b, f16_t{})), 1);
}
#endif

// ---- reductions: always by halves, lane i with lane i + n/2 ----

template <class V, class Op>
SIC_INLINE auto reduce(V v, Op op) {
  using T = std::remove_reference_t<decltype(v[0])>;
  if constexpr (sizeof(V) > 4 * sizeof(T)) {
    typedef T Half __attribute__((vector_size(sizeof(V) / 2)));
    Half half[2];
    std::memcpy(half, &v, sizeof v);
    return reduce(op(half[0], half[1]), op);
  } else {
    typedef int32_t Index __attribute__((vector_size(16)));
    v = op(v, __builtin_shuffle(v, Index{2, 3, 0, 1}));
    return op(v, __builtin_shuffle(v, Index{1, 0, 3, 2}))[0];
  }
}
SIC_INLINE float reduce_add(vf v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}
SIC_INLINE float reduce_max(vf v) {
  return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

SIC_INLINE vi lane_numbers() {
  vi n;
  for (int i = 0; i < W; ++i) n[i] = i;
  return n;
}
// Whether any lane of a comparison holds.
SIC_INLINE bool any(vi mask) {
#if defined(__AVX512BW__)
  return _mm512_movepi32_mask(__m512i(mask)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(__m256i(mask), __m256i(mask));
#else
  return reduce(mask, [](auto a, auto b) { return a | b; }) != 0;
#endif
}

// The larger; NaN if either is.
SIC_INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }
// The largest of n values; NaN if any is, -inf if there are none.
SIC_INLINE float largest(const float* x, int64_t n) {
  float top = -__builtin_inff();
  for (int64_t i = 0; i < n; ++i) top = larger(top, x[i]);
  return top;
}

// Sums of W vectors: lane i of the result is the sum of v[i], added by halves.
SIC_INLINE vf transpose_add(vf* v) {
#if defined(__AVX512BW__)
  for (int i = 0; i < 8; ++i) {
    const vf a = v[i], b = v[i + 8];
    v[i] = vf(_mm512_shuffle_f32x4(a, b, 0x44)) +
           vf(_mm512_shuffle_f32x4(a, b, 0xee));  // lanes: a0 a1 b0 b1 (of 4 floats)
  }
  for (int i = 0; i < 4; ++i) {
    const vf a = v[i], b = v[i + 4];
    v[i] = vf(_mm512_shuffle_f32x4(a, b, 0x88)) +
           vf(_mm512_shuffle_f32x4(a, b, 0xdd));  // a.lo a.hi b.lo b.hi halves summed
  }
  for (int i = 0; i < 2; ++i) {
    const vf a = v[i], b = v[i + 2];
    v[i] = vf(_mm512_shuffle_ps(a, b, 0x44)) + vf(_mm512_shuffle_ps(a, b, 0xee));
  }
  const vf r = vf(_mm512_shuffle_ps(v[0], v[1], 0x88)) + vf(_mm512_shuffle_ps(v[0], v[1], 0xdd));
  // Quarter c of r holds the vectors {0,8,4,12}[c] + {0,2,1,3}; this permutation is its own inverse.
  return __builtin_shuffle(r, vi{0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15});
#elif defined(__AVX2__)
  for (int i = 0; i < 4; ++i) {
    const vf a = v[i], b = v[i + 4];
    v[i] = vf(_mm256_permute2f128_ps(a, b, 0x20)) + vf(_mm256_permute2f128_ps(a, b, 0x31));
  }
  for (int i = 0; i < 2; ++i) {
    const vf a = v[i], b = v[i + 2];
    v[i] = vf(_mm256_shuffle_ps(a, b, 0x44)) + vf(_mm256_shuffle_ps(a, b, 0xee));
  }
  const vf r = vf(_mm256_shuffle_ps(v[0], v[1], 0x88)) + vf(_mm256_shuffle_ps(v[0], v[1], 0xdd));
  return __builtin_shuffle(r, vi{0, 2, 1, 3, 4, 6, 5, 7});
#else
  vf r;
  for (int i = 0; i < W; ++i) r[i] = reduce_add(v[i]);
  return r;
#endif
}

// ---- exponentials ----

// 2^x, relative error below 2e-7; 0 below -126 (and for -inf); NaN stays; x must not exceed 127.
SIC_INLINE vf exp2(vf x) {
  const vf low = splat(-126.0f);
  const vi normal = x >= low;
  const vf clamped = max(x, low);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const vf shifted = clamped + magic;
  const vf f = clamped - (shifted - magic);
  vf p = splat(1.535336188319500e-4f);
  p = fma(p, f, splat(1.339887440266574e-3f));
  p = fma(p, f, splat(9.618437357674640e-3f));
  p = fma(p, f, splat(5.550332471162809e-2f));
  p = fma(p, f, splat(2.402264791363012e-1f));
  p = fma(p, f, splat(6.931472028550421e-1f));
  p = fma(p, f, splat(1.0f));
  const vu scaled = bit_cast<vu>(p) + (bit_cast<vu>(shifted) << 23);
  return x == x ? bit_cast<vf>(scaled & bit_cast<vu>(normal)) : x;
}

// ---- bytes ----

// Each byte of index (0..15) picks from the 16-byte table of its own 128-bit lane.
SIC_INLINE vb lookup16(vb table, vb index) {
#if defined(__AVX512BW__)
  return vb(_mm512_shuffle_epi8(__m512i(table), __m512i(index)));
#elif defined(__AVX2__)
  return vb(_mm256_shuffle_epi8(__m256i(table), __m256i(index)));
#elif defined(__aarch64__)
  return vqtbl1q_u8(table, index);
#else
  return __builtin_shuffle(table, index);
#endif
}

// Whatever only calls these must be inlined: GCC takes a function that does nothing but prefetch for one without effect
// and drops its calls.
SIC_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
SIC_INLINE void prefetch_row(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(static_cast<const char*>(p) + i);
}

}  // namespace sic::cpu::SIC_ISA
