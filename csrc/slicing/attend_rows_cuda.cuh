// attend's selection by one block a row (sequence, query token, KV head), for rows whose scores fit shared memory: all
// that lies between the scan of the sketch and attention, in one launch.
#pragma once
#include "slicing/select_cuda.cuh"
#include "slicing/unread_cuda.cuh"

namespace sic::gpu {

struct RowsTask {
  JoinTask join;                  // of plane-0 scores, by `pool` if they are all there is; its out is not used
  const int16_t* fine = nullptr;  // scores by both planes, laid out as those of join; null: none
  SelectTask shortlist;           // with `fine`: what these rank. Its out is room for the list of each row
  SelectTask selection;
  SelectKeep keep;
  UnreadTask unread;
  UnreadScores coarse;
  slicing::Pool pool = slicing::Pool::softmax;  // of the final scores
};

// Whether a block does a row faster than many: it fits the shared memory of the current device, and there are rows for
// many multiprocessors, or short ones.
bool rows_fit(int64_t width, int64_t G);
// One launch. Writes the selection, and the log of the unread mass to unread.out.
void launch_rows(const RowsTask&, void* stream);

}  // namespace sic::gpu
