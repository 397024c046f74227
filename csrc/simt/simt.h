// Runs CUDA kernels on the host. core/gpu.cuh includes this in place of the CUDA headers where SIC_SIMT is defined.
//
// One fiber for each thread of a cluster of blocks; the clusters of a grid one after another. The files that hold
// kernels are compiled with -fsanitize=thread, whose hooks (hooks.cc) check every access to memory. See docs/simt.md.
#pragma once
#if defined(__CUDACC__)
#error "simt.h stands in for CUDA: do not compile it with nvcc"
#endif
#include <memory>
#include <tuple>

#include "core/check.h"
#include "simt/cuda_api.h"
#include "simt/instructions.h"

namespace sic::simt {

// What a kernel may not do. On a device the context would be lost, or the result wrong; here only the launch has
// failed.
class Fault : public Error {
 public:
  using Error::Error;
};

// A kernel with its arguments, ready to run any number of times.
struct KernelCall {
  const void* entry = nullptr;
  dim3 grid, block;
  unsigned cluster = 1;  // blocks, along x
  size_t shared_bytes = 0;
  std::shared_ptr<const void> arguments;
  size_t argument_bytes = 0;
  void (*run)(const void* arguments) = nullptr;  // one thread
};

// Runs the kernel, or records it if the stream captures. Error for a launch that CUDA would refuse, Fault for one of
// the kernel.
void submit(KernelCall call, cudaStream_t stream);

template <class... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, cudaStream_t stream,
            std::decay_t<P>... values) {
  struct Arguments {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> values;
  };
  auto arguments = std::make_shared<const Arguments>(Arguments{kernel, {values...}});
  const auto run = [](const void* p) {
    const auto& a = *static_cast<const Arguments*>(p);
    std::apply([&](const auto&... v) { a.kernel(v...); }, a.values);
  };
  submit({reinterpret_cast<const void*>(kernel), grid, block, cluster, shared_bytes, arguments, sizeof(Arguments), run},
         stream);
}

}  // namespace sic::simt
