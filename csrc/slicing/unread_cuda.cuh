// The softmax mass that a selection leaves unread, estimated on the device: log of the sum of exp(estimated logit) over
// the visible units that are not listed, for every query head.
#pragma once
#include "core/gpu.cuh"
#include "slicing/device_views.cuh"
#include "slicing/slicing.h"

namespace sic::gpu {

// What either estimate needs.
struct UnreadTask {
  Rows3 q;  // [B,T,Hq,D]
  DType q_type = DType::f32;
  DeviceSelection list;
  SeqLens seq_lens;
  int32_t B = 0, T = 1, Hkv = 1, G = 1, D = 0;
  int64_t positions = 0, window = 0;
  float scale = 0, softcap = 0;
  const float* bias = nullptr;  // [B,S]
  int64_t bias_stride = 0;
  float* out = nullptr;  // [B,T,Hq], in elements of out_stride
  int64_t out_stride[3] = {};

  static UnreadTask of(const slicing::AttendArgs&);
  SIC_HD int64_t rows() const { return int64_t{B} * T * Hkv; }
};

// From plane-0 scores: [B,T,Hq][stride], 1/256 nat, as the scan leaves them.
struct UnreadScores {
  const int16_t* scores = nullptr;
  int64_t stride = 0;
  const float* centre = nullptr;  // [Hkv,D]
  int64_t centre_stride = 0;
};
// From page summaries: every position of an unread page is taken to have the page's centre for its key.
struct UnreadPages {
  Rows3 summary;
  DType type = DType::f32;
  PageMap pages;
};

int64_t unread_scratch(const UnreadTask&, int64_t units);  // units: the most of a row
void launch_unread_tokens(const UnreadTask&, const UnreadScores&, void* scratch, void* stream);
void launch_unread_pages(const UnreadTask&, const UnreadPages&, void* scratch, void* stream);

}  // namespace sic::gpu
