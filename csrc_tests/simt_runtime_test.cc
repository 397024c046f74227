// The fake CUDA runtime: launches that CUDA refuses, streams, capture, graphs, memory, and what is counted.
#include "simt_testing.h"

namespace sic::simt {
namespace {

__global__ void add(int* p, int n, int amount) {
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(n); i += blockDim.x) p[i] += amount;
}
__global__ void nothing() {}
__global__ void needs_shared(int* out) {
  SIC_DYNAMIC_SHARED(int, value);
  value[16000 + threadIdx.x] = 3;
  *out = value[16000 + threadIdx.x];
}

TEST(SimtRuntime, LaunchesThatAreRefused) {
  const auto refused = [](dim3 grid, dim3 block, size_t shared) {
    return fault_of([&] { gpu::launch(nothing, grid, block, shared, nullptr); });
  };
  constexpr const char* kConfiguration = "simt::nothing: invalid configuration argument";
  EXPECT_EQ(refused(1, 1025, 0), kConfiguration);
  EXPECT_EQ(refused(1, 0, 0), kConfiguration);
  EXPECT_EQ(refused(1, dim3(1, 1, 65), 0), kConfiguration);
  EXPECT_EQ(refused(dim3(1, 65536), 1, 0), kConfiguration);
  EXPECT_EQ(refused(dim3(1, 1, 65536), 1, 0), kConfiguration);
  EXPECT_EQ(refused(dim3(1, 65535), 1, 0), "");
  EXPECT_EQ(refused(65536, 1, 0), "");
  EXPECT_EQ(refused(dim3(1, 0), 1, 0), "");  // nothing to do
  EXPECT_NE(refused(1, 1, 228 * 1024), "");
  auto out = output<int>(1);
  gpu::launch(needs_shared, 1, 1, 100 * 1024, nullptr, out.data());  // more than 48 KiB has to be asked for, and is
  EXPECT_EQ(out[0], 3);
}

TEST(SimtRuntime, Device) {
  int count = 0, value = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 1);
  set_multiprocessors(7);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, 7);
  set_multiprocessors(4);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
  EXPECT_EQ(value, 227 * 1024);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorInvalidValue), "invalid argument");
}

TEST(SimtRuntime, Memory) {
  const Counters before = counters();
  int *p = nullptr, *host = nullptr;
  ASSERT_EQ(cudaMalloc(&p, 40 * sizeof(int)), cudaSuccess);
  // It is garbage until it has been set or copied to.
  EXPECT_NE(fault_of([&] { gpu::launch(add, 1, 32, 0, nullptr, p, 40, 1); }).find("never written"), std::string::npos);
  EXPECT_EQ(cudaMemsetAsync(p, 0, 40 * sizeof(int)), cudaSuccess);
  gpu::launch(add, 1, 32, 0, nullptr, p, 40, 5);
  std::vector<int> there(40);
  EXPECT_EQ(cudaMemcpyAsync(there.data(), p, 160, cudaMemcpyDeviceToHost), cudaSuccess);
  for (int x : there) EXPECT_EQ(x, 5);
  EXPECT_EQ(cudaMemcpyAsync(p, there.data(), 164, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(p + 1, 0, 160), cudaErrorInvalidValue);
  EXPECT_NE(fault_of([&] { gpu::launch(add, 1, 32, 0, nullptr, p, 41, 1); }).find("past the end of cudaMalloc memory"),
            std::string::npos);
  ASSERT_EQ(cudaHostAlloc(&host, 4, cudaHostAllocMapped), cudaSuccess);
  void* device = nullptr;
  EXPECT_EQ(cudaHostGetDevicePointer(&device, host, 0), cudaSuccess);
  *host = 1;
  gpu::launch(add, 1, 1, 0, nullptr, static_cast<int*>(device), 1, 2);
  EXPECT_EQ(*host, 3);
  Counters now = counters();
  EXPECT_EQ(now.allocations - before.allocations, 2u);
  EXPECT_EQ(now.live_bytes - before.live_bytes, 164u);
  EXPECT_EQ(now.fills - before.fills, 1u);
  EXPECT_EQ(now.copies - before.copies, 1u);
  EXPECT_EQ(cudaFree(p), cudaSuccess);
  EXPECT_EQ(cudaFree(p), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
  now = counters();
  EXPECT_EQ(now.frees - before.frees, 2u);
  EXPECT_EQ(now.live_bytes, before.live_bytes);
  cudaGetLastError();
}

// Memory of the host's own that the device may touch between the two calls.
TEST(SimtRuntime, RegisteredHostMemory) {
  const Counters before = counters();
  std::vector<int> host(64);
  void* device = nullptr;
  EXPECT_NE(fault_of([&] { gpu::launch(add, 1, 32, 0, nullptr, host.data(), 32, 1); }).find("outside of every buffer"),
            std::string::npos);
  ASSERT_EQ(cudaHostRegister(host.data(), 32 * sizeof(int), cudaHostRegisterMapped), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(host.data() + 31, 8, cudaHostRegisterMapped), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(counters().live_bytes - before.live_bytes, 128u);
  EXPECT_EQ(cudaHostGetDevicePointer(&device, host.data() + 1, 0), cudaErrorInvalidValue);
  ASSERT_EQ(cudaHostGetDevicePointer(&device, host.data(), 0), cudaSuccess);
  gpu::launch(add, 1, 32, 0, nullptr, static_cast<int*>(device), 32, 2);
  EXPECT_EQ(host[31], 2);
  EXPECT_NE(fault_of([&] {
              gpu::launch(add, 1, 32, 0, nullptr, static_cast<int*>(device), 33, 1);
            }).find("past the end of registered host memory"),
            std::string::npos);
  EXPECT_EQ(cudaHostUnregister(host.data() + 1), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaSuccess);
  EXPECT_NE(fault_of([&] { gpu::launch(add, 1, 32, 0, nullptr, host.data(), 32, 1); }).find("outside of every buffer"),
            std::string::npos);
  // Registered for copies only, a kernel has no address of it; nothing is no memory.
  ASSERT_EQ(cudaHostRegister(host.data(), 128, cudaHostRegisterDefault), cudaSuccess);
  EXPECT_EQ(cudaHostGetDevicePointer(&device, host.data(), 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(nullptr, 128, cudaHostRegisterMapped), cudaErrorInvalidValue);
  EXPECT_EQ(cudaHostRegister(host.data(), 0, cudaHostRegisterMapped), cudaErrorInvalidValue);
  EXPECT_EQ(counters().live_bytes, before.live_bytes);
  cudaGetLastError();
}

// A launcher may neither wait nor allocate: this is how a test sees it.
TEST(SimtRuntime, CountsLaunchesAndWaits) {
  const Counters before = counters();
  for (int i = 0; i < 3; ++i) gpu::launch(nothing, 2, 64, 0, nullptr);
  Counters now = counters();
  EXPECT_EQ(now.launches - before.launches, 3u);
  EXPECT_EQ(now.threads - before.threads, 3u * 128);
  EXPECT_EQ(now.synchronisations, before.synchronisations);
  EXPECT_EQ(now.allocations, before.allocations);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(counters().synchronisations - before.synchronisations, 2u);
}

class SimtGraph : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    std::fill(data_.begin(), data_.end(), 0);
  }
  void TearDown() override {
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    cudaGetLastError();
  }
  void add_to(int amount) { gpu::launch(add, 1, 32, 0, stream_, data_.data(), 32, amount); }

  cudaStream_t stream_ = nullptr;
  Buffer<int> data_{32, "data"};
};

TEST_F(SimtGraph, CaptureAndLaunch) {
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  cudaStreamCaptureStatus status;
  EXPECT_EQ(cudaStreamIsCapturing(stream_, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  gpu::memset_async(data_.data(), 0, 128, stream_);
  add_to(1), add_to(10), add_to(100);
  EXPECT_EQ(data_[0], 0);  // recorded, not run
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);

  size_t count = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
  ASSERT_EQ(count, 4u);
  cudaGraphNode_t nodes[4];
  EXPECT_EQ(cudaGraphGetNodes(graph, nodes, &count), cudaSuccess);
  cudaGraphNodeType type;
  EXPECT_EQ(cudaGraphNodeGetType(nodes[0], &type), cudaSuccess);
  EXPECT_EQ(type, cudaGraphNodeTypeMemset);
  EXPECT_EQ(cudaGraphNodeGetType(nodes[1], &type), cudaSuccess);
  EXPECT_EQ(type, cudaGraphNodeTypeKernel);

  cudaGraphExec_t exec;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  const Counters before = counters();
  EXPECT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  EXPECT_EQ(data_[31], 111);
  EXPECT_EQ(counters().launches - before.launches, 3u);

  // A node that is switched off is skipped, here the fill and the middle kernel.
  EXPECT_EQ(cudaGraphNodeSetEnabled(exec, nodes[0], 0), cudaSuccess);
  EXPECT_EQ(cudaGraphNodeSetEnabled(exec, nodes[2], 0), cudaSuccess);
  unsigned enabled = 1;
  EXPECT_EQ(cudaGraphNodeGetEnabled(exec, nodes[2], &enabled), cudaSuccess);
  EXPECT_EQ(enabled, 0u);
  EXPECT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  EXPECT_EQ(data_[31], 212);
  EXPECT_EQ(cudaGraphNodeSetEnabled(exec, nodes[2], 1), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);  // the executable lives on
  EXPECT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  EXPECT_EQ(data_[31], 323);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(exec, stream_), cudaErrorInvalidResourceHandle);
}

TEST_F(SimtGraph, WhatIsKnownOfACapture) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  unsigned long long id = 0, second = 0;
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamGetCaptureInfo(stream_, &status, &id, &graph), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_EQ(graph, nullptr);
  const uint64_t live = counters().live_graphs;
  for (unsigned long long* which : {&id, &second}) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    add_to(1);
    EXPECT_EQ(cudaStreamGetCaptureInfo(stream_, &status, which, &graph), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    size_t count = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
    EXPECT_EQ(count, 1u);
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    EXPECT_EQ(counters().live_graphs, live + 1);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  EXPECT_NE(id, second);
  EXPECT_EQ(counters().live_graphs, live);
}

// A function of the host can be captured, but not switched off; no node can once its graph is gone.
TEST_F(SimtGraph, NodesThatCannotBeSwitchedOff) {
  static int calls = 0;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(cudaLaunchHostFunc(stream_, [](void* n) { calls += *static_cast<int*>(n); }, data_.data()), cudaSuccess);
  add_to(1);
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphNode_t nodes[2];
  size_t count = 2;
  ASSERT_EQ(cudaGraphGetNodes(graph, nodes, &count), cudaSuccess);
  cudaGraphNodeType type;
  EXPECT_EQ(cudaGraphNodeGetType(nodes[0], &type), cudaSuccess);
  EXPECT_EQ(type, cudaGraphNodeTypeHost);
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphNodeSetEnabled(exec, nodes[0], 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGraphNodeSetEnabled(exec, nodes[1], 1), cudaSuccess);
  data_[0] = 5, calls = 0;
  EXPECT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaGraphNodeSetEnabled(exec, nodes[1], 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(nullptr), cudaErrorInvalidValue);
}

TEST_F(SimtGraph, WhatMayNotHappenWhileCapturing) {
  void* p = nullptr;
  const auto spoils = [&](auto call) {
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    const cudaError_t status = call();
    cudaGraph_t graph;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    return status;
  };
  EXPECT_EQ(spoils([&] { return cudaStreamSynchronize(stream_); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(spoils([&] { return cudaDeviceSynchronize(); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(spoils([&] { return cudaMalloc(&p, 16); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(spoils([&] { return cudaMemset(data_.data(), 0, 16); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(spoils([&] { return cudaHostRegister(&p, 8, 0); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
}

TEST_F(SimtGraph, DefaultStreamWhileABlockingOneCaptures) {
  cudaStream_t blocking;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_NE(fault_of([] { gpu::launch(nothing, 1, 1, 0, nullptr); }).find("legacy stream"), std::string::npos);
  cudaGraph_t graph;
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(SimtGraph, SecondStreamJoinsByEvent) {
  cudaStream_t second;
  cudaEvent_t event;
  ASSERT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  add_to(1);
  EXPECT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
  gpu::launch(add, 1, 32, 0, second, data_.data(), 32, 2);
  EXPECT_EQ(cudaEventRecord(event, second), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event, 0), cudaSuccess);
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  EXPECT_EQ(data_[0], 3);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
  gpu::launch(add, 1, 32, 0, stream_, data_.data(), 32, 4);  // no longer capturing
  EXPECT_EQ(data_[0], 7);
}

TEST_F(SimtGraph, FaultsAreReportedByTheGraphLaunch) {
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  gpu::launch(add, 1, 32, 0, stream_, data_.data(), 33, 1);
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  EXPECT_NE(fault_of([&] { cudaGraphLaunch(exec, stream_); }).find("past the end of data"), std::string::npos);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorIllegalAddress);  // a device would say so, from then on
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST(SimtRuntime, Handles) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_NE(fault_of([&] { gpu::launch(nothing, 1, 1, 0, stream); }).find("invalid resource handle"),
            std::string::npos);
  cudaEvent_t start, end;
  ASSERT_EQ(cudaEventCreate(&start), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&end), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(start), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(end), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
  EXPECT_GE(milliseconds, 0.0f);
  EXPECT_EQ(cudaEventDestroy(start), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(end), cudaSuccess);
  cudaGetLastError();
}

}  // namespace
}  // namespace sic::simt
