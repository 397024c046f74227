// Attention on CUDA as other launchers use it: all of sliced_attention, and what attend adds to it.
#pragma once
#include <cstdint>

#include "slicing/slicing.h"

namespace sic::gpu {

// A byte for each (sequence, query token, query head).
struct RowBytes {
  uint8_t* data = nullptr;  // nullptr: not given
  int64_t stride[3] = {};

  static RowBytes of(const TensorView& v) {
    RowBytes r;
    if (!v.given()) return r;
    r.data = v.as<uint8_t>();
    for (int i = 0; i < 3; ++i) r.stride[i] = v.stride[i];
    return r;
  }
};

// Only query heads whose byte has this value are computed; the others' out and lse stay as they are.
struct RowMask {
  RowBytes bytes;
  uint8_t value = 0;
};

// What attend makes of a row's LSE: its status, and the omitted mass, which holds the log of the unread weight before.
struct OmittedMass {
  float* log_unread = nullptr;  // nullptr: not wanted
  int64_t stride[3] = {};
  RowBytes status;
  float limit = 2;  // a larger share is kFallbackMass; above 1: never
};

struct AttentionExtras {
  RowMask only;
  OmittedMass mass;
};

// workspace: attention_partials(args) bytes, 256-byte aligned.
void run_attention(const slicing::AttentionArgs&, const AttentionExtras&, void* workspace, void* stream);
int64_t attention_partials(const slicing::AttentionArgs&);

}  // namespace sic::gpu
