// Planted bugs: each must be reported in every schedule, and the repaired twin must pass.
#include <stdexcept>

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
TEST(SimtFaults, MissingBarrier) {
  expect_planted("simt_faults_test.cc:", [](auto broken) {
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
TEST(SimtFaults, WriteAfterRead) {
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
TEST(SimtFaults, TwoWriters) {
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
TEST(SimtFaults, ReadOfAtomicCounter) {
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
TEST(SimtFaults, MissingBarrierInGlobalMemory) {
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
TEST(SimtFaults, Bytes) {
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
TEST(SimtFaults, MissingWarpBarrier) {
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
TEST(SimtFaults, ShuffleIsNoBarrier) {
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
TEST(SimtFaults, BarrierOfTheWrongLanes) {
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
TEST(SimtFaults, WarpBarrierBetweenWarps) {
  expect_planted("other_warp", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch(other_warp<broken>, 1, 64, 0, nullptr, out.data());
  });
}

// ---- who takes part ----

template <bool kBroken>
__global__ void barrier_of_some(int* out) {
  if (!kBroken || threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 1;
}
TEST(SimtFaults, DivergentBarrier) {
  expect_planted("divergent barrier", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch(barrier_of_some<broken>, 1, 64, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void two_barriers(int* out) {
  if (!kBroken) __syncthreads();
  if (kBroken && threadIdx.x % 2) __syncthreads();
  if (kBroken && threadIdx.x % 2 == 0) __syncthreads();
  out[threadIdx.x] = 1;
}
TEST(SimtFaults, BarriersAtTwoPlaces) {
  expect_planted("divergent barrier: threads of the block wait at two places", [](auto broken) {
    auto out = output<int>(64);
    gpu::launch(two_barriers<broken>, 1, 64, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void lanes_leave(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  if (kBroken && lane >= 24) return;
  out[lane] = __shfl_sync(0xffffffffu, lane, 0);
}
TEST(SimtFaults, LanesThatHaveEnded) {
  expect_planted("ended", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(lanes_leave<broken>, 1, 32, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void half_votes(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned votes = 0;
  if (!kBroken || lane < 16) votes = __ballot_sync(0xffffffffu, 1);
  if (kBroken) __syncthreads();
  out[lane] = static_cast<int>(votes);
}
TEST(SimtFaults, LanesThatNeverCome) {
  expect_planted("deadlock", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(half_votes<broken>, 1, 32, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void different_operations(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  if (kBroken && lane % 2)
    out[lane] = __any_sync(0xffffffffu, 1);
  else
    out[lane] = __all_sync(0xffffffffu, 1);
}
TEST(SimtFaults, DifferentOperations) {
  expect_planted("lanes of a warp meet in different operations", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(different_operations<broken>, 1, 32, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void not_in_mask(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  out[lane] = __shfl_sync(kBroken ? 0xffffu : 0xffffffffu, lane, 0);
}
TEST(SimtFaults, CallerOutsideOfItsMask) {
  expect_planted("is not in its own mask", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(not_in_mask<broken>, 1, 32, 0, nullptr, out.data());
  });
}

// ---- bounds ----

template <bool kBroken>
__global__ void past_the_end(const int* in, int* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[i] = in[kBroken ? i + 1 : i];
}
TEST(SimtFaults, ReadPastTheEnd) {
  expect_planted("read of 4 bytes out of bounds: ends 4 bytes past the end of in", [](auto broken) {
    auto in = input<int>(50);
    auto out = output<int>(50);
    gpu::launch(past_the_end<broken>, 1, 50, 0, nullptr, in.data(), out.data());
  });
}

template <bool kBroken>
__global__ void before_the_start(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[kBroken ? i - 1 : i] = i;
}
TEST(SimtFaults, WriteBeforeTheStart) {
  expect_planted("write of 4 bytes out of bounds: 4 bytes before out", [](auto broken) {
    auto out = output<int>(40);
    gpu::launch(before_the_start<broken>, 1, 40, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void rows(const float* in, int64_t stride, int width, float* out) {
  const int row = static_cast<int>(blockIdx.x), column = static_cast<int>(threadIdx.x);
  if ((kBroken && row < 7) || column < width) out[row * 32 + column] = in[row * stride + column];
}
TEST(SimtFaults, BetweenTheRowsOfATensor) {
  expect_planted("between the rows of view", [](auto broken) {
    std::vector<float> storage(40 * 8);
    TensorView view = view_of(storage.data(), DType::f32, 8, 24);
    view.stride[0] = 40;
    const Offered offered(offer("view", view, Access::read_only, Contents::given));
    auto out = output<float>(8 * 32);
    gpu::launch(rows<broken>, 8, 32, 0, nullptr, static_cast<const float*>(storage.data()), 40, 24, out.data());
  });
}

template <bool kBroken>
__global__ void array_index(int* out, int shift) {
  __shared__ int first[32], second[32];
  const int t = static_cast<int>(threadIdx.x);
  first[t] = t, second[t] = -t;
  __syncthreads();
  out[t] = first[kBroken ? t + shift : t] + second[t];
}
TEST(SimtFaults, SharedArrayIndex) {
  expect_planted("array index 32 is out of bounds", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(array_index<broken>, 1, 32, 0, nullptr, out.data(), 1);
  });
}

template <bool kBroken>
__global__ void dynamic_index(int* out) {
  SIC_DYNAMIC_SHARED(int, value);
  const int t = static_cast<int>(threadIdx.x);
  value[kBroken ? t + 1 : t] = t;
  __syncthreads();
  out[t] = value[kBroken ? t + 1 : t];
}
TEST(SimtFaults, PastDynamicSharedMemory) {
  expect_planted("past the end of dynamic shared memory", [](auto broken) {
    auto out = output<int>(33);
    gpu::launch(dynamic_index<broken>, 1, 33, 33 * 4, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void unknown_memory(const int* in, const int* host, int* out) {
  *out = kBroken ? *host : *in;
}
TEST(SimtFaults, MemoryOfTheHost) {
  expect_planted("read of 4 bytes out of bounds", [](auto broken) {
    const auto host = std::make_unique<int>(3);
    auto in = input<int>(1);
    auto out = output<int>(1);
    gpu::launch(unknown_memory<broken>, 1, 1, 0, nullptr, in.data(), host.get(), out.data());
  });
}

template <bool kBroken>
__global__ void pass_a_local(int* out) {
  __shared__ int* pointer;
  volatile int mine[2] = {static_cast<int>(threadIdx.x), 5};
  if (threadIdx.x == 0) pointer = const_cast<int*>(mine);
  __syncthreads();
  out[threadIdx.x] = kBroken ? *pointer : mine[1];
  __syncthreads();
}
TEST(SimtFaults, LocalMemoryOfAnotherThread) {
  expect_planted("another thread's local memory", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(pass_a_local<broken>, 1, 32, 0, nullptr, out.data());
  });
}

// ---- what memory holds and allows ----

template <bool kBroken>
__global__ void accumulate(int* out) {
  if (!kBroken) out[threadIdx.x] = 0;
  out[threadIdx.x] += 2;
}
TEST(SimtFaults, ReadOfUnwrittenGlobalMemory) {
  expect_planted("read of what was never written: out, byte", [](auto broken) {
    auto out = output<int>(32);
    gpu::launch(accumulate<broken>, 1, 32, 0, nullptr, out.data());
  });
}
TEST(SimtFaults, ReadOfUnwrittenGlobalMemoryByAtomics) {
  expect_planted("read of what was never written: sum", [](auto broken) {
    Buffer<int> sum(1, "sum", Access::read_write, Contents::garbage);
    if (!broken) gpu::memset_async(sum.data(), 0, 4, nullptr);
    gpu::launch(+[](int* p) { atomicAdd(p, 1); }, 2, 32, 0, nullptr, sum.data());
    EXPECT_EQ(sum[0], 64);
  });
}

template <bool kBroken>
__global__ void half_filled(int* out) {
  __shared__ int value[64];
  if (!kBroken || threadIdx.x < 32) value[threadIdx.x] = 1;
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = value[63 - threadIdx.x];
}
TEST(SimtFaults, ReadOfUnwrittenSharedMemory) {
  expect_planted("read of what was never written: shared memory", [](auto broken) {
    auto out = output<int>(128);
    gpu::launch(half_filled<broken>, 2, 64, 0, nullptr, out.data());
  });
}

template <bool kBroken>
__global__ void change(int* in, int* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (kBroken) in[threadIdx.x] = 0;
}
TEST(SimtFaults, WriteToReadOnly) {
  expect_planted("write to read-only in", [](auto broken) {
    auto in = input<int>(32);
    auto out = output<int>(32);
    gpu::launch(change<broken>, 1, 32, 0, nullptr, in.data(), out.data());
  });
}

template <bool kBroken>
__global__ void vector_load(const float* in, float* out) {
  const auto* p = reinterpret_cast<const float4*>(in + 4 * threadIdx.x + (kBroken ? 1 : 0));
  const float4 v = *p;
  out[threadIdx.x] = v.x + v.w;
}
TEST(SimtFaults, MisalignedVector) {
  expect_planted("misaligned", [](auto broken) {
    auto in = input<float>(132);
    auto out = output<float>(32);
    gpu::launch(vector_load<broken>, 1, 32, 0, nullptr, in.data(), out.data());
  });
}

template <bool kBroken>
__global__ void wide_load(const char* in, uint4* out) {
  gpu::store16(out + threadIdx.x, gpu::load16(in + 16 * threadIdx.x + (kBroken ? 8 : 0)));
}
TEST(SimtFaults, MisalignedWideLoad) {
  expect_planted("misaligned read of 16 bytes", [](auto broken) {
    auto in = input<char>(33 * 16);
    auto out = output<uint4>(32);
    gpu::launch(wide_load<broken>, 1, 32, 0, nullptr, in.data(), out.data());
  });
}

template <bool kBroken>
__global__ void read_back(const int* in, int* out) {
  out[4 * threadIdx.x] = in[threadIdx.x];
  uint4 v = {};
  if (kBroken) v = gpu::load16(out + 4 * threadIdx.x);
  out[4 * threadIdx.x + 1] = static_cast<int>(v.x);
}
TEST(SimtFaults, CachedReadOfNewData) {
  expect_planted("cached read (ld.global.nc) of what the same launch writes", [](auto broken) {
    auto in = input<int>(32);
    Buffer<int> out(128, "out");
    gpu::launch(read_back<broken>, 1, 32, 0, nullptr, in.data(), out.data());
  });
}

// ---- between blocks ----

template <bool kBroken>
__global__ void blocks_write(int* out) {
  out[kBroken ? threadIdx.x : blockIdx.x * 32 + threadIdx.x] = 1;
}
TEST(SimtFaults, BlocksThatWriteTheSame) {
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
TEST(SimtFaults, BlocksThatReadWhatOthersWrite) {
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
TEST(SimtFaults, OneBlockWritesWhatAllRead) {
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
TEST(SimtFaults, LastBlockWithoutFences) {
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
TEST(SimtFaults, BlocksThatReadAtomicCounters) {
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
TEST(SimtFaults, AsynchronousCopies) {
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

// ---- arithmetic that has no meaning, exceptions ----

template <bool kBroken>
__global__ void shift(unsigned* out, int distance) {
  out[threadIdx.x] = 1u << (kBroken ? distance : distance - 1);
}
TEST(SimtFaults, UndefinedShift) {
  expect_planted("undefined shift by 32", [](auto broken) {
    auto out = output<unsigned>(1);
    gpu::launch(shift<broken>, 1, 1, 0, nullptr, out.data(), 32);
  });
}

template <bool kBroken>
__global__ void divide(int* out, int divisor) {
  out[threadIdx.x] = 7 / (kBroken ? divisor : divisor + 1);
}
TEST(SimtFaults, DivisionByZero) {
  expect_planted("integer division by zero", [](auto broken) {
    auto out = output<int>(1);
    gpu::launch(divide<broken>, 1, 1, 0, nullptr, out.data(), 0);
  });
}

template <bool kBroken>
__global__ void throws(int* out) {
  if (kBroken) throw std::runtime_error("from inside");
  *out = 1;
}
TEST(SimtFaults, ExceptionInAKernel) {
  expect_planted("exception in kernel code: from inside", [](auto broken) {
    auto out = output<int>(1);
    gpu::launch(throws<broken>, 1, 1, 0, nullptr, out.data());
  });
}

// ---- the message, and what comes after ----

TEST(SimtFaults, MessageNamesKernelLineBlockAndThread) {
  auto in = input<int>(50);
  auto out = output<int>(50);
  const std::string message =
      fault_of([&] { gpu::launch(past_the_end<true>, 1, 50, 0, nullptr, in.data(), out.data()); });
  EXPECT_EQ(message.rfind("simt::past_the_end<true>: read of 4 bytes", 0), 0u) << message;
  EXPECT_NE(message.find("csrc_tests/simt_faults_test.cc:"), std::string::npos) << message;
  EXPECT_NE(message.find("[block (0,0,0), thread (49,0,0)]"), std::string::npos) << message;
}

// Abandoned fibers leave nothing behind: the next launches find every stack again.
TEST(SimtFaults, ManyFaults) {
  in_every_schedule([] {
    for (int i = 0; i < 200; ++i) {
      auto out = output<int>(64);
      EXPECT_THROW(gpu::launch(barrier_of_some<true>, 4, 64, 0, nullptr, out.data()), Error);
      gpu::launch(barrier_of_some<false>, 1, 1024, 0, nullptr, Buffer<int>(1024, "large").data());
    }
  });
}

}  // namespace
}  // namespace sic::simt
