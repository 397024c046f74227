// set_step and mark_step: checks, then the CUDA kernels.
#include "replay/cursor_word.h"
#include "replay/replay.h"

SIC_GPU_KERNELS(set_step, replay::StepArgs)
SIC_GPU_KERNELS(mark_step, replay::MarkArgs)

namespace sic::replay {
namespace {

void check_step(const Check& check, const StepArgs& a) {
  check.tensor("positions", a.positions, DType::i64, 1);
  const auto room = static_cast<int64_t>(kPositions) - a.positions.shape[0];
  check.value(a.position >= 0 && a.position < room, "position", static_cast<double>(a.position),
              "0 up to 2^28 - 1, with the chunk's end");
}

void check_step_outputs(const Check& check, const StepArgs& a) {
  check.output("place", a.place, DType::i64, {2});
  check.output("words", a.words, DType::i64, {-1});
  const int64_t layers = a.words.shape[0];
  check.output("keys", a.keys, DType::i64, {layers, 3});
  check.contiguous("keys", a.keys);
  check.output("positions", a.positions, DType::i64, {-1});
  check.apart({{"place", a.place}, {"keys", a.keys}, {"words", a.words}, {"positions", a.positions}}, {});
}

void check_mark(const Check& check, const MarkArgs& a) {
  check.tensor("words", a.words, DType::i64, 1);
  check.value(a.layer >= 0 && a.layer < a.words.shape[0], "layer", static_cast<double>(a.layer), "one of the segments");
}

}  // namespace

const Op<StepArgs> set_step{"set_step", check_step, check_step_outputs, nullptr, SIC_GPU_ENTRY(set_step)};
const Op<MarkArgs> mark_step{"mark_step", check_mark, [](const Check&, const MarkArgs&) {}, nullptr,
                             SIC_GPU_ENTRY(mark_step)};

}  // namespace sic::replay
