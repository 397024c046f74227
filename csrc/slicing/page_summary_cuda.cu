// page_summary on the GPU.
//
// Floor: page * D * itemsize bytes read and 2 * D * itemsize written for each page and head, 4.6 KB at page 16, D = 128
// in bf16. A warp takes a page and keeps four rows of it in flight on each lane, 16 bytes each.
#include "slicing/page_summary_cuda.cuh"

#include <algorithm>

#include "slicing/validate.h"

namespace sic::gpu {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int64_t kMaxParts = 64;  // blocks of a (sequence, head); each strides over the pages

struct Params {
  SummaryParams summary;
  PageMap pages;
  SeqLens seq_lens;
  IntVector start;
  int64_t positions;  // S
  int heads, parts;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) page_summary_kernel(const __grid_constant__ Params p) {
  const int64_t row = blockIdx.x / p.parts, part = blockIdx.x % p.parts, b = row / p.heads, h = row % p.heads;
  const int64_t len = p.seq_lens[b], start = p.start.data ? p.start[b] : 0, page = p.pages.split.page;
  const int64_t end = len < p.positions ? len : p.positions;
  if (start >= p.positions) return;
  const int64_t begin = start > 0 ? p.pages.split.index(static_cast<uint32_t>(start)) : 0;
  for (int64_t m = begin + part * kWarps + warp_id(); m * page < end; m += static_cast<int64_t>(p.parts) * kWarps) {
    const int64_t live = end - m * page < page ? end - m * page : page;
    summarise_page<T>(p.summary, p.pages.id(b, static_cast<uint32_t>(m)), h, static_cast<uint32_t>(live));
  }
}

}  // namespace

int64_t page_summary_workspace(const slicing::PageSummaryArgs&) { return 0; }

void page_summary(const slicing::PageSummaryArgs& a, const Exec& exec) {
  const int64_t page = a.k_cache.shape[2], Hkv = a.k_cache.shape[1], B = a.seq_lens.shape[0];
  const int64_t M = a.block_table.given() ? a.block_table.shape[1] : 1;
  Params p;
  p.summary = SummaryParams::of(a.k_cache, a.k_scale, a.summary);
  p.pages = PageMap::of(a.block_table, page);
  p.seq_lens = SeqLens::of(a.seq_lens);
  p.start = IntVector::of(a.start);
  p.positions = M * page;
  p.heads = static_cast<int>(Hkv);
  p.parts = static_cast<int>(std::clamp<int64_t>(slicing::ceil_div(M, kWarps), 1, kMaxParts));
  with_float_type(a.k_cache.dtype, [&](auto type) {
    launch(page_summary_kernel<decltype(type)>, dim3(grid_blocks(B * Hkv * p.parts)), dim3(kThreads), 0, exec.stream,
           p);
  });
}

}  // namespace sic::gpu
