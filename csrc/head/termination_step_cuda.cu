// termination_step on the GPU: one launch, a thread for each row.
//
// Floor: about 40 bytes a row and plateau_window entropies; the launch itself is what it takes.
#include "core/gpu.cuh"
#include "head/termination_row.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 128;

struct Params {
  head::TerminationRule rule;
  head::TerminationRows rows;
  int64_t B;
};

__global__ void __launch_bounds__(kThreads) termination_kernel(const __grid_constant__ Params p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b < p.B) head::termination_row(p.rule, p.rows, b);
}

}  // namespace

int64_t termination_step_workspace(const head::TerminationArgs&) { return 0; }

void termination_step(const head::TerminationArgs& a, const Exec& exec) {
  const int64_t B = a.tokens.shape[0];
  launch(termination_kernel, dim3(grid_blocks((B + kThreads - 1) / kThreads)), dim3(kThreads), 0, exec.stream,
         Params{a.rule, head::rows_of(a), B});
}

}  // namespace sic::gpu
