// attend's selection for rows (sequence, query token, KV head) whose scores fit shared memory, of one block or of a
// cluster of blocks: all that lies between the scan of the sketch and attention, in one launch.
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
  int32_t held = 0;  // set by launch_rows: entries of a block's shortlist whose scores stay in shared memory
};

// Whether rows of so many positions fit the shared memory of the current device.
bool rows_fit(int64_t width, int64_t G);
// One launch. Writes the selection, and the log of the unread mass to unread.out. What a row gives depends on the row
// and its width alone, never on how many there are.
void launch_rows(const RowsTask&, void* stream);

}  // namespace sic::gpu
