// The scan on tensor cores: mma.m16n8k32 on signed bytes, A the bits of 16 tokens, B the integer queries of 8 columns.
//
// A warp takes 32 tokens, two blocks of 16, at a time. A plane's row of 16 bytes holds 8 channels of 16 tokens. Lane
// (n, c) = (lane / 4, lane % 4) reads a word, 4 tokens 4n..4n+3, of each of R rows R c..R c + R - 1, and transposes:
// word u then holds 8 R channels of token 4n + u, as they are needed for row n of a fragment, bit by bit. The bits stay
// where they are, worth 1, 2 or 4: the queries, within +-31, are stored worth 4, 2 or 1, and sums are 4 times too
// large. Channels go 128 at a time (R = 4), then 64 (R = 2), then 32 (R = 1), so that no product is wasted.
//
// Floor at D = 128, both planes, 4 heads: 34 bytes a token and KV head read and 16 written for the scores, 2.3 clk per
// SM for those from memory and 3.4 together (H100). A step is some 330 instructions a warp, 2.6 clk a token: 80 of them
// take bits apart, 16 are products. Copies run three steps ahead (1088 bytes a warp each), so that more than 32 KB an
// SM are under way.
#include <algorithm>

#include "slicing/scan_queries_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kStep = 32;   // tokens of a warp's step
constexpr int kStages = 4;  // of a warp's ring
constexpr int kMaxWarps = 8;
constexpr int64_t kTargetBlocks = 4 * 132, kMaxChunk = 4096;

// Of 8 columns a lane of a fragment holds two; of 4, half of the lanes would hold none, and take over tokens instead.
enum Columns { kFour, kEight, kSixteen };

struct MmaParams {
  ScanTask a;
  ScanQueries queries;
  HeadScores scores;
  int32_t chunk;  // tokens
  int32_t chunks, groups;
};

// Row of a plane block that 16-byte piece q of a staged plane holds. Pieces (i, block, c) of 128 channels: row 4 c + i.
__device__ __forceinline__ int row_of_piece(int q, int D) {
  const int whole = D / 128 * 32;
  if (q < whole) return q / 32 * 16 + 4 * (q & 3) + (q >> 3 & 3);
  q -= whole;
  int row = D / 128 * 16;
  if (D & 64) {
    if (q < 16) return row + 2 * (q & 3) + (q >> 3);
    row += 8;
  }
  return row + (q & 3);
}

// Stages 32 tokens: planes as pieces of 16 bytes, then the norms. A lane copies for one of the two blocks only.
template <int kD, bool kBoth>
class Stager {
 public:
  __device__ Stager(const ScanTask& a, int64_t b, int64_t h, int32_t end)
      : a_(a),
        b_(b),
        end_(end),
        half_(lane_id() >> 2 & 1),
        bits_(a.sketch.page_bits(0, h)),
        norm_(reinterpret_cast<const char*>(a.sketch.page_norm(0, h)) + 16 * (lane_id() & 1)) {}

  __device__ __forceinline__ static int bytes(int D) { return (kBoth ? 8 : 4) * D + 64; }

  // The page of this lane's block, asked for one step before it is needed.
  __device__ __forceinline__ void look_up(int32_t pos) {
    pos += half_ * slicing::kTokenBlock;
    valid_ = pos < end_;
    if (!valid_) return;
    const Place place = a_.pages.place(b_, static_cast<uint32_t>(pos));
    page_ = static_cast<uint32_t>(place.page_id), offset_ = place.offset;
  }

  __device__ __forceinline__ void copy(char* stage) const {
    const int D = kD ? kD : a_.D, lane = lane_id(), pieces = D / 4;
    const uint8_t* bits = bits_ + (page_ * a_.sketch.bits_stride[0] + offset_ * static_cast<uint32_t>(D / 8));
    const int64_t plane = int64_t{a_.pages.split.page} * (D / 8);
#pragma unroll
    for (int q = lane; q < (kBoth ? 2 : 1) * pieces; q += 32) {
      const bool second = q >= pieces;
      cp_async16(stage + 16 * q, bits + (second ? plane : 0) + 16 * row_of_piece(second ? q - pieces : q, D), valid_);
    }
    if (lane < 8 && (lane & 3) < 2)
      cp_async16(stage + bytes(D) - 64 + 32 * half_ + 16 * (lane & 1),
                 norm_ + 2 * (page_ * a_.sketch.norm_stride[0] + offset_), valid_);
  }

 private:
  const ScanTask& a_;
  int64_t b_;
  int32_t end_;
  int half_;
  const uint8_t* bits_;  // of the head, on page 0
  const char* norm_;
  bool valid_ = false;
  uint32_t page_ = 0, offset_ = 0;  // fewer than 2^32 pages: each holds a sequence's position, and those are below 2^31
};

// Rows to columns: byte i of x[u] is byte u of w[i].
__device__ __forceinline__ void transpose_bytes(const uint32_t (&w)[4], uint32_t (&x)[4]) {
  const uint32_t a = byte_perm(w[0], w[1], 0x5140), b = byte_perm(w[2], w[3], 0x5140);
  const uint32_t c = byte_perm(w[0], w[1], 0x7362), d = byte_perm(w[2], w[3], 0x7362);
  x[0] = byte_perm(a, b, 0x5410), x[1] = byte_perm(a, b, 0x7632);
  x[2] = byte_perm(c, d, 0x5410), x[3] = byte_perm(c, d, 0x7632);
}

// Channels of 4 tokens from R rows of a staged plane; `piece` is this lane's word of row 0.
template <int R>
__device__ __forceinline__ void load_tokens(const uint32_t* piece, uint32_t (&x)[4]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = i < R ? piece[32 * i] : w[i % R] >> 2 * R * (i / R);
  transpose_bytes(w, x);
}

// Bit `kBit` of the four bytes, worth 1 << kBit % 3.
template <int kBit>
__device__ __forceinline__ uint32_t bit_of_bytes(uint32_t x) {
  return x >> kBit / 3 * 3 & 0x01010101u << kBit % 3;
}

template <int kTiles>
struct Sums {
  int v[kTiles][2][4];  // of tokens 4n + {0, 1} and {2, 3}
};

// The products of k-step S of a piece.
template <int S, int kTiles>
__device__ __forceinline__ void add_step(const uint32_t (&x)[4], const uint2 (&query)[kTiles], Sums<kTiles>& sums) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32_t tokens[4] = {bit_of_bytes<2 * S>(x[2 * m]), bit_of_bytes<2 * S>(x[2 * m + 1]),
                                bit_of_bytes<2 * S + 1>(x[2 * m]), bit_of_bytes<2 * S + 1>(x[2 * m + 1])};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint32_t b[2] = {query[i].x, query[i].y};
      mma_s8_16832(sums.v[i][m], tokens, b);
    }
  }
}

// B operands: in registers where they are few, else in shared memory, [tile][step][lane].
template <int kSteps, int kTiles>
struct Fragments {
  uint2 held[kTiles][kSteps > 0 ? kSteps : 1];
  const uint2* shared;
  int steps;

  __device__ __forceinline__ Fragments(const uint2* shared_, int steps_) : shared(shared_ + lane_id()), steps(steps_) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) held[i][s] = shared[(i * steps + s) * 32];
  }
  __device__ __forceinline__ void get(int step, uint2 (&query)[kTiles]) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) query[i] = kSteps > 0 ? held[i][step] : shared[(i * steps + step) * 32];
  }
};

// Both planes of one piece of 32 R channels; first_step: its first k-step.
template <int R, bool kBoth, int kTiles, class Queries>
__device__ __forceinline__ void add_piece(const uint32_t* piece, int plane_words, const Queries& queries,
                                          int first_step, Sums<kTiles> (&sums)[kBoth ? 2 : 1]) {
  uint32_t x[kBoth ? 2 : 1][4];
#pragma unroll
  for (int p = 0; p < (kBoth ? 2 : 1); ++p) load_tokens<R>(piece + p * plane_words, x[p]);
  const auto step = [&](auto s) {
    constexpr int S = decltype(s)::value;
    if constexpr (S < R) {
      uint2 query[kTiles];
      queries.get(first_step + S, query);
#pragma unroll
      for (int p = 0; p < (kBoth ? 2 : 1); ++p) add_step<S>(x[p], query, sums[p]);
    }
  };
  step(std::integral_constant<int, 0>{});
  step(std::integral_constant<int, 1>{});
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 3>{});
}

template <int kD, bool kBoth, int kTiles, class Queries>
__device__ __forceinline__ void add_planes(const uint32_t* stage, int D, const Queries& queries,
                                           Sums<kTiles> (&sums)[kBoth ? 2 : 1]) {
  const int n = lane_id() >> 2, c = lane_id() & 3;
  const uint32_t* piece = stage + 16 * (n >> 2) + 4 * c + (n & 3);
  int step = 0;
  if constexpr (kD == 128) {
    add_piece<4, kBoth>(piece, D, queries, 0, sums);
  } else if constexpr (kD == 64) {
    add_piece<2, kBoth>(piece, D, queries, 0, sums);
  } else {
    for (; step + 4 <= D / 32; step += 4, piece += 128) add_piece<4, kBoth>(piece, D, queries, step, sums);
    if (D & 64) add_piece<2, kBoth>(piece, D, queries, step, sums), step += 2, piece += 64;
    if (D & 32) add_piece<1, kBoth>(piece, D, queries, step, sums);
  }
}

// What a lane needs of one of its columns.
struct Column {
  int16_t* row = nullptr;  // in first; second is a constant distance away
  float first = 0, second = 0, top = -INFINITY;
  int init = 0;
  int32_t visible = -1;  // a column that only fills the tile

  __device__ __forceinline__ void set(const MmaParams& p, int64_t b, int64_t h, int64_t unit, int column) {
    const int64_t at = unit * p.queries.columns + column;
    const float2 f = p.queries.factors[at];
    first = f.x, second = f.y, init = kRoundingMagicBits - 2 * p.queries.sums[at];
    if (column >= p.a.columns()) return;
    const int t = column / p.a.G;
    const int64_t head_row = (b * p.a.T + t) * p.a.Hkv * p.a.G + h * p.a.G + column % p.a.G;
    visible = static_cast<int32_t>(p.a.seq_lens.visible(b, p.a.T, t, p.a.positions));
    row = p.scores.first + head_row * p.scores.stride;
  }
};

// Scores of kTokens consecutive tokens from pos on.
template <int kTokens, bool kBoth>
__device__ __forceinline__ void put_scores(Column& column, const int (&first)[kTokens], const int (&second)[kTokens],
                                           const float (&norm)[kTokens], int32_t pos, int64_t to_second) {
  uint32_t a[kTokens], b[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float dot = half_of_magic(first[i]), s = scaled_dot(dot, norm[i], column.first);
    column.top = pos + i < column.visible ? fmaxf(column.top, s) : column.top;
    a[i] = rounded_score(s);
    if (kBoth) b[i] = rounded_score(scaled_dot(fmaf(2.0f, dot, half_of_magic(second[i])), norm[i], column.second));
  }
  if (column.visible < 0) return;
  const auto store = [&](int16_t* to, const uint32_t (&v)[kTokens]) {
    if constexpr (kTokens == 2) {
      *reinterpret_cast<uint32_t*>(to) = byte_perm(v[0], v[1], 0x5410);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(byte_perm(v[0], v[1], 0x5410), byte_perm(v[2], v[3], 0x5410));
    }
  };
  store(column.row + pos, a);
  if (kBoth) store(column.row + pos + to_second, b);
}

template <int kTiles>
__device__ __forceinline__ void start_sums(const Column (&columns)[kTiles][2], Sums<kTiles>& sums) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.v[tile][i / 4][i % 4] = columns[tile][i & 1].init;
}

template <int kTokens>
__device__ __forceinline__ void load_norms(const char* from, float (&norm)[kTokens]) {
#pragma unroll
  for (int i = 0; i < kTokens; i += 2) {
    const float2 two = unpack_bf16x2(*reinterpret_cast<const uint32_t*>(from + 2 * i));
    norm[i] = two.x, norm[i + 1] = two.y;
  }
}

// The sums of the lane's column k for its tokens; with four columns, lanes c = 2 and 3 take over tokens 4n + {2, 3}.
template <Columns kColumns, int kTokens>
__device__ __forceinline__ void sums_of_column(const int (&tile)[2][4], int k, int (&v)[kTokens]) {
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if constexpr (kColumns == kFour) {
      const int other = __shfl_xor_sync(kFullWarp, tile[1][2 * i + k], 2);
      v[i] = lane_id() & 2 ? other : tile[0][2 * i + k];
    } else {
      v[i] = tile[i / 2][i % 2 * 2 + k];
    }
  }
}

template <Columns kColumns>
__device__ __forceinline__ void publish_top(const MmaParams& p, const Column& column) {
  constexpr int kHolders = kColumns == kFour ? 2 : 4;  // lanes that hold different columns
  float top = column.top;
#pragma unroll
  for (int s = kHolders; s < 32; s *= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, s));
  if (lane_id() < kHolders && top > -INFINITY)
    atomicMax(p.scores.top + (column.row - p.scores.first) / p.scores.stride, round_to_int(top));
}

template <int kD, Columns kColumns, bool kBoth>
__global__ void __launch_bounds__(32 * kMaxWarps, kColumns == kSixteen ? 2 : 3)
    scan_mma(const __grid_constant__ MmaParams p) {
  constexpr int kTiles = kColumns == kSixteen ? 2 : 1, kPlanes = kBoth ? 2 : 1;
  constexpr int kTokens = kColumns == kFour ? 2 : 4;  // of a lane, for each of its columns
  SIC_DYNAMIC_SHARED(char, shared);
  const ScanTask& a = p.a;
  const int D = kD ? kD : a.D, steps = D / 32, lane = lane_id(), n = lane >> 2;
  int64_t i = blockIdx.x;
  const int32_t begin = static_cast<int32_t>(i % p.chunks * p.chunk);
  i /= p.chunks;
  const int group = static_cast<int>(i % p.groups);
  const int64_t unit = i / p.groups, b = unit / a.Hkv, h = unit % a.Hkv;
  const int32_t visible = static_cast<int32_t>(a.seq_lens.visible(b, 1, 0, a.positions));
  if (begin >= visible) return;
  const int32_t end = visible - begin < p.chunk ? visible : begin + p.chunk;

  uint2* const query = reinterpret_cast<uint2*>(shared);
  const auto* from = reinterpret_cast<const uint2*>(p.queries.fragments) +
                     (unit * (p.queries.columns / 8) + group * kTiles) * steps * 32;
  for (int j = static_cast<int>(threadIdx.x); j < kTiles * steps * 32; j += static_cast<int>(blockDim.x))
    query[j] = from[j];
  const int stage_bytes = Stager<kD, kBoth>::bytes(D);
  char* const ring = shared + kTiles * steps * 256 + warp_id() * kStages * stage_bytes;

  // Step s of the warp: tokens from begin + s * stride on.
  const int32_t stride = block_warps() * kStep, start = begin + warp_id() * kStep;
  Stager<kD, kBoth> stager(a, b, h, end);
  int32_t ahead = start;
  stager.look_up(ahead);
  const auto copy_next = [&](uint32_t stage) {
    if (ahead < end) stager.copy(ring + stage * stage_bytes);
    cp_async_commit();
    ahead += stride;
    if (ahead < end) stager.look_up(ahead);
  };
#pragma unroll
  for (uint32_t s = 0; s < kStages - 1; ++s) copy_next(s);

  // Columns of the lane: two of each tile.
  const int pair = kColumns == kFour ? lane & 1 : lane & 3, token = kColumns == kFour ? 4 * n + (lane & 2) : 4 * n;
  Column columns[kTiles][2];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int k = 0; k < 2; ++k) columns[tile][k].set(p, b, h, unit, 8 * (group * kTiles + tile) + 2 * pair + k);
  const int64_t to_second = kBoth ? p.scores.second - p.scores.first : 0;
  __syncthreads();
  const Fragments<kTiles == 1 ? kD / 32 : 0, kTiles> queries(query, steps);

  uint32_t slot = 0;
  for (int32_t pos = start; pos < end; pos += stride) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // the others' copies too; and all are done with the slot that is filled next
    copy_next((slot + kStages - 1) % kStages);
    const char* const stage = ring + slot * stage_bytes;
    slot = (slot + 1) % kStages;
    Sums<kTiles> sums[kPlanes];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) start_sums(columns, sums[plane]);
    add_planes<kD, kBoth>(reinterpret_cast<const uint32_t*>(stage), D, queries, sums);
    float norm[kTokens];
    load_norms(stage + stage_bytes - 64 + 2 * token, norm);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        int v[2][kTokens] = {};
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) sums_of_column<kColumns>(sums[plane].v[tile], k, v[plane]);
        put_scores<kTokens, kBoth>(columns[tile][k], v[0], v[1], norm, pos + token, to_second);
      }
  }
  cp_async_wait<0>();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int k = 0; k < 2; ++k) publish_top<kColumns>(p, columns[tile][k]);
}

template <int kD, Columns kColumns, bool kBoth>
void launch_kernel(const MmaParams& p, void* stream) {
  const int64_t tiles = kColumns == kSixteen ? 2 : 1;
  const int64_t warp_bytes = kStages * ((kBoth ? 8 : 4) * int64_t{p.a.D} + 64);
  int64_t warps = kMaxWarps;
  while (warps > 1 && warps * warp_bytes > 40 * 1024) warps /= 2;
  launch(scan_mma<kD, kColumns, kBoth>, dim3(grid_blocks(p.a.units() * p.groups * p.chunks)),
         dim3(grid_blocks(32 * warps)), static_cast<size_t>(tiles * p.a.D * 8 + warps * warp_bytes), stream, p);
}

template <Columns kColumns, bool kBoth>
void launch_sized(const MmaParams& p, void* stream) {
  if (p.a.D == 128) return launch_kernel<128, kColumns, kBoth>(p, stream);
  if (p.a.D == 64) return launch_kernel<64, kColumns, kBoth>(p, stream);
  launch_kernel<0, kColumns, kBoth>(p, stream);
}

template <bool kBoth>
void launch_columns(const MmaParams& p, void* stream) {
  if (p.a.columns() <= 4) return launch_sized<kFour, kBoth>(p, stream);
  if (p.a.columns() <= 8) return launch_sized<kEight, kBoth>(p, stream);
  launch_sized<kSixteen, kBoth>(p, stream);
}

}  // namespace

void launch_scan_mma(const ScanTask& a, const ScanQueries& queries, const HeadScores& scores, void* stream) {
  MmaParams p{a, queries, scores, 0, 0, 0};
  constexpr int64_t kRound = kMaxWarps * kStep;
  p.groups = queries.columns <= 8 ? 1 : queries.columns / 16;
  const int64_t share = a.positions * a.units() * p.groups / kTargetBlocks;
  p.chunk = static_cast<int32_t>(std::clamp((share + kRound - 1) / kRound * kRound, 2 * kRound, kMaxChunk));
  p.chunks = static_cast<int32_t>(slicing::ceil_div(a.positions, p.chunk));
  scores.second ? launch_columns<true>(p, stream) : launch_columns<false>(p, stream);
}

}  // namespace sic::gpu
