// Checks that both ops share, and how a checked call lies in memory.
#pragma once
#include "core/check.h"
#include "ragged/ragged.h"

namespace sic::ragged {

constexpr DTypeSet kMovable = kCacheFloats | DType::u8 | DType::i16 | DType::i32 | DType::i64 | DType::f64;

// The tensor with everything behind its first `lead` dimensions as one; its elements must follow each other.
TensorView check_rows(const Check&, const char* arg, const TensorView&, int lead);
// An output of such rows: the leading sizes (-1: any), and rows as `like` has behind its first `like_lead` dimensions.
void check_output_rows(const Check&, const TensorView& out, std::initializer_list<int64_t> leading,
                       const TensorView& like, int like_lead);
// Cumulative lengths of `sequences` sequences (-1: of any number): where the host can read them, ascending from 0 in
// steps of at most `longest`.
void check_lengths(const Check&, const TensorView& cu_seqlens, int64_t sequences, int64_t longest);
// That the packed tensor has the rows with which they end.
void check_packed_rows(const Check&, const char* arg, const TensorView& packed, const TensorView& cu_seqlens);

// Strides in bytes.
struct Layout {
  char *padded, *packed;
  int64_t sequences, longest, rows;  // B, S, N
  int64_t row_bytes, sequence_stride, row_stride, packed_stride;

  // Whether the rows of a sequence follow each other without gaps, in both tensors.
  bool dense() const { return row_stride == row_bytes && packed_stride == row_bytes; }
};
Layout layout_of(const TensorView& padded, const TensorView& packed);

}  // namespace sic::ragged
