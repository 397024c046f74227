// unpack on the GPU: the rows of every sequence at the start of its place, the rest of which is filled.
//
// Floor: every packed row read once, the padded tensor written once. One launch.
#include "ragged/rows_cuda.cuh"

namespace sic::gpu {
namespace {

// An element repeated over a word.
template <class Word>
Word filled_word(int64_t fill, int64_t item) {
  Word word;
  for (int64_t i = 0; i < static_cast<int64_t>(sizeof word); i += item)
    std::memcpy(reinterpret_cast<char*>(&word) + i, &fill, item);
  return word;
}

template <class Word, bool kDense>
__device__ __forceinline__ void fill_words(const RowsParams& p, const RowsPart& part, Word word) {
  const int64_t first = part.live > part.first ? part.live : part.first, row = kDense ? first : first / p.words;
  const uint32_t skip = kDense ? 0 : static_cast<uint32_t>(first - row * p.words);
  const uint32_t count = part.end > first ? static_cast<uint32_t>(part.end - first) : 0;
  for (uint32_t i = threadIdx.x; i < count; i += kCopyThreads)
    store_word(part.padded + WordPlace<Word, kDense>(p, row, skip + i).padded, word);
}

template <class Word, bool kDense>
__global__ void __launch_bounds__(kCopyThreads)
    unpack_rows_kernel(const __grid_constant__ RowsParams p, const __grid_constant__ Word fill) {
  const RowsPart part(p);
  copy_words<Word, kDense, false>(p, part);
  fill_words<Word, kDense>(p, part, fill);
}

}  // namespace

int64_t unpack_workspace(const ragged::UnpackArgs&) { return 0; }

void unpack(const ragged::UnpackArgs& a, const Exec& exec) {
  const int64_t item = itemsize(a.out.dtype);
  with_rows(ragged::layout_of(a.out, a.packed), a.cu_seqlens,
            [&](auto word, auto dense, const RowsParams& p, dim3 grid) {
              using Word = decltype(word);
              launch(unpack_rows_kernel<Word, decltype(dense)::value>, grid, dim3(kCopyThreads), 0, exec.stream, p,
                     filled_word<Word>(a.fill, item));
            });
}

}  // namespace sic::gpu
