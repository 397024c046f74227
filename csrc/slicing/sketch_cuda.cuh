// The key sketch on the GPU: rotation, entries of keys, integer queries; equal to slicing/sketch_cpu.h in every bit.
//
// A row of D channels lies across L lanes of a warp, a group of 8 channels (one byte of a bit plane) to a lane: a warp
// holds 32 / L rows. Rows of more than 256 channels take R = 4 groups a lane: group j in lane j % 32, set j / 32.
#pragma once
#include "slicing/device_views.cuh"
#include "slicing/row_groups.cuh"
#include "slicing/sketch.h"

namespace sic::gpu {

struct SketchSigns {
  uint8_t negative[slicing::kSketchMaxDim / kGroup];  // of the channels of each group
};
constexpr SketchSigns make_sketch_signs() {
  SketchSigns s{};
  for (int d = 0; d < slicing::kSketchMaxDim; ++d)
    if (slicing::sketch_sign_is_negative(d)) s.negative[d / kGroup] |= static_cast<uint8_t>(1 << d % kGroup);
  return s;
}
static __device__ const SketchSigns kSketchSigns = make_sketch_signs();

// 1 / sqrt(2^k), rounded once.
__device__ __forceinline__ float power_of_two_norm(int k) {
  return __uint_as_float((k & 1 ? 0x3f3504f3u : 0x3f800000u) - (static_cast<uint32_t>(k / 2) << 23));
}

// One key or query of each row of a warp. Every lane of the warp calls every function; rows without work hold zeros.
// Uniform: D is 64, 128 or 256, one block of the rotation that fills its lanes; otherwise any D up to 256 * R.
template <int R, bool Uniform>
class SketchRow {
  static_assert(R == 1 || !Uniform);

 public:
  __device__ __forceinline__ SketchRow(int D_, int lanes_) : D(D_), lanes(lanes_), lane(lane_id() & (lanes_ - 1)) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int j = group(r), whole = D / kGroup;
      negative_[r] = j < slicing::kSketchMaxDim / kGroup ? kSketchSigns.negative[j] : 0;
      // The block of a whole group starts where its number first differs from the digits of `whole`.
      log_span_[r] = j < whole ? 31 - __clz(j ^ whole) : -1;
      size_[r] = group_size(D, j);
    }
  }

  const int D, lanes, lane;  // lane: within the row

  __device__ __forceinline__ int group(int r) const { return lane + 32 * r; }
  __device__ __forceinline__ int size(int r) const { return Uniform ? kGroup : size_[r]; }

  // x: signs, butterflies and norm of each block.
  __device__ __forceinline__ void rotate(float (&x)[R][kGroup]) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < kGroup; ++c)
        x[r][c] = __uint_as_float(__float_as_uint(x[r][c]) ^ (negative_[r] >> c & 1) << 31);
      butterfly_inside<1>(x[r], r);
      butterfly_inside<2>(x[r], r);
      butterfly_inside<4>(x[r], r);
    }
    for (int g = 1; g < lanes; g *= 2) butterfly_lanes(x, g);
    if constexpr (R == 4) {
      butterfly_sets<1>(x);
      butterfly_sets<2>(x);
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) x[r][c] = mul_rn(x[r][c], norm(r, c));
  }

  // Sum over the row: halves of each block, then the blocks from left to right. On every lane of the row.
  __device__ __forceinline__ float tree_sum(float (&v)[R][kGroup]) const {
    if constexpr (Uniform) {
      return tree_sum_uniform(v[0]);
    } else {
      return tree_sum_blocks(v);
    }
  }

  // Largest |x|; infinite if any value is infinite or NaN.
  __device__ __forceinline__ float largest(const float (&x)[R][kGroup]) const {
    float top = 0;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c)
        top = fabsf(x[r][c]) <= top ? top : x[r][c] == x[r][c] ? fabsf(x[r][c]) : INFINITY;
    for (int g = lanes / 2; g > 0; g /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, g));
    return top;
  }

 private:
  // Whether channels c and c + h of this group belong to one block; c and h are known to the compiler.
  template <int h>
  __device__ __forceinline__ bool paired(int c, int r) const {
    const int n = size_[r];
    return Uniform || n == kGroup || (c + h < 4 && (n & 4)) || (h == 1 && c == (n & 4) && (n & 2));
  }

  template <int h>
  __device__ __forceinline__ void butterfly_inside(float (&x)[kGroup], int r) const {
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      if (c & h) continue;
      const float a = x[c], b = x[c + h];
      if (paired<h>(c, r)) x[c] = add_rn(a, b), x[c + h] = sub_rn(a, b);
    }
  }

  // Groups j and j ^ g; a product with +-1 is exact, so fusing it changes nothing.
  __device__ __forceinline__ void butterfly_lanes(float (&x)[R][kGroup], int g) const {
    const float sign = lane & g ? -1.0f : 1.0f;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const float y = fmaf(x[r][c], sign, __shfl_xor_sync(kFullWarp, x[r][c], g));
        x[r][c] = Uniform || g < span(r) ? y : x[r][c];
      }
  }

  template <int s>
  __device__ __forceinline__ void butterfly_sets(float (&x)[R][kGroup]) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r & s) continue;
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const float a = x[r][c], b = x[r + s][c];
        if (32 * s < span(r)) x[r][c] = add_rn(a, b), x[r + s][c] = sub_rn(a, b);
      }
    }
  }

  // Groups in the block of group(r); 0 for a group that is not whole.
  __device__ __forceinline__ int span(int r) const { return log_span_[r] < 0 ? 0 : 1 << log_span_[r]; }

  __device__ __forceinline__ float norm(int r, int c) const {
    if (Uniform || log_span_[r] >= 0) return power_of_two_norm(log_span_[r] + 3);
    const int n = size_[r];
    return c < (n & 4) ? 0.5f : c < (n & 6) ? power_of_two_norm(1) : 1.0f;
  }

  // Each lane keeps half of its channels, then a quarter, then one: 10 to 13 exchanges instead of 8 at each step.
  __device__ __forceinline__ float tree_sum_uniform(float (&v)[kGroup]) const {
    int g = lanes / 2;
#pragma unroll
    for (int n = kGroup / 2; n > 0; n /= 2) {
      const bool upper = lane & g;
#pragma unroll
      for (int c = 0; c < n; ++c) {
        const float received = __shfl_xor_sync(kFullWarp, upper ? v[c] : v[c + n], g);
        v[c] = add_rn(upper ? v[c + n] : v[c], received);
      }
      g /= 2;
    }
    float sum = v[0];
    for (; g > 0; g /= 2) sum = add_rn(sum, __shfl_xor_sync(kFullWarp, sum, g));
    for (g = lanes / 2; g >= lanes / 8; g /= 2) sum = add_rn(sum, __shfl_xor_sync(kFullWarp, sum, g));
    return sum;
  }

  __device__ __forceinline__ float tree_sum_blocks(float (&v)[R][kGroup]) const {
    if constexpr (R == 4) {
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        if (span(0) > 64) v[0][c] = add_rn(v[0][c], v[2][c]), v[1][c] = add_rn(v[1][c], v[3][c]);
        if (span(0) > 32) v[0][c] = add_rn(v[0][c], v[1][c]);
      }
    }
    for (int g = lanes / 2; g > 0; g /= 2) {
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int c = 0; c < kGroup; ++c) {
          const float other = __shfl_xor_sync(kFullWarp, v[r][c], g);
          v[r][c] = g < span(r) ? add_rn(v[r][c], other) : v[r][c];
        }
    }
    return add_blocks(v);
  }

  // v: sums over the groups of each block. The block of 2^k groups starts at the digits of D / 8 above k; the ragged
  // group holds blocks of 4, 2 and 1 channels.
  __device__ __forceinline__ float add_blocks(const float (&v)[R][kGroup]) const {
    const int whole = D / kGroup, rest = D % kGroup;
    float last[kGroup];  // of the set in which the row ends
#pragma unroll
    for (int c = 0; c < kGroup; ++c) last[c] = from_set(whole / 32, v, c);
    float total = 0;
    bool any = false;
    const auto add = [&](float x, int j) {
      x = __shfl_sync(kFullWarp, x, j & (lanes - 1), lanes);
      total = any ? add_rn(total, x) : x;
      any = true;
    };
    if constexpr (R == 4) {
      if (whole & 128 || whole & 64) add(sum_inside(v[0]), 0);
      if (whole & 32) add(whole & 64 ? sum_inside(v[2]) : sum_inside(v[0]), 0);
    }
    const float whole_sum = sum_inside(last);
    for (int k = R == 1 ? 5 : 4; k >= 0; --k)
      if (whole >> k & 1) add(whole_sum, whole >> (k + 1) << (k + 1));
    const float four = add_rn(add_rn(last[0], last[2]), add_rn(last[1], last[3]));
    const float low = add_rn(last[0], last[1]), high = add_rn(last[4], last[5]);
    const float third = rest & 2 ? last[2] : last[0], seventh = rest & 2 ? last[6] : last[4];
    if (rest & 4) add(four, whole);
    if (rest & 2) add(rest & 4 ? high : low, whole);
    if (rest & 1) add(rest & 4 ? seventh : third, whole);
    return total;
  }

  __device__ __forceinline__ static float sum_inside(const float (&x)[kGroup]) {
    return add_rn(add_rn(add_rn(x[0], x[4]), add_rn(x[2], x[6])), add_rn(add_rn(x[1], x[5]), add_rn(x[3], x[7])));
  }

  // v[set][c]. Every element is read, then one chosen: choosing the address would put v into local memory.
  __device__ __forceinline__ static float from_set(int set, const float (&v)[R][kGroup], int c) {
    float x = v[0][c];
#pragma unroll
    for (int r = 1; r < R; ++r) {
      const float y = v[r][c];
      x = set == r ? y : x;
    }
    return x;
  }

  uint32_t negative_[R];
  int log_span_[R], size_[R];
};

// ---- keys ----

// A token's entry; byte j of a plane is on the lane of group j, the norm on every lane of the row.
template <int R>
struct SketchEntry {
  uint32_t sign[R], outer[R];
  bf16_t norm;
};

// x: the key less the centre; destroyed.
template <int R, bool Uniform>
__device__ __forceinline__ SketchEntry<R> sketch_entry(const SketchRow<R, Uniform>& row, float (&x)[R][kGroup],
                                                       int planes) {
  row.rotate(x);
  float v[R][kGroup];
  const auto sum_of = [&](auto term) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) v[r][c] = term(x[r][c]);
    return row.tree_sum(v);
  };
  const float total = sum_of([](float y) { return fabsf(y); });
  const float threshold =
      planes == 2 ? mul_rn(total, div_rn(slicing::kOuterThreshold, static_cast<float>(row.D))) : INFINITY;
  SketchEntry<R> e;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    e.sign[r] = e.outer[r] = 0;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      const bool positive = x[r][c] >= 0, large = fabsf(x[r][c]) >= threshold;
      e.sign[r] |= static_cast<uint32_t>(positive) << c;
      e.outer[r] |= static_cast<uint32_t>(positive == large) << c;
    }
    const uint32_t present = (1u << row.size(r)) - 1;
    e.sign[r] &= present, e.outer[r] &= present;
  }
  const float square = sum_of([](float y) { return mul_rn(y, y); });
  float weight = total;
  if (planes == 2) weight = sum_of([&](float y) { return mul_rn(fabsf(y), fabsf(y) >= threshold ? 3.0f : 1.0f); });
  from_float(weight == 0 ? 0.0f : div_rn(square, weight), e.norm);
  return e;
}

// Where the entries of a token lie within its page: byte j of plane 0 at [first + j * stride].
struct SketchBytes {
  int64_t first;
  int stride;

  __device__ __forceinline__ SketchBytes(uint32_t page, uint32_t token, int row_bytes) {
    const uint32_t block = token & ~uint32_t{slicing::kTokenBlock - 1}, left = page - block;
    stride = static_cast<int>(left < slicing::kTokenBlock ? left : slicing::kTokenBlock);
    first = static_cast<int64_t>(block) * row_bytes + (token - block);
  }
};

// Writes a token's entry byte by byte. page_bits, page_norm: its page and head.
template <int R, bool Uniform>
__device__ __forceinline__ void store_entry(const SketchRow<R, Uniform>& row, const SketchEntry<R>& e, int planes,
                                            uint32_t page, uint32_t token, uint8_t* page_bits, bf16_t* page_norm) {
  const int row_bytes = (row.D + 7) / 8;
  const SketchBytes at(page, token, row_bytes);
  uint8_t* second = page_bits + static_cast<int64_t>(page) * row_bytes;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int j = row.group(r);
    if (j >= row_bytes) continue;
    page_bits[at.first + static_cast<int64_t>(j) * at.stride] = static_cast<uint8_t>(e.sign[r]);
    if (planes == 2) second[at.first + static_cast<int64_t>(j) * at.stride] = static_cast<uint8_t>(e.outer[r]);
  }
  if (row.lane == 0) page_norm[token] = e.norm;
}

// ---- queries ----

// A query as integers within +-31, 8 signed bytes to a group (0 beyond D), and the factor of its 2-plane dots: nats *
// 256 per unit of norm. packed: on the lane of group j = row.group(r); factor: on every lane of the row.
template <int R>
struct IntegerQuery {
  uint2 packed[R];
  float factor;
};

// x: the query; destroyed.
template <int R, bool Uniform>
__device__ __forceinline__ IntegerQuery<R> integer_query(const SketchRow<R, Uniform>& row, float (&x)[R][kGroup],
                                                         float scale) {
  constexpr float kLevels = static_cast<float>(slicing::kQueryLevels);
  row.rotate(x);
  const float top = row.largest(x);
  const bool usable = top < INFINITY && top >= slicing::kSmallestQuery;
  const float inverse = usable ? div_rn(kLevels, top) : 0.0f;
  IntegerQuery<R> q;
  q.factor = usable ? mul_rn(mul_rn(div_rn(top, kLevels), scale), slicing::kScoreSteps) : 0.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    uint32_t word[2] = {};
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      // A query so small that 31 / top overflows scores nothing.
      const int level = usable ? __float2int_rn(mul_rn(x[r][c], inverse)) : 0;
      word[c / 4] |= (static_cast<uint32_t>(level) & 0xff) << (c % 4 * 8);
    }
    q.packed[r] = make_uint2(word[0], word[1]);
  }
  return q;
}

// ---- host side ----

// Calls body(set count R, whether Uniform) with the values of SketchRow for head size D as compile-time constants.
template <class Body>
inline void with_sketch_row(int64_t D, Body body) {
  if (D == 64 || D == 128 || D == 256) return body(std::integral_constant<int, 1>{}, std::true_type{});
  if (D <= 256) return body(std::integral_constant<int, 1>{}, std::false_type{});
  body(std::integral_constant<int, 4>{}, std::false_type{});
}

}  // namespace sic::gpu
