// Texts as code points, wherever they are stored, and what a caller's Unicode says of its characters.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sic::references {

// Code points of one width, 1, 2 or 4 bytes each. A view: whoever has the text keeps it alive.
struct Text {
  const void* data = nullptr;
  int width = 1;
  size_t size = 0;

  char32_t operator[](size_t i) const {
    if (width == 1) return static_cast<const uint8_t*>(data)[i];
    if (width == 2) return static_cast<const uint16_t*>(data)[i];
    return static_cast<const uint32_t*>(data)[i];
  }
};

// The caller's, so that both sides agree on every character. Called from any thread.
struct Characters {
  bool (*is_word)(char32_t);        // a letter, a digit or _
  bool (*is_upper)(char32_t);       // a capital
  bool (*is_other_case)(char32_t);  // a small letter, or one in title case
};

// What Python's str.isspace() takes for space: few enough to be listed.
inline bool is_space(char32_t c) {
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 28 && c <= 32);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace sic::references
