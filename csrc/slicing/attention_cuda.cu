// sliced_attention on CUDA: which kernel, how many blocks, what workspace.
#include "slicing/attention_cuda.h"
#include "slicing/attention_merge_cuda.cuh"
#include "slicing/attention_mma_cuda.cuh"
#include "slicing/attention_simt_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

using slicing::AttentionArgs;
using slicing::ceil_div;
using slicing::Unit;

// With so many blocks a GPU is busy, and each takes all splits of its rows. So it does when partial results would take
// much memory and there are blocks for every multiprocessor.
constexpr int64_t kBlocksWithoutSplit = 512, kBlocksThatWillDo = 128, kManyBytes = int64_t{512} << 20;
constexpr int64_t kSharedLimit = 96 * 1024;  // of a block, on every device that the kernels are built for

// Division into splits; from shapes alone.
struct SplitPlan {
  int64_t lists, list_rows;  // lists of a sequence and KV head, and query rows of each
  int64_t splits;            // of the longest list
  bool serial = true;
  int64_t bytes = 0;  // of partial results
};

SplitPlan plan_splits(const AttentionArgs& a) {
  SplitPlan plan;
  const int64_t B = a.q.shape[0], T = a.q.shape[1], Hkv = a.kv.k_cache.shape[1], G = a.q.shape[2] / Hkv;
  const bool listed = a.selected.indices.given();
  plan.lists = listed ? T : 1;
  plan.list_rows = listed ? G : T * G;
  int64_t slots = a.max_seq_len;
  if (listed) {
    const int64_t unit = a.selected.unit == Unit::page ? std::max<int64_t>(1, a.kv.k_cache.shape[2]) : 1;
    slots = std::min(a.selected.indices.shape[3], ceil_div(a.max_seq_len, unit)) * unit;
  }
  plan.splits = std::max<int64_t>(1, ceil_div(slots, kSplit));
  if (plan.splits == 1) return plan;
  const int64_t blocks = B * Hkv * plan.lists * ceil_div(plan.list_rows, 8);
  const int64_t partials = B * T * a.q.shape[2] * plan.splits;
  const int64_t states = ceil_div(partials * int64_t{sizeof(float2)}, 256) * 256;
  const int64_t bytes = states + partials * ceil_div(a.kv.v_cache.shape[3], 4) * 16;
  plan.serial = blocks >= kBlocksWithoutSplit || (blocks >= kBlocksThatWillDo && bytes > kManyBytes);
  if (!plan.serial) plan.bytes = bytes;
  return plan;
}

AttentionParams make_params(const AttentionArgs& a, const AttentionExtras& extras, const SplitPlan& plan,
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

// A kernel over all blocks of the call, `rows` query rows each.
void launch_tiles(void (*kernel)(const AttentionParams), AttentionParams p, const SplitPlan& plan, int rows,
                  int64_t shared_bytes, void* stream) {
  p.list_tiles = static_cast<int32_t>(ceil_div(plan.list_rows, rows));
  const int64_t x = int64_t{p.lists} * p.list_tiles * p.Hkv * (p.serial ? 1 : p.splits);
  if (x >= int64_t{1} << 31) throw Error("sliced_attention: more than 2^31 blocks for a sequence");
  const unsigned y = static_cast<unsigned>(std::min(p.B, 65535)), z = static_cast<unsigned>(ceil_div(p.B, 65535));
  launch(kernel, dim3(static_cast<unsigned>(x), y, z), kAttentionWarps * 32, static_cast<size_t>(shared_bytes), stream,
         p);
}

// ---- tensor cores ----

// Row offsets in units of 16 bytes must fit 32 bits.
bool offsets_fit(const TensorView& cache) {
  int64_t last = 0;
  for (int axis : {0, 2}) {
    if (cache.stride[axis] < 0) return false;
    last += std::max<int64_t>(0, cache.shape[axis] - 1) * cache.stride_bytes(axis);
  }
  return last / 16 < int64_t{1} << 32;
}

bool fits_tensor_cores(const AttentionArgs& a) {
  const TensorView &k = a.kv.k_cache, &v = a.kv.v_cache;
  if (a.q.dtype != k.dtype || (k.dtype != DType::f16 && k.dtype != DType::bf16)) return false;
  if (k.shape[3] > 256 || v.shape[3] > 256) return false;
  return row_access_bytes(k) == 16 && row_access_bytes(v) == 16 && offsets_fit(k) && offsets_fit(v);
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

// ---- CUDA cores ----

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
                        std::to_string(p.Dv) + ", expected at most about 2000 on CUDA");
  launch_tiles(attention_simt<T, 1, kWide>, p, plan, 1, one, stream);
}

}  // namespace

void run_attention(const AttentionArgs& a, const AttentionExtras& extras, void* workspace, void* stream) {
  const SplitPlan plan = plan_splits(a);
  const AttentionParams p = make_params(a, extras, plan, workspace);
  if (fits_tensor_cores(a)) {
    p.type == DType::f16 ? launch_mma<f16_t>(p, plan, stream) : launch_mma<bf16_t>(p, plan, stream);
  } else {
    const bool wide = row_access_bytes(a.kv.k_cache) == 16 && row_access_bytes(a.kv.v_cache) == 16;
    with_storage_type(a.kv.k_cache.dtype, [&](auto type) {
      using T = decltype(type);
      wide ? launch_simt<T, true>(p, plan, stream) : launch_simt<T, false>(p, plan, stream);
    });
  }
  if (plan.serial) return;
  const int64_t rows = a.q.shape[0] * a.q.shape[1] * a.q.shape[2];
  launch(attention_merge, dim3(static_cast<unsigned>(rows)), 128, 0, stream, p);
}

int64_t attention_partials(const AttentionArgs& a) { return plan_splits(a).bytes; }

void sliced_attention(const AttentionArgs& a, const Exec& exec) {
  run_attention(a, {}, exec.workspace.data, exec.stream);
}
int64_t sliced_attention_workspace(const AttentionArgs& a) { return attention_partials(a); }

}  // namespace sic::gpu
