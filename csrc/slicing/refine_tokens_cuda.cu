// refine_tokens on the device: a thread scores one candidate by both planes; then the heads are joined over the list.
// Three launches, four for softmax.
//
// Floor: 34 bytes a candidate and KV head at D = 128. A candidate's bytes lie 16 apart, so that sparse ones draw whole
// sectors, at worst 16 times that; lists as dense as attend's shortlist share them.
#include "slicing/scan_cuda.cuh"

namespace sic::gpu {
namespace {

ScoreScratch scratch_of(const slicing::SketchScoreArgs& a, void* memory) {
  return {a, a.cand_indices.shape[3], false, true, memory};
}

}  // namespace

int64_t refine_tokens_workspace(const slicing::SketchScoreArgs& a) { return scratch_of(a, nullptr).bytes; }

void refine_tokens(const slicing::SketchScoreArgs& a, const Exec& exec) {
  const ScoreScratch s = scratch_of(a, exec.workspace.data);
  const DeviceSelection list = DeviceSelection::of(a.cand_indices, a.cand_counts);
  launch_scan_listed(s.task, list, a.cand_indices.shape[3], s.scores, s.queries, exec.stream);
  JoinTask join = s.join(a);
  join.scores = s.scores.second;
  join.list = list;
  launch_join(join, exec.stream);
}

}  // namespace sic::gpu
