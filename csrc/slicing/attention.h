// How an attention call is divided into tasks; shared by its backends and by attend.
#pragma once
#include <algorithm>

#include "slicing/validate.h"

namespace sic::slicing {

constexpr int64_t kSplitTokens = 1024;  // listed tokens of one split: fixed, so a row's sums never depend on its batch
constexpr int64_t kRowsPerTask = 32;    // query rows that share one pass over K and V
constexpr int64_t kTasksWithoutSplit = 256;  // enough tasks to feed the threads: splits then run one after another

struct AttentionPlan {
  int64_t group = 1, tokens_per_task = 1, token_tasks = 1;
  int64_t splits = 1;  // parallel splits a row; more than one needs workspace
  int64_t rows = 0;
};
int64_t listed_tokens(const AttentionArgs&);  // of the longest list that the shapes allow; dense, all positions
AttentionPlan plan_attention(const AttentionArgs&);
int64_t attention_workspace(const AttentionArgs&);  // of the CPU kernels: partial results of splits

CacheDims check_attention(const Check&, const AttentionArgs&);
// All but queries and cache.
void check_attention_extras(const Check&, const AttentionArgs&, const CacheDims&);
void check_attention_outputs(const Check&, const AttentionArgs&);

}  // namespace sic::slicing
