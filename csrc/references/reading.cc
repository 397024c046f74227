#include "references/reading.h"

#include <algorithm>
#include <cstdlib>

#include "references/numbers.h"

namespace sic::references {
namespace {

bool is_quote(char32_t c) {
  return c == U'"' || c == U'“' || c == U'”' || c == U'「' || c == U'」' || c == U'《' || c == U'》';
}

}  // namespace

std::optional<Found> Reader::read(const CompiledForm& form, int64_t begin, int64_t end) {
  if (form.means == Meaning::nothing) return std::nullopt;
  const Span span = sentence_.span(begin, end);
  if (form.capital && !is_numero(span.begin)) return std::nullopt;
  begin_ = begin, end_ = end;
  Part part{span, Kind::vague};
  part.noun = noun();
  const auto& grammar = sentence_.grammar;
  switch (form.means) {
    case Meaning::list:
      read_list(part);
      break;
    case Meaning::from_end:
      read_from_end(form, part);
      break;
    case Meaning::first:
      read_first(part);
      break;
    case Meaning::last:
      read_last(form, part);
      break;
    case Meaning::all:
      read_all(form, part);
      break;
    case Meaning::label:
      read_labels(grammar.dotted, form.means, part);
      break;
    case Meaning::letter:
      read_labels(grammar.letters, form.means, part);
      break;
    case Meaning::title:
      read_labels(grammar.titles, form.means, part);
      break;
    case Meaning::nothing:
    case Meaning::vague:
      break;
  }
  return Found{begin, end, form.lang, part};
}

// "No." with its capital, and not because a sentence begins.
bool Reader::is_numero(uint32_t begin) const {
  const Text& text = sentence_.text;
  uint32_t from = begin > 2 ? begin - 2 : 0, to = begin;
  while (from < to && is_space(text[from])) ++from;
  while (from < to && is_space(text[to - 1])) --to;
  if (!sentence_.grammar.characters.is_upper(text[begin]) || from == to) return false;
  const char32_t before = text[from];
  return to - from > 1 || (before != '.' && before != '!' && before != '?' && before != ':');
}

// The last one; a general one only where there is no other: 优点的第三条.
int32_t Reader::noun() const {
  int32_t general = -1;
  for (int64_t i = end_; i-- > begin_;) {
    const int32_t word = sentence_.tokens[static_cast<size_t>(i)].word;
    const int32_t noun = word == kNoWord ? -1 : sentence_.grammar.nouns[static_cast<size_t>(word)];
    if (noun < 0) continue;
    if (!sentence_.grammar.generic[static_cast<size_t>(noun)]) return noun;
    if (general < 0) general = noun;
  }
  return general;
}

bool Reader::has(const ClassSet& classes) const {
  const auto tags = sentence_.tags.begin();
  return std::any_of(tags + begin_, tags + end_, [&](Tag tag) { return classes[tag]; });
}

int64_t Reader::value_of(Role role, const Token& token) const {
  if (role == Role::last) return -1;
  if (role == Role::digits) return number_of_digits(sentence_.low, token.begin, token.end);
  if (role == Role::numeral) return number_of_chinese(sentence_.low, token.begin, token.end);
  return token.word == kNoWord ? kTooLarge : sentence_.grammar.numbers[static_cast<size_t>(token.word)];
}

void Reader::read_numbers() {
  numbers_.clear();
  int64_t tens = 0;
  bool ranged = false, counting = false;
  const auto add = [&](int64_t value) {
    numbers_.push_back({value, ranged});
    tens = 0, ranged = false;
  };
  for (int64_t i = begin_; i < end_; ++i) {
    const Role role = sentence_.grammar.roles[sentence_.tags[static_cast<size_t>(i)]];
    if (role == Role::none) continue;
    if (role == Role::range) {
      ranged = !numbers_.empty() && !tens;
      continue;
    }
    if (role == Role::counts) {
      counting = true;
      continue;
    }
    if (role == Role::one && !counting) continue;  // "the second one" is no number
    if (role == Role::last) counting = false;      // nor is "the last one"
    const int64_t value = value_of(role, sentence_.tokens[static_cast<size_t>(i)]);
    if (tens && !(value > 0 && value < 10)) add(tens);
    if (role == Role::tens) {
      tens = value, counting = true;
    } else {
      add(tens + value);
    }
  }
  if (tens) add(tens);
}

// --- what forms mean

void Reader::set_range(Part& part, Range range) {
  part.kind = range.first == range.last ? Kind::ordinal : Kind::cardinal;
  part.ranges = static_cast<uint32_t>(out_.ranges.size()), part.range_count = 1;
  out_.ranges.push_back(range);
}

void Reader::read_list(Part& part) {
  read_numbers();
  for (size_t i = 1; i < numbers_.size(); ++i) {
    if (numbers_[i - 1].ranged && numbers_[i].ranged) return;  // "2 to the second to last"
  }
  if (numbers_.empty()) return;  // a form of a file may match without a number
  for (const auto& [value, ranged] : numbers_) {
    if (!part.range_count) {
      set_range(part, {value, value});
    } else if (ranged) {
      Range& range = out_.ranges.back();
      range = value > 0 ? Range{std::min(range.first, value), std::max(range.first, value)} : Range{range.first, value};
    } else {
      out_.ranges.push_back({value, value});
      ++part.range_count;
    }
  }
  const Range& first = out_.ranges[part.ranges];
  part.kind = part.range_count == 1 && first.first == first.last ? Kind::ordinal : Kind::cardinal;
}

void Reader::read_from_end(const CompiledForm& form, Part& part) {
  read_numbers();
  const auto is_place = [](const Number& n) { return n.value != -1; };
  const auto found = std::find_if(numbers_.begin(), numbers_.end(), is_place);
  int64_t place = found == numbers_.end() ? 2 : std::abs(found->value);  // "next to last" has no number
  if (form.ordinal.value_or(0)) place = *form.ordinal;
  place += has(sentence_.grammar.but);  // "the last but one"
  set_range(part, {-place, -place});
}

void Reader::read_first(Part& part) {
  read_numbers();
  if (numbers_.size() > 1 && numbers_[0].value != 1) return;  // "the second two"
  if (numbers_.empty() || numbers_.back().value < 2) return;  // 前一点: the one before some place
  set_range(part, {1, numbers_.back().value});
}

void Reader::read_last(const CompiledForm& form, Part& part) {
  read_numbers();
  const auto is_count = [](const Number& n) { return n.value != -1; };
  const auto found = std::find_if(numbers_.begin(), numbers_.end(), is_count);
  const int64_t count = found == numbers_.end() ? 1 : found->value;
  if (count < 1 || (count == 1 && form.rear)) return;
  set_range(part, {-count, -1});
}

void Reader::read_all(const CompiledForm& form, Part& part) {
  read_numbers();
  if (form.count.value_or(0)) {
    part.total = form.count;
  } else if (!numbers_.empty()) {
    part.total = numbers_[0].value;
  }
  if (part.total == 1) {  // 这一点
    part.total.reset();
    return;
  }
  set_range(part, {1, -1});
}

void Reader::read_labels(const ClassSet& classes, Meaning means, Part& part) {
  part.labels = static_cast<uint32_t>(out_.labels.size());
  for (int64_t i = begin_; i < end_; ++i) {
    if (!classes[sentence_.tags[static_cast<size_t>(i)]]) continue;
    Span label = sentence_.span(i, i + 1);
    if (means == Meaning::letter && !is_capital(label)) return;  // "give the reason a name"
    if (means == Meaning::title) label = stripped(label);
    if (label.begin == label.end) return;
    out_.labels.push_back(label);
  }
  part.label_count = static_cast<uint32_t>(out_.labels.size()) - part.labels;
  if (part.label_count) part.kind = Kind::named;
}

bool Reader::is_capital(Span label) const {
  bool any = false;
  for (uint32_t i = label.begin; i < label.end; ++i) {
    const char32_t c = sentence_.text[i];
    if (sentence_.grammar.characters.is_other_case(c)) return false;
    any |= sentence_.grammar.characters.is_upper(c);
  }
  return any;
}

Span Reader::stripped(Span label) const {
  while (label.begin < label.end && is_quote(sentence_.text[label.begin])) ++label.begin;
  while (label.begin < label.end && is_quote(sentence_.text[label.end - 1])) --label.end;
  return label;
}

}  // namespace sic::references
