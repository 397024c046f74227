#include "references/nesting.h"

#include <algorithm>

namespace sic::references {
namespace {

constexpr int64_t kLongestBefore = 6;  // tokens that "vague before" describes
// Tokens between two references that may be nested, and before or behind one that belong to it.
constexpr int64_t kLongestGap = 9;

}  // namespace

void Nesting::add(const Found& found) {
  if (!chain_.empty()) {
    const Order order = order_of(chain_.back(), found);
    if (order == Order::apart) {
      finish();
    } else {
      orders_.push_back(order);
    }
  }
  chain_.push_back(found);
}

void Nesting::finish() {
  if (chain_.empty()) return;
  const Found &first = chain_.front(), &last = chain_.back();
  const Window around = stretched(first.begin, last.end, first.lang);
  const Span span = sentence_.span(around.begin, around.end);
  const auto is_vague = [](const Found& found) { return found.part.kind == Kind::vague; };
  if (chain_.size() > static_cast<size_t>(depth_)) {
    add_one(span, Kind::too_deep);
  } else if (std::any_of(chain_.begin(), chain_.end(), is_vague) || is_made_vague(first, last)) {
    add_one(span, Kind::vague);
  } else {
    add_chain(span);
  }
  chain_.clear();
  orders_.clear();
}

Nesting::Order Nesting::order_of(const Found& left, const Found& right) {
  if (left.lang != right.lang || right.begin - left.end > kLongestGap) return Order::apart;
  const Window gap{sentence_.tags.data(), left.end, right.begin};
  if (is_all(left.lang, Rule::inner_first, gap)) return Order::inner_first;
  if (is_all(left.lang, Rule::outer_first, gap)) return Order::outer_first;
  const bool others = left.part.noun >= 0 && right.part.noun >= 0 && left.part.noun != right.part.noun;
  if (others && (is_all(left.lang, Rule::outer_first_other_noun, gap) || is_fronted(left, gap))) {
    return Order::outer_first;
  }
  return Order::apart;
}

// "In the third point, what do you mean by ...": a preposition before, a comma behind, and no other sentence begins.
bool Nesting::is_fronted(const Found& left, const Window& gap) {
  const auto& grammar = sentence_.grammar;
  if (gap.begin == gap.end || !grammar.comma[gap.tags[gap.begin]]) return false;
  for (int64_t i = gap.begin; i < gap.end; ++i) {
    if (grammar.stop[gap.tags[i]]) return false;
  }
  const int64_t begin = stretched(left.begin, left.end, left.lang).begin;
  return is_all(left.lang, Rule::fronted, {gap.tags, std::max<int64_t>(0, begin - 1), begin});
}

bool Nesting::is_all(Lang lang, Rule rule, const Window& window) {
  const Pattern* pattern = sentence_.grammar.rule(lang, rule);
  return pattern && matcher_.match(*pattern, window, window.begin, Matcher::whole) != Matcher::kNone;
}

// Words around a reference that make it another one: "the third point below", 第三点后面那一点.
bool Nesting::is_made_vague(const Found& first, const Found& last) {
  const Window all = sentence_.window();
  const Pattern* after = sentence_.grammar.rule(first.lang, Rule::vague_after);
  if (after && matcher_.match(*after, all, last.end, Matcher::any) != Matcher::kNone) return true;
  const Pattern* before = sentence_.grammar.rule(first.lang, Rule::vague_before);
  if (!before) return false;
  const Window until{all.tags, 0, first.begin};
  for (int64_t at = std::max<int64_t>(0, first.begin - kLongestBefore); at < first.begin; ++at) {
    if (matcher_.match(*before, until, at, Matcher::whole) != Matcher::kNone) return true;
  }
  return false;
}

// With the tokens around that belong to it: "your ... you just gave".
Window Nesting::stretched(int64_t begin, int64_t end, Lang lang) const {
  const auto& tags = sentence_.tags;
  const ClassSet &before = sentence_.grammar.set(lang, Set::before), &after = sentence_.grammar.set(lang, Set::after);
  const int64_t low = std::max<int64_t>(0, begin - kLongestGap);
  const int64_t high = std::min(static_cast<int64_t>(tags.size()), end + kLongestGap);
  while (begin > low && before[tags[static_cast<size_t>(begin - 1)]]) --begin;
  while (end < high && after[tags[static_cast<size_t>(end)]]) ++end;
  return {tags.data(), begin, end};
}

void Nesting::add_one(Span span, Kind kind) {
  Part part{span, kind};
  part.noun = chain_[0].part.noun;
  part.depth = static_cast<int64_t>(chain_.size());
  out_.parts.push_back(part);
}

// From the outermost to the innermost: each link says on which side the inner one is.
void Nesting::add_chain(Span span) {
  std::vector<size_t> ordered(chain_.size());
  size_t outer = 0, inner = chain_.size() - 1;  // each is outside of all that follow it, or inside
  for (size_t i = 0; i < orders_.size(); ++i) ordered[orders_[i] == Order::outer_first ? outer++ : inner--] = i;
  ordered[outer] = chain_.size() - 1;
  for (size_t i = 0; i < ordered.size(); ++i) {
    Part part = chain_[ordered[i]].part;
    part.nested = i > 0;
    part.depth = static_cast<int64_t>(i + 1);
    if (i + 1 == ordered.size()) part.span = span;
    out_.parts.push_back(part);
  }
}

}  // namespace sic::references
