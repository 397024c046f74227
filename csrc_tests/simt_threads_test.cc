// Threads of a block, schedules, barriers, shuffles, votes and reductions of a warp.
#include <thread>
#include <vector>

#include "simt_testing.h"

namespace sic::simt {
namespace {

__global__ void write_indices(uint3* thread, uint3* block, dim3* sizes) {
  const unsigned n = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  thread[b * blockDim.x * blockDim.y * blockDim.z + n] = threadIdx;
  if (n == 0) block[b] = blockIdx;
  if (n == 0 && b == 0) sizes[0] = blockDim, sizes[1] = gridDim;
}

TEST(SimtThreads, Indices) {
  in_every_schedule([] {
    auto thread = output<uint3>(24 * 12), block = output<uint3>(12);
    auto sizes = output<dim3>(2);
    gpu::launch(write_indices, dim3(3, 2, 2), dim3(4, 3, 2), 0, nullptr, thread.data(), block.data(), sizes.data());
    for (unsigned b = 0; b < 12; ++b) {
      EXPECT_EQ(block[b].x, b % 3);
      EXPECT_EQ(block[b].y, b / 3 % 2);
      EXPECT_EQ(block[b].z, b / 6);
      for (unsigned n = 0; n < 24; ++n) {
        const uint3 t = thread[b * 24 + n];
        EXPECT_EQ(t.x, n % 4);
        EXPECT_EQ(t.y, n / 4 % 3);
        EXPECT_EQ(t.z, n / 12);
      }
    }
    EXPECT_EQ(sizes[0].x, 4u);
    EXPECT_EQ(sizes[0].y, 3u);
    EXPECT_EQ(sizes[0].z, 2u);
    EXPECT_EQ(sizes[1].x, 3u);
    EXPECT_EQ(sizes[1].y, 2u);
    EXPECT_EQ(sizes[1].z, 2u);
  });
}

__global__ void note_order(int* order, int* next) {
  order[atomicAdd(next, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

TEST(SimtThreads, SchedulesDiffer) {
  const auto order_of = [](Schedule schedule, uint32_t seed) {
    set_schedule(schedule, seed);
    auto order = output<int>(128);
    Buffer<int> next(1, "next");
    next[0] = 0;
    gpu::launch(note_order, 2, 64, 0, nullptr, order.data(), next.data());
    return std::vector<int>(order.begin(), order.end());
  };
  std::vector<int> forward(128), reverse(128);
  for (int i = 0; i < 128; ++i) forward[i] = i, reverse[i] = 127 - i;
  EXPECT_EQ(order_of(Schedule::forward, 1), forward);
  EXPECT_EQ(order_of(Schedule::reverse, 1), reverse);
  const auto random = order_of(Schedule::random, 1);
  EXPECT_NE(random, forward);
  EXPECT_NE(random, reverse);
  EXPECT_EQ(random, order_of(Schedule::random, 1));
  EXPECT_NE(random, order_of(Schedule::random, 2));
  set_schedule(Schedule::forward);
}

__global__ void rotate(const int* in, int* out, int rounds) {
  __shared__ int value[128];
  const int t = static_cast<int>(threadIdx.x);
  value[t] = in[t];
  for (int i = 0; i < rounds; ++i) {
    __syncthreads();
    const int neighbour = value[(t + 1) % 128];
    __syncthreads();
    value[t] = neighbour;
  }
  out[t] = value[t];
}

__global__ void vote(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  out[t] = __syncthreads_count(t % 3 == 0);
  out[96 + t] = __syncthreads_and(t < 95) + 2 * __syncthreads_and(t < 96);
  out[192 + t] = __syncthreads_or(t == 95) + 2 * __syncthreads_or(t == 96);
}

TEST(SimtThreads, Barriers) {
  in_every_schedule([] {
    auto in = input<int>(128);
    auto out = output<int>(128), votes = output<int>(3 * 96);
    gpu::launch(rotate, 1, 128, 0, nullptr, in.data(), out.data(), 5);
    for (int t = 0; t < 128; ++t) EXPECT_EQ(out[t], (t + 5) % 128);
    gpu::launch(vote, 1, 96, 0, nullptr, votes.data());
    for (int t = 0; t < 96; ++t) {
      EXPECT_EQ(votes[t], 32);
      EXPECT_EQ(votes[96 + t], 2);
      EXPECT_EQ(votes[192 + t], 1);
    }
  });
}

struct Wide {
  float a, b, c, d;
};

__global__ void shuffle_all(int* out, Wide* wide) {
  const int lane = gpu::lane_id();
  const unsigned all = 0xffffffffu;
  out[lane] = __shfl_sync(all, lane, 37);
  out[32 + lane] = __shfl_sync(all, lane, 9, 8);
  out[64 + lane] = __shfl_up_sync(all, lane, 3);
  out[96 + lane] = __shfl_up_sync(all, lane, 3, 8);
  out[128 + lane] = __shfl_down_sync(all, lane, 5);
  out[160 + lane] = __shfl_down_sync(all, lane, 5, 16);
  out[192 + lane] = __shfl_xor_sync(all, lane, 21);
  out[224 + lane] = __shfl_xor_sync(all, lane, 12, 8);
  const float x = static_cast<float>(lane);
  wide[lane] = __shfl_xor_sync(all, Wide{x, x + 1, x + 2, x + 3}, 1);
}

TEST(SimtWarp, Shuffles) {
  in_every_schedule([] {
    auto out = output<int>(256);
    auto wide = output<Wide>(32);
    gpu::launch(shuffle_all, 1, 32, 0, nullptr, out.data(), wide.data());
    for (int i = 0; i < 32; ++i) {
      EXPECT_EQ(out[i], 5);
      EXPECT_EQ(out[32 + i], i / 8 * 8 + 1);
      EXPECT_EQ(out[64 + i], i < 3 ? i : i - 3);
      EXPECT_EQ(out[96 + i], i % 8 < 3 ? i : i - 3);
      EXPECT_EQ(out[128 + i], i + 5 > 31 ? i : i + 5);
      EXPECT_EQ(out[160 + i], i % 16 + 5 > 15 ? i : i + 5);
      EXPECT_EQ(out[192 + i], i ^ 21);
      EXPECT_EQ(out[224 + i], (i ^ 12) > i / 8 * 8 + 7 ? i : i ^ 12);
      EXPECT_EQ(wide[i].d, static_cast<float>((i ^ 1) + 3));
    }
  });
}

__global__ void vote_and_reduce(unsigned* out) {
  const unsigned lane = threadIdx.x, all = 0xffffffffu;
  unsigned* row = out;
  const auto put = [&](unsigned v) { row[lane] = v, row += 32; };
  put(__ballot_sync(all, lane % 5 == 0));
  put(static_cast<unsigned>(__any_sync(all, lane == 31) + 2 * __any_sync(all, 0)));
  put(static_cast<unsigned>(__all_sync(all, lane < 32) + 2 * __all_sync(all, lane != 7)));
  put(__match_any_sync(all, lane / 4 % 3));
  put(__reduce_add_sync(all, lane));
  put(__reduce_min_sync(all, lane + 0x80000000u));
  put(__reduce_max_sync(all, lane + 0x80000000u));
  put(static_cast<unsigned>(__reduce_min_sync(all, static_cast<int>(lane) - 16)));
  put(static_cast<unsigned>(__reduce_max_sync(all, static_cast<int>(lane) - 16)));
  put(static_cast<unsigned>(__reduce_add_sync(all, static_cast<int>(lane) - 16)));
  put(__reduce_and_sync(all, lane | 0x50u));
  put(__reduce_or_sync(all, 1u << lane / 2));
  put(__reduce_xor_sync(all, lane * lane));
  if (lane >= 8 && lane < 24) put(__reduce_add_sync(0x00ffff00u, lane));  // a part of the warp
}

TEST(SimtWarp, VotesAndReductions) {
  in_every_schedule([] {
    Buffer<unsigned> out(14 * 32, "out");
    gpu::launch(vote_and_reduce, 1, 32, 0, nullptr, out.data());
    unsigned squares = 0;
    for (unsigned i = 0; i < 32; ++i) squares ^= i * i;
    for (unsigned i = 0; i < 32; ++i) {
      unsigned same = 0;
      for (unsigned j = 0; j < 32; ++j) same |= (j / 4 % 3 == i / 4 % 3) << j;
      const unsigned expected[] = {
          0x42108421u,   1u,    1u,      same,   496u, 0x80000000u, 0x8000001fu, unsigned(-16), 15u,
          unsigned(-16), 0x50u, 0xffffu, squares};
      for (unsigned k = 0; k < 13; ++k) EXPECT_EQ(out[k * 32 + i], expected[k]) << "operation " << k << " lane " << i;
      if (i >= 8 && i < 24) {
        EXPECT_EQ(out[13 * 32 + i], 248u);
      }
    }
  });
}

// The last warp has 13 lanes.
__global__ void partial_warp(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  const unsigned mask = t < 32 ? 0xffffffffu : 0x1fffu;
  out[t] = __shfl_sync(mask, t, 12);
}

__global__ void halves(const int* in, int* out) {
  __shared__ int value[32];
  const int lane = gpu::lane_id();
  const unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  value[lane] = in[lane];
  __syncwarp(mask);
  int sum = 0;
  for (int i = 0; i < 16; ++i) sum += value[lane / 16 * 16 + i];
  __syncwarp(mask);
  value[lane] = sum;
  __syncwarp();
  out[lane] = value[31 - lane];
}

TEST(SimtWarp, Parts) {
  in_every_schedule([] {
    auto out = output<int>(45), sums = output<int>(32);
    auto in = input<int>(32);
    gpu::launch(partial_warp, 1, 45, 0, nullptr, out.data());
    for (int t = 0; t < 45; ++t) EXPECT_EQ(out[t], t < 32 ? 12 : 44);
    gpu::launch(halves, 1, 32, 0, nullptr, in.data(), sums.data());
    for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(sums[lane], lane < 16 ? 376 : 120);
  });
}

__global__ void reductions(const float* in, float* out) {
  __shared__ float scratch[32];
  const float x = in[blockIdx.x * blockDim.x + threadIdx.x];
  const float sum = gpu::block_reduce_add(x, scratch);
  const float most = gpu::block_reduce_max(x, scratch), least = gpu::block_reduce_min(x, scratch);
  const float part = gpu::warp_reduce_add<8>(x);
  float* row = out + (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  row[0] = sum, row[1] = most, row[2] = least, row[3] = part;
}

TEST(SimtWarp, ReductionsOfGpuHeader) {
  in_every_schedule([] {
    auto in = input<float>(2 * 96);
    auto out = output<float>(4 * 2 * 96);
    gpu::launch(reductions, 2, 96, 0, nullptr, in.data(), out.data());
    for (int i = 0; i < 192; ++i) {
      const int block = i / 96, group = i / 8 * 8;
      EXPECT_EQ(out[4 * i], block ? 13776.0f : 4560.0f);
      EXPECT_EQ(out[4 * i + 1], block * 96 + 95.0f);
      EXPECT_EQ(out[4 * i + 2], block * 96.0f);
      EXPECT_EQ(out[4 * i + 3], group * 8 + 28.0f);
    }
  });
}

thread_local int keeps_its_value = 7;

__global__ void add_one(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x] + 1; }

// Callers on several threads take turns; what their thread-local storage holds stays.
TEST(SimtThreads, CallersOfSeveralThreads) {
  std::vector<std::thread> callers;
  std::atomic<int> good{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&good, c] {
      keeps_its_value = c;
      for (int i = 0; i < 20; ++i) {
        auto in = input<int>(128);
        auto out = output<int>(128);
        gpu::launch(rotate, 1, 128, 0, nullptr, in.data(), out.data(), 3);
        gpu::launch(add_one, 1, 128, 0, nullptr, out.data(), out.data());
        bool right = keeps_its_value == c;
        for (int t = 0; t < 128; ++t) right = right && out[t] == (t + 3) % 128 + 1;
        good += right;
      }
    });
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(good, 80);
  EXPECT_EQ(keeps_its_value, 7);
}

__global__ void full_block(int* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = __syncthreads_count(1); }

TEST(SimtThreads, LargestBlock) {
  auto out = output<int>(3 * 1024);
  gpu::launch(full_block, 3, 1024, 0, nullptr, out.data());
  for (int n : out) EXPECT_EQ(n, 1024);
}

}  // namespace
}  // namespace sic::simt
