// What CUDA kernels and their launchers are written on: the one header that every .cu file includes.
//
// nvcc compiles them for the device. Under SIC_SIMT g++ compiles the same files, and simt/ runs them on the host, where
// their memory accesses are checked.
#pragma once
#if defined(SIC_SIMT)
#include "simt/simt.h"
#else
#include "core/gpu_ptx.cuh"
#endif

#include <array>
#include <mutex>
#include <set>
#include <string>

#include "core/check.h"
#include "core/dtype.h"

namespace sic::gpu {

constexpr unsigned kFullWarp = 0xffffffffu;

// ---- launching ----

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // it is reported here
  throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

#if !defined(SIC_SIMT)
inline std::string kernel_name(const void* kernel) {
  const char* name = nullptr;
#if CUDART_VERSION >= 12030
  if (cudaFuncGetName(&name, kernel) != cudaSuccess) name = nullptr;
#endif
  return name ? name : "kernel launch";
}
#endif

#if !defined(SIC_SIMT)
// All the dynamic shared memory that the current device has, for a kernel's launches from any thread. Once a device.
inline cudaError_t allow_shared_memory(const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  int device = 0, most = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({kernel, device})) return cudaSuccess;
  cudaFuncAttributes own{};
  status = cudaFuncGetAttributes(&own, kernel);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status == cudaSuccess)
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  most - static_cast<int>(own.sharedSizeBytes));
  if (status == cudaSuccess) allowed.insert({kernel, device});
  return status;
}

inline cudaError_t launch_kernel(unsigned cluster, const void* entry, dim3 grid, dim3 block, void** arguments,
                                 size_t shared_bytes, cudaStream_t stream) {
  if (cluster == 1) return cudaLaunchKernel(entry, grid, block, arguments, shared_bytes, stream);
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim.x = cluster, size.val.clusterDim.y = size.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &size, config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, entry, arguments);
}
#endif

// Blocks of a grid's x axis.
inline unsigned grid_blocks(int64_t count) {
  if (count >= int64_t{1} << 31) throw Error(std::to_string(count) + " blocks: more than a launch may have");
  return static_cast<unsigned>(count);
}

// kernel<<<grid, block, shared_bytes, stream>>>(args...) in clusters of so many blocks (along x; 8 at most, and 1 on
// devices without clusters), an Error if it cannot be launched. Nothing to do for an empty grid. Dynamic shared memory
// may be as large as the device has it.
template <class... P, class... A>
void launch_clusters(unsigned cluster, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                     A&&... args) {
  static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter");
  static_assert((sizeof(P) + ... + 0) <= 4096, "kernel parameters are limited to 4 KiB");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const void* entry = reinterpret_cast<const void*>(kernel);
#if defined(SIC_SIMT)
  if (shared_bytes > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
               "dynamic shared memory");
  simt::launch(kernel, grid, block, cluster, shared_bytes, static_cast<cudaStream_t>(stream), static_cast<P>(args)...);
#else
  // With up to 16 KB of static shared memory besides: together 48 KB need no leave.
  cudaError_t status = shared_bytes > 32 * 1024 ? allow_shared_memory(entry) : cudaSuccess;
  if (status == cudaSuccess) {
    const auto run = [&](std::remove_cv_t<P>... values) {
      std::array<void*, sizeof...(P)> pointers{&values...};
      status =
          launch_kernel(cluster, entry, grid, block, pointers.data(), shared_bytes, static_cast<cudaStream_t>(stream));
    };
    run(static_cast<P>(args)...);
  }
  if (status != cudaSuccess) {
    cudaGetLastError();  // it has been reported: the next launch starts clean
    throw Error(kernel_name(entry) + ": " + cudaGetErrorString(status));
  }
#endif
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, A&&... args) {
  launch_clusters(1, kernel, grid, block, shared_bytes, stream, std::forward<A>(args)...);
}

inline void memset_async(void* p, int value, size_t bytes, void* stream) {
  if (bytes) check_cuda(cudaMemsetAsync(p, value, bytes, static_cast<cudaStream_t>(stream)), "memset");
}

// The block's dynamic shared memory as an array of T, 16-byte aligned.
#if defined(SIC_SIMT)
#define SIC_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::sic::simt::dynamic_shared())
#else
#define SIC_DYNAMIC_SHARED(T, name)                               \
  extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(dynamic_shared)
#endif

// ---- threads; blocks are one-dimensional, of whole warps ----

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x & 31); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x >> 5); }
__device__ __forceinline__ int block_warps() { return static_cast<int>(blockDim.x >> 5); }

// ---- exact arithmetic: each operation rounded by itself, never fused ----

__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }

// ---- bits and bytes ----

// Byte i of the result is byte (selector >> 4 i & 7) of the eight bytes a, b.
__device__ __forceinline__ uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
__device__ __forceinline__ int popc(uint32_t x) { return __popc(x); }
// c + the dot product of four signed (or unsigned) bytes.
__device__ __forceinline__ int dp4a(int a, int b, int c) { return __dp4a(a, b, c); }
__device__ __forceinline__ uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c) { return __dp4a(a, b, c); }

// ---- conversions: to_float and from_float of core/dtype.h, and pairs at once ----

__device__ __forceinline__ float2 unpack_bf16x2(uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// ---- reductions: every thread receives the result, the same bits on each; maxima and minima pass over NaN ----

// The larger; NaN if either is.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return larger(a, b); }
};
struct Min {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return fminf(a, b); }
};

// Over groups of kLanes neighbouring lanes. All 32 lanes take part.
template <int kLanes = 32, class T, class Op>
__device__ __forceinline__ T warp_reduce(T v, Op op) {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0);
#pragma unroll
  for (int h = kLanes / 2; h > 0; h /= 2) v = op(v, __shfl_xor_sync(kFullWarp, v, h));
  return v;
}
template <int kLanes = 32, class T>
__device__ __forceinline__ T warp_reduce_add(T v) {
  if constexpr (kLanes == 32 && (std::is_same_v<T, int> || std::is_same_v<T, unsigned>)) {
    return __reduce_add_sync(kFullWarp, v);
  } else {
    return warp_reduce<kLanes>(v, Add{});
  }
}
template <int kLanes = 32, class T>
__device__ __forceinline__ T warp_reduce_max(T v) {
  if constexpr (kLanes == 32 && (std::is_same_v<T, int> || std::is_same_v<T, unsigned>)) {
    return __reduce_max_sync(kFullWarp, v);
  } else {
    return warp_reduce<kLanes>(v, Max{});
  }
}
template <int kLanes = 32, class T>
__device__ __forceinline__ T warp_reduce_min(T v) {
  if constexpr (kLanes == 32 && (std::is_same_v<T, int> || std::is_same_v<T, unsigned>)) {
    return __reduce_min_sync(kFullWarp, v);
  } else {
    return warp_reduce<kLanes>(v, Min{});
  }
}

// Over the block; shared has room for one value of each warp, and may be used again at once.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T v, T* shared, Op op) {
  v = warp_reduce(v, op);
  __syncthreads();  // an earlier reduction may still be read
  if (lane_id() == 0) shared[warp_id()] = v;
  __syncthreads();
  T total = shared[0];
  for (int w = 1; w < block_warps(); ++w) total = op(total, shared[w]);
  return total;
}
template <class T>
__device__ __forceinline__ T block_reduce_add(T v, T* shared) {
  return block_reduce(v, shared, Add{});
}
template <class T>
__device__ __forceinline__ T block_reduce_max(T v, T* shared) {
  return block_reduce(v, shared, Max{});
}
template <class T>
__device__ __forceinline__ T block_reduce_min(T v, T* shared) {
  return block_reduce(v, shared, Min{});
}

}  // namespace sic::gpu
