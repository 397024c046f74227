// Philox against the answers that its authors publish (Random123, kat_vectors).
#include "replay/philox.h"

#include <gtest/gtest.h>

#include <vector>

namespace sic::replay {
namespace {

std::vector<uint32_t> numbers(const Philox& p) { return {p.x, p.x + 4}; }

TEST(Philox, KnownAnswers) {
  EXPECT_EQ(numbers(philox(0, 0, 0, 0, 0, 0)), (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(numbers(philox(kOnes, kOnes, kOnes, kOnes, kOnes, kOnes)),
            (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(numbers(philox(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0)),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Where seed, position, layer and block go.
TEST(Philox, Stream) {
  const int64_t key[] = {0x299f31d0a4093822, 0x0370734413198a2e, static_cast<int64_t>(0xffffffff85a308d3)};
  EXPECT_EQ(numbers(Stream(key)[0x243f6a88]), (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UnitFloat) {
  EXPECT_EQ(unit_float(0xff), 0.0f);
  EXPECT_EQ(unit_float(0x80000000), 0.5f);
  EXPECT_EQ(unit_float(0xffffffff), 1.0f - 1.0f / 16777216.0f);
}

}  // namespace
}  // namespace sic::replay
