// pack on the GPU: the rows of every sequence behind those of the one before it.
//
// Floor: every row read once and written once. One launch; where rows follow each other without gaps, words need no
// division to be found.
#include "ragged/rows_cuda.cuh"

namespace sic::gpu {
namespace {

template <class Word, bool kDense>
__global__ void __launch_bounds__(kCopyThreads) pack_rows_kernel(const __grid_constant__ RowsParams p) {
  copy_words<Word, kDense, true>(p, RowsPart(p));
}

}  // namespace

int64_t pack_workspace(const ragged::PackArgs&) { return 0; }

void pack(const ragged::PackArgs& a, const Exec& exec) {
  with_rows(
      ragged::layout_of(a.padded, a.out), a.cu_seqlens, [&](auto word, auto dense, const RowsParams& p, dim3 grid) {
        launch(pack_rows_kernel<decltype(word), decltype(dense)::value>, grid, dim3(kCopyThreads), 0, exec.stream, p);
      });
}

}  // namespace sic::gpu
