// pack on the CPU: tasks of as many packed rows each, however long the sequences are.
#include <algorithm>

#include "core/parallel.h"
#include "ragged/copy_cpu.h"

namespace sic::cpu::SIC_ISA {

void pack(const ragged::PackArgs& a, const Exec&) {
  const ragged::Layout l = ragged::layout_of(a.padded, a.out);
  const auto bound = [&](int64_t b) { return index_at(a.cu_seqlens, b * a.cu_seqlens.stride[0]); };
  const int64_t rows = bound(l.sequences), per_task = rows_per_task(l.row_bytes);
  const bool past_caches = rows * l.row_bytes >= kStreamBytes;
  parallel_for((rows + per_task - 1) / per_task, [&](int64_t task) {
    const int64_t first = task * per_task, last = std::min(rows, first + per_task);
    // The last sequence that begins at or before the first row.
    int64_t low = 0, high = l.sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (bound(middle) <= first ? low : high) = middle;
    }
    for (int64_t b = low, row = first; row < last; ++b) {
      const int64_t end = std::min(last, bound(b + 1)), within = row - bound(b);
      copy_rows(l.packed + row * l.packed_stride, l.packed_stride,
                l.padded + b * l.sequence_stride + within * l.row_stride, l.row_stride, l.row_bytes, end - row,
                past_caches);
      row = end;
    }
    if (past_caches) finish_stores();
  });
}

}  // namespace sic::cpu::SIC_ISA
