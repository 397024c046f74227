// Which blocks of a launch have seen each other's work.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

namespace sic::simt {

// Blocks of one launch run in any order, so what one wrote another may not read; unless it went through an atomic with
// a device fence on both sides, as where the last block to finish sums up. A cluster counts as one block.
class BlockOrder {
 public:
  void begin_launch();
  void begin_block();
  // What the current thread does.
  void fence();
  void atomic(const void* p);
  // Whether what a thread of an earlier block did in that epoch is known to have happened before.
  bool after(uint32_t epoch, int thread) const;
  bool after_all() const;  // all blocks that ran before

 private:
  // The block's work so far, handed on by one of its threads.
  struct Release {
    uint32_t epoch;
    int thread;
  };
  using Releases = std::map<size_t, Release>;  // by block, in the order that they ran

  std::vector<uint32_t> starts_;                         // epochs
  std::unordered_map<const void*, Releases> published_;  // by atomic variable
  // Of the running block, by thread:
  std::unordered_map<int, Release> fences_;
  std::unordered_map<int, Releases> observed_;  // by atomics since the last fence
  Releases acquired_;
};
extern BlockOrder block_order;

}  // namespace sic::simt
