#include "references/numbers.h"

namespace sic::references {

int chinese_digit(char32_t c) {
  switch (c) {
    case U'零':
    case U'〇':
      return 0;
    case U'一':
      return 1;
    case U'二':
    case U'两':
      return 2;
    case U'三':
      return 3;
    case U'四':
      return 4;
    case U'五':
      return 5;
    case U'六':
      return 6;
    case U'七':
      return 7;
    case U'八':
      return 8;
    case U'九':
      return 9;
    case U'十':
      return 10;
    case U'百':
      return 100;
    default:
      return -1;
  }
}

int64_t number_of_digits(const Text& text, size_t begin, size_t end) {
  if (end - begin > 9) return kTooLarge;
  int64_t number = 0;
  for (size_t i = begin; i < end; ++i) number = number * 10 + digit_of(text[i]);
  return number;
}

int64_t number_of_chinese(const Text& text, size_t begin, size_t end) {
  if (end - begin > 6) return kTooLarge;
  bool units = false;
  int64_t digits = 0;  // read one by one, as 二〇 is
  for (size_t i = begin; i < end; ++i) {
    const int value = chinese_digit(text[i]);
    units |= value >= 10;
    digits = digits * 10 + value;
  }
  if (!units) return digits;
  int64_t total = 0, digit = -1, last_unit = 1000;
  for (size_t i = begin; i < end; ++i) {
    const int value = chinese_digit(text[i]);
    if (value >= 10) {
      if (value >= last_unit) return kTooLarge;
      total += (digit < 0 ? 1 : digit) * value;
      digit = -1, last_unit = value;
    } else {
      if (digit > 0) return kTooLarge;
      digit = value;
    }
  }
  return total + (digit > 0 ? digit : 0);
}

}  // namespace sic::references
