// The text of a pattern as a tree.
#pragma once
#include <string_view>
#include <vector>

#include "references/pattern.h"

namespace sic::references {

struct Node {
  enum Kind : uint8_t { classes, sequence, choice, repeat, look, end } kind;
  ClassSet set{};                     // classes
  std::vector<Node> parts{};          // of the others: what they are made of
  int least = 1, most = 1;            // repeat
  bool lazy = false;                  // repeat
  bool negated = false;               // look
  bool behind = false;                // look
  int64_t narrowest = 0, widest = 0;  // tokens that it takes
};

Node parse_pattern(std::string_view text, const Classes& classes);  // PatternError

}  // namespace sic::references
