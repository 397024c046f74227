// logits_stats and logits_part on the GPU: blocks take segments of a row, then a block a row joins them.
//
// Floor: the logits read once from memory, V * itemsize bytes a row: 0.17 us for V = 128256 in f32 at 3 TB/s, less than
// the two launches; from some tens of rows on the bytes decide. A value takes about 12 instructions of a lane.
//
// A warp holds 512 values at a time. Where segments end depends on V alone, so a row's bits do not depend on the batch.
// A list of up to 8 ids holds none below the least of the block's eight warp maxima: few values reach the insertion.
#include "core/scratch.h"
#include "head/finish_cuda.cuh"
#include "head/float_rows_cuda.cuh"

namespace sic::gpu {
namespace {

constexpr int kPer = 16, kChunk = 32 * kPer, kStride = kHeadWarps * kChunk;
constexpr int64_t kMaxSegments = 64;  // of a row

struct Params {
  DeviceLogits logits;
  Segments segments;
  const char* x;
  int64_t stride, segment;  // bytes of a row; columns
  bool wide;                // rows are 16-byte aligned
};

// How a lane's values lie in a chunk of a row: in turns of 16 bytes.
template <class T>
struct ChunkReader {
  static constexpr int kVec = 16 / static_cast<int>(sizeof(T));

  __device__ __forceinline__ static int column(int j) { return j / kVec * 32 * kVec + lane_id() * kVec + j % kVec; }

  __device__ __forceinline__ static void unpack(uint4 v, float* z) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        z[i] = __uint_as_float(words[i]);
      } else {
        const float2 f = std::is_same_v<T, f16_t> ? unpack_f16x2(words[i]) : unpack_bf16x2(words[i]);
        z[2 * i] = f.x, z[2 * i + 1] = f.y;
      }
    }
  }

  // Of the n columns at x.
  __device__ __forceinline__ static void load(const T* x, int64_t n, bool wide, float (&z)[kPer]) {
    if (wide && n >= kChunk) {
      uint4 v[kPer / kVec];
#pragma unroll
      for (int i = 0; i < kPer / kVec; ++i) v[i] = load16(x + column(i * kVec));
#pragma unroll
      for (int i = 0; i < kPer / kVec; ++i) unpack(v[i], z + i * kVec);
      return;
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j) z[j] = column(j) < n ? to_float(x[column(j)]) : kNever;
  }
};

// Below what the list need not look: as many warps as it has room have a value there or above.
__device__ __forceinline__ float floor_of(const float* tops, int room) {
  float least = tops[0], most = tops[0];
#pragma unroll
  for (int w = 1; w < kHeadWarps; ++w) least = fminf(least, tops[w]), most = fmaxf(most, tops[w]);
  return room == 1 ? most : room <= kHeadWarps ? least : kNever;
}

template <class T>
__global__ void __launch_bounds__(kHeadThreads, 3) logits_segments(const __grid_constant__ Params p) {
  using Reader = ChunkReader<T>;
  __shared__ JoinShared s;
  __shared__ float tops[2][kHeadWarps];
  const int64_t b = blockIdx.x / p.segments.count, segment = blockIdx.x % p.segments.count;
  const int64_t columns = p.logits.columns, first = segment * p.segment;
  const int64_t end = columns - first < p.segment ? columns : first + p.segment;
  const double inverse = inverse_of(p.logits.temperature, b);
  const float factor = head::factor_of(inverse);
  Moments total = Moments::none();
  WarpList list = WarpList::none(p.segments.room);
  int turn = 0;
  for (int64_t block_at = first; block_at < end; block_at += kStride, turn ^= 1) {
    const int64_t at = block_at + warp_id() * kChunk;
    Chunk<kPer> chunk;
    Reader::load(reinterpret_cast<const T*>(p.x + b * p.stride) + at, end - at, p.wide, chunk.z);
    if (!p.logits.plain()) {
#pragma unroll
      for (int j = 0; j < kPer; ++j)
        if (Reader::column(j) < end - at) chunk.z[j] = p.logits(chunk.z[j], b, at + Reader::column(j));
    }
    const uint32_t faults = chunk.faults();
    const float top = faults ? kNever : chunk.top();
    if (lane_id() == 0) tops[turn][warp_id()] = top;
    __syncthreads();
    total.status |= faults;
    if (top == kNever) continue;
    total.merge(chunk.moments(top, factor), inverse);
    const float floor = fmaxf(floor_of(tops[turn], list.room), list.least);
    if (top >= floor)
      list.offer<true>(chunk.z, [&](int j) { return static_cast<int32_t>(at + Reader::column(j)); }, floor);
  }
  // The lanes of a warp hold the same sums, which count once.
  if (lane_id() > 0) total = Moments::none();
  join_warps(total, list, inverse, s);
  if (warp_id() == 0) p.segments.put(b, segment, total, list);
}

struct LogitsFinish {
  FinishParams row;
  FloatRows x;
};

__global__ void __launch_bounds__(kHeadThreads, 2) logits_finish(const __grid_constant__ LogitsFinish p) {
  __shared__ JoinShared s;
  const int64_t b = blockIdx.x;
  finish_row(p.row, b, s, [&](int, int64_t column) { return p.row.logits(p.x(b, column), b, column); });
}

int64_t segment_columns(int64_t V) {
  const int64_t strides = head::ceil_div(V, kStride);
  return kStride * std::max<int64_t>(1, head::ceil_div(strides, kMaxSegments));
}

Segments segments_of(const head::StatsArgs& a, void* memory, int64_t* bytes) {
  Carver carve(memory, 16);
  const int64_t V = head::vocabulary(a);
  const Segments s = Segments::of(carve, a, head::ceil_div(V, segment_columns(V)));
  *bytes = carve.used();
  return s;
}

}  // namespace

int64_t logits_stats_workspace(const head::StatsArgs& a) {
  int64_t bytes = 0;
  segments_of(a, nullptr, &bytes);
  return bytes;
}

void logits_stats(const head::StatsArgs& a, const Exec& exec) {
  int64_t bytes = 0;
  const int64_t B = head::rows(a);
  const FloatRows x = FloatRows::of(a.in.x);
  Params p{};
  p.logits = DeviceLogits::of(a), p.segments = segments_of(a, exec.workspace.data, &bytes);
  p.x = x.data, p.stride = x.stride, p.wide = x.wide, p.segment = segment_columns(head::vocabulary(a));
  with_float_type(a.in.x.dtype, [&](auto type) {
    if constexpr (!std::is_same_v<decltype(type), f8_t>)
      launch(logits_segments<decltype(type)>, dim3(grid_blocks(B * p.segments.count)), dim3(kHeadThreads), 0,
             exec.stream, p);
  });
  launch(logits_finish, dim3(grid_blocks(B)), dim3(kHeadThreads), 0, exec.stream,
         LogitsFinish{FinishParams::of(a, p.segments), x});
}

}  // namespace sic::gpu
