#include "head/stop_matcher.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace sic::head {

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30, kMostRows = int64_t{1} << 24;

std::vector<std::string> sorted(std::vector<std::string> stops) {
  const Check check("StopMatcher");
  int64_t bytes = 0;
  for (size_t i = 0; i < stops.size(); ++i) {
    check.require(!stops[i].empty(), "stops", "an empty one at [" + std::to_string(i) + "]", "at least one byte each");
    bytes += static_cast<int64_t>(stops[i].size());
  }
  check.value(bytes < kMostBytes, "stops", static_cast<double>(bytes), "fewer than 2^30 bytes together");
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  return stops;
}

}  // namespace

// The stops that begin with a state's text are neighbours in sorted order, so a state is grown from a range of them.
StopMatcher::StopMatcher(std::vector<std::string> stops, const Options& options)
    : stops_(sorted(std::move(stops))), include_(options.include) {
  Check("StopMatcher")
      .value(options.rows >= 1 && options.rows <= kMostRows, "batch", static_cast<double>(options.rows), "1 to 2^24");
  std::vector<uint32_t> end{static_cast<uint32_t>(stops_.size())};  // of the range that begins with stop_[state]
  first_child_ = {}, fail_ = {0}, depth_ = {0}, longest_ = {0}, stop_ = {0}, byte_ = {0};
  for (State s = 0; s < byte_.size(); ++s) {
    first_child_.push_back(static_cast<State>(byte_.size()));
    add_children(s, stop_[s], end[s], end);
    if (s == 0)
      for (State c = 1; c < byte_.size(); ++c) root_[byte_[c]] = c;
  }
  first_child_.push_back(static_cast<State>(byte_.size()));
  rows_.resize(static_cast<size_t>(options.rows));
}

void StopMatcher::add_children(State parent, uint32_t begin, uint32_t end, std::vector<uint32_t>& last_stop) {
  const uint32_t depth = depth_[parent];
  while (begin < end && stops_[begin].size() == depth) ++begin;
  while (begin < end) {
    const char byte = stops_[begin][depth];
    uint32_t rest = begin + 1;
    while (rest < end && stops_[rest][depth] == byte) ++rest;
    const State fail = parent == 0 ? 0 : next(fail_[parent], static_cast<uint8_t>(byte));
    fail_.push_back(fail);
    depth_.push_back(depth + 1);
    longest_.push_back(stops_[begin].size() == depth + 1 ? depth + 1 : longest_[fail]);
    stop_.push_back(begin);
    byte_.push_back(static_cast<uint8_t>(byte));
    last_stop.push_back(rest);
    begin = rest;
  }
}

// 0 if there is none: the root is nobody's child.
StopMatcher::State StopMatcher::child(State state, uint8_t byte) const {
  const State first = first_child_[state], count = first_child_[state + 1] - first;
  const void* found = count ? std::memchr(byte_.data() + first, byte, count) : nullptr;
  return found ? static_cast<State>(static_cast<const uint8_t*>(found) - byte_.data()) : 0;
}

StopMatcher::State StopMatcher::next(State state, uint8_t byte) const {
  for (; state != 0; state = fail_[state])
    if (const State to = child(state, byte)) return to;
  return root_[byte];
}

std::string_view StopMatcher::held(State state) const {
  if (include_ || state == 0) return {};
  return std::string_view(stops_[stop_[state]]).substr(0, depth_[state]);
}

StopMatcher::Safe StopMatcher::feed(int64_t row, std::string_view chunk) {
  Row& r = at(row);
  const int64_t before = r.fed;
  r.fed += static_cast<int64_t>(chunk.size());
  if (r.matched) return {};
  const std::string_view held_before = held(r.state);
  State s = r.state;
  size_t i = 0;
  while (i < chunk.size() && !longest_[s]) s = next(s, static_cast<uint8_t>(chunk[i++]));
  r.matched = longest_[s] != 0;
  r.output = before + static_cast<int64_t>(i) -
             static_cast<int64_t>(r.matched ? (include_ ? 0 : longest_[s]) : held(s).size());
  r.state = r.matched ? 0 : s;
  const auto safe = static_cast<size_t>(r.output - (before - static_cast<int64_t>(held_before.size())));
  const size_t from_held = std::min(safe, held_before.size());
  return {held_before.substr(0, from_held), chunk.substr(0, safe - from_held)};
}

std::string_view StopMatcher::finish(int64_t row) {
  Row& r = at(row);
  const std::string_view rest = r.matched ? std::string_view() : held(r.state);
  r.state = 0;
  return rest;
}

void StopMatcher::reorder(const std::vector<int64_t>& rows) {
  std::vector<Row> chosen;
  chosen.reserve(rows.size());
  for (int64_t row : rows) chosen.push_back(at(row));
  rows_ = std::move(chosen);
}

int64_t StopMatcher::nbytes() const {
  size_t bytes = sizeof(*this) + byte_.size() * (5 * sizeof(uint32_t) + 1) + rows_.size() * sizeof(Row);
  for (const std::string& stop : stops_) bytes += sizeof(stop) + stop.size();
  return static_cast<int64_t>(bytes);
}

}  // namespace sic::head
