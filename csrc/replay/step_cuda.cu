// set_step and mark_step on the GPU.
//
// set_step is launched in front of a chunk's graphs, its values in the launch itself: no host memory has to stay as it
// is until a copy is done. It computes the words of all segments beside each other, so that a mark is a load, a fence
// and a store.
#include "core/gpu.cuh"
#include "replay/cursor_word.h"
#include "replay/replay.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 128;

struct StepParams {
  int64_t *place, *keys, *words, *positions;
  int64_t layers, count, position;
  uint64_t epoch, seed;
};

__global__ void __launch_bounds__(kThreads) set_step_kernel(const __grid_constant__ StepParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0) p.place[0] = p.position, p.place[1] = p.position + p.count;
  if (i < p.count) p.positions[i] = p.position + i;
  if (i >= p.layers) return;
  int64_t* const key = p.keys + 3 * i;
  key[0] = static_cast<int64_t>(p.seed), key[1] = p.position, key[2] = i;
  const bool last = i + 1 == p.layers;
  const replay::Place next{p.epoch, last ? 0 : static_cast<uint64_t>(i + 1),
                           static_cast<uint64_t>(last ? p.position + p.count : p.position)};
  p.words[i] = static_cast<int64_t>(replay::pack(next));
}

__global__ void mark_step_kernel(const int64_t* word, volatile uint64_t* progress) {
  const auto value = static_cast<uint64_t>(*word);
  __threadfence_system();
  *progress = value;
}

}  // namespace

int64_t set_step_workspace(const replay::StepArgs&) { return 0; }
int64_t mark_step_workspace(const replay::MarkArgs&) { return 0; }

void set_step(const replay::StepArgs& a, const Exec& exec) {
  const StepParams p{a.place.as<int64_t>(),
                     a.keys.as<int64_t>(),
                     a.words.as<int64_t>(),
                     a.positions.as<int64_t>(),
                     a.words.shape[0],
                     a.positions.shape[0],
                     a.position,
                     a.epoch,
                     a.seed};
  const int64_t threads = p.layers > p.count ? p.layers : p.count;
  launch(set_step_kernel, dim3(grid_blocks((threads + kThreads - 1) / kThreads)), dim3(kThreads), 0, exec.stream, p);
}

void mark_step(const replay::MarkArgs& a, const Exec& exec) {
  launch(mark_step_kernel, dim3(1), dim3(1), 0, exec.stream, a.words.as<const int64_t>() + a.layer, a.progress);
}

}  // namespace sic::gpu
