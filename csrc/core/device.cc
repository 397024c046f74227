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
std::string device_problem() { return "this build has no CUDA kernels"; }
void copy_to_host(void*, const void*, int64_t, void*) { fail(); }

}  // namespace sic
#endif
