// Attention on coded rows, on tensor cores: 2, 3, 4 or 8 bits, head size 128, queries f16 or bf16.
//
// A warp takes 64 tokens of a split, 16 at a time. With lane = 4 g + c:
//   S = Q K^T      The lane loads 32 codes of each of tokens g and g + 8, makes halves of them (template + scale *
//                  level, turned by RoPE's low table) and has K's words in the order in which the queries lie in shared
//                  memory. Those are turned back by RoPE's high table, once for the 64 positions that share its row;
//                  where tokens of a step do not, keys are turned by both.
//   O^T = V^T P^T  The lane loads 16 codes of each of tokens 2c, 2c + 1, 2c + 8, 2c + 9. Levels enter as 1152 + level;
//                  a row of ones adds up the weights, which carry the tokens' scales, and takes the offset out again.
// Sums stay in the rotated space. Weights of a template add up as integers, 2^-16 each: their order does not matter.
// Once a split, rows are rotated back and the templates added. Raw rows and the tail go by another way, a warp for two
// query rows, and join as a part of their own.
//
// Bound: instructions, of which the integer pipe takes half. At 4 bits a step of 16 tokens executes about 930 of a warp
// without rotation of keys (450 of them integer, at half rate), 1030 with 8 channels together, 1200 with all: 15 to 19
// clocks of an SM a token and head; 2 bits as many, 3 bits 1300, 8 bits 760. Memory: 134 B, 9.2 clocks at 14.5
// bytes/clock (H100), 6.5 at 20.7 (H200).
#pragma once
#include "delta/attention_raw_cuda.cuh"
#include "delta/attention_unpack_cuda.cuh"

namespace sic::gpu {

constexpr float kMassUnit = 65536;                             // 2^8 of slack, 64 tokens of a warp: 2^30 at most
constexpr int kBlockSteps = kSplit / kStep / kAttentionWarps;  // steps of a warp: a row of RoPE's high table
static_assert(kBlockSteps * kStep == delta::kRopeBlock);

// One warp's share of a split.
template <int kBits, bool kRotated>
struct CodesWarp {
  using Key = typename LaneCodes<kBits>::Key;
  using Values = typename LaneCodes<kBits>::Values;
  static constexpr int D = kCodedDim, N = kCodedGroups;
  static constexpr int32_t kNoBlock = -2;

  const DeltaAttentionParams& p;
  const Tile& tile;
  CodesShared& s;
  LogitScale to_logit;
  uint32_t* const mass;           // [template][row]
  const char *k_base, *v_base;    // the head's first codes
  float out[N][4];                // channels 16 n + 2 g and the next by rows 2c, 2c + 1
  float rounded[4];               // sums of weights times scales in the same layout
  float sum, base, limit, scale;  // of row g: weights; reference, and where it must follow; scale: of value scales
  int32_t block;                  // of RoPE, that s.q is turned back by; -1: as they are

  __device__ __forceinline__ CodesWarp(const DeltaAttentionParams& params, const Tile& where, CodesShared& shared,
                                       uint32_t* masses)
      : p(params), tile(where), s(shared), to_logit(LogitScale::of(params, where.h)), mass(masses) {
    k_base = p.cache.k.codes.at(0, tile.h, 0);
    v_base = p.cache.v.codes.at(0, tile.h, 0);
  }

  __device__ __forceinline__ void clear() {
    base = 0, limit = kNone, sum = 0, block = kNoBlock;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      rounded[e] = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) out[n][e] = 0;
    }
    for (int i = lane_id(); i < p.cache.v.templates.n * 8; i += 32) mass[i] = 0;
    const float* scales = s.v_scale + warp_id() * delta::kRopeBlock;
    const float top = warp_reduce_max(fmaxf(fabsf(scales[lane_id()]), fabsf(scales[lane_id() + 32])));
    // The power of two above it; weights times scales then fit a half.
    scale = top > 0 ? __uint_as_float((__float_as_uint(top) & 0x7f800000u) + (1u << 23)) : 1.0f;
    __syncwarp();
  }

  // ---- queries ----

  // s.q <- the queries turned back by a row of the high table; without one, as they are.
  __device__ __forceinline__ void turn_queries(int32_t to) {
    if (block == to) return;
    block = to;
    __syncwarp();
    const int half = p.cache.rope.half;
    const float* angles = p.cache.rope.hi + static_cast<int64_t>(max(to, 0)) * 2 * half + lane_id() % 4 * 4;
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      __syncwarp();  // one group's angles at a time
      uint2 x = s.q_plain[n][lane_id()], y = s.q_plain[n + N / 2][lane_id()];
      if (to >= 0) {
        const float4 cosine = __ldg(reinterpret_cast<const float4*>(angles + 16 * n));
        const float4 sine = __ldg(reinterpret_cast<const float4*>(angles + half + 16 * n));
        turn_pair_back(x.x, y.x, cosine.x, sine.x, cosine.y, sine.y);
        turn_pair_back(x.y, y.y, cosine.z, sine.z, cosine.w, sine.w);
      }
      s.q[warp_id()][n][lane_id()] = x, s.q[warp_id()][n + N / 2][lane_id()] = y;
    }
    __syncwarp();
  }
  __device__ __forceinline__ static void turn_pair_back(uint32_t& x, uint32_t& y, float c0, float s0, float c1,
                                                        float s1) {
    const float2 re = unpack_f16x2(x), im = unpack_f16x2(y);
    x = pack_f16x2(re.x * c0 + im.x * s0, re.y * c1 + im.y * s1);
    y = pack_f16x2(im.x * c0 - re.x * s0, im.y * c1 - re.y * s1);
  }

  // ---- keys ----

  __device__ __forceinline__ void load_keys(int step, Key (&k)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      k[half].load(k_base + static_cast<uint64_t>(s.k_at[step * kStep + half * 8 + lane_id() / 4]) * 16, lane_id() % 4);
  }

  // The key of one token, without its position.
  __device__ __forceinline__ void make_key(const Key& code, int slot, KeyWords& x) const {
    uint32_t level[N];
    code.levels(lane_id() % 4, level);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int u = 0; u < 2; ++u) x[n][u] = add_f16x2(widen_levels(level[n], u), kLevelOffset | 0x80008000u);
    if constexpr (kRotated) rotate_words(x, p.cache.rotation.stride);
    __syncwarp();  // the template comes later, for want of registers
    const float factor = s.k_scale[slot];
    const uint32_t scales = pack_f16x2(factor, factor);
    const uint2* centre =
        reinterpret_cast<const uint2*>(p.cache.k.templates.centre(tile.h, s.k_id[slot])) + lane_id() % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint2 c = __ldg(centre + 4 * n);
      x[n][0] = fma_f16x2(x[n][0], scales, c.x), x[n][1] = fma_f16x2(x[n][1], scales, c.y);
    }
  }
  __device__ __forceinline__ void turn_low(int position, KeyWords& x) const {
    const uint4* row = s.low[position % delta::kRopeBlock] + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 cosine = row[i], sine = row[8 + i];
      turn_words(x[2 * i][0], x[2 * i + 4][0], cosine.x, sine.x);
      turn_words(x[2 * i][1], x[2 * i + 4][1], cosine.y, sine.y);
      turn_words(x[2 * i + 1][0], x[2 * i + 5][0], cosine.z, sine.z);
      turn_words(x[2 * i + 1][1], x[2 * i + 5][1], cosine.w, sine.w);
    }
  }
  __device__ __forceinline__ void turn_high(int32_t to, KeyWords& x) const {
    const int half = p.cache.rope.half;
    const float* angles = p.cache.rope.hi + static_cast<int64_t>(to) * 2 * half + lane_id() % 4 * 4;
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      __syncwarp();  // one group's angles at a time
      const float4 c = __ldg(reinterpret_cast<const float4*>(angles + 16 * n));
      const float4 sn = __ldg(reinterpret_cast<const float4*>(angles + half + 16 * n));
      turn_words(x[n][0], x[n + 4][0], pack_f16x2(c.x, c.y), pack_f16x2(sn.x, sn.y));
      turn_words(x[n][1], x[n + 4][1], pack_f16x2(c.z, c.w), pack_f16x2(sn.z, sn.w));
    }
  }

  // Dot products of the step's tokens; logit[half][e]: token 8 half + 2c + e, row g.
  __device__ __forceinline__ void dot(int step, const Key (&code)[2], float (&logit)[2][4]) {
    const int slot = step * kStep + lane_id() / 4;
    const int position[2] = {s.position[slot], s.position[slot + 8]};
    const int first = __shfl_sync(kFullWarp, position[0], 0) / delta::kRopeBlock;
    bool together = true;
    if (p.cache.rope.lo) {
      together =
          __all_sync(kFullWarp, position[0] / delta::kRopeBlock == first && position[1] / delta::kRopeBlock == first);
      turn_queries(together ? first : -1);
    } else {
      turn_queries(-1);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __syncwarp();  // else the compiler makes both keys at once, for which registers are short
      KeyWords x;
      make_key(code[half], slot + 8 * half, x);
      if (p.cache.rope.lo) turn_low(position[half], x);
      if (!together) turn_high(position[half] / delta::kRopeBlock, x);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint2 q = s.q[warp_id()][n][lane_id()];
        const uint32_t a[4] = {q.x, 0, q.y, 0};
        mma_f16_16816(logit[half], a, x[n]);
      }
    }
  }

  // ---- weights ----

  __device__ __forceinline__ void to_logits(int step, float (&logit)[2][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 add = *reinterpret_cast<const float2*>(s.add + step * kStep + half * 8 + lane_id() % 4 * 2);
      to_logit(logit[half], [&](int e) { return e % 2 ? add.y : add.x; });
    }
  }
  __device__ __forceinline__ void mask(int32_t pos, float (&logit)[2][2]) const {
    const int2 reach = s.reach[lane_id() / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t at = pos + i / 2 * 8 + lane_id() % 4 * 2 + i % 2;
      if (at < reach.x || at >= reach.y) logit[i / 2][i % 2] = kNone;
    }
  }
  // What the lanes of row 2c + r hold, c being this lane's.
  __device__ __forceinline__ static float of_column(float x, int r) {
    return __shfl_sync(kFullWarp, x, (lane_id() % 4 * 2 + r) * 4);
  }
  // Rows whose maximum has outgrown their reference take it for the new one.
  __device__ __forceinline__ void follow(const float (&logit)[2][2]) {
    float top = fmaxf(fmaxf(logit[0][0], logit[0][1]), fmaxf(logit[1][0], logit[1][1]));
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
    const bool grown = top > limit, fresh = __all_sync(kFullWarp, !grown || limit == kNone);
    const float keep = !grown ? 1.0f : limit == kNone ? 0.0f : ex2(base - top);
    if (grown) base = top, limit = top + kSlack;
    if (fresh) return;  // there is nothing yet
    sum *= keep;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = of_column(keep, r);
      rounded[r] *= factor, rounded[r + 2] *= factor;
#pragma unroll
      for (int n = 0; n < N; ++n) out[n][r] *= factor, out[n][r + 2] *= factor;
    }
    const float mine = __shfl_sync(kFullWarp, keep, lane_id() % 8 * 4);
    __syncwarp();
    for (int i = lane_id(); i < p.cache.v.templates.n * 8; i += 32)
      atomicExch(mass + i, __float2uint_rn(mul_rn(static_cast<float>(atomicAdd(mass + i, 0u)), mine)));
    __syncwarp();
  }

  // Dot products become weights times value scales, each pair of tokens a word.
  __device__ __forceinline__ void weigh(int split, int step, float (&logit)[2][2], uint32_t (&weight)[2]) {
    to_logits(step, logit);
    const int32_t pos = split * kSplit + step * kStep;
    if (is_ragged(p, tile, pos)) mask(pos, logit);
    const float top = fmaxf(fmaxf(logit[0][0], logit[0][1]), fmaxf(logit[1][0], logit[1][1]));
    if (__any_sync(kFullWarp, top > limit)) follow(logit);
    const float inverse = __uint_as_float(0x7f000000u - __float_as_uint(scale));  // of a power of two
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = step * kStep + half * 8 + lane_id() % 4 * 2;
      const float2 scales = *reinterpret_cast<const float2*>(s.v_scale + slot);
      const ushort2 id = *reinterpret_cast<const ushort2*>(s.v_id + slot);
      const float first = ex2(logit[half][0] - base), second = ex2(logit[half][1] - base);
      sum = add_rn(sum, add_rn(first, second));
      weight[half] = pack_f16x2(first * (scales.x * inverse), second * (scales.y * inverse));
      atomicAdd(mass + id.x * 8 + lane_id() / 4, __float2uint_rn(mul_rn(first, kMassUnit)));
      atomicAdd(mass + id.y * 8 + lane_id() / 4, __float2uint_rn(mul_rn(second, kMassUnit)));
    }
  }

  // ---- values ----

  __device__ __forceinline__ void load_values(int step, Values& v) const {
    const uint32_t* at = s.v_at + step * kStep + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.load(i, v_base + static_cast<uint64_t>(at[i / 2 * 8 + i % 2]) * 16, lane_id() / 4);
  }
  __device__ __forceinline__ void add_values(const Values& v, const uint32_t (&weight)[2]) {
    uint32_t even[N], odd[N];
    v.levels(lane_id() / 4, even, odd);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint32_t a[4] = {widen_levels(even[n], 0), widen_levels(odd[n], 0), widen_levels(even[n], 1),
                             widen_levels(odd[n], 1)};
      mma_f16_16816(out[n], a, weight);
    }
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    mma_f16_16816(rounded, ones, weight);
  }

  // Steps kBlockSteps * warp and the next of the split.
  __device__ __forceinline__ void walk(int split) {
    const int steps = (min(tile.slots - split * kSplit, kSplit) + kStep - 1) / kStep;
    const int begin = warp_id() * kBlockSteps, end = min(begin + kBlockSteps, steps);
    clear();
    if (begin >= end) return;
    Key k[2];
    load_keys(begin, k);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      Values v;
      load_values(step, v);
      float dots[2][4] = {};
      dot(step, k, dots);
      if (step + 1 < end) load_keys(step + 1, k);
      float logit[2][2] = {{dots[0][0], dots[0][1]}, {dots[1][0], dots[1][1]}};
      uint32_t weight[2];
      weigh(split, step, logit, weight);
      add_values(v, weight);
    }
    __syncwarp();
  }

  // Largest logits, sums of weights, and sums of channels in the rotated space.
  __device__ __forceinline__ void store() {
    const int g = lane_id() / 4, c = lane_id() % 4;
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (c == 0) s.state[warp_id()][g] = make_float2(limit == kNone ? kNone : base, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < N; ++n)
        *reinterpret_cast<float2*>(&s.sums[warp_id()][2 * c + r][16 * n + 2 * g]) =
            make_float2((out[n][r] - 1152 * rounded[r]) * scale, (out[n][r + 2] - 1152 * rounded[r]) * scale);
  }
};

// ---- the block ----

__device__ __forceinline__ void stage_coded_queries(const DeltaAttentionParams& p, const Tile& tile, CodesShared& s) {
  const int threads = kAttentionWarps * 32, tid = static_cast<int>(threadIdx.x);
  for (int i = tid; i < kCodedGroups * 32; i += threads) {
    const int lane = i % 32, n = i / 32, r = lane / 4;
    float x[4] = {};
    if (r < tile.rows) {
      const RowPlace row = tile.row(p, r);
      const char* q = p.q.at(tile.b, row.t, row.head);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = load_float(p.type, q, 16 * n + lane % 4 * 4 + e);
    }
    s.q_plain[n][lane] = make_uint2(pack_f16x2(x[0], x[1]), pack_f16x2(x[2], x[3]));
  }
  for (int r = tid; r < 8; r += threads) s.reach[r] = row_reach(p, tile, r);
  if (!p.cache.rope.lo) return;
  // A row: cosines, sines; those of lane c of four together.
  for (int i = tid; i < delta::kRopeBlock * 16; i += threads) {
    const int row = i / 16, piece = i % 16, c = piece % 8 / 2, n = piece % 2 * 2;
    const float* from = p.cache.rope.lo + (row * 2 + piece / 8) * p.cache.rope.half + 16 * n + 4 * c;
    s.low[row][piece] = make_uint4(pack_f16x2(from[0], from[1]), pack_f16x2(from[2], from[3]),
                                   pack_f16x2(from[16], from[17]), pack_f16x2(from[18], from[19]));
  }
}

__device__ __forceinline__ void stage_codes(const DeltaAttentionParams& p, const Tile& tile, int split,
                                            CodesShared& s) {
  const int64_t tail = p.tail.start.data ? p.tail.start[tile.b] : int64_t{0x7fffffff};
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kSplit; i += kAttentionWarps * 32) {
    const Slot slot = find_slot(p, tile, split * kSplit + i);
    const bool newest = slot.pos >= tail;
    const int64_t id = newest ? 0 : slot.place.page_id, offset = newest ? 0 : slot.place.offset;
    delta::Tag tag = load_tag(p.cache.pages.tags.at(id, tile.h, offset));
    bool raw = newest;
    if (tag.k_scale == delta::kRawScale) {
      raw = raw || load_entry(p.cache.pages.k_codes.at(id, tile.h, offset), p.cache.pages.entries) >= 0;
      tag = {};
    }
    s.k_at[i] = static_cast<uint32_t>((id * p.cache.k.codes.stride[0] + offset * p.cache.k.codes.stride[2]) / 16);
    s.v_at[i] = static_cast<uint32_t>((id * p.cache.v.codes.stride[0] + offset * p.cache.v.codes.stride[2]) / 16);
    s.add[i] = raw ? kNone : slot.add;
    s.raw_add[i] = slot.add;
    s.k_scale[i] =
        to_float(f16_t{tag.k_scale}) * (p.cache.rotation.log ? power_of_two_norm(p.cache.rotation.log) : 1.0f);
    s.v_scale[i] = to_float(f16_t{tag.v_scale});
    s.k_id[i] = tag.k_id;
    s.v_id[i] = static_cast<uint16_t>(p.cache.v.templates.known(tag.v_id));
    s.pos[i] = slot.pos;
    s.position[i] = newest ? 0 : static_cast<int32_t>(p.cache.position(tile.b, slot.pos));
    const uint32_t votes = __ballot_sync(kFullWarp, raw && slot.add != kNone);
    if (lane_id() == 0) s.raw[i / 32] = votes;
  }
}

// The parts of a split joined in s.sums[0]: rotated back, raw rows added. A row of lanes takes a row.
__device__ __forceinline__ void join_parts(CodesShared& s) {
  const SketchRow<1, true> row(kCodedDim, kCodedDim / kGroup);
  const int r = warp_id() * 2 + lane_id() / row.lanes;
  float top = kNone;
#pragma unroll
  for (int w = 0; w < kCodedParts; ++w) top = fmaxf(top, s.state[w][r].x);
  float weight[kCodedParts], total = 0;
  float x[1][kGroup] = {}, raw[1][kGroup];
#pragma unroll
  for (int w = 0; w < kCodedParts; ++w) {
    const float2 part = s.state[w][r];
    weight[w] = part.x == kNone ? 0.0f : relative_weight(part.x, top);
    total = add_rn(total, mul_rn(part.y, weight[w]));
    float y[1][kGroup];
    get_row(row, s.sums[w][r], y);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      if (w < kAttentionWarps) x[0][c] = add_rn(x[0][c], mul_rn(y[0][c], weight[w]));
      raw[0][c] = mul_rn(y[0][c], weight[w]);
    }
  }
  flip_signs(row, x);
  row.rotate(x);
  flip_signs(row, x);
#pragma unroll
  for (int c = 0; c < kGroup; ++c) x[0][c] = add_rn(x[0][c], raw[0][c]);
  __syncwarp();
  put_row(row, x, s.sums[0][r]);
  if (row.lane == 0) {
    s.joined[0][r] = make_float2(top, total);
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) s.weight[w][r] = weight[w];
  }
}

// s.sums[0] += weights of templates times templates. A warp takes two channel groups.
__device__ __forceinline__ void add_templates(const DeltaAttentionParams& p, const Tile& tile, const uint32_t* masses,
                                              CodesShared& s) {
  const int g = lane_id() / 4, c = lane_id() % 4, n = p.cache.v.templates.n, first = warp_id() * 2;
  const uint32_t* centres = reinterpret_cast<const uint32_t*>(p.cache.v.templates.centre(tile.h, 0)) + g;
  float sum[2][4] = {};
  for (int from = 0; from < n; from += 16) {
    float mass[4];
    int id[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = from + i / 2 * 8 + c * 2 + i % 2;
      id[i] = min(at, n - 1), mass[i] = 0;
#pragma unroll
      for (int w = 0; w < kAttentionWarps; ++w)
        if (at < n) mass[i] += static_cast<float>(masses[(w * n + at) * 8 + g]) * (s.weight[w][g] / kMassUnit);
    }
    // As two halves: what rounding leaves of the first.
    const uint32_t high[2] = {pack_f16x2(mass[0], mass[1]), pack_f16x2(mass[2], mass[3])};
    uint32_t low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 taken = unpack_f16x2(high[i]);
      low[i] = pack_f16x2(mass[2 * i] - taken.x, mass[2 * i + 1] - taken.y);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t word[4];  // channels 2 g and 2 g + 1 of the group
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = __ldg(centres + id[i] * (kCodedDim / 2) + (first + m) * 8);
      const uint32_t a[4] = {byte_perm(word[0], word[1], 0x5410), byte_perm(word[0], word[1], 0x7632),
                             byte_perm(word[2], word[3], 0x5410), byte_perm(word[2], word[3], 0x7632)};
      mma_f16_16816(sum[m], a, high);
      mma_f16_16816(sum[m], a, low);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2* at = reinterpret_cast<float2*>(&s.sums[0][2 * c + r][16 * (first + m) + 2 * g]);
      *at = make_float2(at->x + sum[m][r], at->y + sum[m][r + 2]);
    }
}

// Resident blocks that leave a thread the registers it needs.
constexpr int codes_blocks(int bits) { return bits == 4 ? 3 : 2; }

template <int kBits, bool kRotated>
__global__ void __launch_bounds__(kAttentionWarps * 32, codes_blocks(kBits))
    attention_codes(const __grid_constant__ DeltaAttentionParams p) {
  SIC_DYNAMIC_SHARED(CodesShared, shared);
  CodesShared& s = *shared;
  uint32_t* const masses = reinterpret_cast<uint32_t*>(shared + 1);
  bool live;
  const Tile tile = find_tile<8>(p, &live);
  if (!live) return;
  const WarpSums sums = {&s.joined[0][0], &s.sums[0][0][0], 8, kCodedStride, 0};  // of one part; the others are empty
  const RowTotals totals = {s.total_state, &s.total[0][0], kCodedDim};
  stage_coded_queries(p, tile, s);
  if (p.serial) clear_totals(8, totals);
  for (int i = static_cast<int>(threadIdx.x); i < 8 * kAttentionWarps; i += kAttentionWarps * 32)
    s.joined[i / 8][i % 8] = make_float2(kNone, 0.0f);
  CodesWarp<kBits, kRotated> warp(p, tile, s, masses + warp_id() * p.cache.v.templates.n * 8);
  for (int split = tile.splits.begin; split < tile.splits.end; ++split) {
    stage_codes(p, tile, split, s);
    __syncthreads();
    warp.walk(split);
    __syncthreads();  // sums lie where the queries were
    warp.store();
    attend_raw_rows(p, tile, split, s);
    __syncthreads();
    join_parts(s);
    __syncthreads();
    add_templates(p, tile, masses, s);
    __syncthreads();
    add_split(p, tile, split, 0, tile.rows, sums, totals);
    __syncthreads();
    if (p.serial) advance_totals(tile, sums, totals);
  }
  __syncthreads();
  if (p.serial) write_totals(p, tile, totals);
}

}  // namespace sic::gpu
