// sliced_attention on CUDA: which kernel, how many blocks, what workspace.
#include "slicing/attention.h"
#include "slicing/attention_cuda.h"
#include "slicing/attention_launch_cuda.cuh"
#include "slicing/attention_merge_cuda.cuh"

namespace sic::gpu {
namespace {

using slicing::AttentionArgs;
using slicing::ceil_div;
using slicing::Unit;

// With so many blocks a GPU is busy, and each takes all splits of its rows. So it does when partial results would take
// much memory and there are blocks for every multiprocessor.
constexpr int64_t kBlocksWithoutSplit = 512, kBlocksThatWillDo = 128, kManyBytes = int64_t{512} << 20;

}  // namespace

SplitPlan plan_splits(const AttentionArgs& a) {
  SplitPlan plan;
  const int64_t B = a.q.shape[0], T = a.q.shape[1], Hkv = a.kv.k_cache.shape[1], G = a.q.shape[2] / Hkv;
  const bool listed = a.selected.indices.given();
  plan.lists = listed ? T : 1;
  plan.list_rows = listed ? G : T * G;
  plan.splits = std::max<int64_t>(1, ceil_div(slicing::listed_tokens(a), kSplit));
  if (plan.splits == 1) return plan;
  const int64_t blocks = B * Hkv * plan.lists * ceil_div(plan.list_rows, 8);
  const int64_t partials = B * T * a.q.shape[2] * plan.splits;
  const int64_t states = ceil_div(partials * int64_t{sizeof(float2)}, 256) * 256;
  const int64_t bytes = states + partials * ceil_div(a.kv.v_cache.shape[3], 4) * 16;
  plan.serial = blocks >= kBlocksWithoutSplit || (blocks >= kBlocksThatWillDo && bytes > kManyBytes);
  if (!plan.serial) plan.bytes = bytes;
  return plan;
}

AttentionParams attention_params(const AttentionArgs& a, const AttentionExtras& extras, const SplitPlan& plan,
                                 void* workspace) {
  AttentionParams p;
  p.kv = DeviceKv::of(a.kv);
  p.list = DeviceSelection::of(a.selected.indices, a.selected.counts);
  p.q = Rows3::of(a.q), p.out = Rows3::of(a.out), p.lse = Rows3::of(a.lse);
  if (a.key_bias.given()) p.key_bias = a.key_bias.as<const float>(), p.bias_stride = a.key_bias.stride[0];
  if (a.sinks.given()) p.sinks = a.sinks.as<const float>(), p.sink_stride = a.sinks.stride[0];
  p.window = a.window, p.max_seq_len = a.max_seq_len;
  p.scale = a.scale, p.softcap = a.softcap;
  p.type = a.q.dtype;
  p.pages = a.selected.unit == Unit::page;
  p.serial = plan.serial;
  p.capacity = a.selected.indices.given() ? static_cast<int32_t>(a.selected.indices.shape[3]) : 0;
  p.B = static_cast<int32_t>(a.q.shape[0]), p.T = static_cast<int32_t>(a.q.shape[1]);
  p.Hkv = static_cast<int32_t>(a.kv.k_cache.shape[1]), p.G = static_cast<int32_t>(a.q.shape[2]) / p.Hkv;
  p.Dk = static_cast<int32_t>(a.q.shape[3]), p.Dv = static_cast<int32_t>(a.kv.v_cache.shape[3]);
  p.lists = static_cast<int32_t>(plan.lists), p.splits = static_cast<int32_t>(plan.splits);
  p.only = extras.only, p.mass = extras.mass;
  if (!plan.serial) {
    const int64_t partials = a.q.shape[0] * a.q.shape[1] * a.q.shape[2] * plan.splits;
    p.states = static_cast<float2*>(workspace);
    p.sums = reinterpret_cast<float*>(static_cast<char*>(workspace) +
                                      ceil_div(partials * int64_t{sizeof(float2)}, 256) * 256);
  }
  return p;
}

void merge_splits(const AttentionParams& p, const SplitPlan& plan, void* stream) {
  if (plan.serial) return;
  launch(attention_merge, dim3(grid_blocks(int64_t{p.B} * p.T * p.Hkv * p.G)), 128, 0, stream, p);
}

void run_attention(const AttentionArgs& a, const AttentionExtras& extras, void* workspace, void* stream) {
  const SplitPlan plan = plan_splits(a);
  const AttentionParams p = attention_params(a, extras, plan, workspace);
  if (fits_tensor_cores(a)) {
    attend_on_tensor_cores(p, plan, stream);
  } else {
    const bool wide = row_access_bytes(a.kv.k_cache) == 16 && row_access_bytes(a.kv.v_cache) == 16;
    attend_on_cuda_cores(p, plan, a.kv.k_cache.dtype, wide, stream);
  }
  merge_splits(p, plan, stream);
}

int64_t attention_partials(const AttentionArgs& a) { return plan_splits(a).bytes; }

void sliced_attention(const AttentionArgs& a, const Exec& exec) {
  run_attention(a, {}, exec.workspace.data, exec.stream);
}
int64_t sliced_attention_workspace(const AttentionArgs& a) { return attention_partials(a); }

}  // namespace sic::gpu
