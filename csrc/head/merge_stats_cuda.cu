// merge_stats on the GPU: a warp takes a row.
//
// Floor: the parts read once, (32 + 12 k + 4 W) bytes a part and row; in practice a launch.
#include "head/finish_cuda.cuh"

namespace sic::gpu {
namespace {

// A tensor of parts by (part, row, column).
template <class T>
struct PartRows {
  const T* data;
  int64_t part_stride, stride;

  static PartRows of(const TensorView& v) { return {v.as<const T>(), v.stride[0], v.rank > 1 ? v.stride[1] : 0}; }
  __device__ __forceinline__ T operator()(int64_t i, int64_t b, int64_t j = 0) const {
    return data[i * part_stride + b * stride + j];
  }
};

struct MergeParams {
  PartRows<float> m;
  PartRows<double> s, t, u;
  PartRows<int64_t> top_ids;
  PartRows<float> top, watch, target;
  PartRows<uint8_t> status;
  FloatVector temperature;
  DeviceStats out;
  int64_t n, B;
  int k, W;
  bool targets;
};

// The z of an id that lies in one of the parts; NaN where it was never asked for.
__device__ __forceinline__ float greatest(const PartRows<float>& v, int64_t n, int64_t b, int64_t j) {
  float z = kNever;
  for (int64_t i = 0; i < n; ++i) z = larger(z, v(i, b, j));
  return z;
}

__device__ __forceinline__ void offer_part(const MergeParams& p, int64_t i, int64_t b, WarpList& list) {
  float z[2];
  int32_t id[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = lane_id() + 32 * h;
    const int64_t listed = j < p.k ? p.top_ids(i, b, j) : -1;
    z[h] = listed >= 0 ? p.top(i, b, j) : kNever, id[h] = listed >= 0 ? static_cast<int32_t>(listed) : kNoId;
  }
  list.offer<false>(z, [&](int h) { return id[h]; });
}

__global__ void __launch_bounds__(kHeadThreads, 2) merge_stats_kernel(const __grid_constant__ MergeParams p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kHeadWarps + warp_id();
  if (b >= p.B) return;
  const double inverse = inverse_of(p.temperature, b);
  Moments moments = Moments::none();
  for (int64_t i = lane_id(); i < p.n; i += 32)
    moments.merge({p.m(i, b), p.status(i, b), p.s(i, b), p.t(i, b), p.u(i, b)}, inverse);
  moments = join_lanes(moments, inverse);
  WarpList list = WarpList::none(p.k);
  for (int64_t i = 0; i < p.n; ++i) offer_part(p, i, b, list);
  const RowLog log = write_stats(p.out, b, moments, list, inverse, 0);
  for (int j = lane_id(); j < p.W; j += 32) p.out.watch_logprobs(b, j) = log(greatest(p.watch, p.n, b, j));
  // A part's target has no third dimension: its rows are the columns.
  if (p.targets && lane_id() == 0) p.out.target_logprob(b) = log(greatest(p.target, p.n, b, 0));
}

}  // namespace

int64_t merge_stats_workspace(const head::MergeArgs&) { return 0; }

void merge_stats(const head::MergeArgs& a, const Exec& exec) {
  const head::Part& in = a.parts;
  MergeParams p{};
  p.m = p.m.of(in.m), p.s = p.s.of(in.s), p.t = p.t.of(in.t), p.u = p.u.of(in.u);
  p.top_ids = p.top_ids.of(in.top_ids), p.top = p.top.of(in.top);
  p.watch = p.watch.of(in.watch), p.target = p.target.of(in.target), p.status = p.status.of(in.status);
  p.temperature = FloatVector::of(a.temperature), p.out = DeviceStats::of(a.stats);
  p.n = in.m.shape[0], p.B = in.m.shape[1];
  p.k = static_cast<int>(in.top_ids.shape[2]), p.W = static_cast<int>(in.watch.shape[2]);
  p.targets = in.target.shape[1] > 0;
  launch(merge_stats_kernel, dim3(grid_blocks(head::ceil_div(p.B, kHeadWarps))), dim3(kHeadThreads), 0, exec.stream, p);
}

}  // namespace sic::gpu
