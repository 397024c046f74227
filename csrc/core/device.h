// What host code asks of a CUDA device outside of kernels. Every call is an Error in a build without CUDA kernels.
#pragma once
#include <cstdint>
#include <string>

namespace sic {

// Makes a device the current one of the calling thread while it lives; -1 leaves the one that is.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_, device_;
};

// Why a device cannot run the kernels of this build; empty if all can.
std::string device_problem();

// Waits for the stream (cudaStream_t). For checks and sizes only, never on the way to a kernel.
void copy_to_host(void* to, const void* from, int64_t bytes, void* stream);

}  // namespace sic
