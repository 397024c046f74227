// Integer queries as the scan kernels read them.
#pragma once
#include "slicing/scan_cuda.cuh"

namespace sic::gpu {

// Columns of a (sequence, KV head) are its query tokens and heads, padded with zeros; one of the first two is given.
struct ScanQueries {
  int8_t* fragments = nullptr;  // [units][columns / 8][steps][32 lanes][8]: B operands of mma.m16n8k32
  uint2* rows = nullptr;        // [units][columns][row_bytes]: 8 channels each
  float2* factors = nullptr;    // [units][columns]: of plane 0 alone, of both planes
  int32_t* sums = nullptr;      // [units][columns]: of the integers
  int32_t columns = 0, row_bytes = 0, steps = 0;
};

ScanQueries scan_queries(const ScanTask&, bool fragments, void* memory, int64_t* used);
void launch_scan_mma(const ScanTask&, const ScanQueries&, const HeadScores&, void* stream);

}  // namespace sic::gpu
