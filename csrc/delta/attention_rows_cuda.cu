// Attention on coded rows, on CUDA cores: how many query rows a block takes.
#include <string>

#include "core/check.h"
#include "delta/attention_rows_cuda.cuh"

namespace sic::gpu {
namespace {

constexpr int64_t kSharedLimit = 99 * 1024;  // of a block, on every device that the kernels are built for

template <int kRows, int R, bool Uniform>
bool launch_coded_rows(const DeltaAttentionParams& p, const SplitPlan& plan, void* stream) {
  RowsShared s;
  const int64_t bytes = lay_out<R>(nullptr, kRows, p.Dk, p.Dv, &s);
  if (bytes > kSharedLimit) return false;
  launch_tiles(attention_coded_rows<kRows, R, Uniform>, p, plan, kRows, bytes, stream);
  return true;
}

template <int R, bool Uniform>
void launch_coded_rows(const DeltaAttentionParams& p, const SplitPlan& plan, void* stream) {
  // Above 256 channels a lane has no registers for more query rows.
  if constexpr (R == 1) {
    if (plan.list_rows > 4 && launch_coded_rows<8, R, Uniform>(p, plan, stream)) return;
    if (plan.list_rows > 1 && launch_coded_rows<4, R, Uniform>(p, plan, stream)) return;
  }
  if (!launch_coded_rows<1, R, Uniform>(p, plan, stream))
    Check("delta_attention").fail("q", "rows of " + std::to_string(p.Dk), "what shared memory holds");
}

bool is_uniform(int D) { return D == 64 || D == 128 || D == 256; }

}  // namespace

void attend_coded_rows(const DeltaAttentionParams& p, const SplitPlan& plan, void* stream) {
  if (is_uniform(p.Dk) && is_uniform(p.Dv)) return launch_coded_rows<1, true>(p, plan, stream);
  if (std::max(p.Dk, p.Dv) <= 256) return launch_coded_rows<1, false>(p, plan, stream);
  launch_coded_rows<4, false>(p, plan, stream);
}

}  // namespace sic::gpu
