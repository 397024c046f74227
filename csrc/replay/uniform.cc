// uniform: checks, then the backend.
#include "replay/replay.h"

SIC_OP_KERNELS(uniform, replay::UniformArgs)

namespace sic::replay {
namespace {

void check_inputs(const Check& check, const UniformArgs& a) {
  check.tensor("key", a.key, DType::i64, {3});
  check.value(a.count >= 0 && a.count < int64_t{1} << 34, "count", static_cast<double>(a.count), "0 to 2^34 - 1");
}

void check_outputs(const Check& check, const UniformArgs& a) {
  check.output("out", a.out, DType::f32, {a.count});
  check.apart({{"out", a.out}}, {&a.key});
}

}  // namespace

const Op<UniformArgs> uniform{"uniform", check_inputs, check_outputs, SIC_KERNELS(uniform),
                              [](const UniformArgs& a) { return a.count == 0; }};

}  // namespace sic::replay
