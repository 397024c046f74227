// delta_attention on CUDA: which kernel; splits and their merge are those of sliced_attention.
#include "delta/attention_cuda.h"

namespace sic::gpu {

using delta::AttentionArgs;

void delta_attention(const AttentionArgs& a, const Exec& exec) {
  const SplitPlan plan = plan_splits(a.attention);
  DeltaAttentionParams p;
  static_cast<AttentionParams&>(p) = attention_params(a.attention, {}, plan, exec.workspace.data);
  p.cache = CodedCache::of(a.pages, a.codec, a.positions);
  p.tail = DeviceTail::of(a.tail);
  (fits_codes_kernel(a) ? attend_codes : attend_coded_rows)(p, plan, exec.stream);
  merge_splits(p, plan, exec.stream);
}
int64_t delta_attention_workspace(const AttentionArgs& a) { return plan_splits(a.attention).bytes; }

}  // namespace sic::gpu
