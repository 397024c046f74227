// The stop matcher of csrc/head against a search through the whole text.
#include "head/stop_matcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"

namespace sic::head {
namespace {

std::string text_of(const StopMatcher::Safe& safe) { return std::string(safe.held) + std::string(safe.chunk); }

// Where the output ends and whether a stop was seen: the first end wins, of equals the longest stop.
struct Found {
  bool matched;
  size_t output;
};
Found search(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops)
      if (stop.size() <= end && text.compare(end - stop.size(), stop.size(), stop) == 0)
        longest = std::max(longest, stop.size());
    if (longest) return {true, end - longest};
  }
  size_t held = 0;
  for (const std::string& stop : stops)
    for (size_t n = 1; n < stop.size() && n <= text.size(); ++n)
      if (text.compare(text.size() - n, n, stop, 0, n) == 0) held = std::max(held, n);
  return {false, text.size() - held};
}

TEST(StopMatcher, ByteByByte) {
  StopMatcher matcher({"\xE5\xA5\xBD"}, {});
  for (const char* piece : {"\xE5", "\xA5"}) {
    EXPECT_EQ(text_of(matcher.feed(0, piece)), "");
    EXPECT_FALSE(matcher.matched(0));
  }
  EXPECT_EQ(text_of(matcher.feed(0, "\xBD")), "");
  EXPECT_TRUE(matcher.matched(0));
  EXPECT_EQ(matcher.trim(0), 3);
}

TEST(StopMatcher, EmptyStopsAndRowsAreErrors) {
  EXPECT_THROW(StopMatcher({"a", ""}, {}), ArgumentError);
  EXPECT_THROW(StopMatcher({"a"}, {0, false}), ArgumentError);
  StopMatcher never({}, {});
  EXPECT_EQ(text_of(never.feed(0, "abc")), "abc");
  EXPECT_EQ(never.finish(0), "");
}

TEST(StopMatcher, RandomTextsOfTwoLetters) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const auto word = [&](size_t most) {
      std::string s(1 + random() % most, 'a');
      for (char& c : s) c = static_cast<char>('a' + random() % 2);
      return s;
    };
    std::vector<std::string> stops(random() % 5);
    for (std::string& stop : stops) stop = word(6);
    StopMatcher matcher(stops, {});
    std::string text, output;
    while (text.size() < 24) {
      const std::string chunk = word(5);
      text += chunk;
      output += text_of(matcher.feed(0, chunk));
      const Found want = search(stops, text);
      ASSERT_EQ(matcher.matched(0), want.matched) << text;
      ASSERT_EQ(output, text.substr(0, want.output)) << text;
      ASSERT_EQ(matcher.trim(0), want.matched ? static_cast<int64_t>(text.size() - want.output) : 0) << text;
    }
    const std::string rest(matcher.finish(0));
    ASSERT_EQ(output + rest, matcher.matched(0) ? output : text);
  }
}

TEST(StopMatcher, RowsAreIndependentAndCanBeReordered) {
  StopMatcher matcher({"stop"}, {2, false});
  matcher.feed(0, "st");
  matcher.feed(1, "xyz");
  matcher.reorder({0, 0, 1});
  ASSERT_EQ(matcher.rows(), 3);
  EXPECT_EQ(text_of(matcher.feed(1, "op")), "");
  EXPECT_TRUE(matcher.matched(1));
  EXPECT_FALSE(matcher.matched(0));
  EXPECT_EQ(text_of(matcher.feed(0, "ay")), "stay");
  matcher.reset(1);
  EXPECT_EQ(text_of(matcher.feed(1, "op")), "op");
}

TEST(StopMatcher, ThousandStopsAreSmall) {
  std::mt19937 random(2);
  std::vector<std::string> stops(1000);
  for (std::string& stop : stops) {
    stop.resize(3 + random() % 18);
    for (char& c : stop) c = static_cast<char>(' ' + random() % 95);
  }
  EXPECT_LT(StopMatcher(stops, {32, false}).nbytes(), 320 * 1024);
}

}  // namespace
}  // namespace sic::head
