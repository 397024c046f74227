// probe on the GPU.
//
// Floor: the projection read once a row, from the second-level cache for all rows but the first.
#include "head/probe_cuda.cuh"

namespace sic::gpu {
namespace {

__global__ void __launch_bounds__(kHeadThreads, 4) probe_kernel(const __grid_constant__ ProbeParams p) {
  __shared__ ProbeShared s;
  probe_row(p, blockIdx.x, s);
}

}  // namespace

int64_t probe_workspace(const head::ProbeArgs&) { return 0; }

void probe(const head::ProbeArgs& a, const Exec& exec) {
  launch(probe_kernel, dim3(grid_blocks(a.hidden.shape[0])), dim3(kHeadThreads), 0, exec.stream,
         ProbeParams::of(a.hidden, a.probe));
}

}  // namespace sic::gpu
