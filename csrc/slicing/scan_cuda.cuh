// The scan of a sketch on the device: integer queries, then the scores of every query head for every visible token, or
// for listed ones. Integers throughout; equal to scan_cpu.h in every score.
#pragma once
#include "core/gpu.cuh"
#include "core/scratch.h"
#include "slicing/device_views.cuh"
#include "slicing/join_cuda.cuh"
#include "slicing/slicing.h"

namespace sic::gpu {

// ---- interface ----

struct ScanTask {
  Rows3 q;  // [B,T,Hq,D]
  DType q_type = DType::f32;
  bool wide_q = false;
  DeviceSketch sketch;
  PageMap pages;
  SeqLens seq_lens;
  int32_t B = 0, T = 1, Hkv = 1, G = 1, D = 0, planes = 2;
  int64_t positions = 0;  // max_seq_len
  float scale = 0;
  bool in_blocks = false;  // whole 16-byte rows of 16 tokens everywhere: tensor cores may scan

  SIC_HD int64_t units() const { return int64_t{B} * Hkv; }
  SIC_HD int32_t columns() const { return T * G; }  // of a (sequence, KV head): t * G + g
  SIC_HD int64_t head_rows() const { return int64_t{B} * T * Hkv * G; }
};

ScanTask scan_task(const slicing::SketchScoreArgs&);

// Scores of each (sequence, query token, query head), in that order, and what joining the heads of a group needs.
struct HeadScores {
  int16_t* first = nullptr;   // [rows][stride], by plane 0
  int16_t* second = nullptr;  // by both planes; null if not wanted
  int32_t* top = nullptr;     // [rows]: of `first` over the visible positions, of listed scores over the list
  unsigned long long* weight = nullptr;  // [rows]: zeroed by the scan
  int64_t stride = 0;                    // a multiple of 64; scores beyond the visible are not defined
};

// Room for `width` scores a row.
HeadScores head_scores(const ScanTask&, int64_t width, bool first, bool second, Carver&);

// Joins scores.first over the visible positions, to an output that is still to be given.
JoinTask join_task(const ScanTask&, const HeadScores&, slicing::Pool);

int64_t scan_scratch(const ScanTask&);  // bytes, for the queries

// The workspace of an op that only scores; without memory it measures.
struct ScoreScratch {
  ScanTask task;
  HeadScores scores;
  char* queries;
  int64_t bytes;

  // width, first, second: as head_scores takes them.
  ScoreScratch(const slicing::SketchScoreArgs& a, int64_t width, bool first, bool second, void* memory)
      : task(scan_task(a)) {
    Carver carve(memory, kWorkspaceAlignment);
    scores = head_scores(task, width, first, second, carve);
    queries = carve.take<char>(scan_scratch(task));
    bytes = carve.used();
  }
  // The join into the op's out [B,T,Hkv,width].
  JoinTask join(const slicing::SketchScoreArgs& a) const {
    JoinTask j = join_task(task, scores, a.pool);
    j.width = a.out.shape[3], j.out = a.out.as<int16_t>();
    for (int i = 0; i < 3; ++i) j.out_stride[i] = a.out.stride[i];
    return j;
  }
};

// Two launches. Fills first, second if given, top, and zeroes weight.
void launch_scan(const ScanTask&, const HeadScores&, void* scratch, void* stream);
// Scores by both planes of listed positions, to second; top of them. list.indices [B,T,Hkv,width].
void launch_scan_listed(const ScanTask&, const DeviceSelection& list, int64_t width, const HeadScores&, void* scratch,
                        void* stream);

// ---- device ----

// An accumulator's bits are those of the float 12582912 + 2 * dot: this is the dot, exactly.
__device__ __forceinline__ float half_of_magic(int32_t bits) {
  return fmaf(detail::float_of(static_cast<uint32_t>(bits)), 0.5f, -0.5f * kRoundingMagic);
}
// The score before rounding; NaN is the lowest.
__device__ __forceinline__ float scaled_dot(float dot, float norm, float factor) {
  const float s = fmaxf(mul_rn(mul_rn(dot, norm), factor), static_cast<float>(slicing::kScoreMin));
  return fminf(s, static_cast<float>(-slicing::kScoreMin));
}
// Its lower 16 bits are the score.
__device__ __forceinline__ uint32_t rounded_score(float s) { return detail::bits_of(add_rn(s, kRoundingMagic)); }

}  // namespace sic::gpu
