// core/device.h on a CUDA device.
#include "core/device.h"

#include "core/gpu.cuh"

namespace sic {

DeviceGuard::DeviceGuard(int device) : before_(device), device_(device) {
  gpu::check_cuda(cudaGetDevice(&before_), "current device");
  if (device_ < 0) device_ = before_;
  if (before_ != device_) gpu::check_cuda(cudaSetDevice(device_), "device");
}

DeviceGuard::~DeviceGuard() {
  if (before_ != device_) cudaSetDevice(before_);
}

std::string device_problem() {
  int count = 0, major = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  for (int i = 0; status == cudaSuccess && i < count; ++i) {
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i);
    if (status == cudaSuccess && major < 8) return "device " + std::to_string(i) + " is older than sm_80";
  }
  if (status == cudaSuccess) return count > 0 ? "" : "no CUDA device";
  cudaGetLastError();
  return cudaGetErrorString(status);
}

void wait_for(void* stream, void* other) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  gpu::check_cuda(cudaStreamIsCapturing(s, &capture), "stream");
  if (capture != cudaStreamCaptureStatusNone) return;
  cudaEvent_t event = nullptr;
  gpu::check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  cudaError_t status = cudaEventRecord(event, static_cast<cudaStream_t>(other));
  if (status == cudaSuccess) status = cudaStreamWaitEvent(s, event, 0);
  cudaEventDestroy(event);  // once it has been reached
  gpu::check_cuda(status, "waiting for the stream of an array");
}

void copy_to_host(void* to, const void* from, int64_t bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  gpu::check_cuda(cudaStreamIsCapturing(s, &capture), "stream");
  if (capture != cudaStreamCaptureStatusNone)
    throw Error("device values cannot be read while a graph is captured (SIC_CHECK=1, or an output sized by counts)");
  gpu::check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, s),
                  "reading device memory");
  gpu::check_cuda(cudaStreamSynchronize(s), "reading device memory");
}

}  // namespace sic
