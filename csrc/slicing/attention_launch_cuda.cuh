// What the launchers of the attention kernels share.
#pragma once
#include <algorithm>

#include "slicing/attention_parts_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {

// Division into splits; from shapes alone.
struct SplitPlan {
  int64_t lists, list_rows;  // lists of a sequence and KV head, and query rows of each
  int64_t splits;            // of the longest list
  bool serial = true;
  int64_t bytes = 0;  // of partial results
};

SplitPlan plan_splits(const slicing::AttentionArgs&);
// All that kernels need to know; workspace: plan.bytes.
AttentionParams attention_params(const slicing::AttentionArgs&, const AttentionExtras&, const SplitPlan&,
                                 void* workspace);
// Joins the partial results of splits that ran side by side.
void merge_splits(const AttentionParams&, const SplitPlan&, void* stream);

// A kernel over all blocks of the call, `rows` query rows each. Params: AttentionParams, or more than that.
template <class Params>
void launch_tiles(void (*kernel)(const Params), Params p, const SplitPlan& plan, int rows, int64_t shared_bytes,
                  void* stream) {
  p.list_tiles = static_cast<int32_t>(slicing::ceil_div(plan.list_rows, rows));
  const int64_t x = int64_t{p.lists} * p.list_tiles * p.Hkv * (p.serial ? 1 : p.splits);
  const unsigned y = static_cast<unsigned>(std::min(p.B, 65535)),
                 z = static_cast<unsigned>(slicing::ceil_div(p.B, 65535));
  launch(kernel, dim3(grid_blocks(x), y, z), kAttentionWarps * 32, static_cast<size_t>(shared_bytes), stream, p);
}

// The kernels for half types; whether they take a call.
bool fits_tensor_cores(const slicing::AttentionArgs&);
void attend_on_tensor_cores(const AttentionParams&, const SplitPlan&, void* stream);

// The kernels for everything else. wide: rows of K and V are 16-byte aligned, and multiples of it.
void attend_on_cuda_cores(const AttentionParams&, const SplitPlan&, DType cache, bool wide, void* stream);

}  // namespace sic::gpu
