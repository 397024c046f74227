#include "references/pattern.h"

namespace sic::references {

int64_t Matcher::match(const Pattern& pattern, const Window& window, int64_t at, Goal goal) {
  const Search search{pattern, window, at};
  const Choice from{pattern.entry(), at};
  steps_ = 0, remembers_ = false;
  int64_t end = explore(search, from, goal);
  if (end == kTooLong) {
    forget();
    remembers_ = true;
    end = explore(search, from, goal);
  }
  return end;
}

// What is known of going on from here, asked a second time. A program has no loops, so all that was left to try from
// there has been tried: it failed, or a look ended well that way. Looks at other places may come here again; what they
// want is whether, not where, their program ends, and it is shared with no other.
Matcher::Outcome Matcher::outcome(Choice from) {
  const uint64_t place = uint64_t{from.instruction} << 32 | static_cast<uint32_t>(from.at);
  const auto [known, is_new] = known_.try_emplace(place, Outcome::fails);
  if (!is_new) return known->second;
  trail_.push_back(place);
  return Outcome::unknown;
}

// To clear a map takes as long as it has buckets, however few of them the next match fills.
void Matcher::forget() {
  if (known_.bucket_count() > kKeptBuckets) {
    std::unordered_map<uint64_t, Outcome>().swap(known_);
  } else {
    known_.clear();
  }
}

int64_t Matcher::explore(const Search& search, Choice now, Goal goal) {
  using In = Pattern::Instruction;
  const Pattern& pattern = search.pattern;
  const Window& window = search.window;
  const size_t base = choices_.size(), begin = trail_.size();
  int64_t result = kNone;
  for (;;) {
    if (++steps_ > kPlainSteps && !remembers_) {
      result = kTooLong;
      break;
    }
    const In& in = pattern.at(now.instruction);
    const Outcome known = remembers_ ? outcome(now) : Outcome::unknown;
    if (known == Outcome::ends) {
      result = now.at;
      break;
    }
    bool failed = known == Outcome::fails;
    if (!failed) {
      switch (in.op) {
        case In::take:
          failed = now.at >= window.end || !pattern.takes(in.other, window.tags[now.at]);
          now.instruction = in.next, ++now.at;
          break;
        case In::split:
          choices_.push_back({in.other, now.at, trail_.size()});
          now.instruction = in.next;
          break;
        case In::end:
          failed = now.at != window.end;
          now.instruction = in.next;
          break;
        case In::look: {
          const int64_t found = look(search, in, now.at);
          if (found == kTooLong) result = kTooLong;
          failed = (found == kNone) != in.negated;
          now.instruction = in.next;
          break;
        }
        case In::accept:
          failed = (goal == some && now.at == search.start) || (goal == whole && now.at != window.end);
          if (!failed) result = now.at;
      }
    }
    if (result != kNone) break;
    if (!failed) continue;
    if (choices_.size() == base) break;
    now = choices_.back();
    choices_.pop_back();
    trail_.resize(now.trail);
  }
  choices_.resize(base);
  for (; trail_.size() > begin; trail_.pop_back()) {
    if (result != kNone) known_[trail_.back()] = Outcome::ends;
  }
  return result;
}

int64_t Matcher::look(const Search& search, const Pattern::Instruction& in, int64_t at) {
  const int64_t begin = at - in.behind;
  return begin < search.window.begin ? kNone : explore(search, {in.other, begin}, any);
}

}  // namespace sic::references
