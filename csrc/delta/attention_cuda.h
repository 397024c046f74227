// What the delta attention kernels take, and which of them there are.
#pragma once
#include "delta/decode_rows_cuda.cuh"
#include "slicing/attention_launch_cuda.cuh"

namespace sic::gpu {

// Rows that are not coded, by (sequence, head, row): positions from start[b] on.
struct DeviceTail {
  Rows3 k, v;
  IntVector start;
  DType type = DType::f32;

  static DeviceTail of(const delta::Tail& t) {
    DeviceTail d;
    if (!t.start.given()) return d;
    d.k = Rows3::of(t.k), d.v = Rows3::of(t.v), d.start = IntVector::of(t.start), d.type = t.k.dtype;
    return d;
  }
};

// kv holds no rows: what the pages stand for.
struct DeltaAttentionParams : AttentionParams {
  CodedCache cache;
  DeviceTail tail;
};

// The kernel on tensor cores; whether it takes a call.
bool fits_codes_kernel(const delta::AttentionArgs&);
void attend_codes(const DeltaAttentionParams&, const SplitPlan&, void* stream);

// Any head sizes, any bits, queries of any type.
void attend_coded_rows(const DeltaAttentionParams&, const SplitPlan&, void* stream);

}  // namespace sic::gpu
