// Checks that the ops of the family share.
#pragma once
#include "core/check.h"
#include "delta/delta.h"
#include "slicing/validate.h"

namespace sic::delta {

struct CodedDims {
  int64_t P = 0, Hkv = 0, page = 1, Dk = 0, Dv = 0, E = 0;
};

// The codec by itself, the pages against it. encoding: also what only encode reads.
CodedDims check_coded(const Check&, const Pages&, const Codec&, bool encoding);
// Block table and lengths, as slicing checks them.
slicing::CacheDims check_sequences(const Check&, const Pages&, const TensorView& block_table,
                                   const TensorView& seq_lens);
// Positions of RoPE against its tables; values where the host can read them. Rows to encode: [N]; of a cache: [B,S] or
// not given.
void check_row_positions(const Check&, const TensorView& positions, const Codec&, int64_t N);
void check_cache_positions(const Check&, const TensorView& positions, const TensorView& seq_lens, const Codec&,
                           int64_t S);

}  // namespace sic::delta
