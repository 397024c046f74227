// append_kv on the GPU: rows into their slots, and the index entries that they change.
//
// Floor: the rows read once and written once, and planes * D / 8 + 2 bytes of sketch: 1058 B for each token and head at
// D = 128 in bf16. One launch: a row of lanes takes a (token, head), converts and writes its key and value, and
// sketches the key from the registers that it was written from. Two more cases need launches of their own:
//   - page summaries: the rows of a page come from several blocks, and its summary needs them all;
//   - more than kScanRows tokens: rows then meet in a hash table first (slots_cuda.cuh).
#include <algorithm>

#include "slicing/page_summary_cuda.cuh"
#include "slicing/sketch_cuda.cuh"
#include "slicing/slots_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

struct Params {
  Winners winners;
  Rows3 k, v, k_cache, v_cache;
  HeadScale k_scale, v_scale;
  DType input;
  DeviceSketch sketch;
  const float* centre;
  int64_t centre_stride;
  SummaryParams summary;
  int heads, D, Dv, lanes, planes;
  bool wide_k, wide_v, wide_k_cache, wide_v_cache;
};

template <class Cache, class In>
__device__ __forceinline__ Group<Cache> converted(const char* row, int j, int n, bool wide, float scale) {
  const Group<In> in = load_group(reinterpret_cast<const In*>(row) + j * kGroup, n, wide);
  if constexpr (std::is_same_v<Cache, In>) {
    return in;
  } else {
    Group<Cache> out = {};
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      Cache x;
      from_float(div_rn(to_float(in.element(c)), scale), x);
      out.put(c, x);
    }
    return out;
  }
}

// Group j of a row, as the cache stores it. Only f8 caches take rows of another type.
template <class Cache>
__device__ __forceinline__ Group<Cache> read_group(DType input, const char* row, int j, int n, bool wide, float scale) {
  if constexpr (std::is_same_v<Cache, f8_t>) {
    if (input == DType::f32) return converted<Cache, float>(row, j, n, wide, scale);
    if (input == DType::f16) return converted<Cache, f16_t>(row, j, n, wide, scale);
    if (input == DType::bf16) return converted<Cache, bf16_t>(row, j, n, wide, scale);
  }
  return converted<Cache, Cache>(row, j, n, wide, scale);
}

// R = 0: no sketch.
template <class Cache, int R, bool Uniform>
__global__ void __launch_bounds__(kThreads, R == 4 ? 1 : 2) append_rows_kernel(const __grid_constant__ Params p) {
  __shared__ int64_t shared_slots[kScanRows];
  const Winners& w = p.winners;
  const SlotScan scan = load_slots(w, shared_slots);
  const int per_warp = 32 / p.lanes, lane = lane_id() & (p.lanes - 1);
  const int64_t item = (static_cast<int64_t>(blockIdx.x) * kWarps + warp_id()) * per_warp + lane_id() / p.lanes;
  const int64_t i = item / p.heads, h = item % p.heads, slot = i < w.rows ? w.slots[i] : -1;
  const bool live = counts(w, scan, false, i, slot, p.lanes);
  const int64_t page_id = live ? slot / w.page : 0;
  const uint32_t offset = live ? static_cast<uint32_t>(slot - page_id * w.page) : 0;

  const float k_scale = p.k_scale[h], v_scale = p.v_scale[h];
  const char *k_row = p.k.at(i, h, 0), *v_row = p.v.at(i, h, 0);
  Cache* k_to = p.k_cache.as<Cache>(page_id, h, offset);
  Cache* v_to = p.v_cache.as<Cache>(page_id, h, offset);
  const auto copy = [&](const char* from, Cache* to, int D, bool wide, bool wide_cache, float scale) {
    for (int j = lane; live && j * kGroup < D; j += p.lanes) {
      const int n = group_size(D, j);
      store_group(to + j * kGroup, read_group<Cache>(p.input, from, j, n, wide, scale), n, wide_cache);
    }
  };
  if constexpr (R == 0) {
    copy(k_row, k_to, p.D, p.wide_k, p.wide_k_cache, k_scale);
    copy(v_row, v_to, p.Dv, p.wide_v, p.wide_v_cache, v_scale);
  } else {
    const SketchRow<R, Uniform> row(p.D, p.lanes);
    Group<Cache> keys[R];
#pragma unroll
    for (int r = 0; r < R; ++r)
      keys[r] = read_group<Cache>(p.input, k_row, row.group(r), live ? row.size(r) : 0, p.wide_k, k_scale);
    copy(v_row, v_to, p.Dv, p.wide_v, p.wide_v_cache, v_scale);
    float x[R][kGroup];
    const float* centre = p.centre + h * p.centre_stride;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int first = row.group(r) * kGroup, n = live ? row.size(r) : 0;
      store_group(k_to + first, keys[r], n, p.wide_k_cache);
#pragma unroll
      for (int c = 0; c < kGroup; ++c)
        x[r][c] = sub_rn(mul_rn(to_float(keys[r].element(c)), k_scale), c < n ? centre[first + c] : 0.0f);
    }
    const SketchEntry<R> e = sketch_entry(row, x, p.planes);
    if (live)
      store_entry(row, e, p.planes, static_cast<uint32_t>(w.page), offset, p.sketch.page_bits(page_id, h),
                  p.sketch.page_norm(page_id, h));
  }
}

// A page's live keys are those up to the last slot written.
template <class Cache>
__global__ void __launch_bounds__(kThreads, 2) append_summaries_kernel(const __grid_constant__ Params p) {
  __shared__ int64_t shared_slots[kScanRows];
  const Winners& w = p.winners;
  const SlotScan scan = load_slots(w, shared_slots);
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id(), i = item / p.heads, h = item % p.heads;
  const int64_t slot = i < w.rows ? w.slots[i] : -1;
  if (!counts(w, scan, true, i, slot, 32)) return;
  const int64_t page_id = slot / w.page;
  summarise_page<Cache>(p.summary, page_id, h, static_cast<uint32_t>(slot - page_id * w.page) + 1);
}

int64_t table_bytes(const slicing::AppendKvArgs& a) { return winner_bytes(a.k.shape[0], a.summary.given()); }

unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(slicing::ceil_div(items, per_block));
}

Params make_params(const slicing::AppendKvArgs& a, const Winners& winners) {
  Params p{};
  p.winners = winners;
  p.k = Rows3::of(a.k), p.v = Rows3::of(a.v);
  p.k_cache = Rows3::of(a.k_cache), p.v_cache = Rows3::of(a.v_cache);
  p.k_scale = HeadScale::of(a.k_scale), p.v_scale = HeadScale::of(a.v_scale);
  p.input = a.k.dtype;
  p.sketch = DeviceSketch::of(a.bits, a.norm);
  p.heads = static_cast<int>(a.k_cache.shape[1]);
  p.D = static_cast<int>(a.k_cache.shape[3]), p.Dv = static_cast<int>(a.v_cache.shape[3]);
  p.lanes = lanes_per_row(p.D);
  p.wide_k = groups_aligned(a.k), p.wide_v = groups_aligned(a.v);
  p.wide_k_cache = groups_aligned(a.k_cache), p.wide_v_cache = groups_aligned(a.v_cache);
  if (a.bits.given()) {
    p.centre = a.centre.as<const float>(), p.centre_stride = a.centre.stride[0];
    p.planes = static_cast<int>(a.bits.shape[2] / slicing::sketch_plane_bytes(a.k_cache.shape[2], p.D));
  }
  if (a.summary.given()) p.summary = SummaryParams::of(a.k_cache, a.k_scale, a.summary);
  return p;
}

}  // namespace

int64_t append_kv_workspace(const slicing::AppendKvArgs& a) { return table_bytes(a); }

void append_kv(const slicing::AppendKvArgs& a, const Exec& exec) {
  const Params p = make_params(
      a, enter_rows(a.slots, a.k_cache.shape[2], a.summary.given(), exec.workspace.as<int32_t>(), exec.stream));
  const int64_t items = p.winners.rows * p.heads;
  const dim3 block(kThreads);
  with_float_type(a.k_cache.dtype, [&](auto type) {
    using Cache = decltype(type);
    const dim3 grid(blocks_for(items, kWarps * (32 / p.lanes)));
    if (a.bits.given()) {
      with_sketch_row(p.D, [&](auto sets, auto uniform) {
        launch(append_rows_kernel<Cache, decltype(sets)::value, decltype(uniform)::value>, grid, block, 0, exec.stream,
               p);
      });
    } else {
      launch(append_rows_kernel<Cache, 0, false>, grid, block, 0, exec.stream, p);
    }
    if (a.summary.given())
      launch(append_summaries_kernel<Cache>, dim3(blocks_for(items, kWarps)), block, 0, exec.stream, p);
  });
}

}  // namespace sic::gpu
