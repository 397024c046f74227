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

// Whether this need not be tried: what was there before failed, or what it left to try comes first. A look that comes
// out well leaves its steps behind as well, but its own program belongs to it alone, and it is asked once at a place.
bool Matcher::spent(Choice from) {
  return !seen_.insert(uint64_t{from.instruction} << 32 | static_cast<uint32_t>(from.at)).second;
}

// To clear a set takes as long as it has buckets, however few of them the next match fills.
void Matcher::forget() {
  if (seen_.bucket_count() > kKeptBuckets) {
    std::unordered_set<uint64_t>().swap(seen_);
  } else {
    seen_.clear();
  }
}

int64_t Matcher::explore(const Search& search, Choice now, Goal goal) {
  using In = Pattern::Instruction;
  const Pattern& pattern = search.pattern;
  const Window& window = search.window;
  const size_t base = choices_.size();
  int64_t result = kNone;
  for (;;) {
    if (++steps_ > kPlainSteps && !remembers_) {
      result = kTooLong;
      break;
    }
    const In& in = pattern.at(now.instruction);
    bool failed = remembers_ && spent(now);
    if (!failed) {
      switch (in.op) {
        case In::take:
          failed = now.at >= window.end || !pattern.takes(in.other, window.tags[now.at]);
          now = {in.next, now.at + 1};
          break;
        case In::split:
          choices_.push_back({in.other, now.at});
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
  }
  choices_.resize(base);
  return result;
}

int64_t Matcher::look(const Search& search, const Pattern::Instruction& in, int64_t at) {
  const int64_t begin = at - in.behind;
  return begin < search.window.begin ? kNone : explore(search, {in.other, begin}, any);
}

}  // namespace sic::references
