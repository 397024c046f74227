// Coded keys and values of one head to rows of floats.
#pragma once
#include "core/rows.h"
#include "delta/codes_cpu.h"
#include "delta/rotation_cpu.h"

namespace sic::cpu::SIC_ISA {

// What the rows of one head are differences from.
struct CodedHead {
  int D = 0, bits = 4, templates = 1;
  const f16_t* centres = nullptr;  // [templates][D]

  CodedHead(const delta::Templates& t, int bits_, int64_t h)
      : D(static_cast<int>(t.centres.shape[2])), bits(bits_), templates(static_cast<int>(t.centres.shape[1])) {
    centres = t.centres.as<const f16_t>() + h * templates * D;
  }
  // Floats between rows: levels come in whole channel groups.
  static int64_t stride(int64_t D) { return delta::lane_channels(D) * delta::kLanes; }
};

struct KeyHead : CodedHead {
  int rotation;
  float norm;
  const delta::Rope* rope;
  bool turns_in_lanes;  // RoPE pairs a channel with one of the same lane

  KeyHead(const delta::Codec& c, int64_t h)
      : CodedHead(c.k, c.k_bits, h),
        rotation(static_cast<int>(c.k_rotation)),
        norm(slicing::rotation_norm(rotation)),
        rope(c.rope.lo.given() ? &c.rope : nullptr),
        turns_in_lanes(D % (2 * delta::kLanes) == 0 && !c.rope.interleaved && 2 * c.rope.lo.shape[2] == D) {}
};

// x <- x * scale + centre.
inline void add_centre(const CodedHead& head, int id, float scale, float* x) {
  const f16_t* centre = head.centres + int64_t{id} * head.D;
  int d = 0;
  for (; d + W <= head.D; d += W) store(x + d, fma(load(x + d), splat(scale), load(centre + d)));
  for (; d < head.D; ++d) x[d] = x[d] * scale + to_float(centre[d]);
}

// Code rows [0, n). What lies behind them is there to be fetched, not read: it may be of another width.
struct CodeRows {
  static constexpr int kAhead = 64;
  const uint8_t* const* codes;
  int64_t bytes;
  int n;
  bool fetch;

  SIC_MEMBER_INLINE void fetch_ahead(int j) const {
    if (fetch) prefetch_row(codes[j + kAhead], bytes);
  }
};
struct KeyRows : CodeRows {
  const float* scale;
  const int32_t* id;
  const int32_t* position;
  bool in_block = false;  // Turn::in_block
};

// ---- RoPE ----

// (a + i b) (c + i s).
SIC_INLINE void turn_pair(vf& a, vf& b, vf c, vf s) {
  const vf re = fma(a, c, -(b * s)), im = fma(a, s, b * c);
  a = re, b = im;
}

// How far a key is turned: to its position, or by its place in a block of positions alone.
enum class Turn { whole, in_block };

inline void apply_rope(float* x, const delta::Rope& rope, int64_t position, Turn how = Turn::whole) {
  const RopeAngles r(rope, position);
  float* second = r.interleaved ? x + 1 : x + r.half;
  const int step = r.interleaved ? 2 : 1;
  turn<false>(x, second, r.lo, r.half, step);
  if (how == Turn::whole) turn<false>(x, second, r.hi, r.half, step);
}

// A query turned back by the block of a position: its products with keys turned in the block are those of whole turns.
inline void turn_back(float* q, const delta::Rope& rope, int64_t position) {
  const RopeAngles r(rope, position);
  turn<true>(q, r.interleaved ? q + 1 : q + r.half, r.hi, r.half, r.interleaved ? 2 : 1);
}

// ---- values ----

// The inverse of rotate().
inline void unrotate(float* x, int D) {
  const float* signs = slicing::sketch_signs();
  for (int at = 0, n; at < D; at += n) {
    n = slicing::rotation_block(D - at);
    butterfly(x + at, n);
    const float c = slicing::rotation_norm(n);
    for (int i = at; i < at + n; ++i) x[i] *= c * signs[i];
  }
}

// Levels of code rows, kGroups * 16 channels (0: any number) each.
template <int kBits, int kGroups>
void decode_levels(const CodedHead& head, const CodeRows& rows, float* out) {
  const LevelReader<kBits> levels(head.D);
  const int64_t stride = CodedHead::stride(head.D);
  for (int j = 0; j < rows.n; ++j, out += stride) {
    rows.fetch_ahead(j);
    if constexpr (kGroups == 0) {
      levels.row(rows.codes[j], out);
    } else {
      for (int lane = 0; lane < delta::kLanes; lane += W) {
        vf x[kGroups];
        levels.template row<kGroups>(rows.codes[j], lane, x);
        SIC_UNROLL for (int i = 0; i < kGroups; ++i) store(out + delta::kLanes * i + lane, x[i]);
      }
    }
  }
}

struct ValueRows : CodeRows {
  const float* scale;
  const int32_t* id;
};

// Values as they were before the rotation.
template <int kBits, int kGroups>
void decode_values(const CodedHead& head, const ValueRows& rows, float* out) {
#if defined(__AVX512BW__)
  if constexpr (kGroups == 4 || kGroups == 8 || kGroups == 16) {
    const LevelReader<kBits> levels(head.D);
    const float* signs = slicing::sketch_signs();
    const float norm = slicing::rotation_norm(head.D);
    for (int j = 0; j < rows.n; ++j, out += kGroups * W) {
      rows.fetch_ahead(j);
      vf x[kGroups];
      levels.template row<kGroups>(rows.codes[j], 0, x);
      rotate_groups<1, kGroups>(x, 0);
      const f16_t* centre = head.centres + rows.id[j] * (kGroups * W);
      const vf scale = splat(rows.scale[j] * norm);
      SIC_UNROLL for (int i = 0; i < kGroups; ++i) {
        const vf y = rotate_within(x[i], 1);
        store(out + W * i, fma(y, scale * load(signs + W * i), load(centre + W * i)));
      }
    }
    return;
  }
#endif
  decode_levels<kBits, kGroups>(head, rows, out);
  for (int j = 0; j < rows.n; ++j) {
    float* row = out + j * CodedHead::stride(head.D);
    unrotate(row, head.D);
    add_centre(head, rows.id[j], rows.scale[j], row);
  }
}

// ---- keys ----

// Keys whose rotation stays within lanes: no channel leaves its register. RoPE if it does so, too.
template <int kBits, int kGroups, Turn kTurn = Turn::whole>
class LaneKeys {
 public:
  SIC_MEMBER_INLINE explicit LaneKeys(const KeyHead& head)
      : levels_(head.D),
        rope_(head.turns_in_lanes ? head.rope : nullptr),
        centres_(head.centres),
        norm_(head.norm),
        first_(head.rotation == 1 ? kGroups * delta::kLanes : head.D / head.rotation) {}

  // x[n]: channels 16 n + lane of key j.
  SIC_MEMBER_INLINE void key(const KeyRows& rows, int j, int lane, vf* x,
                             bool in_block = kTurn == Turn::in_block) const {
    levels_.template row<kGroups>(rows.codes[j], lane, x);
    if (first_ < delta::kLanes) SIC_UNROLL for (int i = 0; i < kGroups; ++i) x[i] = rotate_within(x[i], first_);
    rotate_groups<1, kGroups>(x, first_ / delta::kLanes);
    const f16_t* centre = centres_ + rows.id[j] * (kGroups * delta::kLanes) + lane;
    const vf scale = splat(rows.scale[j] * norm_);
    SIC_UNROLL for (int i = 0; i < kGroups; ++i) x[i] = fma(x[i], scale, load(centre + delta::kLanes * i));
    if (!rope_) return;
    const uint32_t position = static_cast<uint32_t>(rows.position[j]);
    constexpr int kRow = kGroups * delta::kLanes;
    turn(rope_->lo.as<const float>() + position % delta::kRopeBlock * kRow + lane, x);
    if (in_block) return;
    turn(rope_->hi.as<const float>() + position / delta::kRopeBlock * int64_t{kRow} + lane, x);
  }

 private:
  SIC_INLINE void turn(const float* angles, vf* x) {
    constexpr int kHalf = kGroups / 2;
    SIC_UNROLL for (int i = 0; i < kHalf; ++i) {
      const float* at = angles + delta::kLanes * i;
      turn_pair(x[i], x[i + kHalf], load(at), load(at + delta::kLanes * kHalf));
    }
  }

  const LevelReader<kBits> levels_;
  const delta::Rope* rope_;
  const f16_t* centres_;
  float norm_;
  int first_;
};

template <int kBits, int kGroups>
void decode_keys_by_lanes(const KeyHead& head, const KeyRows& rows, float* out) {
  const LaneKeys<kBits, kGroups> keys(head);
  for (int j = 0; j < rows.n; ++j, out += kGroups * delta::kLanes) {
    rows.fetch_ahead(j);
    for (int lane = 0; lane < delta::kLanes; lane += W) {
      vf x[kGroups];
      keys.key(rows, j, lane, x, rows.in_block);
      SIC_UNROLL for (int i = 0; i < kGroups; ++i) store(out + delta::kLanes * i + lane, x[i]);
    }
    if (head.rope && !head.turns_in_lanes)
      apply_rope(out, *head.rope, rows.position[j], rows.in_block ? Turn::in_block : Turn::whole);
  }
}

// Any keys.
template <int kBits>
void decode_keys(const KeyHead& head, const KeyRows& rows, float* out) {
  const LevelReader<kBits> levels(head.D);
  const int D = head.D;
  for (int j = 0; j < rows.n; ++j, out += CodedHead::stride(D)) {
    rows.fetch_ahead(j);
    levels.row(rows.codes[j], out);
    rotate_strided(out, D, head.rotation);
    add_centre(head, rows.id[j], rows.scale[j], out);
    if (head.rope) apply_rope(out, *head.rope, rows.position[j], rows.in_block ? Turn::in_block : Turn::whole);
  }
}

// ---- decoding and attention in one, where a vector holds a channel group ----

#if defined(__AVX512BW__)
// The same sums as tile_logits of R query rows makes with decoded keys.
template <int kBits, int kGroups, int R, Turn kTurn>
void dot_keys(const KeyHead& head, const KeyRows& rows, const float* q, int64_t Dp, float* logits, int64_t stride) {
  constexpr int N = W / R;
  const LaneKeys<kBits, kGroups, kTurn> keys(head);
  for (int j = 0; j < rows.n; j += N) {
    vf sum[W] = {};
    SIC_UNROLL for (int i = 0; i < N; i += 2) {  // two keys at a time: each load of q serves both
      if (j + i >= rows.n) break;
      const int next = std::min(j + i + 1, rows.n - 1);  // what lies behind the last key is none
      rows.fetch_ahead(j + i);
      rows.fetch_ahead(next);
      vf x[kGroups], y[kGroups];
      keys.key(rows, j + i, 0, x);
      keys.key(rows, next, 0, y);
      SIC_UNROLL for (int c = 0; c < kGroups; ++c) SIC_UNROLL for (int r = 0; r < R; ++r) {
        const vf qv = load(q + r * Dp + W * c);
        sum[r * N + i] = fma(qv, x[c], sum[r * N + i]);
        sum[r * N + i + 1] = fma(qv, y[c], sum[r * N + i + 1]);
      }
    }
    float dots[W];
    store(dots, transpose_add(sum));
    SIC_UNROLL for (int r = 0; r < R; ++r) std::memcpy(logits + r * stride + j, dots + r * N, sizeof(float) * N);
  }
}

// The same sums as tile_values makes with decoded levels.
template <int kBits, int kGroups, int R>
void add_levels(const CodedHead& head, const CodeRows& rows, const float* weights, int64_t stride, const float* decay,
                float* acc, int64_t Dp) {
  constexpr int C = kGroups * R <= 16 ? kGroups : kGroups % (16 / R) == 0 ? 16 / R : kGroups / 2;
  static_assert(kGroups % C == 0 && kGroups <= 4 * C);
  const LevelReader<kBits> levels(head.D);
  const auto add = [&](auto first) __attribute__((always_inline)) {
    vf sum[R][C];
    float* own = acc + W * first();
    SIC_UNROLL for (int r = 0; r < R; ++r) SIC_UNROLL for (int c = 0; c < C; ++c) sum[r][c] =
        load(own + r * Dp + W * c) * splat(decay[r]);
    for (int j = 0; j < rows.n; ++j) {
      if (first() == 0) rows.fetch_ahead(j);
      vf x[kGroups];
      levels.template row<kGroups>(rows.codes[j], 0, x);
      SIC_UNROLL for (int r = 0; r < R; ++r) {
        const vf weight = splat(weights[r * stride + j]);
        SIC_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = fma(weight, x[first() + c], sum[r][c]);
      }
    }
    SIC_UNROLL for (int r = 0; r < R; ++r) SIC_UNROLL for (int c = 0; c < C; ++c)
        store(own + r * Dp + W * c, sum[r][c]);
  };
  add(std::integral_constant<int, 0>());
  if constexpr (C < kGroups) add(std::integral_constant<int, C>());
  if constexpr (2 * C < kGroups) add(std::integral_constant<int, 2 * C>());
  if constexpr (3 * C < kGroups) add(std::integral_constant<int, 3 * C>());
}
#endif

// ---- the function for a codec ----

using LevelDecoder = void (*)(const CodedHead&, const CodeRows&, float* out);
using ValueDecoder = void (*)(const CodedHead&, const ValueRows&, float* out);
using KeyDecoder = void (*)(const KeyHead&, const KeyRows&, float* out);

// Calls body(bits) with a constant.
template <class Body>
auto with_bits(int bits, Body body) {
  switch (bits) {
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 5:
      return body(std::integral_constant<int, 5>());
    default:
      return body(std::integral_constant<int, 8>());
  }
}

// Head sizes with kernels of their own: calls body(channel groups), 0 for any other.
template <class Body>
auto with_groups(int D, Body body) {
  switch (D) {
    case 64:
      return body(std::integral_constant<int, 4>());
    case 96:
      return body(std::integral_constant<int, 6>());
    case 128:
      return body(std::integral_constant<int, 8>());
    case 256:
      return body(std::integral_constant<int, 16>());
    default:
      return body(std::integral_constant<int, 0>());
  }
}

inline LevelDecoder level_decoder(const CodedHead& head) {
  return with_bits(head.bits, [&](auto bits) {
    return with_groups(head.D, [&](auto groups) -> LevelDecoder { return decode_levels<bits(), groups()>; });
  });
}

inline ValueDecoder value_decoder(const CodedHead& head) {
  return with_bits(head.bits, [&](auto bits) {
    return with_groups(head.D, [&](auto groups) -> ValueDecoder { return decode_values<bits(), groups()>; });
  });
}

// The rotation leaves no vector of a channel group, but for sums of whole vectors.
inline bool rotates_in_lanes(const KeyHead& head) {
  const int stride = head.D / head.rotation;
  return head.rotation == 1 || ((stride & (stride - 1)) == 0 && (stride >= delta::kLanes || W == delta::kLanes));
}

inline KeyDecoder key_decoder(const KeyHead& head) {
  return with_bits(head.bits, [&](auto bits) {
    return with_groups(rotates_in_lanes(head) ? head.D : 0, [&](auto groups) -> KeyDecoder {
      if constexpr (groups() == 0)
        return decode_keys<bits()>;
      else
        return decode_keys_by_lanes<bits(), groups()>;
    });
  });
}

// Null where there is none: then rows are decoded first.
using KeyDots = void (*)(const KeyHead&, const KeyRows&, const float* q, int64_t Dp, float* logits, int64_t stride);
using LevelSums = void (*)(const CodedHead&, const CodeRows&, const float* weights, int64_t stride, const float* decay,
                           float* acc, int64_t Dp);

template <Turn kTurn>
KeyDots key_dots([[maybe_unused]] const KeyHead& head, [[maybe_unused]] int64_t rows) {
#if defined(__AVX512BW__)
  if (rows > 2 && rows <= 4 && rotates_in_lanes(head) && (!head.rope || head.turns_in_lanes))
    return with_bits(head.bits, [&](auto bits) {
      return with_groups(head.D, [&](auto groups) -> KeyDots {
        if constexpr (groups() == 0 || groups() > 8)
          return nullptr;
        else
          return dot_keys<bits(), groups(), 4, kTurn>;
      });
    });
#endif
  return nullptr;
}

inline LevelSums level_sums([[maybe_unused]] const CodedHead& head, [[maybe_unused]] int64_t rows) {
#if defined(__AVX512BW__)
  if (rows > 2 && rows <= 4)
    return with_bits(head.bits, [&](auto bits) {
      return with_groups(head.D, [&](auto groups) -> LevelSums {
        if constexpr (groups() == 0)
          return nullptr;
        else
          return add_levels<bits(), groups(), 4>;
      });
    });
#endif
  return nullptr;
}

}  // namespace sic::cpu::SIC_ISA
