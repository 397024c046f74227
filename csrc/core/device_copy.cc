// copy_to_host for builds without a device; core/device_copy_cuda.cu has the other one.
#if !defined(SIC_CUDA) && !defined(SIC_SIMT)
#include "core/device_copy.h"

#include "core/check.h"

namespace sic {

void copy_to_host(void*, const void*, int64_t, void*) { throw Error("this build has no CUDA kernels"); }

}  // namespace sic
#endif
