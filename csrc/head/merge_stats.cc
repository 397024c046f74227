// merge_stats: checks, then the backend.
#include "head/validate.h"

SIC_OP_KERNELS(merge_stats, head::MergeArgs)

namespace sic::head {
namespace {

void check_inputs(const Check& check, const MergeArgs& a) {
  const Part& p = a.parts;
  check.tensor("parts.m", p.m, DType::f32, 2);
  const int64_t n = p.m.shape[0], B = p.m.shape[1];
  check.value(n >= 1, "parts", double(n), "1 or more");
  check.tensor("parts.s", p.s, DType::f64, {n, B});
  check.tensor("parts.t", p.t, DType::f64, {n, B});
  check.tensor("parts.u", p.u, DType::f64, {n, B});
  check.tensor("parts.top_ids", p.top_ids, DType::i64, {n, B, -1});
  const int64_t k = p.top_ids.shape[2];
  check.value(k >= 1 && k <= kMaxTop, "parts.top_ids", double(k), "1 to 64 ids");
  check.tensor("parts.top", p.top, DType::f32, {n, B, k});
  check.tensor("parts.watch", p.watch, DType::f32, {n, B, -1});
  check.tensor("parts.target", p.target, DType::f32, {n, -1});
  const int64_t targets = p.target.shape[1];
  check.require(targets == 0 || targets == B, "parts.target", describe(p.target), "one for each row, or none");
  check.tensor("parts.status", p.status, DType::u8, {n, B});
  check_temperature(check, a.temperature, B);
}

void check_outputs(const Check& check, const MergeArgs& a) {
  const Part& p = a.parts;
  check_stats(check, a.stats, {p.m.shape[1], p.top_ids.shape[2], p.watch.shape[2], p.target.shape[1]});
  check_apart(check, a.stats,
              {&p.m, &p.s, &p.t, &p.u, &p.top_ids, &p.top, &p.watch, &p.target, &p.status, &a.temperature});
}

}  // namespace

const Op<MergeArgs> merge_stats{"merge_stats", check_inputs, check_outputs, SIC_KERNELS(merge_stats)};

}  // namespace sic::head
