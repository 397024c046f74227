// append_kv on the CPU: rows, then their index entries.
#include "slicing/append_kv.h"

#include "core/parallel.h"
#include "core/scratch.h"
#include "slicing/page_summary_cpu.h"
#include "slicing/sketch_cpu.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {
namespace {

using slicing::AppendKvArgs;

constexpr int64_t kRowsPerTask = 64;

void write_row(const TensorView& rows, const TensorView& cache, const TensorView& scale, int64_t i, int64_t h,
               int64_t slot) {
  const int64_t page = cache.shape[2], D = cache.shape[3];
  const int64_t from = i * rows.stride[0] + h * rows.stride[1];
  const int64_t to = slot / page * cache.stride[0] + h * cache.stride[1] + slot % page * cache.stride[2];
  if (rows.dtype == cache.dtype) {
    const int64_t bytes = itemsize(cache.dtype);
    std::memcpy(cache.as<char>() + to * bytes, rows.as<const char>() + from * bytes, D * bytes);
    return;
  }
  float* row = reinterpret_cast<float*>(thread_scratch(D * static_cast<int64_t>(sizeof(float))));
  load_row(rows, from, D, 1.0f, row);
  const float s = slicing::scale_at(scale, h);
  for (int64_t d = 0; d < D; ++d) row[d] /= s;
  store_row(cache, to, D, row, 1.0f);
}

void write_sketch(const AppendKvArgs& a, int64_t h, int64_t slot) {
  const int64_t page = a.k_cache.shape[2], D = a.k_cache.shape[3], id = slot / page, token = slot % page;
  const int planes = static_cast<int>(a.bits.shape[2] / slicing::sketch_plane_bytes(page, D));
  float* x = reinterpret_cast<float*>(thread_scratch(2 * D * static_cast<int64_t>(sizeof(float))));
  const float* centre = a.centre.as<const float>() + h * a.centre.stride[0];
  load_row(a.k_cache, id * a.k_cache.stride[0] + h * a.k_cache.stride[1] + token * a.k_cache.stride[2], D,
           slicing::scale_at(a.k_scale, h), x);
  for (int64_t d = 0; d < D; ++d) x[d] -= centre[d];
  SketchWriter(page, static_cast<int>(D), planes)
      .write(x, x + D, a.bits.as<uint8_t>() + id * a.bits.stride[0] + h * a.bits.stride[1],
             a.norm.as<bf16_t>() + id * a.norm.stride[0] + h * a.norm.stride[1], token);
}

}  // namespace

void append_kv(const AppendKvArgs& a, const Exec&) {
  const int64_t N = a.k.shape[0], Hkv = a.k_cache.shape[1], page = a.k_cache.shape[2];
  const slicing::AppendPlan plan = slicing::plan_append(a);
  // Of two rows for one slot the later one stays: then the rows of a head go in order.
  const int64_t chunk = plan.distinct ? kRowsPerTask : std::max<int64_t>(N, 1), chunks = (N + chunk - 1) / chunk;
  parallel_for(Hkv * chunks, [&](int64_t task) {
    const int64_t h = task / chunks, begin = task % chunks * chunk;
    for (int64_t i = begin; i < std::min(N, begin + chunk); ++i) {
      const int64_t slot = index_at(a.slots, i * a.slots.stride[0]);
      if (slot < 0) continue;
      write_row(a.k, a.k_cache, a.k_scale, i, h, slot);
      write_row(a.v, a.v_cache, a.v_scale, i, h, slot);
      if (a.bits.given()) write_sketch(a, h, slot);
    }
  });
  if (!a.summary.given()) return;
  // A page's live keys are those up to the last slot written.
  parallel_for(static_cast<int64_t>(plan.last_slots.size()) * Hkv, [&](int64_t task) {
    const int64_t slot = plan.last_slots[task / Hkv], h = task % Hkv;
    float* temp =
        reinterpret_cast<float*>(thread_scratch(3 * a.k_cache.shape[3] * static_cast<int64_t>(sizeof(float))));
    summarise_page(a.k_cache, a.summary, slot / page, h, slot % page + 1, slicing::scale_at(a.k_scale, h), temp);
  });
}

}  // namespace sic::cpu::SIC_ISA
