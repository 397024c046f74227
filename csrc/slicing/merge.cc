// merge_states and merge_many: checks, then the backend.
#include "core/isa.h"
#include "slicing/validate.h"

SIC_CPU_OP(merge_states, slicing::MergeStatesArgs)
SIC_CPU_OP(merge_many, slicing::MergeArgs)

namespace sic::slicing {

void merge_states(const MergeStatesArgs& a, const Exec& exec) {
  const Check check("merge_states", exec.device);
  check.tensor("out_a", a.out_a, kFloats, 3);
  const int64_t R = a.out_a.shape[0], H = a.out_a.shape[1], D = a.out_a.shape[2];
  check.tensor("lse_a", a.lse_a, DType::f32, {R, H});
  check.tensor("out_b", a.out_b, a.out_a.dtype, {R, H, D});
  check.tensor("lse_b", a.lse_b, DType::f32, {R, H});
  if (exec.check_only && !a.out.given()) return;
  check.output("out", a.out, a.out_a.dtype, {R, H, D});
  check.output("lse", a.lse, DType::f32, {R, H});
  if (runs_on_cpu(check, exec)) cpu::merge_states(a);
}

void merge_many(const MergeArgs& a, const Exec& exec) {
  const Check check("merge_many", exec.device);
  check.tensor("outs", a.outs, kFloats, 4);
  const int64_t n = a.outs.shape[0], R = a.outs.shape[1], H = a.outs.shape[2], D = a.outs.shape[3];
  check.tensor("lses", a.lses, DType::f32, {n, R, H});
  if (exec.check_only && !a.out.given()) return;
  check.output("out", a.out, a.outs.dtype, {R, H, D});
  check.output("lse", a.lse, DType::f32, {R, H});
  if (runs_on_cpu(check, exec)) cpu::merge_many(a);
}

}  // namespace sic::slicing
