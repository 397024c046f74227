// delta_encode: checks, then the backend.
#include "delta/encode.h"

#include <algorithm>

#include "core/scratch.h"
#include "delta/validate.h"
#include "slicing/sketch.h"

SIC_OP_KERNELS(delta_encode, delta::EncodeArgs)

namespace sic::delta {

void last_slots(const TensorView& slots, int64_t* out, SlotRow* room) {
  const int64_t N = slots.shape[0];
  bool ascending = true;  // as most are: nothing to sort
  for (int64_t i = 0; i < N; ++i) {
    out[i] = index_at(slots, i * slots.stride[0]);
    ascending = ascending && (i == 0 || out[i] > out[i - 1]);
  }
  if (ascending) return;
  SlotRow* end = room;
  for (int64_t i = 0; i < N; ++i)
    if (out[i] >= 0) *end++ = {out[i], i};
  std::sort(room, end, [](SlotRow a, SlotRow b) { return a.slot != b.slot ? a.slot < b.slot : a.row < b.row; });
  for (SlotRow* r = room; r + 1 < end; ++r)
    if (r->slot == r[1].slot) out[r->row] = -1;
}

int64_t encode_workspace(const EncodeArgs& a) {
  Carver parts(nullptr);
  parts.take<int64_t>(a.k.shape[0]);
  parts.take<SlotRow>(a.k.shape[0]);
  parts.take<int32_t>(a.k.shape[0] * a.k.shape[1]);
  return parts.used();
}

namespace {

void check_index(const Check& check, const EncodeArgs& a, const CodedDims& d) {
  if (!a.bits.given() && !a.norm.given()) return;
  slicing::CacheDims cache;
  cache.P = d.P, cache.Hkv = d.Hkv, cache.page = d.page;
  const int64_t plane = slicing::sketch_plane_bytes(d.page, d.Dk);
  const int64_t planes = a.bits.rank == 3 ? a.bits.shape[2] / plane : 0;
  slicing::check_sketch(check, a.bits, a.norm, static_cast<int>(planes), cache, d.Dk);
  check.output("sketch.bits", a.bits, DType::u8, {d.P, d.Hkv, -1});
  check.output("sketch.norm", a.norm, DType::bf16, {d.P, d.Hkv, d.page});
  check.tensor("params.centre", a.centre, DType::f32, {d.Hkv, d.Dk});
}

// Everything it takes is an input: pages and index are written in place.
void check_inputs(const Check& check, const EncodeArgs& a) {
  const CodedDims d = check_coded(check, a.pages, a.codec, true);
  check.tensor("k", a.k, kFloats, {-1, d.Hkv, d.Dk});
  const int64_t N = a.k.shape[0];
  check.tensor("v", a.v, a.k.dtype, {N, d.Hkv, d.Dv});
  check_row_positions(check, a.positions, a.codec, N);
  check.value(a.sinks >= 0, "sinks", double(a.sinks), "0 or more positions");
  check_index(check, a, d);
  check.tensor("slots", a.slots, kIndexInts, {N});
  const Pages& p = a.pages;
  check.apart({{"pages.k_codes", p.k_codes},
               {"pages.v_codes", p.v_codes},
               {"pages.tags", p.tags},
               {"pages.raw", p.raw},
               {"pages.raw_owner", p.raw_owner},
               {"pages.raw_state", p.raw_state},
               {"sketch.bits", a.bits},
               {"sketch.norm", a.norm}},
              {&a.k, &a.v, &a.positions, &a.slots, &a.centre});
  const TensorView slots = check.host(a.slots);
  for (int64_t i = 0; slots.given() && i < N; ++i) {
    const int64_t slot = index_at(slots, i * slots.stride[0]);
    check.require(slot >= -1 && slot < d.P * d.page, "slots", std::to_string(slot) + " at [" + std::to_string(i) + "]",
                  "-1 to " + std::to_string(d.P * d.page - 1));
  }
}

void check_outputs(const Check&, const EncodeArgs&) {}

}  // namespace

const Op<EncodeArgs> delta_encode{"delta_encode",
                                  check_inputs,
                                  check_outputs,
                                  SIC_KERNELS(delta_encode),
                                  [](const EncodeArgs& a) { return a.k.size() == 0 && a.v.size() == 0; },
                                  encode_workspace};

}  // namespace sic::delta
