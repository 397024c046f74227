#include "references/pattern_syntax.h"

#include <algorithm>
#include <string>
#include <utility>

namespace sic::references {
namespace {

constexpr int kDeepest = 100;                  // groups in one another: each is a level of recursion
constexpr int64_t kWidest = int64_t{1} << 40;  // more than any text has tokens

class Parser {
 public:
  Parser(std::string_view text, const Classes& classes) : text_(text), classes_(classes) {}

  Node whole() {
    Node node = choice(0);
    if (at_ < text_.size()) fail("a ) without its (");
    return node;
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const { throw PatternError(text_, problem); }

  bool accept(std::string_view token) {
    while (at_ < text_.size() && is_blank(text_[at_])) ++at_;
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }
  static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
  bool ended() {
    accept("");
    return at_ == text_.size() || text_[at_] == ')' || text_[at_] == '|';
  }

  Node choice(int depth) {
    if (depth > kDeepest) fail("more than " + std::to_string(kDeepest) + " groups in one another");
    Node node{Node::choice};
    do {
      node.parts.push_back(sequence(depth));
    } while (accept("|"));
    node.narrowest = kWidest;
    for (const Node& part : node.parts) {
      node.narrowest = std::min(node.narrowest, part.narrowest);
      node.widest = std::max(node.widest, part.widest);
    }
    return node;
  }

  Node sequence(int depth) {
    Node node{Node::sequence};
    while (!ended()) {
      if (accept("?")) {
        add_repeat(node, 0, 1);
      } else if (accept("{")) {
        const int least = digit(","), most = digit("}");
        add_repeat(node, least, most);
      } else {
        node.parts.push_back(item(depth));
      }
    }
    for (const Node& part : node.parts) {
      node.narrowest = std::min(kWidest, node.narrowest + part.narrowest);
      node.widest = std::min(kWidest, node.widest + part.widest);
    }
    return node;
  }

  int digit(std::string_view behind) {
    const char c = at_ < text_.size() ? text_[at_++] : ' ';
    if (c < '0' || c > '9' || !accept(behind)) fail("a { without m,n}");
    return c - '0';
  }

  void add_repeat(Node& sequence, int least, int most) {
    if (sequence.parts.empty() || sequence.parts.back().kind == Node::end) fail("nothing to repeat");
    if (sequence.parts.back().kind == Node::repeat) fail("a repeat of a repeat, without a group");
    if (least > most) fail("{m,n} with m above n");
    Node node{Node::repeat};
    node.least = least, node.most = most;
    node.lazy = accept("?");
    node.narrowest = std::min(kWidest, least * sequence.parts.back().narrowest);
    node.widest = std::min(kWidest, most * sequence.parts.back().widest);
    node.parts.push_back(std::move(sequence.parts.back()));
    sequence.parts.back() = std::move(node);
  }

  Node item(int depth) {
    if (accept("<")) return one_of();
    if (accept("$")) return {Node::end};
    for (const bool behind : {false, true}) {
      for (const bool negated : {false, true}) {
        const std::string open = std::string("(?") + (behind ? "<" : "") + (negated ? "!" : "=");
        if (accept(open)) return look(depth, behind, negated);
      }
    }
    if (!accept("(")) fail("a character that is no part of a pattern");
    Node group{Node::sequence};  // not what is in it: it may be repeated again
    group.parts.push_back(closed(depth));
    group.narrowest = group.parts[0].narrowest, group.widest = group.parts[0].widest;
    return group;
  }

  Node closed(int depth) {
    Node node = choice(depth + 1);
    if (!accept(")")) fail("a ( without its )");
    return node;
  }

  Node look(int depth, bool behind, bool negated) {
    Node node{Node::look};
    node.behind = behind, node.negated = negated;
    node.parts.push_back(closed(depth));
    if (behind && node.parts[0].narrowest != node.parts[0].widest) {
      fail("look-behind requires a fixed number of tokens");
    }
    if (behind && node.parts[0].widest > UINT16_MAX) fail("look-behind is too wide");
    return node;
  }

  Node one_of() {
    Node node{Node::classes};
    node.narrowest = node.widest = 1;
    const size_t close = std::min(text_.find('>', at_), text_.size());
    while (at_ <= close) {
      const size_t stop = std::min(text_.find('|', at_), close);
      const auto found = classes_.find(text_.substr(at_, stop - at_));
      if (found == classes_.end()) fail("class " + std::string(text_.substr(at_, stop - at_)));
      node.set.set(found->second);
      at_ = stop + 1;
    }
    if (close == text_.size()) fail("a < without its >");
    return node;
  }

  std::string_view text_;
  const Classes& classes_;
  size_t at_ = 0;
};

}  // namespace

Node parse_pattern(std::string_view text, const Classes& classes) { return Parser(text, classes).whole(); }

}  // namespace sic::references
