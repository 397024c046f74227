// core/device.h for builds without a device; device_cuda.cu has the other one.
#if !defined(SIC_CUDA) && !defined(SIC_SIMT)
#include "core/device.h"

#include "core/check.h"

namespace sic {
namespace {
[[noreturn]] void fail() { throw Error("this build has no CUDA kernels"); }
}  // namespace

DeviceGuard::DeviceGuard(int device) : before_(device), device_(device) { fail(); }
DeviceGuard::~DeviceGuard() = default;
void wait_for(void*, void*) { fail(); }
std::string device_problem() { return "this build has no CUDA kernels"; }

void (*device_reader)(void* to, const void* from, int64_t bytes) = nullptr;
void copy_to_host(void* to, const void* from, int64_t bytes, void*) {
  if (!device_reader) fail();
  device_reader(to, from, bytes);
}

}  // namespace sic
#endif
