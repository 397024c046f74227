// The contract of the delta family: a KV cache stored as differences from templates.
//
// A key (before RoPE) or value is the nearest of up to 256 templates of its head, plus a rotated residual in integer
// levels of 2 to 8 bits times one half-precision scale. Rows that this does not fit are kept raw in a side table.
// Shapes: as in slicing/slicing.h; n templates a head, E entries in the side table, N rows to encode.
#pragma once
#include <cstdint>

#include "core/op.h"
#include "slicing/slicing.h"

namespace sic::delta {

using sic::Exec;
using slicing::Selected;

// Templates of the keys or of the values, and what the search for the nearest one needs of them.
struct Templates {
  TensorView centres;  // f16 [Hkv,n,D]
  TensorView search;  // i8 [Hkv,ceil(n/16),ceil(D/4),16,4]: (centre - mean) / step, 4 channels of 16 templates together
  TensorView half_norm;  // f32 [Hkv,16*ceil(n/16)]: |centre - mean|^2 / 2, infinite where there is no template
  TensorView mean;       // f32 [Hkv,D]
  TensorView step;       // f32 [Hkv]
  TensorView bound;      // f32 [Hkv]: rows whose squared error is larger are kept raw
};

// Position 64 i + j turns by hi[i] and lo[j]; undo is the inverse of hi. Without tables keys carry no positions.
struct Rope {
  TensorView lo;        // f32 [64,2,R/2]: cosines, sines
  TensorView hi, undo;  // f32 [n,2,R/2]
  bool interleaved = false;
};

struct Codec {
  int k_bits = 4, v_bits = 4;  // 2, 3, 4, 5 or 8
  Templates k, v;
  int64_t k_rotation = 1;  // channels of a key that are rotated together; values are rotated as a whole
  Rope rope;
};

// The coded cache. tags: f16 k_scale, f16 v_scale, u8 k_id, u8 v_id (codes.h).
struct Pages {
  TensorView k_codes, v_codes, tags;     // u8 [P,Hkv,page,bytes]
  TensorView raw, raw_owner, raw_state;  // f32|f16|bf16 [E,Dk+Dv], i64 [E], i32 [2]: entries in use, rows without room
};

struct EncodeArgs {
  TensorView k, v, positions, slots;  // [N,Hkv,Dk], [N,Hkv,Dv], i32/i64 [N] twice
  Codec codec;
  int64_t sinks = 4;  // rows at the first positions are kept raw
  Pages pages;
  TensorView bits, norm, centre;  // a key sketch to keep up to date
};
extern const Op<EncodeArgs> delta_encode;

struct DecodeArgs {
  Pages pages;
  Codec codec;
  TensorView block_table, seq_lens;
  TensorView positions;  // i32 [B,S]; not given: 0, 1, 2, ..
  int64_t max_seq_len = 0;
  TensorView k, v;  // out: f32|f16|bf16 [B,S,Hkv,Dk], [B,S,Hkv,Dv]; zeros behind a sequence
};
extern const Op<DecodeArgs> delta_decode;

// Rows that are not coded yet: positions from start[b] on, keys rotated.
struct Tail {
  TensorView k, v, start;  // f32|f16|bf16 [B,Hkv,R,Dk], [B,Hkv,R,Dv], i32/i64 [B]
};

struct AttentionArgs {
  // All but the cache, whose k_cache and v_cache are shapes without data: what the pages stand for.
  slicing::AttentionArgs attention;
  Pages pages;
  Codec codec;
  TensorView positions;  // i32 [B,S], of RoPE; what a query sees goes by the index
  Tail tail;
};
extern const Op<AttentionArgs> delta_attention;

}  // namespace sic::delta
