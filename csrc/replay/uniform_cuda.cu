// uniform on the GPU: a block of four numbers a thread, stored at once where the output is aligned for it.
#include "core/gpu.cuh"
#include "replay/philox.h"
#include "replay/replay.h"

namespace sic::gpu {
namespace {

constexpr int kThreads = 256;

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) uniform_kernel(const int64_t* key, float* out, int64_t count) {
  const int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x, left = count - 4 * block;
  if (left <= 0) return;
  const replay::Philox numbers = replay::Stream(key)[static_cast<uint32_t>(block)];
  const float4 v = make_float4(replay::unit_float(numbers.x[0]), replay::unit_float(numbers.x[1]),
                               replay::unit_float(numbers.x[2]), replay::unit_float(numbers.x[3]));
  float* const to = out + 4 * block;
  if (kAligned && left >= 4) {
    *reinterpret_cast<float4*>(to) = v;
    return;
  }
  to[0] = v.x;
  if (left > 1) to[1] = v.y;
  if (left > 2) to[2] = v.z;
  if (left > 3) to[3] = v.w;
}

}  // namespace

int64_t uniform_workspace(const replay::UniformArgs&) { return 0; }

void uniform(const replay::UniformArgs& a, const Exec& exec) {
  const bool aligned = reinterpret_cast<uintptr_t>(a.out.data) % sizeof(float4) == 0;
  const int64_t blocks = (a.count + 3) / 4;
  launch(aligned ? uniform_kernel<true> : uniform_kernel<false>, dim3(grid_blocks((blocks + kThreads - 1) / kThreads)),
         dim3(kThreads), 0, exec.stream, a.key.as<const int64_t>(), a.out.as<float>(), a.count);
}

}  // namespace sic::gpu
