// Element types of the library, and the scalar conversions between them.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

// Functions that CUDA kernels call too.
#if defined(__CUDACC__)
#include <cuda_fp8.h>
#define SIC_HD __host__ __device__
#else
#define SIC_HD
#endif

// Of functions that *_cpu.cc files call: a copy by itself would be one that all instruction sets share.
#define SIC_FLAT __attribute__((always_inline))

namespace sic {

// f64 holds sums that are to be merged, boolean flags; i8 and other are only named in errors: no op takes them.
enum class DType : uint8_t { f32, f16, bf16, f8e4m3, u8, i16, i32, i64, f64, i8, boolean, other };

constexpr int kNumDTypes = 12;

inline int itemsize(DType t) {
  constexpr int kBytes[kNumDTypes] = {4, 2, 2, 1, 1, 2, 4, 8, 8, 1, 1, 0};
  return kBytes[static_cast<int>(t)];
}

inline const char* name(DType t) {
  constexpr const char* kNames[kNumDTypes] = {"float32", "float16", "bfloat16", "float8_e4m3fn",
                                              "uint8",   "int16",   "int32",    "int64",
                                              "float64", "int8",    "bool",     "an unknown type"};
  return kNames[static_cast<int>(t)];
}

// A set of element types, for argument checks.
struct DTypeSet {
  uint32_t mask = 0;
  constexpr DTypeSet() = default;
  constexpr DTypeSet(DType t) : mask(1u << static_cast<int>(t)) {}  // NOLINT: one type is a set
  constexpr bool contains(DType t) const { return mask >> static_cast<int>(t) & 1; }
};
constexpr DTypeSet operator|(DTypeSet a, DTypeSet b) {
  a.mask |= b.mask;
  return a;
}
constexpr DTypeSet kFloats = DTypeSet(DType::f32) | DType::f16 | DType::bf16;
constexpr DTypeSet kCacheFloats = kFloats | DType::f8e4m3;
constexpr DTypeSet kIndexInts = DTypeSet(DType::i32) | DType::i64;

// Storage types: distinct C++ types, so that templates can be instantiated on them.
struct f16_t {
  uint16_t bits;
};
struct bf16_t {
  uint16_t bits;
};
struct f8_t {
  uint8_t bits;
};

namespace detail {
SIC_HD inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
SIC_HD inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
}  // namespace detail

SIC_HD inline float to_float(float x) { return x; }
SIC_HD inline float to_float(bf16_t x) { return detail::float_of(uint32_t(x.bits) << 16); }
// A device converts in one or two instructions: the same bits, except for the payload of a NaN.
SIC_HD inline float to_float(f16_t x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return detail::float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Placing the field 13 bits up leaves the exponent 112 too small; the product also normalises subnormals.
  return detail::float_of(sign | detail::bits_of(detail::float_of(magnitude << 13) * 0x1p112f));
#endif
}
SIC_HD inline float to_float(f8_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
#else
  const uint32_t sign = uint32_t(x.bits & 0x80) << 24, magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return detail::float_of(sign | 0x7fc00000);
  return detail::float_of(sign | detail::bits_of(detail::float_of(magnitude << 20) * 0x1p120f));
#endif
}

// Round to nearest, ties to even.
SIC_HD inline void from_float(float x, float& out) { out = x; }
SIC_HD inline void from_float(float x, bf16_t& out) {
  uint32_t u = detail::bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) {
    out.bits = uint16_t(u >> 16 | 0x40);
    return;
  }
  out.bits = uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
SIC_HD inline void from_float(float x, f16_t& out) {
  const uint32_t u = detail::bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out.bits = uint16_t(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or beyond
    out.bits = uint16_t(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal: let the adder align and round
    out.bits = uint16_t(sign | (detail::bits_of(detail::float_of(magnitude) + 0.5f) - 0x3f000000));
  } else {
    out.bits = uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
  }
}
// Saturates at +-448, as the caches of other stacks do.
SIC_HD inline void from_float(float x, f8_t& out) {
  const uint32_t u = detail::bits_of(x), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out.bits = uint8_t(sign | 0x7f);
  } else if (magnitude >= 0x43e80000) {  // 464 and above round past the largest finite value
    out.bits = uint8_t(sign | 0x7e);
  } else if (magnitude < 0x3c800000) {  // below 2^-6: subnormal
    out.bits = uint8_t(sign | (detail::bits_of(detail::float_of(magnitude) + 16384.0f) - 0x46800000));
  } else {
    out.bits = uint8_t(sign | (magnitude - 0x3c000000 + 0x7ffff + (magnitude >> 20 & 1)) >> 20);
  }
}

// Calls body(element type) with a value of the storage type of dtype (f32, f16, bf16, f8e4m3).
// Inlined, so that what the body is compiled for stays with its caller.
template <class Body>
SIC_FLAT inline void with_float_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32:
      return body(float{});
    case DType::f16:
      return body(f16_t{});
    case DType::bf16:
      return body(bf16_t{});
    default:
      return body(f8_t{});
  }
}

}  // namespace sic
