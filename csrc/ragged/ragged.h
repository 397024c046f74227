// The contract of the ragged family: rows of sequences between a padded and a packed tensor.
//
// Shapes: B sequences of at most S tokens, N packed rows. A row is whatever a token has: everything behind the first
// two dimensions of the padded tensor, or the first of the packed one, contiguous in itself; rows may lie anywhere.
// cu_seqlens i32|i64 [B+1] are cumulative lengths from 0 on: sequence b is the packed rows cu_seqlens[b] up to
// cu_seqlens[b + 1]. Bits are moved, so every element type will do.
#pragma once
#include <cstdint>

#include "core/op.h"

namespace sic::ragged {

struct PackArgs {
  TensorView padded;      // [B,S,...]
  TensorView cu_seqlens;  // i32|i64 [B+1]
  TensorView out;         // [N,...]; rows from the last of cu_seqlens on are not touched
};
extern const Op<PackArgs> pack;
// Rows that pack writes. From a CUDA device this waits for the stream.
int64_t packed_rows(const PackArgs&, const Exec&);

struct UnpackArgs {
  TensorView packed;      // [N,...]
  TensorView cu_seqlens;  // i32|i64 [B+1]
  int64_t max_len = 0;    // S
  int64_t fill = 0;       // the bits of the element behind a sequence, in the low bytes
  TensorView out;         // [B,S,...]
};
extern const Op<UnpackArgs> unpack;

}  // namespace sic::ragged
