// What host code asks of a CUDA device outside of kernels. Calls are an Error in a build without CUDA kernels.
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

// What is put on `stream` from now on runs after what `other` holds (both cudaStream_t). Not while `stream` captures a
// graph: what was done before is no part of it, and whoever replays it has to wait.
void wait_for(void* stream, void* other);

// Waits for the stream (cudaStream_t). For checks and sizes only, never on the way to a kernel.
void copy_to_host(void* to, const void* from, int64_t bytes, void* stream);

#if !defined(SIC_CUDA) && !defined(SIC_SIMT)
// How copy_to_host reads where the build has no CUDA kernels but the process has a device that others fill; it waits
// for what is being written. Null: it does not.
extern void (*device_reader)(void* to, const void* from, int64_t bytes);
#endif

}  // namespace sic
