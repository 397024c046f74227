// Scalar conversions, views, instruction sets and threads of csrc/core.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/check.h"
#include "core/dtype.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "core/tensor_view.h"

namespace sic {
namespace {

template <class T>
uint32_t bits_from(float x) {
  T t;
  from_float(x, t);
  return t.bits;
}

TEST(DType, HalfByHand) {
  EXPECT_EQ(bits_from<f16_t>(1.0f), 0x3c00u);
  EXPECT_EQ(bits_from<f16_t>(-2.0f), 0xc000u);
  EXPECT_EQ(bits_from<f16_t>(65504.0f), 0x7bffu);
  EXPECT_EQ(bits_from<f16_t>(65519.0f), 0x7bffu);
  EXPECT_EQ(bits_from<f16_t>(65520.0f), 0x7c00u);    // the tie rounds to infinity
  EXPECT_EQ(bits_from<f16_t>(0x1p-24f), 0x0001u);    // the smallest subnormal
  EXPECT_EQ(bits_from<f16_t>(0x1p-25f), 0x0000u);    // a tie, to even
  EXPECT_EQ(bits_from<f16_t>(0x1.8p-24f), 0x0002u);  // a tie, to even
  EXPECT_EQ(bits_from<f16_t>(-0.0f), 0x8000u);
  EXPECT_TRUE(std::isnan(to_float(f16_t{0x7e00})));
  EXPECT_EQ(bits_from<f16_t>(std::numeric_limits<float>::quiet_NaN()) & 0x7e00u, 0x7e00u);
}

TEST(DType, BrainFloatByHand) {
  EXPECT_EQ(bits_from<bf16_t>(1.0f), 0x3f80u);
  EXPECT_EQ(bits_from<bf16_t>(1.00390625f), 0x3f80u);    // 1 + 2^-8: a tie, to even
  EXPECT_EQ(bits_from<bf16_t>(1.01171875f), 0x3f82u);    // 1 + 3 * 2^-8: a tie, to even
  EXPECT_EQ(bits_from<bf16_t>(3.4028235e38f), 0x7f80u);  // rounds to infinity
  EXPECT_TRUE(std::isnan(to_float(bf16_t{static_cast<uint16_t>(bits_from<bf16_t>(std::nanf("")))})));
}

TEST(DType, F8ByHand) {
  EXPECT_EQ(bits_from<f8_t>(1.0f), 0x38u);
  EXPECT_EQ(bits_from<f8_t>(448.0f), 0x7eu);
  EXPECT_EQ(bits_from<f8_t>(1e9f), 0x7eu);  // saturates
  EXPECT_EQ(bits_from<f8_t>(0x1p-9f), 0x01u);
  EXPECT_EQ(bits_from<f8_t>(0x1p-10f), 0x00u);  // a tie, to even
  EXPECT_EQ(bits_from<f8_t>(-0.0f), 0x80u);
  EXPECT_TRUE(std::isnan(to_float(f8_t{0x7f})));
}

// Every stored value survives widening and narrowing.
template <class T, int kBits>
void round_trip() {
  for (uint32_t u = 0; u < 1u << kBits; ++u) {
    T stored{};
    stored.bits = static_cast<decltype(stored.bits)>(u);
    const float wide = to_float(stored);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(to_float([&] {
        T again;
        from_float(wide, again);
        return again;
      }())));
      continue;
    }
    ASSERT_EQ(bits_from<T>(wide), u) << wide;
  }
}
TEST(DType, EveryHalfRoundTrips) { round_trip<f16_t, 16>(); }
TEST(DType, EveryBrainFloatRoundTrips) { round_trip<bf16_t, 16>(); }
TEST(DType, EveryF8RoundTrips) { round_trip<f8_t, 8>(); }

// Between two neighbours, anything below the middle goes down and anything above it goes up.
TEST(DType, HalfRoundsToNearest) {
  for (uint32_t u = 0; u < 0x7bff; ++u) {
    const float low = to_float(f16_t{static_cast<uint16_t>(u)}), high = to_float(f16_t{static_cast<uint16_t>(u + 1)});
    const float middle = low + (high - low) / 2;
    ASSERT_EQ(bits_from<f16_t>(std::nextafter(middle, low)), u);
    ASSERT_EQ(bits_from<f16_t>(std::nextafter(middle, high)), u + 1);
    ASSERT_EQ(bits_from<f16_t>(middle), u % 2 ? u + 1 : u);
  }
}

TEST(TensorView, ContiguousStrides) {
  float data[24];
  const TensorView v = view_of(data, DType::f32, 2, 3, 4);
  EXPECT_EQ(v.rank, 3);
  EXPECT_EQ(v.size(), 24);
  EXPECT_EQ(v.stride[0], 12);
  EXPECT_EQ(v.stride[1], 4);
  EXPECT_EQ(v.stride[2], 1);
  EXPECT_EQ(v.stride_bytes(0), 48);
  EXPECT_FALSE(TensorView{}.given());
  EXPECT_EQ(TensorView{}.size(), 0);
}

TEST(Check, OneErrorFormat) {
  double data[6];
  const TensorView v = view_of(data, DType::f32, 2, 3);
  const Check check("some_op");
  EXPECT_NO_THROW(check.tensor("x", v, kFloats, 2));
  try {
    check.tensor("x", v, kIndexInts, 2);
    FAIL() << "accepted";
  } catch (const ArgumentError& e) {
    EXPECT_EQ(std::string(e.what()).find("some_op: x: got float32[2,3]"), 0u) << e.what();
    EXPECT_NE(std::string(e.what()).find(", expected int32|int64 of rank 2"), std::string::npos) << e.what();
  }
  EXPECT_THROW(check.tensor("x", v, kFloats, 3), ArgumentError);
  EXPECT_THROW(check.shape("x", v, {2, 4}), ArgumentError);
  EXPECT_NO_THROW(check.shape("x", v, {-1, 3}));
}

TEST(Check, OutputsThatShareMemory) {
  float data[100];
  const auto view = [&](int64_t begin, int64_t size, int64_t stride) {
    TensorView v = view_of(data + begin, DType::f32, size);
    v.stride[0] = stride;
    return v;
  };
  const Check check("some_op");
  const auto apart = [&](const TensorView& a, const TensorView& b) {
    check.apart({{"a", a}, {"b", b}}, {});
    check.apart({{"b", b}, {"a", a}}, {});
    check.apart({{"a", a}}, {&b});
  };
  EXPECT_NO_THROW(apart(view(0, 50, 1), view(50, 50, 1)));
  EXPECT_NO_THROW(apart(view(0, 50, 2), view(1, 50, 2)));             // interleaved
  EXPECT_THROW(apart(view(0, 50, 2), view(0, 3, 1)), ArgumentError);  // the same first element
  EXPECT_THROW(apart(view(0, 50, 1), view(49, 50, 1)), ArgumentError);
  EXPECT_THROW(check.apart({{"a", view(0, 100, 1)}, {"b", view(10, 10, 2)}}, {}), ArgumentError);  // a covers b
  EXPECT_THROW(check.apart({{"b", view(10, 10, 2)}, {"a", view(0, 100, 1)}}, {}), ArgumentError);
  EXPECT_THROW(check.apart({{"a", view(99, 100, -1)}, {"b", view(10, 10, 2)}}, {}), ArgumentError);
  EXPECT_NO_THROW(check.apart({{"a", view(0, 100, 1)}, {"b", view(10, 0, 2)}}, {}));  // nothing is in nothing
}

TEST(Isa, AnySupportedOneCanBeForcedAndOthersFail) {
  ASSERT_TRUE(is_supported(Isa::plain));
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (is_supported(isa)) {
      force_isa(name(isa));
      EXPECT_EQ(current_isa(), isa);
    } else {
      EXPECT_THROW(force_isa(name(isa)), ArgumentError);
    }
  }
  EXPECT_THROW(force_isa("sse9"), ArgumentError);
  force_isa("auto");
  EXPECT_TRUE(is_supported(current_isa()));
}

class Threads : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(0); }
};

TEST_P(Threads, EveryTaskRunsExactlyOnce) {
  EXPECT_EQ(num_threads(), GetParam());
  for (int64_t tasks : {0, 1, 2, 3, 17, 1000}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      std::vector<std::atomic<int>> ran(static_cast<size_t>(tasks));
      parallel_for(tasks, [&](int64_t i) { ++ran[static_cast<size_t>(i)]; });
      for (auto& count : ran) ASSERT_EQ(count.load(), 1);
    }
  }
}

TEST_P(Threads, NestedAndConcurrentCallsFinish) {
  std::atomic<int64_t> sum{0};
  auto work = [&] {
    for (int repeat = 0; repeat < 20; ++repeat)
      parallel_for(8, [&](int64_t) { parallel_for(4, [&](int64_t i) { sum += i; }); });
  };
  std::thread other(work);
  work();
  other.join();
  EXPECT_EQ(sum.load(), 2 * 20 * 8 * 6);
}

INSTANTIATE_TEST_SUITE_P(Counts, Threads, testing::Values(1, 2, 3, 8));

TEST(Check, TensorsOfOneCallAreOnOneDevice) {
  float x = 0;
  TensorView v = view_of(&x, DType::f32, 1);
  const Check check("op", Device::cuda, 1);
  const auto message = [&] {
    try {
      check.tensor("x", v, DType::f32, 1);
    } catch (const ArgumentError& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(message(), "op: x: got float32[1] on cpu, expected a tensor on cuda");
  v.device = Device::cuda;
  EXPECT_EQ(message(), "op: x: got float32[1] on cuda:0, expected a tensor on cuda:1");
  v.device_id = 1;
  EXPECT_EQ(message(), "accepted");
}

}  // namespace
}  // namespace sic
