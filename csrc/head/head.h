// The contract of the head family: what logits say, without a second pass over them.
//
// Shapes: B rows, V ids (of this shard of the vocabulary), D hidden size, k ids listed, W ids watched, R rank and n
// outputs of a probe. Optional tensors are left default-constructed.
#pragma once
#include <cstdint>

#include "core/op.h"

namespace sic::head {

using sic::Exec;

constexpr int64_t kMaxTop = 64, kMaxWatched = 64, kMaxRank = 64, kMaxOutputs = 16;

// Bits of status; 0 is good.
enum Status : uint8_t {
  kNan = 1,    // a NaN among the logits
  kInf = 2,    // a +inf among them
  kEmpty = 4,  // all of them -inf, masked or behind the valid vocabulary
};

// Where logits come from, and what becomes of them before anything is counted:
//   z = softcap * tanh(x / softcap) + bias, and -inf for ids that are masked or not valid
// Of z the lists; of z / temperature everything else.
struct Logits {
  TensorView x;               // f32|f16|bf16 [B,V]; lm_head_stats has in its place
  TensorView hidden, weight;  // f32|f16|bf16 [B,D], [V,D]: x = hidden . weight, in f32
  TensorView temperature;     // f32 [] or [B]; 0: greedy, statistics at 1
  TensorView bias;            // f32 [V]
  float softcap = 0;          // 0: none
  int64_t valid_vocab = 0;    // ids from it on do not take part
  TensorView mask_bits;       // i32 [B,ceil(V/32)]: bit i of word j lets id 32 j + i (of this shard) take part
  int64_t vocab_start = 0;    // id of the first column
};

struct Wanted {
  int64_t k = 0;
  TensorView watch_ids;   // i32|i64 [W] or [B,W]
  TensorView target_ids;  // i32|i64 [B]; -1: none
};

// The greatest k of z, greatest first, the lowest id first of equals; ids of -inf are not listed. Rows with a status
// have id 0 and NaN. Ids not listed: -1, -inf.
struct Stats {
  TensorView lse, entropy, varentropy;                // f32 [B], natural
  TensorView argmax;                                  // i64 [B]
  TensorView topk_ids, topk_logprobs;                 // i64, f32 [B,k]
  TensorView watch_logprobs, target_logprob, status;  // f32 [B,W], f32 [B] ([0] without targets), u8 [B]
};

// The same of a shard, to be merged; k is 1 or more. With y = (z - m) / temperature: s = sum e^y, t = sum y e^y, u =
// sum y^2 e^y. Of no id: m = -inf, s = t = u = 0.
struct Part {
  TensorView m;             // f32 [B]
  TensorView s, t, u;       // f64 [B]
  TensorView top_ids, top;  // i64, f32 [B,k]: ids and their z; -1, -inf
  TensorView watch,
      target;         // f32 [B,W], f32 [B] ([0]): z of the ids that are in the shard, else -inf; NaN without a target
  TensorView status;  // u8 [B]: kNan, kInf
};

// score = link(vector . activation(projection . hidden) + bias)
enum class Activation { none, relu };
enum class Link { sigmoid, identity };
struct Probe {
  TensorView projection, vector, bias;  // f32|f16|bf16 [R,D], f32 [n,R], f32 [n]
  Activation activation = Activation::none;
  Link link = Link::sigmoid;
  TensorView score;  // out: f32 [B,n]
};

// Either `stats` or `part` is the output: of the ops *_stats the one, of *_part the other.
struct StatsArgs {
  Logits in;
  Wanted wanted;
  Stats stats;
  Part part;
  Probe probe;  // lm_head_stats alone, optional
};
extern const Op<StatsArgs> logits_stats, logits_part, lm_head_stats, lm_head_part;

// parts: the tensors of Part with a first dimension of n parts. Parts of one call have equal k and W.
struct MergeArgs {
  Part parts;
  TensorView temperature;
  Stats stats;
};
extern const Op<MergeArgs> merge_stats;

struct ProbeArgs {
  TensorView hidden;  // f32|f16|bf16 [B,D]
  Probe probe;
};
extern const Op<ProbeArgs> probe;

}  // namespace sic::head
