// refine_tokens on the device: a thread scores one candidate by both planes; then the heads are joined over the list.
// Three launches, four for softmax.
//
// Floor: 34 bytes a candidate and KV head at D = 128. A candidate's bytes lie 16 apart, so that sparse ones draw whole
// sectors, at worst 16 times that; lists as dense as attend's shortlist share them.
#include "slicing/scan_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

struct Layout {
  ScanTask task;
  HeadScores scores;
  int64_t queries = 0, bytes = 0;

  Layout(const slicing::SketchScoreArgs& a, void* memory) : task(scan_task(a)) {
    scores = head_scores(task, a.cand_indices.shape[3], false, true, static_cast<char*>(memory), bytes);
    queries = (bytes + 255) / 256 * 256;
    bytes = queries + scan_scratch(task);
  }
};

}  // namespace

int64_t refine_tokens_workspace(const slicing::SketchScoreArgs& a) { return Layout(a, nullptr).bytes; }

void refine_tokens(const slicing::SketchScoreArgs& a, const Exec& exec) {
  const Layout l(a, exec.workspace.data);
  const DeviceSelection list = DeviceSelection::of(a.cand_indices, a.cand_counts);
  launch_scan_listed(l.task, list, a.cand_indices.shape[3], l.scores, exec.workspace.as<char>() + l.queries,
                     exec.stream);
  JoinTask join = join_task(l.task, l.scores, a.pool, a.out);
  join.scores = l.scores.second;
  join.list = list;
  launch_join(join, exec.stream);
}

}  // namespace sic::gpu
