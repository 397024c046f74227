// unpack: checks, then the backend.
#include "ragged/layout.h"

SIC_OP_KERNELS(unpack, ragged::UnpackArgs)

namespace sic::ragged {
namespace {

void check_inputs(const Check& check, const UnpackArgs& a) {
  check_rows(check, "packed", a.packed, 1);
  check.value(a.max_len >= 0, "max_len", static_cast<double>(a.max_len), "0 or more");
  check_lengths(check, a.cu_seqlens, -1, a.max_len);
  check_packed_rows(check, "packed", a.packed, a.cu_seqlens);
}

void check_outputs(const Check& check, const UnpackArgs& a) {
  check_output_rows(check, a.out, {a.cu_seqlens.shape[0] - 1, a.max_len}, a.packed, 1);
  check.apart({{"out", a.out}}, {&a.packed, &a.cu_seqlens});
}

}  // namespace

const Op<UnpackArgs> unpack{"unpack", check_inputs, check_outputs, SIC_KERNELS(unpack),
                            [](const UnpackArgs& a) { return a.out.size() == 0; }};

}  // namespace sic::ragged
