// Numbers as people write them: digits of either width, and Chinese numerals.
#pragma once
#include <cstdint>

#include "references/text.h"

namespace sic::references {

constexpr int64_t kTooLarge = 1'000'000'000;  // what a number too long to be an ordinal counts as: in no list

// The digit that a character is, -1 for none.
inline int digit_of(char32_t c) {
  if (c >= '0' && c <= '9') return static_cast<int>(c - '0');
  return c >= 0xFF10 && c <= 0xFF19 ? static_cast<int>(c - 0xFF10) : -1;
}

// 0 to 9, 10 and 100 for what a Chinese numeral is made of, else -1.
int chinese_digit(char32_t c);

// Of [begin, end), which are digits; full-width ones too.
int64_t number_of_digits(const Text& text, size_t begin, size_t end);
// Of [begin, end), which chinese_digit() knows: 三, 十二, 二十, 一百零三, 二〇. One that is no number, as 十百, is too
// large.
int64_t number_of_chinese(const Text& text, size_t begin, size_t end);

}  // namespace sic::references
