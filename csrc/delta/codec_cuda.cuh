// What kernels of the delta family take by value: templates, RoPE, pages, levels. Made on the host.
#pragma once
#include "delta/delta.h"
#include "delta/encode.h"
#include "delta/levels.h"
#include "slicing/device_views.cuh"
#include "slicing/row_groups.cuh"

namespace sic::gpu {

struct DeviceTemplates {
  const f16_t* centres = nullptr;  // [head][n][D]
  const int8_t* search = nullptr;  // [head][groups][quads][16][4]
  const float *half_norm = nullptr, *mean = nullptr, *step = nullptr, *bound = nullptr;
  int32_t n = 0, D = 0, groups = 0, quads = 0;

  static DeviceTemplates of(const delta::Templates& t) {
    DeviceTemplates d;
    d.centres = t.centres.as<const f16_t>();
    d.n = static_cast<int32_t>(t.centres.shape[1]), d.D = static_cast<int32_t>(t.centres.shape[2]);
    if (!t.search.given()) return d;
    d.search = t.search.as<const int8_t>();
    d.groups = static_cast<int32_t>(t.search.shape[1]), d.quads = static_cast<int32_t>(t.search.shape[2]);
    d.half_norm = t.half_norm.as<const float>(), d.mean = t.mean.as<const float>();
    d.step = t.step.as<const float>(), d.bound = t.bound.as<const float>();
    return d;
  }
  // A stored id that is none, as of another codec, is 0.
  __device__ __forceinline__ int known(int id) const { return id < n ? id : 0; }
  __device__ __forceinline__ const f16_t* centre(int64_t h, int id) const { return centres + (h * n + known(id)) * D; }
};

// The rows of cosines and sines of one position.
struct RopeAngles {
  const float *lo, *hi;  // cosines; sines follow
};
struct DeviceRope {
  const float *lo = nullptr, *hi = nullptr, *undo = nullptr;  // nullptr: none
  int32_t half = 0;                                           // pairs
  bool interleaved = false;

  static DeviceRope of(const delta::Rope& r) {
    DeviceRope d;
    if (!r.hi.given()) return d;
    d.lo = r.lo.as<const float>(), d.hi = r.hi.as<const float>(), d.undo = r.undo.as<const float>();
    d.half = static_cast<int32_t>(r.lo.shape[2]), d.interleaved = r.interleaved;
    return d;
  }
  __device__ __forceinline__ int channels() const { return lo ? 2 * half : 0; }
  // Channel d's pair, and whether d is its second member; d < channels().
  __device__ __forceinline__ int pair(int d) const { return interleaved ? d / 2 : d < half ? d : d - half; }
  __device__ __forceinline__ bool second(int d) const { return interleaved ? d & 1 : d >= half; }
  __device__ __forceinline__ int partner(int d) const { return interleaved ? d ^ 1 : d < half ? d + half : d - half; }
  __device__ __forceinline__ RopeAngles at(int64_t position, const float* blocks) const {
    return {lo + position % delta::kRopeBlock * 2 * half, blocks + position / delta::kRopeBlock * 2 * half};
  }
};

// (x + i y) (c + i s), or back: each operation rounded by itself.
__device__ __forceinline__ void turn(float& x, float& y, float c, float s) {
  const float re = sub_rn(mul_rn(x, c), mul_rn(y, s)), im = add_rn(mul_rn(x, s), mul_rn(y, c));
  x = re, y = im;
}
__device__ __forceinline__ void turn_back(float& x, float& y, float c, float s) {
  const float re = add_rn(mul_rn(x, c), mul_rn(y, s)), im = sub_rn(mul_rn(y, c), mul_rn(x, s));
  x = re, y = im;
}
// Channel d of a row that has lost its position (or, apply, got it); own, other: the channel and its partner.
template <bool kApply>
__device__ __forceinline__ float turned(const DeviceRope& rope, const RopeAngles& at, int d, float own, float other) {
  const int i = rope.pair(d);
  const bool second = rope.second(d);
  float x = second ? other : own, y = second ? own : other;
  if (kApply) {
    turn(x, y, at.lo[i], at.lo[rope.half + i]);
    turn(x, y, at.hi[i], at.hi[rope.half + i]);
  } else {
    turn_back(x, y, at.hi[i], at.hi[rope.half + i]);
    turn_back(x, y, at.lo[i], at.lo[rope.half + i]);
  }
  return second ? y : x;
}

// Rows of code bytes, tags and the side table.
struct DevicePages {
  Rows3 k_codes, v_codes, tags;  // by (page id, head, offset in the page)
  char* raw = nullptr;           // [entry][Dk + Dv]
  int64_t* owner = nullptr;
  int32_t* state = nullptr;
  int64_t raw_stride = 0, owner_stride = 0, state_stride = 0;  // of raw in bytes
  int32_t entries = 0, Dk = 0, Dv = 0, k_bytes = 0, v_bytes = 0;
  DType raw_type = DType::f32;

  static DevicePages of(const delta::Pages& p, const delta::Codec& c) {
    DevicePages d;
    d.k_codes = Rows3::of(p.k_codes), d.v_codes = Rows3::of(p.v_codes), d.tags = Rows3::of(p.tags);
    d.raw = p.raw.as<char>(), d.raw_stride = p.raw.stride_bytes(0), d.raw_type = p.raw.dtype;
    d.entries = static_cast<int32_t>(p.raw.shape[0]);
    if (p.raw_owner.given()) d.owner = p.raw_owner.as<int64_t>(), d.owner_stride = p.raw_owner.stride[0];
    if (p.raw_state.given()) d.state = p.raw_state.as<int32_t>(), d.state_stride = p.raw_state.stride[0];
    d.Dk = static_cast<int32_t>(c.k.centres.shape[2]), d.Dv = static_cast<int32_t>(c.v.centres.shape[2]);
    d.k_bytes = static_cast<int32_t>(p.k_codes.shape[3]), d.v_bytes = static_cast<int32_t>(p.v_codes.shape[3]);
    return d;
  }
  __device__ __forceinline__ const char* raw_row(int32_t entry, bool values) const {
    return raw + entry * raw_stride + (values ? int64_t{Dk} * (raw_type == DType::f32 ? 4 : 2) : 0);
  }
};

// A tag as it lies in memory, at an even address.
__device__ __forceinline__ delta::Tag load_tag(const char* at) {
  const uint16_t* words = reinterpret_cast<const uint16_t*>(at);
  const uint16_t ids = words[2];
  return {words[0], words[1], static_cast<uint8_t>(ids & 255), static_cast<uint8_t>(ids >> 8)};
}
// The number at the beginning of a raw row's key code; -1: none that there can be.
__device__ __forceinline__ int32_t load_entry(const char* code, int32_t entries) {
  const uint8_t* b = reinterpret_cast<const uint8_t*>(code);
  const uint32_t e = b[0] | b[1] << 8 | b[2] << 16 | static_cast<uint32_t>(b[3]) << 24;
  return e < static_cast<uint32_t>(entries) ? static_cast<int32_t>(e) : -1;
}

__device__ __forceinline__ float load_float(DType type, const char* row, int d) {
  if (type == DType::f32) return reinterpret_cast<const float*>(row)[d];
  if (type == DType::f16) return to_float(reinterpret_cast<const f16_t*>(row)[d]);
  return to_float(reinterpret_cast<const bf16_t*>(row)[d]);
}
__device__ __forceinline__ void store_float(DType type, char* row, int d, float x) {
  if (type == DType::f32) return from_float(x, reinterpret_cast<float*>(row)[d]);
  if (type == DType::f16) return from_float(x, reinterpret_cast<f16_t*>(row)[d]);
  from_float(x, reinterpret_cast<bf16_t*>(row)[d]);
}

// Group j of a row of floats, zeros behind its n elements.
template <class T>
__device__ __forceinline__ void widen_group(const char* row, int j, int n, bool wide, float (&x)[kGroup]) {
  const Group<T> g = load_group(reinterpret_cast<const T*>(row) + j * kGroup, n, wide);
#pragma unroll
  for (int c = 0; c < kGroup; ++c) x[c] = to_float(g.element(c));
}
__device__ __forceinline__ void load_floats(DType type, const char* row, int j, int n, bool wide, float (&x)[kGroup]) {
  if (type == DType::f32) return widen_group<float>(row, j, n, wide, x);
  if (type == DType::f16) return widen_group<f16_t>(row, j, n, wide, x);
  widen_group<bf16_t>(row, j, n, wide, x);
}

}  // namespace sic::gpu
