// Atomics, intrinsics, conversions, and which memory counts as whose.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "simt_testing.h"

namespace sic::simt {
namespace {

struct Totals {
  int add, least, most, either, both, odd;
  unsigned wrapped, counted_down;
  unsigned long long wide;
  float sum;
};

__global__ void update(Totals* t) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&t->add, i);
  atomicMin(&t->least, -i);
  atomicMax(&t->most, i);
  atomicOr(&t->either, 1 << i % 7);
  atomicAnd(&t->both, ~(1 << i % 3));
  atomicXor(&t->odd, i);
  atomicInc(&t->wrapped, 9u);
  atomicDec(&t->counted_down, 5u);
  atomicAdd(&t->wide, 1ull << 40);
  atomicAdd(&t->sum, 0.5f);
}

TEST(SimtMemory, Atomics) {
  in_every_schedule([] {
    Buffer<Totals> t(1, "totals");
    t[0] = {0, 0, 0, 0, 255, 0, 0, 0, 0, 0};
    gpu::launch(update, 3, 40, 0, nullptr, t.data());
    int odd = 0;
    for (int i = 0; i < 120; ++i) odd ^= i;
    EXPECT_EQ(t[0].add, 119 * 60);
    EXPECT_EQ(t[0].least, -119);
    EXPECT_EQ(t[0].most, 119);
    EXPECT_EQ(t[0].either, 127);
    EXPECT_EQ(t[0].both, 248);
    EXPECT_EQ(t[0].odd, odd);
    EXPECT_EQ(t[0].wrapped, 0u);
    EXPECT_EQ(t[0].counted_down, 0u);
    EXPECT_EQ(t[0].wide, 120ull << 40);
    EXPECT_EQ(t[0].sum, 60.0f);
  });
}

// Exchange and compare-and-swap: every value is handed on exactly once, and a float maximum is built.
__global__ void swap(int* slot, int* seen, float* most) {
  const int i = static_cast<int>(threadIdx.x);
  seen[i] = atomicExch(slot, i);
  int* const bits = reinterpret_cast<int*>(most);
  const float x = static_cast<float>(i * 37 % 64);
  int old = atomicCAS(bits, 0, 0);
  while (__int_as_float(old) < x) {
    const int before = atomicCAS(bits, old, __float_as_int(x));
    if (before == old) break;
    old = before;
  }
}

TEST(SimtMemory, ExchangeAndCompare) {
  in_every_schedule([] {
    Buffer<int> slot(1, "slot");
    Buffer<float> most(1, "most");
    slot[0] = -1, most[0] = 0;
    auto seen = output<int>(64);
    gpu::launch(swap, 1, 64, 0, nullptr, slot.data(), seen.data(), most.data());
    std::vector<int> times(65);
    for (int v : seen) ++times[static_cast<size_t>(v + 1)];
    ++times[static_cast<size_t>(slot[0] + 1)];
    for (int n : times) EXPECT_EQ(n, 1);
    EXPECT_EQ(most[0], 63.0f);
  });
}

// ---- intrinsics ----

TEST(SimtIntrinsics, Conversions) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  EXPECT_EQ(__float2int_rn(2.5f), 2);
  EXPECT_EQ(__float2int_rn(3.5f), 4);
  EXPECT_EQ(__float2int_rn(-2.5f), -2);
  EXPECT_EQ(__float2int_rz(-2.9f), -2);
  EXPECT_EQ(__float2int_rd(-2.1f), -3);
  EXPECT_EQ(__float2int_ru(2.1f), 3);
  EXPECT_EQ(__float2int_rn(inf), std::numeric_limits<int>::max());
  EXPECT_EQ(__float2int_rn(-3e9f), std::numeric_limits<int>::min());
  EXPECT_EQ(__float2int_rn(nan), 0);
  EXPECT_EQ(__float2uint_rn(-1.0f), 0u);
  EXPECT_EQ(__float2uint_rz(4e9f), 4000000000u);
  EXPECT_EQ(__float2ll_rn(1e30f), std::numeric_limits<long long>::max());
  EXPECT_EQ(__int2float_rn(16777217), 16777216.0f);
}

TEST(SimtIntrinsics, Bits) {
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7250u), 0x77225500u);
  EXPECT_EQ(__byte_perm(0x00000080u, 0, 0x8888u), 0xffffffffu);
  EXPECT_EQ(__clz(1), 31);
  EXPECT_EQ(__clz(0), 32);
  EXPECT_EQ(__ffs(0), 0);
  EXPECT_EQ(__ffs(8), 4);
  EXPECT_EQ(__popc(0xf0f0u), 8);
  EXPECT_EQ(__brev(1u), 0x80000000u);
  EXPECT_EQ(__funnelshift_l(0x80000000u, 1u, 1), 3u);
  EXPECT_EQ(__funnelshift_r(0x80000000u, 1u, 1), 0xc0000000u);
  EXPECT_EQ(__umulhi(0xffffffffu, 0xffffffffu), 0xfffffffeu);
  EXPECT_EQ(__dp4a(static_cast<int>(0xff7f0102u), static_cast<int>(0x02ff0304u), 100), 100 + 8 + 3 - 127 - 2);
  EXPECT_EQ(__dp4a(0xff7f0102u, 0x02ff0304u, 100u), 100u + 8 + 3 + 127 * 255 + 255 * 2);
}

TEST(SimtIntrinsics, HelpersOfGpuHeader) {
  EXPECT_EQ(gpu::ex2(3.0f), 8.0f);
  EXPECT_EQ(gpu::ex2(-127.0f), 0.0f);
  EXPECT_EQ(gpu::ex2(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(gpu::pack_bf16x2(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(gpu::pack_f16x2(1.0f, -2.0f), 0xc0003c00u);
  EXPECT_EQ(gpu::unpack_f16x2(0xc0003c00u).y, -2.0f);
  EXPECT_EQ(gpu::unpack_bf16x2(0xc0003f80u).x, 1.0f);
  EXPECT_EQ(gpu::add_rn(16777216.0f, 1.0f), 16777216.0f);
}

// ---- memory on offer ----

__global__ void fill(float* p, int64_t stride, int width) {
  for (int i = static_cast<int>(threadIdx.x); i < width; i += 32) p[blockIdx.x * stride + i] = 1.0f;
}

// Keys and values as two views of one buffer, row by row.
TEST(SimtMemory, InterleavedViews) {
  in_every_schedule([] {
    std::vector<float> storage(6 * 2 * 8);
    TensorView keys = view_of(storage.data(), DType::f32, 6, 8);
    keys.stride[0] = 16;
    TensorView values = keys;
    values.data = storage.data() + 8;
    const Offered k(offer("keys", keys, Access::read_only, Contents::given));
    const Offered v(offer("values", values, Access::read_write, Contents::given));
    gpu::launch(fill, 6, 32, 0, nullptr, storage.data() + 8, 16, 8);
    EXPECT_NE(fault_of([&] { gpu::launch(fill, 6, 32, 0, nullptr, storage.data(), 16, 8); }).find("read-only keys"),
              std::string::npos);
    allow_writes(storage.data());
    gpu::launch(fill, 6, 32, 0, nullptr, storage.data(), 16, 8);
    for (float x : storage) EXPECT_EQ(x, 1.0f);
  });
}

TEST(SimtMemory, TransposedAndBroadcastViews) {
  std::vector<float> storage(2 * 3 * 4);
  TensorView heads_first = view_of(storage.data(), DType::f32, 3, 2, 4);
  heads_first.stride[0] = 4, heads_first.stride[1] = 12;  // [2, 3, 4] seen as [3, 2, 4]: no gaps
  {
    const Offered offered(offer("heads", heads_first, Access::read_write, Contents::given));
    gpu::launch(fill, 1, 32, 0, nullptr, storage.data(), 0, 24);
  }
  TensorView row = view_of(storage.data(), DType::f32, 5, 4);
  row.stride[0] = 0;  // one row, five times
  const Offered offered(offer("row", row, Access::read_write, Contents::given));
  gpu::launch(fill, 1, 32, 0, nullptr, storage.data(), 0, 4);
  EXPECT_NE(fault_of([&] { gpu::launch(fill, 1, 32, 0, nullptr, storage.data(), 0, 5); }).find("past the end of row"),
            std::string::npos);
}

TEST(SimtMemory, WithdrawnMemoryIsOutOfBounds) {
  std::vector<float> storage(32);
  {
    const Offered offered(offer("gone", storage.data(), 128, Access::read_write, Contents::given));
  }
  EXPECT_NE(fault_of([&] { gpu::launch(fill, 1, 32, 0, nullptr, storage.data(), 0, 32); }).find("out of bounds"),
            std::string::npos);
}

__constant__ int squares[4] = {0, 1, 4, 9};

__global__ void constants(int* out) {
  static constexpr int kOdd[4] = {1, 3, 5, 7};
  out[threadIdx.x] = squares[threadIdx.x] + kOdd[threadIdx.x];
}

TEST(SimtMemory, Constants) {
  auto out = output<int>(4);
  gpu::launch(constants, 1, 4, 0, nullptr, out.data());
  EXPECT_EQ(out[3], 16);
}

struct Parameters {
  const int* in;
  int* out;
  int64_t stride[5];
};

__global__ void with_struct(const Parameters p) { p.out[threadIdx.x] = p.in[threadIdx.x * p.stride[4]]; }

TEST(SimtMemory, StructsByValue) {
  auto in = input<int>(96);
  auto out = output<int>(32);
  gpu::launch(with_struct, 1, 32, 0, nullptr, Parameters{in.data(), out.data(), {0, 0, 0, 0, 3}});
  EXPECT_EQ(out[31], 93);
}

// More memory than the emulator likes to remember: it forgets, and stays right.
TEST(SimtMemory, LargeBuffers) {
  constexpr int kCount = 3 << 19;
  for (int i = 0; i < 4; ++i) {
    auto out = output<float>(kCount);
    gpu::launch(fill, 1, 32, 0, nullptr, out.data(), 0, kCount);
    EXPECT_EQ(out[kCount - 1], 1.0f);
  }
}

}  // namespace
}  // namespace sic::simt
