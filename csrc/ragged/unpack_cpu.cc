// unpack on the CPU: tasks of as many padded rows each; what is behind a sequence is filled.
#include <algorithm>

#include "core/parallel.h"
#include "ragged/copy_cpu.h"

namespace sic::cpu::SIC_ISA {

void unpack(const ragged::UnpackArgs& a, const Exec&) {
  const ragged::Layout l = ragged::layout_of(a.out, a.packed);
  const auto bound = [&](int64_t b) { return index_at(a.cu_seqlens, b * a.cu_seqlens.stride[0]); };
  const int64_t rows = l.sequences * l.longest, per_task = rows_per_task(l.row_bytes), item = itemsize(a.out.dtype);
  const bool past_caches = rows * l.row_bytes >= kStreamBytes;
  parallel_for((rows + per_task - 1) / per_task, [&](int64_t task) {
    const int64_t last = std::min(rows, (task + 1) * per_task);
    for (int64_t at = task * per_task; at < last;) {
      const int64_t b = at / l.longest, row = at % l.longest, end = std::min(l.longest, row + last - at);
      const int64_t begin = bound(b), split = std::clamp(bound(b + 1) - begin, row, end);
      char* to = l.padded + b * l.sequence_stride;
      copy_rows(to + row * l.row_stride, l.row_stride, l.packed + (begin + row) * l.packed_stride, l.packed_stride,
                l.row_bytes, split - row, past_caches);
      fill_rows(to + split * l.row_stride, l.row_stride, a.fill, item, l.row_bytes, end - split, past_caches);
      at += end - row;
    }
    if (past_caches) finish_stores();
  });
}

}  // namespace sic::cpu::SIC_ISA
