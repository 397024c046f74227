// Planted bugs in the order of accesses: each must be reported in every schedule, and the repaired twin must pass.
#include <algorithm>

#include "simt_testing.h"

namespace sic::simt {
namespace {

// ---- order within a block ----

template <bool kBroken>
__global__ void read_after_write(int* out) {
  __shared__ int value[64];
  const int t = static_cast<int>(threadIdx.x);
  value[t] = t;
  if (!kBroken) __syncthreads();
  out[t] = value[63 - t];
}
TEST(SimtRaces, MissingBarrier) {
  expect_planted("simt_races_test.cc:", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch(read_after_write<broken>, 1, 64, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void write_after_read(const int* in, int* out) {
  __shared__ int value[64];
  const int t = static_cast<int>(threadIdx.x);
  int sum = 0;
  for (int i = 0; i < 3; ++i) {
    value[t] = in[t] + i;
    __syncthreads();
    sum += value[63 - t];
    if (!kBroken) __syncthreads();
  }
  out[t] = sum;
}
TEST(SimtRaces, WriteAfterRead) {
  expect_planted("race: ", [](auto broken) {
    auto in = input<int>(64);
    auto out = output<int>(64);
    gpu::launch(write_after_read<broken>, 1, 64, 0, nullptr, in.data(), out.data());
  });
}

template <bool kBroken>
__global__ void same_place(int* out) {
  __shared__ int value;
  if (kBroken || threadIdx.x == 0) value = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = value;
}
TEST(SimtRaces, TwoWriters) {
  expect_planted("race: write after write: shared memory", [](auto broken) {
    auto out = output<int>(40);
    gpu::launch(same_place<broken>, 1, 40, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void count(int* out) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, 1);
  if (!kBroken) __syncthreads();
  out[threadIdx.x] = total;
}
TEST(SimtRaces, ReadOfAtomicCounter) {
  expect_planted("race: ", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch(count<broken>, 1, 64, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void through_global(int* out) {
  out[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (!kBroken) __syncthreads();
  const int neighbour = out[(threadIdx.x + 1) % 64];
  __syncthreads();
  out[threadIdx.x] = neighbour;
}
TEST(SimtRaces, MissingBarrierInGlobalMemory) {
  expect_planted("out, byte", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch(through_global<broken>, 1, 64, 0, nullptr, out.data());
  });
}

// Single bytes of a word belong to different threads; that is no race.
template <bool kBroken>
__global__ void bytes_of_words(uint8_t* out) {
  __shared__ uint8_t value[64];
  value[threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
  __syncthreads();
  const uint8_t neighbour = value[threadIdx.x ^ 1];
  if (!kBroken) __syncthreads();
  value[threadIdx.x] = neighbour;
  out[threadIdx.x] = neighbour;
}
TEST(SimtRaces, Bytes) {
  expect_planted("race: ", [](auto broken) {
    auto out = output<uint8_t>(64);
    gpu::launch(bytes_of_words<broken>, 1, 64, 0, nullptr, out.data());
  });
}

// ---- order within a warp ----

template <bool kBroken>
__global__ void exchange(int* out) {
  __shared__ int value[32];
  const int t = static_cast<int>(threadIdx.x);
  value[t] = t;
  if (!kBroken) __syncwarp();
  out[t] = value[t ^ 1];
}
TEST(SimtRaces, MissingWarpBarrier) {
  expect_planted("exchange", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(exchange<broken>, 1, 32, 0, nullptr, out.data());
  });
}

// A shuffle brings lanes together, but it orders no memory.
template <bool kBroken>
__global__ void shuffle_is_no_barrier(int* out) {
  __shared__ int value[32];
  const int t = static_cast<int>(threadIdx.x);
  value[t] = t;
  const int other = __shfl_xor_sync(0xffffffffu, t, 1);
  if (!kBroken) __syncwarp();
  out[t] = value[other];
}
TEST(SimtRaces, ShuffleIsNoBarrier) {
  expect_planted("race: read after write", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(shuffle_is_no_barrier<broken>, 1, 32, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void barrier_of_halves(int* out) {
  __shared__ int value[32];
  const int t = static_cast<int>(threadIdx.x);
  value[t] = t;
  __syncwarp(t < 16 ? 0xffffu : 0xffff0000u);
  out[t] = value[kBroken ? t ^ 16 : t ^ 8];
}
TEST(SimtRaces, BarrierOfTheWrongLanes) {
  expect_planted("barrier_of_halves", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(barrier_of_halves<broken>, 1, 32, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void other_warp(int* out) {
  __shared__ int value[64];
  const int t = static_cast<int>(threadIdx.x);
  value[t] = t;
  if (kBroken)
    __syncwarp();
  else
    __syncthreads();
  out[t] = value[t ^ 32];
}
TEST(SimtRaces, WarpBarrierBetweenWarps) {
  expect_planted("other_warp", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch(other_warp<broken>, 1, 64, 0, nullptr, out.data());
  });
}

// ---- between blocks ----

template <bool kBroken>
__global__ void blocks_write(int* out) {
  out[kBroken ? threadIdx.x : blockIdx.x * 32 + threadIdx.x] = 1;
}
TEST(SimtRaces, BlocksThatWriteTheSame) {
  expect_planted("race between blocks: write after write: out", [](auto broken) {
    auto out = output<int>(3 * 32);
    gpu::launch(blocks_write<broken>, 3, 32, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void blocks_read(int* data) {
  const int i = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  data[i] = data[kBroken ? (i + 32) % 96 : i] + 1;
}
TEST(SimtRaces, BlocksThatReadWhatOthersWrite) {
  expect_planted("race between blocks: ", [](auto broken) {
    Buffer<int> data(96, "data");
    std::fill(data.begin(), data.end(), 0);
    gpu::launch(blocks_read<broken>, 3, 32, 0, nullptr, data.data());
  });
}

// All blocks read the same word, one writes it.
template <bool kBroken>
__global__ void one_block_writes(int* data, int* out) {
  out[blockIdx.x] = data[0];
  if (kBroken && blockIdx.x == 1) data[0] = 1;
}
TEST(SimtRaces, OneBlockWritesWhatAllRead) {
  expect_planted("race between blocks: ", [](auto broken) {
    Buffer<int> data(1, "data");
    data[0] = 0;
    auto out = output<int>(4);
    gpu::launch(one_block_writes<broken>, 4, 1, 0, nullptr, data.data(), out.data());
  });
}

// The last block to finish adds up what all have written. kMissing: 0 nothing, 1 the fence before the counter, 2 the
// one after it, 3 the barrier before the counter.
template <int kMissing>
__global__ void last_block(int* parts, int* counter, int* total) {
  __shared__ bool last;
  parts[blockIdx.x * 32 + threadIdx.x] = static_cast<int>(blockIdx.x + threadIdx.x);
  if (kMissing != 3) __syncthreads();
  if (threadIdx.x == 0) {
    if (kMissing != 1) __threadfence();
    last = atomicAdd(counter, 1) == static_cast<int>(gridDim.x) - 1;
    if (kMissing != 2) __threadfence();
  }
  __syncthreads();
  if (!last) return;
  int sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += parts[b * 32 + threadIdx.x];
  total[threadIdx.x] = sum;
}
template <int kMissing>
void run_last_block() {
  auto parts = output<int>(5 * 32, "parts"), total = output<int>(32, "total");
  auto counter = output<int>(1, "counter");
  gpu::memset_async(counter.data(), 0, 4, nullptr);
  gpu::launch(last_block<kMissing>, 5, 32, 0, nullptr, parts.data(), counter.data(), total.data());
  for (int t = 0; t < 32; ++t) EXPECT_EQ(total[t], 10 + 5 * t);
}
TEST(SimtRaces, LastBlockWithoutFences) {
  constexpr const char* kText = "race between blocks: read after write: parts";
  expect_planted(kText, [](auto broken) { run_last_block<broken ? 1 : 0>(); });
  expect_planted(kText, [](auto broken) { run_last_block<broken ? 2 : 0>(); });
  expect_planted(kText, [](auto broken) { run_last_block<broken ? 3 : 0>(); });
}

template <bool kBroken>
__global__ void histogram(int* bins, int* out) {
  atomicAdd(&bins[threadIdx.x % 4], 1);
  if (kBroken) out[blockIdx.x * 32 + threadIdx.x] = bins[threadIdx.x % 4];
}
TEST(SimtRaces, BlocksThatReadAtomicCounters) {
  expect_planted("race", [](auto broken) {
    Buffer<int> bins(4, "bins"), out(96, "out");
    std::fill(bins.begin(), bins.end(), 0);
    gpu::launch(histogram<broken>, 3, 32, 0, nullptr, bins.data(), out.data());
    EXPECT_EQ(bins[3], 24);
  });
}

// ---- asynchronous copies ----

enum class CopyBug { none, no_wait, short_wait, no_barrier, early_reuse, never_waited };

template <CopyBug kBug>
__global__ void copied_sums(const float* in, int tiles, float* out) {
  __shared__ __align__(16) float tile[2][128];
  const int t = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int i) {
    if (i < tiles) gpu::cp_async16(&tile[i % 2][4 * t], in + i * 128 + 4 * t);
    gpu::cp_async_commit();
  };
  float sum = 0;
  fetch(0);
  for (int i = 0; i < tiles; ++i) {
    fetch(i + 1);
    if (kBug == CopyBug::short_wait)
      gpu::cp_async_wait<2>();
    else if (kBug != CopyBug::no_wait)
      gpu::cp_async_wait<1>();
    if (kBug != CopyBug::no_barrier) __syncwarp();
    for (int k = 0; k < 4; ++k) sum += tile[i % 2][(4 * t + 33 * k) % 128];
    if (kBug != CopyBug::early_reuse) __syncwarp();
  }
  if (kBug == CopyBug::never_waited) fetch(0);
  if (kBug != CopyBug::never_waited) gpu::cp_async_wait<0>();
  out[t] = sum;
}
template <CopyBug kBug>
void run_copies() {
  auto in = input<float>(5 * 128);
  auto out = output<float>(32);
  gpu::launch(copied_sums<kBug>, 1, 32, 0, nullptr, in.data(), 5, out.data());
  for (int t = 0; t < 32; ++t) {
    float sum = 0;
    for (int i = 0; i < 5; ++i)
      for (int k = 0; k < 4; ++k) sum += static_cast<float>(i * 128 + (4 * t + 33 * k) % 128);
    EXPECT_EQ(out[t], sum);
  }
}
TEST(SimtRaces, AsynchronousCopies) {
  const auto plant = [](const char* text, auto bug) {
    expect_planted(text, [](auto broken) { run_copies<broken ? decltype(bug)::value : CopyBug::none>(); });
  };
  plant("before its wait", std::integral_constant<CopyBug, CopyBug::no_wait>{});
  plant("before its wait", std::integral_constant<CopyBug, CopyBug::short_wait>{});
  plant("copied_sums", std::integral_constant<CopyBug, CopyBug::no_barrier>{});
  plant("copied_sums", std::integral_constant<CopyBug, CopyBug::early_reuse>{});
  plant("cp.async that it has not waited for", std::integral_constant<CopyBug, CopyBug::never_waited>{});
}

__global__ void copy_or_zero(const uint4* in, uint4* out, unsigned valid) {
  __shared__ uint4 tile[32];
  gpu::cp_async16(&tile[threadIdx.x], in + (threadIdx.x < valid ? threadIdx.x : 1000), threadIdx.x < valid);
  gpu::cp_async_commit();
  gpu::cp_async_wait<0>();
  out[threadIdx.x] = tile[threadIdx.x];
}
TEST(SimtMemory, CopiesFillWithZeros) {
  in_every_schedule([] {
    Buffer<uint4> in(9, "in", Access::read_only);
    std::fill(in.begin(), in.end(), make_uint4(1, 2, 3, 4));
    auto out = output<uint4>(32);
    gpu::launch(copy_or_zero, 1, 32, 0, nullptr, in.data(), out.data(), 9u);
    for (unsigned i = 0; i < 32; ++i) EXPECT_EQ(out[i].w, i < 9 ? 4u : 0u);
  });
}

}  // namespace
}  // namespace sic::simt
