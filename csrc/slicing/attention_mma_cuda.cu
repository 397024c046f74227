// Attention on tensor cores: which calls, which kernel.
#include "slicing/attention_launch_cuda.cuh"
#include "slicing/attention_mma_cuda.cuh"

namespace sic::gpu {
namespace {

// Row offsets in units of 16 bytes must fit 32 bits.
bool offsets_fit(const TensorView& cache) {
  int64_t last = 0;
  for (int axis : {0, 2}) {
    if (cache.stride[axis] < 0) return false;
    last += std::max<int64_t>(0, cache.shape[axis] - 1) * cache.stride_bytes(axis);
  }
  return last / 16 < int64_t{1} << 32;
}

template <class T, int D, int kTiles>
void launch_mma(const AttentionParams& p, const SplitPlan& plan, void* stream) {
  const bool exact = p.Dk == D && p.Dv == D;
  launch_tiles(exact ? attention_mma<T, D, kTiles, true> : attention_mma<T, D, kTiles, false>, p, plan, kTiles * 8,
               sizeof(MmaShared<D, kTiles>), stream);
}

template <class T>
void launch_mma(const AttentionParams& p, const SplitPlan& plan, void* stream) {
  const int D = std::max(p.Dk, p.Dv);
  const bool many = plan.list_rows > 8;
  if (D > 128) return launch_mma<T, 256, 1>(p, plan, stream);
  if (D > 64) return many ? launch_mma<T, 128, 2>(p, plan, stream) : launch_mma<T, 128, 1>(p, plan, stream);
  many ? launch_mma<T, 64, 2>(p, plan, stream) : launch_mma<T, 64, 1>(p, plan, stream);
}

}  // namespace

bool fits_tensor_cores(const slicing::AttentionArgs& a) {
  const TensorView &k = a.kv.k_cache, &v = a.kv.v_cache;
  if (a.q.dtype != k.dtype || (k.dtype != DType::f16 && k.dtype != DType::bf16)) return false;
  if (k.shape[3] > 256 || v.shape[3] > 256) return false;
  return row_access_bytes(k) == 16 && row_access_bytes(v) == 16 && offsets_fit(k) && offsets_fit(v);
}

void attend_on_tensor_cores(const AttentionParams& p, const SplitPlan& plan, void* stream) {
  p.type == DType::f16 ? launch_mma<f16_t>(p, plan, stream) : launch_mma<bf16_t>(p, plan, stream);
}

}  // namespace sic::gpu
