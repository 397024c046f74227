// lm_head_stats and lm_head_part on the GPU: blocks take segments of the vocabulary and count their logits where they
// arise, then a block a row joins them; the probe runs beside that.
//
// Floor: the weights read once from memory, V * D * itemsize bytes: 349 us for 128256 x 4096 in bf16 at 3 TB/s, up to
// some hundred rows. Everything else is a few bytes a row and column of arithmetic on tensor cores that else wait.
#include <algorithm>

#include "core/scratch.h"
#include "head/lm_head_mma_cuda.cuh"
#include "head/lm_head_simt_cuda.cuh"
#include "head/probe_cuda.cuh"

namespace sic::gpu {
namespace {

// Segments that keep any device of today busy, two blocks a multiprocessor.
constexpr int64_t kSegments = 264;

template <class T, int kRows>
__global__ void __launch_bounds__(kHeadThreads, 2) lm_head_mma(const __grid_constant__ LmHeadParams p) {
  SIC_DYNAMIC_SHARED(char, shared);
  count_segment<MmaProducts<T, kRows>>(p, shared);
}

template <class T>
__global__ void __launch_bounds__(kHeadThreads, 2) lm_head_simt(const __grid_constant__ LmHeadParams p) {
  SIC_DYNAMIC_SHARED(char, shared);
  count_segment<SimtProducts<T>>(p, shared);
}

struct HeadFinish {
  FinishParams row;
  ProbeParams probe;
  const float* found;
  int64_t rows;
};

// Blocks of rows, then blocks of their probes.
__global__ void __launch_bounds__(kHeadThreads, 2) lm_head_finish(const __grid_constant__ HeadFinish p) {
  __shared__ JoinShared join;
  __shared__ ProbeShared inner;
  const int64_t b = blockIdx.x;
  if (b < p.rows)
    finish_row(p.row, b, join, [&](int i, int64_t) { return p.found[b * p.row.wanted.count() + i]; });
  else
    probe_row(p.probe, b - p.rows, inner);
}

// ---- launching ----

struct Plan {
  Segments segments;
  float* found;
  int64_t bytes;
  int tiles;  // of a segment
};

Plan plan_of(const head::StatsArgs& a, void* memory) {
  Plan plan;
  Carver carve(memory, 16);
  const int64_t B = head::rows(a), tiles = head::ceil_div(head::vocabulary(a), kTileColumns);
  const int64_t each = std::max<int64_t>(1, head::ceil_div(tiles, kSegments));
  plan.tiles = static_cast<int>(each);
  plan.segments = Segments::of(carve, a, head::ceil_div(tiles, each));
  plan.found = carve.take<float>(B * DeviceWanted::of(a.wanted).count());
  plan.bytes = carve.used();
  return plan;
}

template <class Products>
void launch_segments(void (*kernel)(LmHeadParams), LmHeadParams p, void* stream) {
  const int64_t channels = head::ceil_div(p.D, Products::kChannels) * Products::kChannels;
  p.chunk = static_cast<int>(std::clamp<int64_t>(channels, Products::kChannels, Products::kMaxChunk));
  p.row_blocks = static_cast<int>(head::ceil_div(p.B, Products::kRows));
  const int64_t shared = Products::bytes_of(p.chunk) + HeadTile<Products::kRows>::bytes_of(p.segments.room);
  launch(kernel, dim3(grid_blocks(p.segments.count * p.row_blocks)), dim3(kHeadThreads), shared, stream, p);
}

template <class T>
void launch_mma(const LmHeadParams& p, void* stream) {
  if (p.B <= 8) return launch_segments<MmaProducts<T, 8>>(lm_head_mma<T, 8>, p, stream);
  if (p.B <= 16) return launch_segments<MmaProducts<T, 16>>(lm_head_mma<T, 16>, p, stream);
  launch_segments<MmaProducts<T, 32>>(lm_head_mma<T, 32>, p, stream);
}

}  // namespace

int64_t lm_head_stats_workspace(const head::StatsArgs& a) { return plan_of(a, nullptr).bytes; }

void lm_head_stats(const head::StatsArgs& a, const Exec& exec) {
  const Plan plan = plan_of(a, exec.workspace.data);
  const FloatRows weight = FloatRows::of(a.in.weight);
  LmHeadParams p{};
  p.logits = DeviceLogits::of(a), p.wanted = DeviceWanted::of(a.wanted), p.segments = plan.segments;
  p.found = plan.found, p.tiles = plan.tiles, p.hidden = FloatRows::of(a.in.hidden);
  p.weight = weight.data, p.weight_stride = weight.stride, p.wide_weight = weight.wide;
  p.B = head::rows(a), p.D = a.in.hidden.shape[1];
  const bool on_tensor_cores = weight.dtype == p.hidden.dtype && weight.wide && p.D % 8 == 0 && p.D < int64_t{1} << 30;
  with_float_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2)
      if (on_tensor_cores) return launch_mma<T>(p, exec.stream);
    if constexpr (!std::is_same_v<T, f8_t>) launch_segments<SimtProducts<T>>(lm_head_simt<T>, p, exec.stream);
  });
  const HeadFinish finish{FinishParams::of(a, plan.segments), ProbeParams::of(a.in.hidden, a.probe), plan.found, p.B};
  launch(lm_head_finish, dim3(grid_blocks(a.probe.projection.given() ? 2 * p.B : p.B)), dim3(kHeadThreads), 0,
         exec.stream, finish);
}

}  // namespace sic::gpu
