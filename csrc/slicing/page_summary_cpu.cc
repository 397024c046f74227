// page_summary on the CPU.
#include "slicing/page_summary_cpu.h"

#include "core/paged.h"
#include "core/parallel.h"
#include "core/scratch.h"
#include "slicing/validate.h"

namespace sic::cpu::SIC_ISA {

void page_summary(const slicing::PageSummaryArgs& a, const Exec&) {
  const int64_t B = a.seq_lens.shape[0], Hkv = a.k_cache.shape[1], page = a.k_cache.shape[2], D = a.k_cache.shape[3];
  const int64_t M = a.block_table.given() ? a.block_table.shape[1] : 1;
  parallel_for(B * Hkv * M, [&](int64_t task) {
    const int64_t m = task % M, h = task / M % Hkv, b = task / M / Hkv;
    const int64_t len = index_at(a.seq_lens, b * a.seq_lens.stride[0]);
    const int64_t start = a.start.given() ? index_at(a.start, b * a.start.stride[0]) : 0;
    const int64_t live = std::min(page, len - m * page);
    if (live <= 0 || (m + 1) * page <= start) return;
    const int64_t id = PageTable(a.block_table, b)[static_cast<uint32_t>(m)];
    float* temp = reinterpret_cast<float*>(thread_scratch(3 * D * static_cast<int64_t>(sizeof(float))));
    summarise_page(a.k_cache, a.summary, id, h, live, slicing::scale_at(a.k_scale, h), temp);
  });
}

}  // namespace sic::cpu::SIC_ISA
