// The scan of a sketch: preparation of the queries, and the paths for any layout. The tensor-core path is in
// scan_mma_cuda.cu.
#include <algorithm>

#include "slicing/scan_cuda.cuh"
#include "slicing/scan_queries_cuda.cuh"
#include "slicing/sketch_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kPrepareWarps = 4;
constexpr int kScanThreads = 256;

// ---- queries ----

// Where byte i of register `reg` of k-step `step` lies for bit `bit` of plane row j, and how far its query is shifted:
// the order in which scan_mma_cuda.cu meets the bits.
struct FragmentPlace {
  int step, lane, reg, byte, shift;

  __device__ FragmentPlace(int j, int bit, int D) {
    int rows = 4, base = D / 128 * 16;  // plane rows a lane holds: 4 in a piece of 128 channels, then 2, then 1
    step = j / 16 * 4;
    if (j < base) {
      j %= 16;
    } else {
      step = base / 4, j -= base;
      rows = D & 64 && j < 8 ? 2 : 1;
      if (D & 64 && j >= 8) step += 2, j -= 8;
    }
    const int part = bit % (2 * rows);  // the other bits of the byte serve other bytes of the register
    lane = j / rows, byte = j % rows + rows * (bit / (2 * rows));
    step += part / 2, reg = part % 2, shift = 2 - part % 3;
  }
};

template <class T, int R, bool Uniform>
__global__ void __launch_bounds__(32 * kPrepareWarps, R == 1 ? 8 : 4)
    scan_prepare(ScanTask a, ScanQueries out, HeadScores scores, int lanes) {
  const SketchRow<R, Uniform> row(a.D, lanes);
  const int64_t i = (int64_t{blockIdx.x} * kPrepareWarps + warp_id()) * (32 / lanes) + lane_id() / lanes;
  const int64_t unit = i / out.columns, b = unit / a.Hkv, h = unit % a.Hkv;
  const int column = static_cast<int>(i % out.columns), t = column / a.G;
  const bool live = unit < a.units() && column < a.columns();
  const int64_t head = h * a.G + column % a.G;
  float x[R][kGroup] = {};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (!live) continue;
    const Group<T> g = load_group(a.q.as<const T>(b, t, head) + row.group(r) * kGroup, row.size(r), a.wide_q);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) x[r][c] = to_float(g.element(c));
  }
  const IntegerQuery<R> q = integer_query(row, x, a.scale);
  int sum = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    sum = dp4a(static_cast<int>(q.packed[r].x), 0x01010101, sum);
    sum = dp4a(static_cast<int>(q.packed[r].y), 0x01010101, sum);
  }
  for (int s = lanes / 2; s > 0; s /= 2) sum += __shfl_xor_sync(kFullWarp, sum, s);
  if (unit >= a.units()) return;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int j = row.group(r);
    if (j >= out.row_bytes) continue;
    if (!out.fragments) {
      out.rows[i * out.row_bytes + j] = q.packed[r];
      continue;
    }
    int8_t* const tile = out.fragments + unit * out.columns * (32 * out.steps) + (column / 8) * (256 * out.steps);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      const FragmentPlace at(j, c, a.D);
      const uint32_t word = c < 4 ? q.packed[r].x : q.packed[r].y;
      tile[at.step * 256 + (column % 8 * 4 + at.lane) * 8 + at.reg * 4 + at.byte] =
          static_cast<int8_t>(static_cast<int32_t>(word << (24 - 8 * (c & 3))) >> 24 << at.shift);
    }
  }
  if (row.lane != 0) return;
  const float gain = a.planes == 2 ? slicing::kOnePlaneGain : 1.0f;
  out.factors[i] = make_float2(mul_rn(q.factor, gain), q.factor);
  out.sums[i] = sum;
  if (!live) return;
  const int64_t head_row = (b * a.T + t) * a.Hkv * a.G + head;
  scores.top[head_row] = INT32_MIN;
  scores.weight[head_row] = 0;
}

// ---- any layout ----

// The eight bits of a byte as eight bytes 0 or 1.
__device__ __forceinline__ uint2 spread_bits(uint32_t byte) {
  return make_uint2((byte & 15) * 0x00204081u & 0x01010101u, (byte >> 4) * 0x00204081u & 0x01010101u);
}

struct ScanBlock {
  int64_t b, h;
  int t;              // listed: the query token
  int column, count;  // the block's columns
  int64_t first;      // position, or entry of the list
};

// Columns of one unit, up to 8 a block: all query tokens together, or listed, each for itself.
template <bool kListed>
__device__ __forceinline__ ScanBlock scan_block(const ScanTask& a, int64_t chunks, int groups) {
  ScanBlock s;
  int64_t i = blockIdx.x;
  s.first = i % chunks * kScanThreads, i /= chunks;
  const int group = static_cast<int>(i % groups);
  i /= groups;
  s.t = kListed ? static_cast<int>(i % a.T) : 0;
  if (kListed) i /= a.T;
  s.b = i / a.Hkv, s.h = i % a.Hkv;
  const int end = kListed ? a.G : a.columns();
  s.column = s.t * a.G + 8 * group, s.count = end - 8 * group < 8 ? end - 8 * group : 8;
  return s;
}

// A thread scores one token for up to 8 columns. Floor: D / 8 bytes a plane and 2 for the norm, once for all columns;
// rows of fewer than 16 tokens do not let it be reached.
template <bool kListed, bool kBoth>
__global__ void __launch_bounds__(kScanThreads)
    scan_any(ScanTask a, ScanQueries queries, HeadScores scores, DeviceSelection list, int64_t chunks, int groups) {
  SIC_DYNAMIC_SHARED(uint2, query);  // [row_bytes][8]
  const ScanBlock s = scan_block<kListed>(a, chunks, groups);
  const int64_t visible = a.seq_lens.visible(s.b, 1, 0, a.positions);
  const int64_t count = kListed ? list.count(s.b, s.t, s.h) : visible;
  if (s.first >= count) return;
  const int64_t column0 = (s.b * a.Hkv + s.h) * queries.columns + s.column;
  for (int i = static_cast<int>(threadIdx.x); i < 8 * queries.row_bytes; i += kScanThreads) {
    const int c = i % 8;
    query[i] = c < s.count ? queries.rows[(column0 + c) * queries.row_bytes + i / 8] : make_uint2(0, 0);
  }
  __syncthreads();
  const int64_t i = s.first + threadIdx.x;
  const bool in = i < count;
  const uint32_t pos = static_cast<uint32_t>(!in ? 0 : kListed ? list.row(s.b, s.t, s.h)[i] : i);
  int first[8] = {}, second[8] = {};
  float norm = 0;
  if (in) {
    const Place place = a.pages.place(s.b, pos);
    const uint32_t page = a.pages.split.page, block = place.offset & ~uint32_t{slicing::kTokenBlock - 1};
    const int64_t width = page - block < slicing::kTokenBlock ? page - block : slicing::kTokenBlock;
    const uint8_t* bits =
        a.sketch.page_bits(place.page_id, s.h) + int64_t{block} * queries.row_bytes + (place.offset - block);
    const int64_t plane = int64_t{page} * queries.row_bytes;
    norm = to_float(a.sketch.page_norm(place.page_id, s.h)[place.offset]);
    for (int j = 0; j < queries.row_bytes; ++j, bits += width) {
      const uint2 x = spread_bits(bits[0]), y = kBoth ? spread_bits(bits[plane]) : make_uint2(0, 0);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const uint2 q = query[8 * j + c];
        const int qx = static_cast<int>(q.x), qy = static_cast<int>(q.y);
        first[c] = dp4a(static_cast<int>(x.y), qy, dp4a(static_cast<int>(x.x), qx, first[c]));
        if (kBoth) second[c] = dp4a(static_cast<int>(y.y), qy, dp4a(static_cast<int>(y.x), qx, second[c]));
      }
    }
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    if (c >= s.count) continue;
    const int column = s.column + c, t = column / a.G;
    const int64_t head_row = (s.b * a.T + t) * a.Hkv * a.G + s.h * a.G + column % a.G;
    const float2 factor = queries.factors[column0 + c];
    const int sum = queries.sums[column0 + c], dot = 2 * first[c] - sum, dot2 = 2 * dot + 2 * second[c] - sum;
    int32_t score = 0;
    if (!kListed) {
      score = round_to_int(scaled_dot(exact_float(dot), norm, factor.x));
      if (in) scores.first[head_row * scores.stride + i] = static_cast<int16_t>(score);
    }
    if (kBoth) {
      const int32_t fine = round_to_int(scaled_dot(exact_float(dot2), norm, factor.y));
      if (in) scores.second[head_row * scores.stride + i] = static_cast<int16_t>(fine);
      if (kListed) score = fine;
    }
    const bool counts = in && (kListed || i < a.seq_lens.visible(s.b, a.T, t, a.positions));
    const int32_t top = warp_reduce_max(counts ? score : INT32_MIN);
    if (lane_id() == 0 && top > INT32_MIN) atomicMax(scores.top + head_row, top);
  }
}

// ---- launching ----

void launch_prepare(const ScanTask& a, const ScanQueries& queries, const HeadScores& scores, void* stream) {
  const int lanes = std::min(32, lanes_per_row(a.D));
  const int64_t rows = a.units() * queries.columns, in_block = kPrepareWarps * (32 / lanes);
  with_float_type(a.q_type, [&](auto type) {
    with_sketch_row(a.D, [&](auto sets, auto uniform) {
      if constexpr (!std::is_same_v<decltype(type), f8_t>)
        launch(scan_prepare<decltype(type), decltype(sets)::value, decltype(uniform)::value>,
               dim3(grid_blocks(slicing::ceil_div(rows, in_block))), dim3(32 * kPrepareWarps), 0, stream, a, queries,
               scores, lanes);
    });
  });
}

}  // namespace

ScanQueries scan_queries(const ScanTask& a, bool fragments, void* memory, int64_t* used) {
  ScanQueries q;
  Carver carve(memory, 16);
  q.row_bytes = static_cast<int32_t>(slicing::sketch_row_bytes(a.D)), q.steps = a.D / 32;
  q.columns = a.columns();
  if (fragments) q.columns = q.columns <= 8 ? 8 : (q.columns + 15) / 16 * 16;
  if (fragments)
    q.fragments = carve.take<int8_t>(a.units() * q.columns * q.steps * 32);
  else
    q.rows = carve.take<uint2>(a.units() * q.columns * q.row_bytes);
  q.factors = carve.take<float2>(a.units() * q.columns);
  q.sums = carve.take<int32_t>(a.units() * q.columns);
  if (used) *used = carve.used();
  return q;
}

ScanTask scan_task(const slicing::SketchScoreArgs& a) {
  ScanTask s;
  s.q = Rows3::of(a.q), s.q_type = a.q.dtype, s.wide_q = groups_aligned(a.q);
  s.sketch = DeviceSketch::of(a.bits, a.norm);
  s.pages = PageMap::of(a.block_table, a.page);
  s.seq_lens = SeqLens::of(a.seq_lens);
  s.B = static_cast<int32_t>(a.q.shape[0]), s.T = static_cast<int32_t>(a.q.shape[1]);
  s.Hkv = static_cast<int32_t>(a.norm.shape[1]), s.G = static_cast<int32_t>(a.q.shape[2] / a.norm.shape[1]);
  s.D = static_cast<int32_t>(a.q.shape[3]), s.planes = a.planes, s.positions = a.max_seq_len, s.scale = a.scale;
  s.in_blocks = a.page % slicing::kTokenBlock == 0 && s.D % 32 == 0 && row_access_bytes(a.bits) == 16 &&
                row_access_bytes(a.norm) == 16;
  return s;
}

HeadScores head_scores(const ScanTask& a, int64_t width, bool first, bool second, Carver& carve) {
  HeadScores s;
  s.stride = (width + 63) / 64 * 64;
  const int64_t rows = a.head_rows();
  if (first) s.first = carve.take<int16_t>(rows * s.stride);
  if (second) s.second = carve.take<int16_t>(rows * s.stride);
  s.top = carve.take<int32_t>(rows);
  s.weight = carve.take<unsigned long long>(rows);
  return s;
}

JoinTask join_task(const ScanTask& a, const HeadScores& scores, slicing::Pool pool) {
  JoinTask j;
  j.scores = scores.first, j.stride = scores.stride, j.top = scores.top, j.weight = scores.weight;
  j.B = a.B, j.T = a.T, j.Hkv = a.Hkv, j.G = a.G, j.pool = pool, j.seq_lens = a.seq_lens;
  return j;
}

// Alignment decides the path, and may differ between measuring and running: room for either.
int64_t scan_scratch(const ScanTask& a) {
  int64_t fragments = 0, rows = 0;
  scan_queries(a, true, nullptr, &fragments);
  scan_queries(a, false, nullptr, &rows);
  return std::max(fragments, rows);
}

void launch_scan(const ScanTask& a, const HeadScores& scores, void* scratch, void* stream) {
  if (a.head_rows() == 0) return;
  const ScanQueries queries = scan_queries(a, a.in_blocks, scratch, nullptr);
  launch_prepare(a, queries, scores, stream);
  if (a.positions == 0) return;
  if (a.in_blocks) return launch_scan_mma(a, queries, scores, stream);
  const int64_t chunks = slicing::ceil_div(a.positions, kScanThreads);
  const int groups = (a.columns() + 7) / 8;
  const dim3 grid(static_cast<unsigned>(a.units() * groups * chunks));
  const size_t shared = 64 * static_cast<size_t>(queries.row_bytes);
  if (scores.second)
    launch(scan_any<false, true>, grid, dim3(kScanThreads), shared, stream, a, queries, scores, DeviceSelection{},
           chunks, groups);
  else
    launch(scan_any<false, false>, grid, dim3(kScanThreads), shared, stream, a, queries, scores, DeviceSelection{},
           chunks, groups);
}

void launch_scan_listed(const ScanTask& a, const DeviceSelection& list, int64_t width, const HeadScores& scores,
                        void* scratch, void* stream) {
  if (a.head_rows() == 0) return;
  const ScanQueries queries = scan_queries(a, false, scratch, nullptr);
  launch_prepare(a, queries, scores, stream);
  const int64_t chunks = slicing::ceil_div(width, kScanThreads);
  const int groups = (a.G + 7) / 8;
  launch(scan_any<true, true>, dim3(grid_blocks(a.units() * a.T * groups * chunks)), dim3(kScanThreads),
         64 * static_cast<size_t>(queries.row_bytes), stream, a, queries, scores, list, chunks, groups);
}

}  // namespace sic::gpu
