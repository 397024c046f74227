// copy_to_host on a CUDA device.
#include "core/check.h"
#include "core/device_copy.h"
#include "core/gpu.cuh"

namespace sic {

void copy_to_host(void* to, const void* from, int64_t bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaError_t status = cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, s);
  if (status == cudaSuccess) status = cudaStreamSynchronize(s);
  if (status != cudaSuccess) throw Error(std::string("reading device memory: ") + cudaGetErrorString(status));
}

}  // namespace sic
