// append_kv: checks, then the backend.
#include <algorithm>

#include "slicing/append_kv.h"
#include "slicing/sketch.h"
#include "slicing/validate.h"

SIC_OP_KERNELS(append_kv, slicing::AppendKvArgs)

namespace sic::slicing {

AppendPlan plan_append(const AppendKvArgs& a) {
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < a.slots.shape[0]; ++i) {
    const int64_t slot = index_at(a.slots, i * a.slots.stride[0]);
    if (slot >= 0) slots.push_back(slot);
  }
  std::sort(slots.begin(), slots.end());
  AppendPlan plan;
  const int64_t page = a.k_cache.shape[2];
  for (size_t i = 0; i < slots.size(); ++i) {
    plan.distinct = plan.distinct && (i == 0 || slots[i] != slots[i - 1]);
    if (i + 1 == slots.size() || slots[i + 1] / page != slots[i] / page) plan.last_slots.push_back(slots[i]);
  }
  return plan;
}

namespace {

// Everything it takes is an input: rows and indices are written in place.
void check_inputs(const Check& check, const AppendKvArgs& a) {
  check.output("k_cache", a.k_cache, kCacheFloats, {-1, -1, -1, -1});
  const int64_t P = a.k_cache.shape[0], Hkv = a.k_cache.shape[1], page = a.k_cache.shape[2], D = a.k_cache.shape[3];
  check.output("v_cache", a.v_cache, a.k_cache.dtype, {P, Hkv, page, -1});
  check_scale(check, "k_scale", a.k_scale, a.k_cache, Hkv);
  check_scale(check, "v_scale", a.v_scale, a.v_cache, Hkv);
  const DTypeSet rows = a.k_cache.dtype == DType::f8e4m3 ? kCacheFloats : DTypeSet(a.k_cache.dtype);
  check.tensor("k", a.k, rows, {-1, Hkv, D});
  const int64_t N = a.k.shape[0];
  check.tensor("v", a.v, a.k.dtype, {N, Hkv, a.v_cache.shape[3]});
  check.tensor("slots", a.slots, kIndexInts, {N});
  if (a.bits.given()) {
    CacheDims d;
    d.P = P, d.Hkv = Hkv, d.page = page;
    check.value(D <= kSketchMaxDim, "D", double(D), "1 to 1024 for a sketch");
    const int64_t planes = a.bits.rank == 3 ? a.bits.shape[2] / std::max<int64_t>(1, sketch_plane_bytes(page, D)) : 0;
    check_sketch(check, a.bits, a.norm, static_cast<int>(planes), d, D);
    check.output("sketch.bits", a.bits, DType::u8, {P, Hkv, -1});
    check.output("sketch.norm", a.norm, DType::bf16, {P, Hkv, page});
    check.tensor("params.centre", a.centre, DType::f32, {Hkv, D});
  }
  if (a.summary.given()) check.output("summary", a.summary, summary_dtype(a.k_cache.dtype), {P, Hkv, 2, D});
  // V may be a view of K, so the caches are not held against each other.
  const std::initializer_list<const TensorView*> inputs = {&a.k, &a.v, &a.slots, &a.k_scale, &a.v_scale, &a.centre};
  check.apart({{"k_cache", a.k_cache}}, inputs);
  check.apart({{"v_cache", a.v_cache}}, inputs);
  check.apart({{"sketch.bits", a.bits}, {"sketch.norm", a.norm}, {"summary", a.summary}}, inputs);
  for (const TensorView* cache : {&a.k_cache, &a.v_cache})
    check.apart({{"sketch.bits", a.bits}, {"sketch.norm", a.norm}, {"summary", a.summary}}, {cache});
  const TensorView slots = check.host(a.slots);
  for (int64_t i = 0; slots.given() && i < N; ++i) {
    const int64_t slot = index_at(slots, i * slots.stride[0]);
    check.require(slot >= -1 && slot < P * page, "slots", std::to_string(slot) + " at [" + std::to_string(i) + "]",
                  "-1 to " + std::to_string(P * page - 1));
  }
}

void check_outputs(const Check&, const AppendKvArgs&) {}

}  // namespace

const Op<AppendKvArgs> append_kv{"append_kv", check_inputs, check_outputs, SIC_KERNELS(append_kv),
                                 [](const AppendKvArgs& a) { return a.k.size() == 0 && a.v.size() == 0; }};

}  // namespace sic::slicing
