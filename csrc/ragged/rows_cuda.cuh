// What the kernels of pack and unpack share: a sequence is a run of words, of which every block takes a part.
//
// Grids follow from shapes alone: a block for every part of the padded tensor, and the lengths are read on the device.
// What they say is taken as right, but no block leaves the tensors for it.
#pragma once
#include <algorithm>

#include "core/words.cuh"
#include "ragged/layout.h"

namespace sic::gpu {

constexpr int kCopyThreads = 256, kWordsInFlight = 4, kCopySteps = 2;
constexpr int64_t kWordsPerBlock = int64_t{kCopyThreads} * kWordsInFlight * kCopySteps;

// Strides in bytes. Where all rows follow each other without gaps a row is one word, and `scale` words are a token.
struct RowsParams {
  const void* cu_seqlens;
  bool wide;
  char *padded, *packed;
  int64_t longest, rows;  // S and N
  int64_t sequence_stride, row_stride, packed_stride;
  uint32_t words;  // of a row
  uint32_t scale;
  int64_t blocks;  // of a sequence

  __device__ __forceinline__ int64_t bound(int64_t b) const {
    return wide ? static_cast<const int64_t*>(cu_seqlens)[b]
                : static_cast<int64_t>(static_cast<const int32_t*>(cu_seqlens)[b]);
  }
};

// The part of a sequence that a block takes, in words: `live` of its words have a packed row.
struct RowsPart {
  char *padded, *packed;  // of the sequence
  int64_t first, live, end;

  __device__ __forceinline__ explicit RowsPart(const RowsParams& p) {
    const int64_t b = blockIdx.x / p.blocks, token = static_cast<int64_t>(p.words) * p.scale;
    const int64_t begin = p.bound(b), length = p.bound(b + 1) - begin;
    const int64_t room = begin < 0 ? 0 : min64(p.longest, p.rows - begin);
    padded = p.padded + b * p.sequence_stride;
    packed = p.packed + begin * p.scale * p.packed_stride;
    first = blockIdx.x % p.blocks * kWordsPerBlock;
    live = max64(0, min64(length, room)) * token;
    end = min64(p.longest * token, first + kWordsPerBlock);
  }

 private:
  __device__ __forceinline__ static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
  __device__ __forceinline__ static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
};

// Where a word lies in both tensors.
template <class Word, bool kDense>
struct WordPlace {
  int64_t padded, packed;

  // Word `offset` from the start of row `row` on.
  __device__ __forceinline__ WordPlace(const RowsParams& p, int64_t row, uint32_t offset) {
    constexpr int64_t kWord = sizeof(Word);
    if constexpr (kDense) {
      padded = packed = (row + offset) * kWord;
    } else {
      const uint32_t over = offset / p.words, at = offset - over * p.words;
      padded = (row + over) * p.row_stride + at * kWord;
      packed = (row + over) * p.packed_stride + at * kWord;
    }
  }
};

// The words of the part that have a packed row, from the padded tensor to the packed one or back; four loads of a
// thread are in flight.
template <class Word, bool kDense, bool kPack>
__device__ __forceinline__ void copy_words(const RowsParams& p, const RowsPart& part) {
  const int64_t row = kDense ? part.first : part.first / p.words;
  const uint32_t skip = kDense ? 0 : static_cast<uint32_t>(part.first - row * p.words);
  const int64_t last = part.live < part.end ? part.live : part.end;
  const uint32_t count = last > part.first ? static_cast<uint32_t>(last - part.first) : 0;
  for (uint32_t first = threadIdx.x; first < count; first += kWordsInFlight * kCopyThreads) {
    Word word[kWordsInFlight];
    char* target[kWordsInFlight];
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u) {
      const uint32_t i = first + u * kCopyThreads;
      target[u] = nullptr;
      if (i >= count) continue;
      const WordPlace<Word, kDense> at(p, row, skip + i);
      char *const padded = part.padded + at.padded, *const packed = part.packed + at.packed;
      word[u] = load_word<Word>(kPack ? padded : packed);
      target[u] = kPack ? packed : padded;
    }
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u)
      if (target[u]) store_word(target[u], word[u]);
  }
}

// ---- host side ----

// The widest word, up to 16 bytes, to which all rows are aligned and of which they are a whole number.
inline int64_t word_bytes(const ragged::Layout& l) {
  const int64_t all = reinterpret_cast<intptr_t>(l.padded) | reinterpret_cast<intptr_t>(l.packed) | l.row_bytes |
                      l.sequence_stride | l.row_stride | l.packed_stride;
  return all == 0 ? 16 : std::min<int64_t>(16, all & -all);
}

// launch(a word, whether rows are dense, parameters, grid).
template <class Launch>
void with_rows(const ragged::Layout& l, const TensorView& cu_seqlens, Launch launch) {
  with_word(word_bytes(l), [&](auto word) {
    constexpr int64_t kWord = sizeof(word);
    const int64_t words = l.row_bytes / kWord;
    RowsParams p{};
    p.cu_seqlens = cu_seqlens.data, p.wide = cu_seqlens.dtype == DType::i64;
    p.padded = l.padded, p.packed = l.packed, p.longest = l.longest, p.rows = l.rows;
    p.sequence_stride = l.sequence_stride, p.row_stride = l.row_stride, p.packed_stride = l.packed_stride;
    p.words = static_cast<uint32_t>(l.dense() ? 1 : words), p.scale = static_cast<uint32_t>(l.dense() ? words : 1);
    p.blocks = (l.longest * words + kWordsPerBlock - 1) / kWordsPerBlock;
    if (l.dense()) p.row_stride = p.packed_stride = kWord;
    const dim3 grid(grid_blocks(l.sequences * p.blocks));
    if (l.dense()) return launch(word, std::true_type{}, p, grid);
    launch(word, std::false_type{}, p, grid);
  });
}

}  // namespace sic::gpu
