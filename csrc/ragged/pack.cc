// pack: checks, then the backend.
#include "ragged/layout.h"

SIC_OP_KERNELS(pack, ragged::PackArgs)

namespace sic::ragged {
namespace {

void check_inputs(const Check& check, const PackArgs& a) {
  check_rows(check, "padded", a.padded, 2);
  check_lengths(check, a.cu_seqlens, a.padded.shape[0], a.padded.shape[1]);
}

void check_outputs(const Check& check, const PackArgs& a) {
  check_output_rows(check, a.out, {-1}, a.padded, 2);
  check_packed_rows(check, "out", a.out, a.cu_seqlens);
  check.apart({{"out", a.out}}, {&a.padded, &a.cu_seqlens});
}

}  // namespace

int64_t packed_rows(const PackArgs& a, const Exec& exec) {
  const Check check("pack", exec.device, exec.device_id, false, exec.stream);
  const TensorView bounds = check.host(a.cu_seqlens, true);
  return index_at(bounds, (bounds.shape[0] - 1) * bounds.stride[0]);
}

const Op<PackArgs> pack{"pack", check_inputs, check_outputs, SIC_KERNELS(pack),
                        [](const PackArgs& a) { return a.padded.size() == 0 || a.out.size() == 0; }};

}  // namespace sic::ragged
