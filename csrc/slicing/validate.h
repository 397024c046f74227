// Checks that several slicing ops share.
#pragma once
#include <limits>

#include "core/check.h"
#include "slicing/slicing.h"

namespace sic::slicing {

constexpr int64_t kMaxPage = (int64_t{1} << 31) - 1;            // positions are counted in 31 bits
constexpr float kLargest = std::numeric_limits<float>::max();   // finite
constexpr float kSmallest = std::numeric_limits<float>::min();  // that can be divided by

struct CacheDims {
  int64_t B = 0, P = 0, Hkv = 0, page = 1, M = 1, S = 0;
};

// A cache (or an index laid out like one) with its block table and lengths; also every length and page id that the host
// can read.
CacheDims check_cache(const Check&, const char* arg, const TensorView& cache, DTypeSet types,
                      const TensorView& block_table, const TensorView& seq_lens, int64_t page);
CacheDims check_kv(const Check&, const PagedKv& kv);
void check_scale(const Check&, const char* arg, const TensorView& scale, const TensorView& cache, int64_t Hkv);

// q [B,T,Hq,D] against the cache's heads; returns the group size.
int64_t check_query(const Check&, const TensorView& q, const CacheDims& dims, int64_t D);

// A selection's shapes; where the host can read them also that every listed token or page is visible.
void check_selection(const Check&, const Selected& s, const CacheDims& dims, int64_t T, const TensorView& seq_lens);

// Sketch arrays against a cache's dimensions.
void check_sketch(const Check&, const TensorView& bits, const TensorView& norm, int planes, const CacheDims& dims,
                  int64_t D);
void check_start(const Check&, const TensorView& start, int64_t B);

// Spans of tokens that are always read: their shape; where the host can read them also that none that holds any tokens
// begins before the first.
void check_keep(const Check&, const TensorView& keep, int64_t B);

// Score rows are addressed up to max_seq_len; no length may lie beyond it.
void check_max_seq_len(const Check&, int64_t max_seq_len, const CacheDims& dims, const TensorView& seq_lens);

// A number that f32 holds.
void check_finite(const Check&, const char* arg, float x);

// A number of tokens given by the caller.
void check_count(const Check&, const char* arg, int64_t n);

// Rows that gather writes for one (sequence, query token, KV head).
int64_t gathered_of_row(const GatherArgs&, int64_t b, int64_t t, int64_t h);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A summary has its cache's type; f8 is too coarse for a bound, so its summary is f32.
inline DType summary_dtype(DType cache) { return cache == DType::f8e4m3 ? DType::f32 : cache; }

// f8 scale of head h; 1 where none is given.
inline float scale_at(const TensorView& scale, int64_t h) {
  if (!scale.given()) return 1.0f;
  return scale.as<const float>()[scale.rank == 0 ? 0 : h * scale.stride[0]];
}

}  // namespace sic::slicing
