// probe: checks, then the backend.
#include "head/validate.h"

SIC_OP_KERNELS(probe, head::ProbeArgs)

namespace sic::head {
namespace {

void check_inputs(const Check& check, const ProbeArgs& a) {
  check.tensor("hidden", a.hidden, kFloats, 2);
  check_probe(check, a.probe, a.hidden.shape[1]);
}

void check_outputs(const Check& check, const ProbeArgs& a) {
  const Probe& p = a.probe;
  check.output("score", p.score, DType::f32, {a.hidden.shape[0], p.vector.shape[0]});
  check.apart({{"score", p.score}}, {&a.hidden, &p.projection, &p.vector, &p.bias});
}

}  // namespace

const Op<ProbeArgs> probe{"probe", check_inputs, check_outputs, SIC_KERNELS(probe)};

}  // namespace sic::head
