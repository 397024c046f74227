// Clusters of blocks: who is who, shared memory of peers, and planted bugs in its use, each with a repaired twin.
#include <numeric>

#include "simt_testing.h"

namespace sic::simt {
namespace {

constexpr int kThreads = 40;  // not a whole number of warps

template <class... P, class... A>
void run(unsigned cluster, unsigned blocks, void (*kernel)(P...), A... args) {
  gpu::launch_clusters(cluster, kernel, blocks, kThreads, kThreads * sizeof(int), nullptr, args...);
}

// ---- what works ----

// Each thread sums what the threads of its number have in all blocks of the cluster, in turns that begin elsewhere.
__global__ void sum_of_peers(int* out) {
  SIC_DYNAMIC_SHARED(int, mine);
  const int t = static_cast<int>(threadIdx.x), size = gpu::cluster_size(), rank = gpu::cluster_rank();
  mine[t] = static_cast<int>(blockIdx.x) * 1000 + t;
  gpu::cluster_sync();
  int sum = 0;
  for (int i = 0; i < size; ++i) sum += gpu::peer_shared(mine, (rank + i) % size)[t];
  gpu::cluster_sync();
  mine[t] = 0;
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}
TEST(SimtClusters, SumsOfPeers) {
  for (const unsigned cluster : {1u, 2u, 4u, 8u}) {
    in_every_schedule([&] {
      auto out = output<int>(24 * kThreads);
      run(cluster, 24, sum_of_peers, out.data());
      for (unsigned i = 0; i < out.size(); ++i) {
        const unsigned block = i / kThreads, first = block / cluster * cluster;
        unsigned expected = cluster * (i % kThreads);
        for (unsigned b = first; b < first + cluster; ++b) expected += b * 1000;
        ASSERT_EQ(out[i], static_cast<int>(expected)) << i;
      }
    });
  }
}

// Atomics in a peer's memory, and writes that it finds after the barrier.
__global__ void send_around(int* out) {
  SIC_DYNAMIC_SHARED(int, mine);
  const int t = static_cast<int>(threadIdx.x), size = gpu::cluster_size(), rank = gpu::cluster_rank();
  mine[t] = 0;
  gpu::cluster_sync();
  for (int i = 0; i < size; ++i) atomicAdd(gpu::peer_shared(mine, i) + t / 2, rank + 1);
  gpu::cluster_sync();
  const int got = mine[t / 2];
  gpu::cluster_sync();
  gpu::peer_shared(mine, (rank + 1) % size)[kThreads - 1 - t] = got;
  gpu::cluster_sync();
  out[blockIdx.x * kThreads + threadIdx.x] = mine[kThreads - 1 - t];
}
TEST(SimtClusters, AtomicsAndWrites) {
  in_every_schedule([&] {
    auto out = output<int>(8 * kThreads);
    run(4, 8, send_around, out.data());
    for (const int x : out) ASSERT_EQ(x, 2 * (1 + 2 + 3 + 4));
  });
}

__global__ void through_global(int* memory, int* out) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  memory[i] = static_cast<int>(i);
  gpu::cluster_sync();
  out[i] = memory[(blockIdx.x ^ 1) * kThreads + threadIdx.x];
}
TEST(SimtClusters, BarriersOrderGlobalMemory) {
  in_every_schedule([&] {
    auto memory = output<int>(6 * kThreads, "memory"), out = output<int>(6 * kThreads);
    run(2, 6, through_global, memory.data(), out.data());
    EXPECT_EQ(out[0], kThreads);
    EXPECT_NE(fault_of([&] { run(1, 6, through_global, memory.data(), out.data()); }).find("race between blocks"),
              std::string::npos);
  });
}

TEST(SimtClusters, InAGraph) {
  auto out = output<int>(4 * kThreads);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  gpu::launch_clusters(4, sum_of_peers, 4, kThreads, kThreads * sizeof(int), stream, out.data());
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    std::iota(out.begin(), out.end(), 0);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    EXPECT_EQ(out[1], 6004);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(SimtClusters, LaunchesThatAreRefused) {
  auto out = output<int>(24 * kThreads);
  const auto refused = [&](unsigned cluster, unsigned blocks) {
    return fault_of([&] { run(cluster, blocks, sum_of_peers, out.data()); });
  };
  constexpr const char* kSize = "simt::sum_of_peers: invalid cluster size";
  EXPECT_EQ(refused(0, 24), kSize);
  EXPECT_EQ(refused(16, 16), kSize);
  EXPECT_EQ(refused(4, 22), kSize);
  int on = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&on, cudaDevAttrClusterLaunch, 0), cudaSuccess);
  EXPECT_EQ(on, 1);
  set_clusters(false);
  EXPECT_EQ(cudaDeviceGetAttribute(&on, cudaDevAttrClusterLaunch, 0), cudaSuccess);
  EXPECT_EQ(on, 0);
  EXPECT_EQ(refused(2, 24), kSize);
  EXPECT_EQ(refused(1, 24), "");
  set_clusters(true);
}

// ---- races ----

template <bool kBroken>
__global__ void read_of_peer(int* out) {
  SIC_DYNAMIC_SHARED(int, mine);
  mine[threadIdx.x] = 0;
  gpu::cluster_sync();
  mine[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kBroken)
    __syncthreads();  // of the block alone
  else
    gpu::cluster_sync();
  out[blockIdx.x * kThreads + threadIdx.x] = gpu::peer_shared(mine, gpu::cluster_rank() ^ 1)[threadIdx.x];
  gpu::cluster_sync();
}
TEST(SimtClusters, ReadOfAPeer) {
  expect_planted("race between blocks: ", [](auto broken) {
    auto out = output<int>(2 * kThreads);
    run(2, 2, read_of_peer<broken>, out.data());
  });
}

template <bool kBroken>
__global__ void write_under_a_reader(int* out) {
  SIC_DYNAMIC_SHARED(int, mine);
  mine[threadIdx.x] = 0;
  gpu::cluster_sync();
  // The own block reads too, so that there are readers of both.
  const int sum = gpu::peer_shared(mine, gpu::cluster_rank() ^ 1)[threadIdx.x] + mine[threadIdx.x];
  if (kBroken)
    __syncthreads();
  else
    gpu::cluster_sync();
  mine[threadIdx.x] = 1;
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
  gpu::cluster_sync();
}
TEST(SimtClusters, WriteUnderAReader) {
  expect_planted("race between blocks: ", [](auto broken) {
    auto out = output<int>(2 * kThreads);
    run(2, 2, write_under_a_reader<broken>, out.data());
  });
}

template <bool kBroken>
__global__ void two_writers() {
  SIC_DYNAMIC_SHARED(int, mine);
  gpu::cluster_sync();
  const int rank = gpu::cluster_rank();
  if (kBroken || rank == 1) gpu::peer_shared(mine, 2)[threadIdx.x] = rank;
  gpu::cluster_sync();
}
TEST(SimtClusters, TwoWriters) {
  expect_planted("write after write: dynamic shared memory", [](auto broken) { run(4, 4, two_writers<broken>); });
}

template <bool kBroken>
__global__ void count_together(int* out) {
  SIC_DYNAMIC_SHARED(int, mine);
  mine[threadIdx.x] = 0;
  gpu::cluster_sync();
  atomicAdd(gpu::peer_shared(mine, 0), 1);
  if (kBroken)
    __syncthreads();
  else
    gpu::cluster_sync();
  if (gpu::cluster_rank() == 0) out[threadIdx.x] = mine[0];
  gpu::cluster_sync();
}
TEST(SimtClusters, CountTogether) {
  expect_planted("read after write: dynamic shared memory, byte 0", [](auto broken) {
    auto out = output<int>(kThreads);
    run(4, 4, count_together<broken>, out.data());
    EXPECT_EQ(out[7], 4 * kThreads);
  });
}

template <bool kBroken>
__global__ void never_written(int* out) {
  SIC_DYNAMIC_SHARED(int, mine);
  if (!kBroken || threadIdx.x < 32) mine[threadIdx.x] = 0;
  gpu::cluster_sync();
  out[blockIdx.x * kThreads + threadIdx.x] = gpu::peer_shared(mine, 0)[threadIdx.x];
  gpu::cluster_sync();
}
TEST(SimtClusters, NeverWritten) {
  expect_planted("never written: dynamic shared memory", [](auto broken) {
    auto out = output<int>(2 * kThreads);
    run(2, 2, never_written<broken>, out.data());
  });
}

// ---- the life of a peer ----

template <bool kBroken>
__global__ void before_it_begins() {
  SIC_DYNAMIC_SHARED(int, mine);
  if (!kBroken) gpu::cluster_sync();
  gpu::peer_shared(mine, gpu::cluster_rank() ^ 1)[threadIdx.x] = 1;
  gpu::cluster_sync();
}
TEST(SimtClusters, BeforeItBegins) {
  expect_planted("which may not have begun", [](auto broken) { run(2, 2, before_it_begins<broken>); });
}

template <bool kBroken>
__global__ void after_it_ended(int* out) {
  SIC_DYNAMIC_SHARED(int, mine);
  mine[threadIdx.x] = 5;
  gpu::cluster_sync();
  if (gpu::cluster_rank() == 1) out[threadIdx.x] = gpu::peer_shared(mine, 0)[threadIdx.x];
  if (!kBroken) gpu::cluster_sync();
}
TEST(SimtClusters, AfterItEnded) {
  expect_planted(
      "block 0 of the cluster, which may have ended: no barrier follows, at csrc_tests/simt_clusters_test.cc",
      [](auto broken) {
        auto out = output<int>(kThreads);
        run(2, 2, after_it_ended<broken>, out.data());
      });
}

// ---- barriers ----

template <bool kBroken>
__global__ void barrier_of_some_blocks() {
  if (!kBroken || gpu::cluster_rank() != 1) gpu::cluster_sync();
}
TEST(SimtClusters, BarrierOfSomeBlocks) {
  expect_planted("divergent barrier of the cluster", [](auto broken) { run(2, 2, barrier_of_some_blocks<broken>); });
}

template <bool kBroken>
__global__ void barriers_at_two_places() {
  if (kBroken && gpu::cluster_rank() == 1)
    gpu::cluster_sync();
  else
    gpu::cluster_sync();
}
TEST(SimtClusters, BarriersAtTwoPlaces) {
  expect_planted("threads of the cluster wait at two places",
                 [](auto broken) { run(2, 2, barriers_at_two_places<broken>); });
}

template <bool kBroken>
__global__ void two_kinds_of_barrier() {
  if (kBroken && threadIdx.x < 32)
    __syncthreads();
  else
    gpu::cluster_sync();
}
TEST(SimtClusters, TwoKindsOfBarrier) {
  expect_planted("deadlock of 80 threads", [](auto broken) { run(2, 2, two_kinds_of_barrier<broken>); });
}

// ---- addresses ----

template <bool kBroken>
__global__ void past_the_end() {
  SIC_DYNAMIC_SHARED(int, mine);
  gpu::cluster_sync();
  const unsigned at = threadIdx.x + (kBroken ? 1 : 0);
  gpu::peer_shared(mine, gpu::cluster_rank() ^ 1)[at] = 1;
  gpu::cluster_sync();
}
TEST(SimtClusters, PastTheEnd) {
  expect_planted("out of bounds: past the end of dynamic shared memory",
                 [](auto broken) { run(2, 2, past_the_end<broken>); });
}

template <bool kBroken>
__global__ void no_such_block() {
  SIC_DYNAMIC_SHARED(int, mine);
  gpu::cluster_sync();
  *(gpu::peer_shared(mine, gpu::cluster_rank() + (kBroken ? 1 : 0)) + threadIdx.x) = 1;
  gpu::cluster_sync();
}
TEST(SimtClusters, NoSuchBlock) {
  expect_planted("the cluster has no block 2", [](auto broken) { run(2, 2, no_such_block<broken>); });
}

template <bool kBroken>
__global__ void address_of_a_peer(int* global) {
  SIC_DYNAMIC_SHARED(int, mine);
  gpu::cluster_sync();
  *(gpu::peer_shared(kBroken ? global : mine, 0) + 8 * gpu::cluster_rank()) = 1;
  gpu::cluster_sync();
}
TEST(SimtClusters, AddressForAPeer) {
  expect_planted("not in the block's own dynamic shared memory", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch_clusters(2, address_of_a_peer<broken>, 2, 1, 64, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void static_shared(int* out) {
  __shared__ int value[kThreads];
  SIC_DYNAMIC_SHARED(int, mine);
  (kBroken ? value : mine)[threadIdx.x] = 1;
  __syncthreads();
  out[blockIdx.x * kThreads + threadIdx.x] = (kBroken ? value : mine)[kThreads - 1 - threadIdx.x];
}
TEST(SimtClusters, StaticSharedMemory) {
  expect_planted("a __shared__ variable in a cluster", [](auto broken) {
    auto out = output<int>(2 * kThreads);
    gpu::launch_clusters(2, static_shared<broken>, 2, kThreads, kThreads * sizeof(int), nullptr, out.data());
  });
}

}  // namespace
}  // namespace sic::simt
