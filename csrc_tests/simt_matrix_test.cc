// Matrix fragments against plain products, in the layouts that PTX documents.
#include <cmath>
#include <random>
#include <vector>

#include "simt_testing.h"

namespace sic::simt {
namespace {

enum class Kind { f16, bf16, s8 };

// Each lane loads its fragments element by element, as the tables of the PTX manual name them.
template <Kind kKind, class T, class D>
__global__ void multiply(const T* a, const T* b, const D* c, D* d, int K) {
  constexpr int n = 4 / sizeof(T);  // elements in a register
  const int group = gpu::lane_id() / 4, in_group = gpu::lane_id() % 4;
  uint32_t fa[4] = {}, fb[2] = {};
  for (int i = 0; i < 4 * n; ++i) {
    const int r = i / n;
    const int row = r % 2 == 0 ? group : group + 8;
    const int column = in_group * n + i % n + (r >= 2 ? 4 * n : 0);
    fa[r] |= static_cast<uint32_t>(a[row * K + column]) << (8 * sizeof(T) * (i % n));
  }
  for (int i = 0; i < 2 * n; ++i) {
    const int r = i / n;
    const int row = in_group * n + i % n + (r == 1 ? 4 * n : 0), column = group;
    fb[r] |= static_cast<uint32_t>(b[row * 8 + column]) << (8 * sizeof(T) * (i % n));
  }
  D fd[4];
  for (int i = 0; i < 4; ++i) fd[i] = c[(i < 2 ? group : group + 8) * 8 + in_group * 2 + i % 2];
  if constexpr (kKind == Kind::f16) gpu::mma_f16_16816(fd, fa, fb);
  if constexpr (kKind == Kind::bf16) gpu::mma_bf16_16816(fd, fa, fb);
  if constexpr (kKind == Kind::s8) gpu::mma_s8_16832(fd, fa, fb);
  for (int i = 0; i < 4; ++i) d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + i % 2] = fd[i];
}

template <class Storage, Kind kKind>
void check_float_product() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Buffer<uint16_t> a(16 * 16, "a", Access::read_only), b(16 * 8, "b", Access::read_only);
  Buffer<float> c(16 * 8, "c", Access::read_only);
  auto d = output<float>(16 * 8, "d");
  const auto fill = [&](Buffer<uint16_t>& m) {
    for (uint16_t& bits : m) {
      Storage x;
      from_float(normal(random), x);
      bits = x.bits;
    }
  };
  fill(a), fill(b);
  for (float& x : c) x = normal(random);
  gpu::launch(multiply<kKind, uint16_t, float>, 1, 32, 0, nullptr, a.data(), b.data(), c.data(), d.data(), 16);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      double sum = c[i * 8 + j];
      for (int k = 0; k < 16; ++k)
        sum += double(to_float(Storage{a[i * 16 + k]})) * double(to_float(Storage{b[k * 8 + j]}));
      EXPECT_FLOAT_EQ(d[i * 8 + j], static_cast<float>(sum)) << i << ' ' << j;
    }
}

TEST(SimtMatrix, HalfProduct) { in_every_schedule(check_float_product<f16_t, Kind::f16>); }
TEST(SimtMatrix, BrainFloatProduct) { in_every_schedule(check_float_product<bf16_t, Kind::bf16>); }

TEST(SimtMatrix, ByteProduct) {
  in_every_schedule([] {
    std::mt19937 random(4);
    Buffer<uint8_t> a(16 * 32, "a", Access::read_only), b(32 * 8, "b", Access::read_only);
    Buffer<int> c(16 * 8, "c", Access::read_only);
    auto d = output<int>(16 * 8, "d");
    for (uint8_t& x : a) x = static_cast<uint8_t>(random());
    for (uint8_t& x : b) x = static_cast<uint8_t>(random());
    for (int& x : c) x = static_cast<int>(random() % 20001) - 10000;
    gpu::launch(multiply<Kind::s8, uint8_t, int>, 1, 32, 0, nullptr, a.data(), b.data(), c.data(), d.data(), 32);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) {
        int sum = c[i * 8 + j];
        for (int k = 0; k < 32; ++k) sum += static_cast<int8_t>(a[i * 32 + k]) * static_cast<int8_t>(b[k * 8 + j]);
        EXPECT_EQ(d[i * 8 + j], sum) << i << ' ' << j;
      }
  });
}

__global__ void transpose(const uint32_t* in, uint32_t* out) {
  out[threadIdx.x] = gpu::transpose8x8_b16(in[threadIdx.x]);
}

TEST(SimtMatrix, Transpose) {
  in_every_schedule([] {
    Buffer<uint32_t> in(32, "in", Access::read_only);
    auto out = output<uint32_t>(32);
    auto* from = reinterpret_cast<uint16_t*>(in.data());
    for (int i = 0; i < 64; ++i) from[i] = static_cast<uint16_t>(1000 + i);
    gpu::launch(transpose, 1, 32, 0, nullptr, in.data(), out.data());
    const auto* to = reinterpret_cast<const uint16_t*>(out.data());
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 8; ++j) EXPECT_EQ(to[i * 8 + j], from[j * 8 + i]);
  });
}

template <bool kTransposed>
__global__ void load_four(const uint16_t* in, uint32_t* out) {
  __shared__ __align__(16) uint16_t rows[32 * 16];  // every second group of eight is skipped
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) rows[i / 8 * 16 + i % 8] = in[i];
  __syncwarp();
  uint32_t d[4];
  if constexpr (kTransposed)
    gpu::load_matrix_x4_transposed(d, rows + gpu::lane_id() * 16);
  else
    gpu::load_matrix_x4(d, rows + gpu::lane_id() * 16);
  for (int m = 0; m < 4; ++m) out[m * 32 + gpu::lane_id()] = d[m];
}

TEST(SimtMatrix, LoadFromShared) {
  in_every_schedule([] {
    auto in = input<uint16_t>(256);
    auto plain = output<uint32_t>(128), transposed = output<uint32_t>(128);
    gpu::launch(load_four<false>, 1, 32, 0, nullptr, in.data(), plain.data());
    gpu::launch(load_four<true>, 1, 32, 0, nullptr, in.data(), transposed.data());
    for (int m = 0; m < 4; ++m)
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) {
          const int at = m * 64 + i * 8 + j;
          EXPECT_EQ(reinterpret_cast<const uint16_t*>(plain.data())[at], m * 64 + i * 8 + j);
          EXPECT_EQ(reinterpret_cast<const uint16_t*>(transposed.data())[at], m * 64 + j * 8 + i);
        }
  });
}

}  // namespace
}  // namespace sic::simt
