// score_tokens on the device: per-head scores by plane 0 go to the workspace, and the heads' maxima with them; then the
// heads are joined. Three launches, four for softmax.
#include "slicing/scan_cuda.cuh"

namespace sic::gpu {
namespace {

ScoreScratch scratch_of(const slicing::SketchScoreArgs& a, void* memory) {
  return {a, a.max_seq_len, true, false, memory};
}

}  // namespace

int64_t score_tokens_workspace(const slicing::SketchScoreArgs& a) { return scratch_of(a, nullptr).bytes; }

void score_tokens(const slicing::SketchScoreArgs& a, const Exec& exec) {
  const ScoreScratch s = scratch_of(a, exec.workspace.data);
  launch_scan(s.task, s.scores, s.queries, exec.stream);
  launch_join(s.join(a), exec.stream);
}

}  // namespace sic::gpu
