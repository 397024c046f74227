// Reads device memory from host code; for checks and sizes only, never on the way to a kernel.
#pragma once
#include <cstdint>

namespace sic {

// Waits for the stream (cudaStream_t). Error in a build without CUDA kernels.
void copy_to_host(void* to, const void* from, int64_t bytes, void* stream);

}  // namespace sic
