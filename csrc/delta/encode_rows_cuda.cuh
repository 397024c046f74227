// Rows to codes on the GPU, bit for bit as delta/quantise_cpu.h: nearest template, residual, levels, scale.
//
// A block takes kEncodeRows rows of one head. Rows lie across lanes as the sketch has them (slicing/sketch_cuda.cuh),
// 32 / L rows to a warp. For the search they become 8-bit integers in shared memory, and the warps share the templates:
// one mma is 16 rows, 8 templates and 32 channels.
#pragma once
#include "delta/rotation_cuda.cuh"
#include "slicing/slots_cuda.cuh"

namespace sic::gpu {

constexpr int kEncodeRows = 16, kEncodeWarps = 8;

// Levels of 2 to 5 bits as steps: a size is the first one and every step whose threshold is reached. 8 bits: none.
struct LevelSteps {
  float start = 0, first = 0, threshold[15] = {}, step[15] = {};
  int32_t count = 0, half = 0;  // steps; the lowest code of a positive level
  bool at_largest = false;      // delta::starts_at_largest()

  static LevelSteps of(int bits) {
    LevelSteps s;
    s.start = delta::start_of(bits), s.at_largest = delta::starts_at_largest(bits), s.half = 1 << (bits - 1);
    if (bits == 8) return s;
    const int8_t* level = delta::levels_of(bits).level + s.half;
    s.first = level[0], s.count = s.half - 1;
    for (int i = 0; i < s.count; ++i)
      s.threshold[i] = 0.5f * static_cast<float>(level[i] + level[i + 1]), s.step[i] = level[i + 1] - level[i];
    return s;
  }
};

// Keys or values.
struct EncodeSide {
  Rows3 rows, codes;  // by (row, head), and (page id, head, offset)
  DeviceTemplates templates;
  LevelSteps levels;
  int32_t bits = 0, code_bytes = 0, lanes = 0;
  bool wide_rows = false, wide_codes = false;  // whole groups, words of 4 bytes
};

// The part of shared memory that is a block's rows.
struct EncodeRoom {
  float* x;       // [row][x_stride]: the row, then exchanges of its rotation
  int8_t* q;      // [row][q_stride]: integers of the search, then codes
  uint8_t* mask;  // [row][mask_stride]: the top bits of codes
  int32_t x_stride, q_stride, mask_stride;

  __device__ __forceinline__ float* x_row(int r) const { return x + r * x_stride; }
  __device__ __forceinline__ int8_t* q_row(int r) const { return q + r * q_stride; }
  __device__ __forceinline__ uint8_t* mask_row(int r) const { return mask + r * mask_stride; }
};
// Lays the parts out from `base`; returns the bytes.
SIC_HD inline int64_t lay_out(char* base, int D, EncodeRoom* room) {
  room->x_stride = (D + 7) / 8 * 8 + 4;
  room->q_stride = (D + 31) / 32 * 32 + 16;  // eight rows' words lie in different banks
  room->mask_stride = (D + 31) / 32 * 4;
  const int64_t x_bytes = int64_t{4} * kEncodeRows * room->x_stride, q_bytes = int64_t{kEncodeRows} * room->q_stride;
  room->x = reinterpret_cast<float*>(base);
  room->q = reinterpret_cast<int8_t*>(base + x_bytes);
  room->mask = reinterpret_cast<uint8_t*>(base + x_bytes + q_bytes);
  return x_bytes + q_bytes + int64_t{kEncodeRows} * room->mask_stride;
}

// ---- nearest template ----

struct Score {
  float score;
  int32_t id;

  __device__ __forceinline__ void join(float other, int32_t other_id) {
    if (other > score || (other == score && other_id < id)) score = other, id = other_id;
  }
};

// x less the mean as integers within +-127, to shared memory; returns what one of them stands for.
template <int R, bool Uniform>
__device__ __forceinline__ float search_integers(const SketchRow<R, Uniform>& row, const DeviceTemplates& t, int64_t h,
                                                 const float (&x)[R][kGroup], int8_t* q, int q_bytes) {
  float v[R][kGroup];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < kGroup; ++c)
      v[r][c] = c < row.size(r) ? sub_rn(x[r][c], t.mean[h * t.D + row.group(r) * kGroup + c]) : 0.0f;
  const float top = row.largest(v);
  const bool usable = top >= slicing::kSmallestQuery && top < INFINITY;
  const float inverse = usable ? div_rn(127.0f, top) : 0.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    uint32_t word[2] = {};
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      const int level = usable ? __float2int_rn(fmaxf(fminf(mul_rn(v[r][c], inverse), 127.0f), -127.0f)) : 0;
      word[c / 4] |= (static_cast<uint32_t>(level) & 0xff) << (c % 4 * 8);
    }
    const int at = row.group(r) * kGroup;
    if (at < q_bytes) *reinterpret_cast<uint2*>(q + at) = make_uint2(word[0], word[1]);
  }
  // Groups that no lane has, up to a whole step of the product.
  for (int at = (R == 4 ? 1024 : row.lanes * kGroup) + row.lane * kGroup; at < q_bytes; at += row.lanes * kGroup)
    *reinterpret_cast<uint2*>(q + at) = make_uint2(0, 0);
  return usable ? div_rn(top, 127.0f) : 0.0f;
}

// The block's warps share the tiles of 8 templates; best[warp][row].
__device__ __forceinline__ void search_templates(const DeviceTemplates& t, int64_t h, const EncodeRoom& room,
                                                 const float* factors, Score (*best)[kEncodeRows]) {
  const int g = lane_id() / 4, c = lane_id() % 4, steps = (t.D + 31) / 32;
  const uint32_t* search = reinterpret_cast<const uint32_t*>(t.search) + h * t.groups * t.quads * delta::kLanes;
  Score mine[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
  for (int tile = warp_id(); tile < 2 * t.groups; tile += kEncodeWarps) {
    const uint32_t* from = search + tile / 2 * t.quads * delta::kLanes + tile % 2 * 8 + g;
    int dot[4] = {};
#pragma unroll 4
    for (int k = 0; k < steps; ++k) {
      uint32_t a[4], b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int quad = k * 8 + i * 4 + c;
        b[i] = quad < t.quads ? __ldg(from + quad * delta::kLanes) : 0;
        a[2 * i] = *reinterpret_cast<const uint32_t*>(room.q_row(g) + 4 * quad);
        a[2 * i + 1] = *reinterpret_cast<const uint32_t*>(room.q_row(g + 8) + 4 * quad);
      }
      mma_s8_16832(dot, a, b);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int id = tile * 8 + 2 * c + e % 2;
      const float half_norm = t.half_norm[h * t.groups * delta::kLanes + id];
      const float score = sub_rn(mul_rn(static_cast<float>(dot[e]), factors[g + e / 2 * 8]), half_norm);
      if (score > mine[e / 2].score) mine[e / 2] = {score, id};  // ids ascend
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      const float other = __shfl_xor_sync(kFullWarp, mine[i].score, lanes);
      mine[i].join(other, __shfl_xor_sync(kFullWarp, mine[i].id, lanes));
    }
    if (c == 0) best[warp_id()][g + 8 * i] = mine[i];
  }
}

__device__ __forceinline__ int nearest_template(const Score (*best)[kEncodeRows], int r) {
  Score s = best[0][r];
#pragma unroll
  for (int w = 1; w < kEncodeWarps; ++w) s.join(best[w][r].score, best[w][r].id);
  return s.id;
}

// ---- levels ----

// Codes of the residuals y, a byte each, and the sizes of their levels.
template <int R, bool Uniform>
__device__ __forceinline__ void quantise(const SketchRow<R, Uniform>& row, const LevelSteps& levels, float unit,
                                         const float (&y)[R][kGroup], float (&size)[R][kGroup],
                                         uint32_t (&codes)[R][2]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float a[kGroup];
    int m[kGroup];
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      a[c] = fabsf(mul_rn(y[r][c], unit));
      m[c] = levels.count ? 0 : __float2int_rn(fminf(a[c], float{delta::kMaxLevel8}));
      size[r][c] = levels.count ? levels.first : static_cast<float>(m[c]);
    }
    for (int i = 0; i < levels.count; ++i) {
      const float threshold = levels.threshold[i], step = levels.step[i];
#pragma unroll
      for (int c = 0; c < kGroup; ++c)
        if (a[c] >= threshold) ++m[c], size[r][c] += step;
    }
    codes[r][0] = codes[r][1] = 0;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      const bool negative = mul_rn(y[r][c], unit) < 0;
      // 8 bits: levels are codes less 128, and there is one of 0.
      int code = negative ? levels.half - m[c] - (levels.count ? 1 : 0) : levels.half + m[c];
      if (c >= row.size(r)) code = 0, size[r][c] = 0;
      codes[r][c / 4] |= static_cast<uint32_t>(code) << (c % 4 * 8);
    }
  }
}

// ---- packing ----

// Bytes [4 o, 4 o + 4) of a row of codes.
__device__ __forceinline__ uint32_t packed_word(const uint8_t* codes, const uint8_t* mask, int D, int bits, int o) {
  const int width = delta::low_bits(bits), low = static_cast<int>(delta::low_field_bytes(D, bits));
  uint32_t word = 0;
  if (width == 8) return *reinterpret_cast<const uint32_t*>(codes + 4 * o);
  if (4 * o >= low)
    return 4 * o - low < (D + 7) / 8 && width < bits ? *reinterpret_cast<const uint32_t*>(mask + 4 * o - low) : 0;
  int first = 0, left = static_cast<int>(delta::lane_channels(D)), at = 4 * o;
  for (;;) {
    const int n = static_cast<int>(delta::part_channels(left, width)),
              bytes = static_cast<int>(delta::word_bytes(n, width));
    if (at >= delta::kLanes * bytes) {
      at -= delta::kLanes * bytes, first += n, left -= n;
      continue;
    }
    const uint32_t low_mask = (1u << width) - 1;
    for (int b = 0; b < 4; b += bytes) {
      const uint8_t* lane = codes + first * delta::kLanes + (at + b) / bytes;
      for (int i = 0; i < n; ++i) word |= (lane[delta::kLanes * i] & low_mask) << (width * i + 8 * b);
    }
    return word;
  }
}

__device__ __forceinline__ void store_word(char* to, uint32_t word, bool wide) {
  if (wide) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
#pragma unroll
    for (int b = 0; b < 4; ++b) to[b] = static_cast<char>(word >> 8 * b);
  }
}

// The lowest bit of each byte.
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t word) { return (word & 0x01010101u) * 0x01020408u >> 24; }

// Codes go through shared memory: a word holds channels 16 apart.
template <int R, bool Uniform>
__device__ __forceinline__ void store_codes(const SketchRow<R, Uniform>& row, const EncodeSide& side,
                                            const EncodeRoom& room, int r, const uint32_t (&packed)[R][2], char* to,
                                            bool live) {
  auto* const codes = reinterpret_cast<uint8_t*>(room.q_row(r));
  uint8_t* const mask = room.mask_row(r);
  const int width = delta::low_bits(side.bits);
#pragma unroll
  for (int s = 0; s < R; ++s) {
    const int at = row.group(s) * kGroup;
    if (at < room.q_stride - 16) *reinterpret_cast<uint2*>(codes + at) = make_uint2(packed[s][0], packed[s][1]);
    const uint32_t top = bits_of_bytes(packed[s][0] >> width) | bits_of_bytes(packed[s][1] >> width) << 4;
    if (at < 8 * room.mask_stride) mask[row.group(s)] = static_cast<uint8_t>(top);
  }
  for (int b = (R == 4 ? 128 : row.lanes) + row.lane; b < room.mask_stride; b += row.lanes) mask[b] = 0;
  __syncwarp();
  for (int o = row.lane; live && 4 * o < side.code_bytes; o += row.lanes)
    store_word(to + 4 * o, packed_word(codes, mask, row.D, side.bits, o), side.wide_codes);
}

// ---- a row ----

struct RowCode {
  f16_t scale;
  bool fits;
};

// x: the residual of a row; destroyed. Writes the codes; the result is on every lane of the row.
template <int R, bool Uniform>
__device__ __forceinline__ RowCode code_residual(const SketchRow<R, Uniform>& row, const EncodeSide& side, float bound,
                                                 const EncodeRoom& room, int r, float (&y)[R][kGroup], char* to,
                                                 bool live) {
  float v[R][kGroup], size[R][kGroup];
  uint32_t codes[R][2];
#pragma unroll
  for (int s = 0; s < R; ++s)
#pragma unroll
    for (int c = 0; c < kGroup; ++c) v[s][c] = mul_rn(y[s][c], y[s][c]);
  const float square = row.tree_sum(v);
  const float reach = side.levels.at_largest ? row.largest(y) : __fsqrt_rn(div_rn(square, static_cast<float>(row.D)));
  const bool used = reach >= delta::kSmallestStart && reach < INFINITY;
  const float unit = used ? div_rn(side.levels.start, reach) : 0.0f;
  int squares = 0;
#pragma unroll
  for (int s = 0; s < R; ++s)
#pragma unroll
    for (int c = 0; c < kGroup; ++c) y[s][c] = used ? y[s][c] : 0.0f;
  quantise(row, side.levels, unit, y, size, codes);
  store_codes(row, side, room, r, codes, to, live);
#pragma unroll
  for (int s = 0; s < R; ++s)
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      v[s][c] = mul_rn(fabsf(y[s][c]), size[s][c]);
      const int level = static_cast<int>(size[s][c]);
      squares += level * level;
    }
  for (int g = row.lanes / 2; g > 0; g /= 2) squares += __shfl_xor_sync(kFullWarp, squares, g);
  const float along = row.tree_sum(v), sum = static_cast<float>(squares);
  RowCode result;
  from_float(used && along > 0 ? div_rn(along, sum) : 0.0f, result.scale);
  const float s = to_float(result.scale);
  const float error = add_rn(sub_rn(square, mul_rn(add_rn(s, s), along)), mul_rn(mul_rn(s, s), sum));
  result.fits = s < INFINITY && square < INFINITY && !(error > bound);
  if (!(s < INFINITY)) result.scale.bits = 0x7bff;  // the largest
  return result;
}

}  // namespace sic::gpu
