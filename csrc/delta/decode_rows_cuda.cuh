// Coded rows to numbers on the GPU, by lanes as the sketch has them: 8 neighbouring channels to a lane.
#pragma once
#include "delta/rotation_cuda.cuh"

namespace sic::gpu {

// Keys or values as they are coded.
struct CodeSide {
  Rows3 codes;  // by (page id, head, offset in the page)
  DeviceTemplates templates;
  float level[32] = {};  // by code; 8 bits: none
  int32_t bits = 0, width = 0, mask_at = 0, lanes = 0;
  int32_t access = 1;  // bytes to which every row is aligned, at most 16

  static CodeSide of(const TensorView& codes, const delta::Templates& t, int bits) {
    CodeSide s;
    s.codes = Rows3::of(codes), s.templates = DeviceTemplates::of(t);
    s.bits = bits, s.width = delta::low_bits(bits);
    s.mask_at = static_cast<int32_t>(delta::low_field_bytes(s.templates.D, bits));
    s.lanes = lanes_per_row(s.templates.D), s.access = row_access_bytes(codes);
    for (int i = 0; bits < 8 && i < 1 << bits; ++i) s.level[i] = delta::levels_of(bits).level[i];
    return s;
  }
};

// Eight words of `bytes` bytes each, lane after lane of a part.
struct CodeWords {
  uint32_t raw[kGroup];

  __device__ __forceinline__ void load(const uint8_t* from, int bytes, int access) {
    if (access == 16 && bytes > 1) {
      const uint4 low = load_cached16(from);
      raw[0] = low.x, raw[1] = low.y, raw[2] = low.z, raw[3] = low.w;
      if (bytes == 2) return;
      const uint4 high = load_cached16(from + 16);
      raw[4] = high.x, raw[5] = high.y, raw[6] = high.z, raw[7] = high.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= 2 * bytes) break;
      raw[i] = access >= 4 ? __ldg(reinterpret_cast<const uint32_t*>(from) + i)
                           : from[4 * i] | from[4 * i + 1] << 8 | from[4 * i + 2] << 16 |
                                 static_cast<uint32_t>(from[4 * i + 3]) << 24;
    }
  }
  __device__ __forceinline__ uint32_t word(int c, int bytes) const {
    return bytes == 4 ? raw[c] : bytes == 2 ? raw[c / 2] >> 16 * (c % 2) : raw[c / 4] >> 8 * (c % 4);
  }
};

// Decodes rows of one side; every lane of a warp calls decode(), for a row that it shares with its neighbours.
template <int R, bool Uniform>
class RowDecoder {
 public:
  // levels: 32 floats in shared memory, made by fill_levels().
  __device__ __forceinline__ RowDecoder(const CodeSide& side, const float* levels)
      : row(side.templates.D, side.lanes), side_(side), levels_(levels) {
#pragma unroll
    for (int r = 0; r < R; ++r) find_part(r);
  }

  const SketchRow<R, Uniform> row;

  // level * scale of the lane's channels.
  __device__ __forceinline__ void load_residual(const char* codes, float scale, float (&x)[R][kGroup]) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      int code[kGroup] = {};
      if (row.size(r) > 0) load_group_codes(reinterpret_cast<const uint8_t*>(codes), r, code);
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const float level = side_.bits == 8 ? static_cast<float>(code[c] - 128) : levels_[code[c]];
        x[r][c] = c < row.size(r) ? mul_rn(level, scale) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void add_template(int64_t h, int id, float (&x)[R][kGroup]) const {
    const DeviceTemplates& t = side_.templates;
    const f16_t* centre = t.centre(h, id);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        if (c >= row.size(r)) continue;
        const int d = row.group(r) * kGroup + c;
        x[r][c] = add_rn(x[r][c], to_float(centre[d]));
      }
  }

  // The inverse of the values' rotation.
  __device__ __forceinline__ void unrotate(float (&x)[R][kGroup]) const {
    flip_signs(row, x);
    row.rotate(x);
    flip_signs(row, x);
  }

  // A row of floats as it is.
  __device__ __forceinline__ void load_raw(DType type, const char* from, float (&x)[R][kGroup]) const {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kGroup; ++c)
        x[r][c] = c < row.size(r) ? load_float(type, from, row.group(r) * kGroup + c) : 0.0f;
  }

 private:
  __device__ __forceinline__ void find_part(int r) {
    const int j = row.group(r);
    mask_[r] = side_.mask_at + j;
    if (side_.width == 8) {
      at_[r] = j * kGroup, bytes_[r] = 1, shift_[r] = 0;
      return;
    }
    int n = j / 2, at = 0, left = static_cast<int>(delta::lane_channels(row.D));
    while (left > 0) {
      const int channels = static_cast<int>(delta::part_channels(left, side_.width));
      bytes_[r] = static_cast<int>(delta::word_bytes(channels, side_.width));
      if (n < channels) break;
      n -= channels, left -= channels, at += delta::kLanes * bytes_[r];
    }
    at_[r] = at + j % 2 * kGroup * bytes_[r], shift_[r] = n * side_.width;
  }

  __device__ __forceinline__ void load_group_codes(const uint8_t* codes, int r, int (&code)[kGroup]) const {
    if (side_.width == 8 && row.size(r) < kGroup) {
#pragma unroll
      for (int c = 0; c < kGroup; ++c) code[c] = c < row.size(r) ? codes[at_[r] + c] : 0;
      return;
    }
    CodeWords words;
    words.load(codes + at_[r], bytes_[r], side_.access);
    const uint32_t top = side_.width < side_.bits ? codes[mask_[r]] : 0;
#pragma unroll
    for (int c = 0; c < kGroup; ++c)
      code[c] = static_cast<int>((words.word(c, bytes_[r]) >> shift_[r] & ((1u << side_.width) - 1)) |
                                 (top >> c & 1) << side_.width);
  }

  const CodeSide& side_;
  const float* levels_;
  int at_[R], bytes_[R], shift_[R], mask_[R];
};

__device__ __forceinline__ void fill_levels(const CodeSide& side, float* levels) {
  for (int i = static_cast<int>(threadIdx.x); i < 32; i += static_cast<int>(blockDim.x)) levels[i] = side.level[i];
}

// Where a row's numbers come from.
struct RowSource {
  const char *codes = nullptr, *raw = nullptr;  // raw: in place of codes
  float scale = 0;
  int id = 0;
};
// A stored row; values: its value. A raw row whose entry is none is template 0.
__device__ __forceinline__ RowSource find_row(const DevicePages& p, const CodeSide& side, bool values, int64_t page_id,
                                              int64_t h, uint32_t offset) {
  const delta::Tag tag = load_tag(p.tags.at(page_id, h, offset));
  RowSource s;
  s.codes = side.codes.at(page_id, h, offset);
  if (tag.k_scale == delta::kRawScale) {
    const int32_t entry = load_entry(p.k_codes.at(page_id, h, offset), p.entries);
    if (entry >= 0) s.raw = p.raw_row(entry, values);
    return s;
  }
  s.scale = to_float(f16_t{values ? tag.v_scale : tag.k_scale});
  s.id = values ? tag.v_id : tag.k_id;
  return s;
}

// A stored key at its position. room: a row in shared memory.
template <int R, bool Uniform>
__device__ __forceinline__ void decode_key(const RowDecoder<R, Uniform>& d, const KeyRotation& rotation,
                                           const DeviceRope& rope, const RowSource& s, DType raw_type, int64_t h,
                                           int64_t position, float* room, float (&x)[R][kGroup]) {
  d.load_residual(s.codes, s.scale, x);
  rotate_key(d.row, rotation, room, x);
  d.add_template(h, s.id, x);
  if (s.raw) d.load_raw(raw_type, s.raw, x);
  if (rope.lo) turn_key<true>(d.row, rope, rope.at(position, rope.hi), room, x);
}
template <int R, bool Uniform>
__device__ __forceinline__ void decode_value(const RowDecoder<R, Uniform>& d, const RowSource& s, DType raw_type,
                                             int64_t h, float (&x)[R][kGroup]) {
  d.load_residual(s.codes, s.scale, x);
  d.unrotate(x);
  d.add_template(h, s.id, x);
  if (s.raw) d.load_raw(raw_type, s.raw, x);
}

// What kernels that read a coded cache take.
struct CodedCache {
  DevicePages pages;
  CodeSide k, v;
  KeyRotation rotation;
  DeviceRope rope;
  const int32_t* positions = nullptr;  // of RoPE
  int64_t position_stride = 0;

  static CodedCache of(const delta::Pages& p, const delta::Codec& c, const TensorView& positions) {
    CodedCache r;
    r.pages = DevicePages::of(p, c);
    r.k = CodeSide::of(p.k_codes, c.k, c.k_bits), r.v = CodeSide::of(p.v_codes, c.v, c.v_bits);
    r.rotation = KeyRotation::of(r.pages.Dk, c.k_rotation), r.rope = DeviceRope::of(c.rope);
    if (positions.given()) r.positions = positions.as<const int32_t>(), r.position_stride = positions.stride[0];
    return r;
  }
  __device__ __forceinline__ int64_t position(int64_t b, int32_t pos) const {
    return positions ? positions[b * position_stride + pos] : pos;
  }
};

}  // namespace sic::gpu
