// The contract of the slicing family: one argument struct and one op each.
//
// Calling an op, `select(args, exec)`, checks every argument (ArgumentError, nothing touched), then runs the backend of
// the tensors' device (core/op.h).
// Shapes: B sequences, T query tokens, Hq query heads, Hkv KV heads, G = Hq/Hkv, P pages, M pages a sequence,
// S = M * page positions, D head size. Optional tensors are left default-constructed.
#pragma once
#include <cstdint>

#include "core/op.h"

namespace sic::slicing {

enum class Unit { token, page };
enum class Pool { max, softmax };

using sic::Exec;

// Keys and values: [P,Hkv,page,D] under a block table [B,M], or [B,Hkv,S,D] without one. seq_lens [B].
struct PagedKv {
  TensorView k_cache, v_cache, block_table, seq_lens;
  TensorView k_scale, v_scale;  // f32, [] or [Hkv]; f8 caches only
};

struct Selected {
  TensorView indices, counts;  // i32 [B,T,Hkv,K], i32 [B,T,Hkv]
  Unit unit = Unit::token;
};

struct AppendKvArgs {
  TensorView k, v, k_cache, v_cache, slots;  // [N,Hkv,Dk], [N,Hkv,Dv], caches, i64 [N]
  TensorView k_scale, v_scale;
  TensorView bits, norm, centre;  // a key sketch to keep up to date
  TensorView summary;             // or a page summary
};
extern const Op<AppendKvArgs> append_kv;

struct KeySketchArgs {
  TensorView k_cache, block_table, seq_lens, centre, k_scale;
  int planes = 2;
  TensorView start;       // i32/i64 [B]
  TensorView bits, norm;  // out: u8 [P,Hkv,bytes], bf16 [P,Hkv,page]
};
extern const Op<KeySketchArgs> key_sketch;

struct SketchScoreArgs {
  TensorView q, bits, norm, block_table, seq_lens;
  int64_t page = 0;
  int planes = 2;
  TensorView cand_indices, cand_counts;  // refine_tokens only
  Pool pool = Pool::max;
  float scale = 0;
  int64_t max_seq_len = 0;
  TensorView out;  // i16 [B,T,Hkv,S] or [B,T,Hkv,K]
};
extern const Op<SketchScoreArgs> score_tokens;
extern const Op<SketchScoreArgs> refine_tokens;

struct PageSummaryArgs {
  TensorView k_cache, block_table, seq_lens, k_scale, start;
  TensorView summary;  // out: [P,Hkv,2,D]
};
extern const Op<PageSummaryArgs> page_summary;

struct ScorePagesArgs {
  TensorView q, summary, block_table, seq_lens;
  int64_t page = 0;
  float beta = 0.5f;
  Pool pool = Pool::softmax;
  float scale = 0;
  int64_t max_seq_len = 0;
  TensorView out;  // f32 [B,T,Hkv,M]
};
extern const Op<ScorePagesArgs> score_pages;

struct SelectArgs {
  TensorView scores, seq_lens;  // [B,T,Hkv,N] i16|f32|f16|bf16
  Unit unit = Unit::token;
  int64_t page = 1;
  double ratio = 0.12;
  int64_t budget = -1;  // tokens; -1: by ratio
  TensorView budgets;   // i32/i64 [B,Hkv], in place of budget
  double top_p = 1;
  int64_t sink = 16, recent = 32;
  TensorView keep;             // i32/i64 [B,n,2]: tokens [begin, end) that are taken; empty spans are padding
  int64_t min_len = 0;         // up to so many positions, everything is kept
  int64_t least = 0;           // the budget is at least so many tokens
  TensorView indices, counts;  // out
};
extern const Op<SelectArgs> select;
// Slots a row of indices needs.
int64_t selection_capacity(const SelectArgs&);

struct GatherArgs {
  PagedKv kv;
  Selected selected;
  TensorView k, v, indptr;  // out: [N,Dk], [N,Dv], i64 [B*T*Hkv+1]
};
extern const Op<GatherArgs> gather;
// Rows that gather writes. Reads the counts: from a CUDA device this waits for the stream.
int64_t gathered_rows(const GatherArgs&, const Exec&);

struct AttentionArgs {
  TensorView q;  // [B,T,Hq,Dk]
  PagedKv kv;
  Selected selected;  // not given: dense
  float scale = 0;
  TensorView key_bias;  // f32 [B,S]
  float softcap = 0;    // 0: none
  int64_t window = 0;   // 0: none
  TensorView sinks;     // f32 [Hq]
  int64_t max_seq_len = 0;
  TensorView out, lse;  // out: [B,T,Hq,Dv] in q's type, f32 [B,T,Hq]
};
extern const Op<AttentionArgs> sliced_attention;

struct MergeArgs {
  TensorView outs, lses;  // [n,R,H,D], f32 [n,R,H]
  TensorView out, lse;    // [R,H,D], [R,H]
};
struct MergeStatesArgs {
  TensorView out_a, lse_a, out_b, lse_b;  // [R,H,D], f32 [R,H]
  TensorView out, lse;
};
extern const Op<MergeArgs> merge_many;
extern const Op<MergeStatesArgs> merge_states;

// Why a query head was answered the way it was.
enum Status : uint8_t {
  kSliced = 0,
  kDenseLayer = 1,    // the policy keeps this layer dense
  kDenseShort = 2,    // fewer than min_len positions, or the budget covers them all
  kDensePrefill = 3,  // more query tokens than max_sliced_T
  kFallbackMass = 4,  // estimated omitted mass above the policy's limit
};

struct AttendArgs {
  AttentionArgs attention;  // out, lse, and the extras; its selection is ignored
  TensorView bits, norm, centre;
  int planes = 2;
  TensorView summary;
  double ratio = 0.12, candidates = 0.35, top_p = 1;
  int64_t sink = 16, recent = 32;
  TensorView keep;
  float beta = 0.5f;
  Pool pool = Pool::softmax;   // of the final scores; the shortlist is joined by maximum
  float max_omitted_mass = 2;  // above 1: never
  bool dense_layer = false;
  int64_t max_sliced_T = 16, min_len = 0;
  TensorView indices, counts, omitted_mass, status;  // out: selection; f32, u8 [B,T,Hq]
};
extern const Op<AttendArgs> attend;
// Its first half: what a query needs, and the log of the sum of exp(estimated logit) over the rest in omitted_mass. The
// cache may be a shape without data; attention's outputs, the limit of omitted mass and what makes a call dense are
// not looked at.
extern const Op<AttendArgs> select_slice;
bool attend_is_dense(const AttendArgs&);         // by policy, for the whole call
SelectArgs attend_selection(const AttendArgs&);  // the selection it makes; its scores have a shape only
int64_t attend_capacity(const AttendArgs&);      // slots a row of its indices needs
// The attention over what it selects. Before there are indices they have a shape only: the least that would do.
AttentionArgs attend_attention(const AttendArgs&);

}  // namespace sic::slicing
