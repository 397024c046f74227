// An op is a constant: its checks and its kernels. Calling it is the only way from arguments to a kernel:
//   check the inputs, check the outputs (ArgumentError, nothing touched), run the backend of the tensors' device.
//
//   SIC_OP_KERNELS(select, slicing::SelectArgs)                              // declares the kernels
//   const Op<SelectArgs> select{"select", check_inputs, check_outputs, SIC_KERNELS(select)};
#pragma once
#include <cstdint>

#include "core/check.h"
#include "core/device.h"
#include "core/tensor_view.h"

namespace sic {

// How to run a call.
struct Exec {
  Device device = Device::cpu;
  int device_id = -1;                              // of a CUDA device; -1: the current one
  bool inputs = true, outputs = true, run = true;  // the steps to take; a binding allocates between the first two
  bool device_values = false;  // CUDA: also check lengths, page ids and lists, read back for it (synchronises)
  void* stream = nullptr;      // cudaStream_t
  TensorView workspace;        // u8, workspace() bytes; the CPU does without
};

constexpr int64_t kWorkspaceAlignment = 256;  // of a CUDA workspace

template <class Args>
struct Op {
  const char* name;
  void (*check_inputs)(const Check&, const Args&);
  void (*check_outputs)(const Check&, const Args&);
  void (*cpu)(const Args&, const Exec&);
  void (*gpu)(const Args&, const Exec&);
  int64_t (*gpu_workspace)(const Args&);
  bool (*empty)(const Args&) = nullptr;  // whether there is nothing to compute
  int64_t (*cpu_workspace)(const Args&) = nullptr;

  void operator()(const Args& args, const Exec& exec) const {
    const Check check(name, exec.device, exec.device_id, exec.device_values, exec.stream);
    if (exec.inputs) check_inputs(check, args);
    if (exec.outputs) check_outputs(check, args);
    if (!exec.run || (empty && empty(args))) return;
    if (exec.device == Device::cpu) {
      check.built(cpu != nullptr, "CPU");
      // What it was not given the kernel takes from memory of its own.
      if (exec.workspace.given() && cpu_workspace) check.workspace(exec.workspace, cpu_workspace(args), 16);
      return cpu(args, exec);
    }
    check.built(gpu != nullptr, "CUDA");
    const DeviceGuard guard(exec.device_id);
    check.workspace(exec.workspace, gpu_workspace(args), kWorkspaceAlignment);
    gpu(args, exec);
  }

  // Bytes of workspace, from shapes and the device alone. Inputs must have been checked.
  int64_t workspace(const Args& args, const Exec& exec) const {
    if (exec.device == Device::cpu) return cpu_workspace ? cpu_workspace(args) : 0;
    Check(name).built(gpu != nullptr, "CUDA");
    const DeviceGuard guard(exec.device_id);
    return gpu_workspace(args);
  }
};

}  // namespace sic

// CUDA kernels: built by nvcc (SIC_CUDA), or by the emulator (SIC_SIMT), which then stands in for the CPU kernels too.
#if defined(SIC_CUDA) || defined(SIC_SIMT)
#define SIC_GPU_KERNELS(op, Args)      \
  namespace sic::gpu {                 \
  void op(const Args&, const Exec&);   \
  int64_t op##_workspace(const Args&); \
  }
#define SIC_GPU_ENTRY(op) &gpu::op, &gpu::op##_workspace
#else
#define SIC_GPU_KERNELS(op, Args)
#define SIC_GPU_ENTRY(op) nullptr, nullptr
#endif

#if defined(SIC_SIMT)
#define SIC_OP_KERNELS(op, Args) SIC_GPU_KERNELS(op, Args)
#define SIC_KERNELS(op) nullptr, SIC_GPU_ENTRY(op)
#else
#include "core/isa.h"
#define SIC_OP_KERNELS(op, Args) SIC_CPU_OP(op, Args) SIC_GPU_KERNELS(op, Args)
#define SIC_KERNELS(op) &cpu::op, SIC_GPU_ENTRY(op)
#endif
