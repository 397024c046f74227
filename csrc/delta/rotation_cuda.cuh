// Rotations of residuals on rows of lanes; bit for bit those of delta/rotation_cpu.h.
#pragma once
#include "delta/codec_cuda.cuh"
#include "slicing/sketch_cuda.cuh"

namespace sic::gpu {

// Reverses the signs that SketchRow::rotate() begins with: rotating then is the bare transform; before and after a
// rotation it is the inverse.
template <int R, bool Uniform>
__device__ __forceinline__ void flip_signs(const SketchRow<R, Uniform>& row, float (&x)[R][kGroup]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int j = row.group(r);
    const uint32_t negative = j < slicing::kSketchMaxDim / kGroup ? kSketchSigns.negative[j] : 0;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) x[r][c] = __uint_as_float(__float_as_uint(x[r][c]) ^ (negative >> c & 1) << 31);
  }
}

// What the keys' rotation needs to know: R channels, D / R apart, together.
struct KeyRotation {
  int32_t channels = 1, stride = 1, log = 0;

  static KeyRotation of(int64_t D, int64_t R) {
    KeyRotation k;
    k.channels = static_cast<int32_t>(R), k.stride = static_cast<int32_t>(D / R);
    while (int64_t{1} << k.log < R) ++k.log;
    return k;
  }
};

// A lane's groups to and from a row in shared memory, which has room for whole groups.
template <int R, bool Uniform>
__device__ __forceinline__ void put_row(const SketchRow<R, Uniform>& row, const float (&x)[R][kGroup], float* to) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (row.size(r) == 0) continue;
    float4* at = reinterpret_cast<float4*>(to + row.group(r) * kGroup);
    at[0] = make_float4(x[r][0], x[r][1], x[r][2], x[r][3]);
    at[1] = make_float4(x[r][4], x[r][5], x[r][6], x[r][7]);
  }
}
template <int R, bool Uniform>
__device__ __forceinline__ void get_row(const SketchRow<R, Uniform>& row, const float* from, float (&x)[R][kGroup]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float4 low = make_float4(0, 0, 0, 0), high = low;
    if (row.size(r) > 0) {
      const float4* at = reinterpret_cast<const float4*>(from + row.group(r) * kGroup);
      low = at[0], high = at[1];
    }
    x[r][0] = low.x, x[r][1] = low.y, x[r][2] = low.z, x[r][3] = low.w;
    x[r][4] = high.x, x[r][5] = high.y, x[r][6] = high.z, x[r][7] = high.w;
  }
}

// The keys' rotation, its own inverse. room: a row in shared memory, used where lanes do not hold what they exchange.
template <int R, bool Uniform>
__device__ __forceinline__ void rotate_key(const SketchRow<R, Uniform>& row, const KeyRotation& k, float* room,
                                           float (&x)[R][kGroup]) {
  if (k.channels == 1) return;
  if (k.stride == 1) {  // one block: all of a head size that is a power of two
    flip_signs(row, x);
    return row.rotate(x);
  }
  for (int i = 0; i < k.log; ++i) {
    const int h = k.stride << i;
    __syncwarp();
    put_row(row, x, room);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const int d = row.group(r) * kGroup + c;
        if (c >= row.size(r)) continue;
        x[r][c] = d / k.stride >> i & 1 ? sub_rn(room[d - h], x[r][c]) : add_rn(x[r][c], room[d + h]);
      }
  }
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < kGroup; ++c) x[r][c] = mul_rn(x[r][c], power_of_two_norm(k.log));
}

// A key without its position, or (apply) with it. room: as above.
template <bool kApply, int R, bool Uniform>
__device__ __forceinline__ void turn_key(const SketchRow<R, Uniform>& row, const DeviceRope& rope, const RopeAngles& at,
                                         float* room, float (&x)[R][kGroup]) {
  __syncwarp();
  put_row(row, x, room);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      const int d = row.group(r) * kGroup + c;
      if (d < rope.channels()) x[r][c] = turned<kApply>(rope, at, d, x[r][c], room[rope.partner(d)]);
    }
}

}  // namespace sic::gpu
