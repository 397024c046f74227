// score_tokens on the device: per-head scores by plane 0 go to the workspace, and the heads' maxima with them; then the
// heads are joined. Three launches, four for softmax.
#include "slicing/scan_cuda.cuh"
#include "slicing/validate.h"

namespace sic::gpu {
namespace {

struct Layout {
  ScanTask task;
  HeadScores scores;
  int64_t queries = 0, bytes = 0;

  Layout(const slicing::SketchScoreArgs& a, void* memory) : task(scan_task(a)) {
    scores = head_scores(task, a.max_seq_len, true, false, static_cast<char*>(memory), bytes);
    queries = (bytes + 255) / 256 * 256;
    bytes = queries + scan_scratch(task);
  }
};

}  // namespace

int64_t score_tokens_workspace(const slicing::SketchScoreArgs& a) { return Layout(a, nullptr).bytes; }

void score_tokens(const slicing::SketchScoreArgs& a, const Exec& exec) {
  const Layout l(a, exec.workspace.data);
  launch_scan(l.task, l.scores, exec.workspace.as<char>() + l.queries, exec.stream);
  launch_join(join_task(l.task, l.scores, a.pool, a.out), exec.stream);
}

}  // namespace sic::gpu
