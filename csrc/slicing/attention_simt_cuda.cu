// Attention on CUDA cores: how many query rows a block takes.
#include "slicing/attention_launch_cuda.cuh"
#include "slicing/attention_simt_cuda.cuh"

namespace sic::gpu {
namespace {

constexpr int64_t kSharedLimit = 96 * 1024;  // of a block, on every device that the kernels are built for

template <class T, int kRows, bool kWide>
int64_t simt_shared_bytes(const AttentionParams& p) {
  SimtShared s;
  return lay_out(nullptr, kRows, simt_query_stride<T, kWide>(p.Dk), (p.Dv + 3) / 4 * 4, &s);
}

template <class T, bool kWide>
void launch_simt(const AttentionParams& p, const SplitPlan& plan, void* stream) {
  const int64_t eight = simt_shared_bytes<T, 8, kWide>(p), four = simt_shared_bytes<T, 4, kWide>(p),
                one = simt_shared_bytes<T, 1, kWide>(p);
  if (plan.list_rows > 4 && eight <= kSharedLimit)
    return launch_tiles(attention_simt<T, 8, kWide>, p, plan, 8, eight, stream);
  if (plan.list_rows > 1 && four <= kSharedLimit)
    return launch_tiles(attention_simt<T, 4, kWide>, p, plan, 4, four, stream);
  if (one > kSharedLimit)
    throw ArgumentError("sliced_attention: k_cache, v_cache: got head sizes " + std::to_string(p.Dk) + " and " +
                        std::to_string(p.Dv) + ", expected at most about 3500 on CUDA");
  launch_tiles(attention_simt<T, 1, kWide>, p, plan, 1, one, stream);
}

}  // namespace

void attend_on_cuda_cores(const AttentionParams& p, const SplitPlan& plan, DType cache, bool wide, void* stream) {
  with_float_type(cache, [&](auto type) {
    using T = decltype(type);
    wide ? launch_simt<T, true>(p, plan, stream) : launch_simt<T, false>(p, plan, stream);
  });
}

}  // namespace sic::gpu
