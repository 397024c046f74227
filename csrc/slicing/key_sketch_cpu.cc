// key_sketch on the CPU: every live key of the pages from `start` on.
#include "core/parallel.h"
#include "core/scratch.h"
#include "slicing/sketch_cpu.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {

void key_sketch(const slicing::KeySketchArgs& a, const Exec&) {
  const int64_t B = a.seq_lens.shape[0], Hkv = a.k_cache.shape[1], page = a.k_cache.shape[2], D = a.k_cache.shape[3];
  const int64_t M = a.block_table.given() ? a.block_table.shape[1] : 1;
  const SketchWriter writer(page, static_cast<int>(D), a.planes);
  parallel_for(B * Hkv * M, [&](int64_t task) {
    const int64_t m = task % M, h = task / M % Hkv, b = task / M / Hkv;
    const int64_t len = index_at(a.seq_lens, b * a.seq_lens.stride[0]);
    const int64_t start = a.start.given() ? index_at(a.start, b * a.start.stride[0]) : 0;
    const int64_t live = std::min(page, len - m * page);
    if (live <= 0 || (m + 1) * page <= start) return;
    const int64_t id = PageTable(a.block_table, b)[static_cast<uint32_t>(m)];
    const float scale = slicing::scale_at(a.k_scale, h);
    const float* centre = a.centre.as<const float>() + h * a.centre.stride[0];
    float* x = reinterpret_cast<float*>(thread_scratch(2 * D * static_cast<int64_t>(sizeof(float))));
    for (int64_t i = 0; i < live; ++i) {
      load_row(a.k_cache, id * a.k_cache.stride[0] + h * a.k_cache.stride[1] + i * a.k_cache.stride[2], D, scale, x);
      for (int64_t d = 0; d < D; ++d) x[d] -= centre[d];
      writer.write(x, x + D, a.bits.as<uint8_t>() + id * a.bits.stride[0] + h * a.bits.stride[1],
                   a.norm.as<bf16_t>() + id * a.norm.stride[0] + h * a.norm.stride[1], i);
    }
  });
}

}  // namespace sic::cpu::SIC_ISA
