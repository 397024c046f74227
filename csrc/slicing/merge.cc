// merge_states and merge_many: checks, then the backend.
#include "slicing/validate.h"

SIC_OP_KERNELS(merge_states, slicing::MergeStatesArgs)
SIC_OP_KERNELS(merge_many, slicing::MergeArgs)

namespace sic::slicing {

namespace {

void check_states(const Check& check, const MergeStatesArgs& a) {
  check.tensor("out_a", a.out_a, kFloats, 3);
  const int64_t R = a.out_a.shape[0], H = a.out_a.shape[1], D = a.out_a.shape[2];
  check.tensor("lse_a", a.lse_a, DType::f32, {R, H});
  check.tensor("out_b", a.out_b, a.out_a.dtype, {R, H, D});
  check.tensor("lse_b", a.lse_b, DType::f32, {R, H});
}

// In place is fine: every element is read before it is written. Not shifted, though: another thread's may be read
// later.
void check_in_place(const Check& check, const char* arg, const TensorView& out, const TensorView& in) {
  bool same = out.data == in.data;
  for (int i = 0; i < out.rank; ++i) same = same && (out.shape[i] <= 1 || out.stride[i] == in.stride[i]);
  if (!same) check.apart({{arg, out}}, {&in});
}

void check_merged(const Check& check, const MergeStatesArgs& a) {
  const TensorView& s = a.out_a;
  check.output("out", a.out, s.dtype, {s.shape[0], s.shape[1], s.shape[2]});
  check.output("lse", a.lse, DType::f32, {s.shape[0], s.shape[1]});
  for (const TensorView* in : {&a.out_a, &a.out_b}) check_in_place(check, "out", a.out, *in);
  for (const TensorView* in : {&a.lse_a, &a.lse_b}) check_in_place(check, "lse", a.lse, *in);
  check.apart({{"out", a.out}}, {&a.lse_a, &a.lse_b});
  check.apart({{"lse", a.lse}, {"out", a.out}}, {});
  check.apart({{"lse", a.lse}}, {&a.out_a, &a.out_b});
}

void check_many(const Check& check, const MergeArgs& a) {
  check.tensor("outs", a.outs, kFloats, 4);
  const int64_t n = a.outs.shape[0], R = a.outs.shape[1], H = a.outs.shape[2];
  check.tensor("lses", a.lses, DType::f32, {n, R, H});
}

void check_merged_many(const Check& check, const MergeArgs& a) {
  const TensorView& s = a.outs;
  check.output("out", a.out, s.dtype, {s.shape[1], s.shape[2], s.shape[3]});
  check.output("lse", a.lse, DType::f32, {s.shape[1], s.shape[2]});
  check.apart({{"out", a.out}, {"lse", a.lse}}, {&a.outs, &a.lses});
}

}  // namespace

const Op<MergeStatesArgs> merge_states{"merge_states", check_states, check_merged, SIC_KERNELS(merge_states)};
const Op<MergeArgs> merge_many{"merge_many", check_many, check_merged_many, SIC_KERNELS(merge_many)};

}  // namespace sic::slicing
