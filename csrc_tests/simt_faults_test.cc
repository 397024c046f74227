// Planted bugs: each must be reported in every schedule, and the repaired twin must pass.
#include <memory>
#include <stdexcept>
#include <vector>

#include "simt_testing.h"

namespace sic::simt {
namespace {

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

__global__ void wait_for_ever(int* flag) {
  if (threadIdx.x == 0)
    while (atomicAdd(flag, 0) == 0) continue;
  if (threadIdx.x == 1) atomicExch(flag, 1);
}
TEST(SimtFaults, ThreadsThatSpin) {
  Buffer<int> flag(1, "flag");
  flag[0] = 0;
  const std::string message = fault_of([&] { gpu::launch(wait_for_ever, 1, 32, 0, nullptr, flag.data()); });
  EXPECT_NE(message.find("does it spin?"), std::string::npos) << message;
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
