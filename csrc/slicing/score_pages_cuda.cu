// score_pages on the GPU: q.centre + beta * sum |q_i| radius_i for every page, joined over the group.
//
// Floor: the summaries read once, 2 * D * itemsize bytes for each page and head (512 B at D = 128 in bf16); scores are
// 4 bytes a head. Two launches: the first scores up to 16 rows (a query token and a head of the group) with one reading
// of the summaries and leaves, for every row and 64 pages, the largest score and the sum of exponentials; the second
// joins the heads, which needs those of the whole row. Sums go by fixed spans of 64 pages, so a row's result depends on
// that row alone.
#include <algorithm>

#include "slicing/device_views.cuh"
#include "slicing/row_groups.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSpan = 64;          // pages whose scores a block makes at once
constexpr int kMostRows = 16;      // rows scored with one reading
constexpr int64_t kMaxParts = 64;  // blocks of a (sequence, head, tile of rows); each strides over the spans
constexpr int64_t kMaxQueryBytes = 48 * 1024;

struct SpanStats {
  float top, sum;  // sum of exp(score - top)
};

struct Params {
  Rows3 q, summary, out;
  PageMap pages;
  SeqLens seq_lens;
  DType q_type;
  float scale, beta;
  int64_t T, heads, group, M, max_seq_len, spans;
  int D, lanes, row_tiles, parts;
  bool wide_summary, softmax;
  float* scores;     // [B,T,Hkv,G,M]
  SpanStats* stats;  // [B,T,Hkv,G,spans]

  __device__ __forceinline__ int64_t visible_pages(int64_t b, int64_t t) const {
    const int64_t n = seq_lens.visible(b, T, t, max_seq_len);
    return n > 0 ? static_cast<int64_t>(pages.split.index(static_cast<uint32_t>(n - 1))) + 1 : 0;
  }
  // Row g of (b, t, h).
  __device__ __forceinline__ int64_t row(int64_t b, int64_t t, int64_t h, int64_t g) const {
    return ((b * T + t) * heads + h) * group + g;
  }
};

// ---- scores ----

__device__ __forceinline__ float load_float(DType type, const char* p, int64_t i) {
  if (type == DType::f32) return reinterpret_cast<const float*>(p)[i];
  if (type == DType::f16) return to_float(reinterpret_cast<const f16_t*>(p)[i]);
  return to_float(reinterpret_cast<const bf16_t*>(p)[i]);
}

// What the rows of a tile have in common.
template <int kRows>
struct Tile {
  int64_t b, h, first_row;  // row: t * G + g
  int rows;

  __device__ __forceinline__ Tile(const Params& p, int64_t block) {
    const int64_t tile = block % p.row_tiles, all = p.T * p.group;
    h = block / p.row_tiles % p.heads, b = block / p.row_tiles / p.heads;
    first_row = tile * kRows;
    rows = static_cast<int>(all - first_row < kRows ? all - first_row : kRows);
  }
  __device__ __forceinline__ int64_t t(const Params& p, int row) const { return (first_row + row) / p.group; }
  __device__ __forceinline__ int64_t g(const Params& p, int row) const { return (first_row + row) % p.group; }
};

// The tile's queries times the scale, zeros beyond its rows and beyond D.
template <int kRows>
__device__ __forceinline__ void load_queries(const Params& p, const Tile<kRows>& tile, int padded, float* q) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * padded; i += kThreads) {
    const int row = i / padded, d = i % padded;
    float x = 0;
    if (row < tile.rows && d < p.D)
      x = load_float(p.q_type, p.q.at(tile.b, tile.t(p, row), tile.h * p.group + tile.g(p, row)), d) * p.scale;
    q[i] = x;
  }
}

// Each lane passes half of its n values on to lane ^ g and adds the half that it keeps; then a quarter, and so on.
template <int n, int kRows>
__device__ __forceinline__ void exchange_halves(float (&v)[kRows], int g, int lane) {
  if constexpr (n > 1) {
    const bool upper = lane & g;
#pragma unroll
    for (int r = 0; r < n / 2; ++r) {
      const float low = v[r], high = v[r + n / 2];
      v[r] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, g);
    }
    exchange_halves<n / 2>(v, g / 2, lane);
  }
}

// The sums over a row of lanes of kRows values each. With 16 lanes or more, v[0] is the sum of row r on the first lane
// of the r-th part of the row of lanes (r is returned there, kRows elsewhere); otherwise every lane has all of them
// (-1).
template <int kRows>
__device__ __forceinline__ int reduce_rows(float (&v)[kRows], int lanes, int lane) {
  if (lanes < kMostRows) {
    for (int g = lanes / 2; g > 0; g /= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) v[r] += __shfl_xor_sync(kFullWarp, v[r], g);
    }
    return -1;
  }
  exchange_halves<kRows>(v, lanes / 2, lane);
  const int each = lanes / kRows;  // lanes that share a row
  for (int g = each / 2; g > 0; g /= 2) v[0] += __shfl_xor_sync(kFullWarp, v[0], g);
  return lane & (each - 1) ? kRows : lane / each;
}

// Scores of kPages pages (those of the warp's row of lanes) against all rows: v[page][row], partial sums of this lane.
template <class S, int kRows, int kPages>
__device__ __forceinline__ void score_pages_of_lane(const Params& p, const Tile<kRows>& tile, const float* q,
                                                    int padded, const int64_t (&ids)[kPages], int lane,
                                                    float (&v)[kPages][kRows]) {
#pragma unroll
  for (int u = 0; u < kPages; ++u)
#pragma unroll
    for (int r = 0; r < kRows; ++r) v[u][r] = 0;
  for (int j = lane; j * kGroup < p.D; j += p.lanes) {
    const int n = group_size(p.D, j);
    Group<S> centre[kPages], radius[kPages];
#pragma unroll
    for (int u = 0; u < kPages; ++u) {
      const int size = ids[u] < 0 ? 0 : n;
      centre[u] = load_group(p.summary.as<const S>(ids[u], tile.h, 0) + j * kGroup, size, p.wide_summary);
      radius[u] = load_group(p.summary.as<const S>(ids[u], tile.h, 1) + j * kGroup, size, p.wide_summary);
    }
#pragma unroll
    for (int half = 0; half < kGroup; half += 4) {
      float c[kPages][4], reach[kPages][4];
#pragma unroll
      for (int u = 0; u < kPages; ++u)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          c[u][i] = to_float(centre[u].element(half + i));
          reach[u][i] = to_float(radius[u].element(half + i)) * p.beta;
        }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(q + r * padded + j * kGroup + half);
        const float xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int u = 0; u < kPages; ++u)
#pragma unroll
          for (int i = 0; i < 4; ++i) v[u][r] = fmaf(xs[i], c[u][i], fmaf(fabsf(xs[i]), reach[u][i], v[u][r]));
      }
    }
  }
}

// The span's scores of one row: to memory, and what the join needs of them. One warp.
__device__ __forceinline__ void finish_row(const Params& p, int64_t row, int64_t span, int64_t visible,
                                           const float* scores) {
  float s[kSpan / 32], top = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < kSpan / 32; ++i) {
    const int64_t m = span * kSpan + 32 * i + lane_id();
    s[i] = m < visible ? scores[32 * i + lane_id()] : -INFINITY;
    if (m < visible) p.scores[row * p.M + m] = s[i];
    top = larger(top, s[i]);
  }
  top = warp_reduce(top, Larger{});
  if (p.softmax && top != -INFINITY) {
#pragma unroll
    for (int i = 0; i < kSpan / 32; ++i) sum += expf(s[i] - top);
    sum = warp_reduce_add(sum);
  }
  if (lane_id() == 0) p.stats[row * p.spans + span] = {top, sum};
}

template <class S, int kRows>
__global__ void __launch_bounds__(kThreads, 2) score_pages_kernel(const __grid_constant__ Params p) {
  constexpr int kPages = kRows > 8 ? 1 : 2;  // of a row of lanes at once
  __shared__ float scores[kRows][kSpan];
  SIC_DYNAMIC_SHARED(float, q);
  const Tile<kRows> tile(p, blockIdx.x / p.parts);
  const int padded = (p.D + kGroup - 1) / kGroup * kGroup;
  const int lane = lane_id() & (p.lanes - 1), per_warp = 32 / p.lanes;
  // Later query tokens see more.
  const int64_t visible = p.visible_pages(tile.b, tile.t(p, tile.rows - 1));
  int64_t span = blockIdx.x % p.parts;
  if (span * kSpan >= visible) return;
  load_queries(p, tile, padded, q);
  __syncthreads();
  for (; span * kSpan < visible; span += p.parts) {
    for (int first = warp_id() * per_warp * kPages; first < kSpan; first += kWarps * per_warp * kPages) {
      int64_t ids[kPages];
      int at[kPages];
#pragma unroll
      for (int u = 0; u < kPages; ++u) {
        at[u] = first + lane_id() / p.lanes + u * per_warp;
        const int64_t m = span * kSpan + at[u];
        ids[u] = m < visible && at[u] < kSpan ? p.pages.id(tile.b, static_cast<uint32_t>(m)) : -1;
      }
      float v[kPages][kRows];
      score_pages_of_lane<S, kRows, kPages>(p, tile, q, padded, ids, lane, v);
#pragma unroll
      for (int u = 0; u < kPages; ++u) {
        const int row = reduce_rows(v[u], p.lanes, lane);
        if (ids[u] < 0) continue;
        if (row >= 0 && row < kRows) scores[row][at[u]] = v[u][0];
        if (row < 0 && lane == 0) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) scores[r][at[u]] = v[u][r];
        }
      }
    }
    __syncthreads();
    for (int r = warp_id(); r < tile.rows; r += kWarps) {
      const int64_t t = tile.t(p, r);
      finish_row(p, p.row(tile.b, t, tile.h, tile.g(p, r)), span, p.visible_pages(tile.b, t), scores[r]);
    }
    __syncthreads();
  }
}

// ---- the join ----

// What is taken off each head's scores: its maximum, and for a softmax the log of its sum. One warp a head.
__device__ __forceinline__ float head_offset(const Params& p, int64_t row, int64_t visible) {
  const SpanStats* stats = p.stats + row * p.spans;
  const int64_t spans = (visible + kSpan - 1) / kSpan;
  float top = -INFINITY, sum = 0;
  for (int64_t i = lane_id(); i < spans; i += 32) top = larger(top, stats[i].top);
  top = warp_reduce(top, Larger{});
  if (!p.softmax || top == -INFINITY) return top;
  for (int64_t i = lane_id(); i < spans; i += 32) sum += stats[i].sum * expf(stats[i].top - top);
  return top + logf(warp_reduce_add(sum));
}

__global__ void __launch_bounds__(kThreads) join_pages_kernel(const __grid_constant__ Params p, int parts) {
  SIC_DYNAMIC_SHARED(float, offsets);  // [G]
  const int64_t list = blockIdx.x / parts, m = static_cast<int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x;
  const int64_t h = list % p.heads, t = list / p.heads % p.T, b = list / p.heads / p.T;
  const int64_t visible = p.visible_pages(b, t), row = p.row(b, t, h, 0);
  for (int64_t g = warp_id(); g < p.group; g += kWarps) {
    const float offset = head_offset(p, row + g, visible);
    if (lane_id() == 0) offsets[g] = offset;
  }
  __syncthreads();
  if (m >= p.M) return;
  float top = -INFINITY;
  if (m < visible) {
    const float* scores = p.scores + row * p.M + m;
    for (int64_t g = 0; g < p.group; ++g) top = larger(top, scores[g * p.M] - offsets[g]);
    if (p.softmax && top != -INFINITY) {
      float sum = 0;
      for (int64_t g = 0; g < p.group; ++g) sum += expf(scores[g * p.M] - offsets[g] - top);
      top += logf(sum);
    }
  }
  p.out.as<float>(b, t, h)[m] = top;
}

// ---- host side ----

struct Sizes {
  int64_t B, T, Hq, M, spans;

  explicit Sizes(const slicing::ScorePagesArgs& a)
      : B(a.q.shape[0]),
        T(a.q.shape[1]),
        Hq(a.q.shape[2]),
        M(slicing::ceil_div(a.max_seq_len, a.page)),
        spans(slicing::ceil_div(M, kSpan)) {}
  int64_t score_bytes() const { return (B * T * Hq * M * 4 + 255) / 256 * 256; }
  int64_t stats_bytes() const { return B * T * Hq * spans * static_cast<int64_t>(sizeof(SpanStats)); }
};

Params make_params(const slicing::ScorePagesArgs& a, const Exec& exec) {
  const Sizes s(a);
  Params p;
  p.q = Rows3::of(a.q), p.summary = Rows3::of(a.summary), p.out = Rows3::of(a.out);
  p.pages = PageMap::of(a.block_table, a.page);
  p.seq_lens = SeqLens::of(a.seq_lens);
  p.q_type = a.q.dtype;
  p.scale = a.scale, p.beta = a.beta;
  p.T = s.T, p.heads = a.summary.shape[1], p.group = s.Hq / p.heads, p.M = s.M, p.max_seq_len = a.max_seq_len;
  p.spans = s.spans;
  p.D = static_cast<int>(a.q.shape[3]), p.lanes = lanes_per_row(p.D);
  p.wide_summary = groups_aligned(a.summary), p.softmax = a.pool == slicing::Pool::softmax;
  p.scores = exec.workspace.as<float>();
  p.stats = reinterpret_cast<SpanStats*>(exec.workspace.as<char>() + s.score_bytes());
  p.parts = static_cast<int>(std::clamp<int64_t>(s.spans, 1, kMaxParts));
  return p;
}

template <class S, int kRows>
void launch_scores(Params p, int64_t B, void* stream) {
  p.row_tiles = static_cast<int>(slicing::ceil_div(p.T * p.group, kRows));
  const size_t query_bytes = sizeof(float) * kRows * ((p.D + kGroup - 1) / kGroup * kGroup);
  launch(score_pages_kernel<S, kRows>, dim3(grid_blocks(B * p.heads * p.row_tiles * p.parts)), dim3(kThreads),
         query_bytes, stream, p);
}

// As many rows with one reading as there are, and as the shared memory of every device holds.
template <class S>
void launch_scores(const Params& p, int64_t B, void* stream) {
  const int64_t most = std::min(p.T * p.group, kMaxQueryBytes / (4 * (p.D + kGroup)));
  if (most > 8) return launch_scores<S, 16>(p, B, stream);
  if (most > 4) return launch_scores<S, 8>(p, B, stream);
  if (most > 2) return launch_scores<S, 4>(p, B, stream);
  if (most > 1) return launch_scores<S, 2>(p, B, stream);
  launch_scores<S, 1>(p, B, stream);
}

}  // namespace

int64_t score_pages_workspace(const slicing::ScorePagesArgs& a) {
  const Sizes s(a);
  return s.score_bytes() + s.stats_bytes();
}

void score_pages(const slicing::ScorePagesArgs& a, const Exec& exec) {
  const Params p = make_params(a, exec);
  const int64_t B = a.q.shape[0];
  with_float_type(a.summary.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>) launch_scores<decltype(type)>(p, B, exec.stream);
  });
  const int64_t parts = slicing::ceil_div(p.M, kThreads);
  launch(join_pages_kernel, dim3(grid_blocks(B * p.T * p.heads * parts)), dim3(kThreads),
         sizeof(float) * static_cast<size_t>(p.group), exec.stream, p, static_cast<int>(parts));
}

}  // namespace sic::gpu
