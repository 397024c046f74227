#include "references/tokens.h"

#include <algorithm>

#include "references/numbers.h"

namespace sic::references {
namespace {

constexpr uint64_t kHashStart = 0xCBF29CE484222325, kHashFactor = 0x100000001B3;  // FNV-1a, over code points
constexpr size_t kLongestTitle = 60;

size_t power_of_two(size_t least) {
  size_t size = 8;
  while (size < least) size *= 2;
  return size;
}

size_t spread(uint64_t hash) { return static_cast<size_t>(hash ^ hash >> 29); }

char32_t closing(char32_t quote) {
  switch (quote) {
    case U'"':
      return U'"';
    case U'“':
      return U'”';
    case U'「':
      return U'」';
    case U'《':
      return U'》';
    default:
      return 0;
  }
}

constexpr int32_t kNotLookedUp = -2;

bool is_chinese_digit(char32_t c) { return c >= 128 && chinese_digit(c) >= 0; }
bool is_letter(char32_t c) { return c >= 'a' && c <= 'z'; }

}  // namespace

// --- words

Words::Words(const std::vector<Word>& words) {
  slots_.assign(power_of_two(2 * words.size()), kNoWord);
  groups_.resize(power_of_two(2 * words.size()));
  for (const Word& word : words) {
    const auto number = static_cast<int32_t>(texts_.size());
    const std::u32string& text = word.text;
    texts_.push_back(text);
    const Text view{text.data(), 4, text.size()};
    if (text.empty() || find(view, 0, text.size()) != kNoWord) continue;
    longest_ = std::max(longest_, text.size());
    uint64_t hash = kHashStart;
    for (const char32_t c : text) hash = (hash ^ c) * kHashFactor;
    size_t slot = spread(hash) & (slots_.size() - 1);
    while (slots_[slot] != kNoWord) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = number;
    if (std::all_of(text.begin(), text.end(), [](char32_t c) { return c < 128; })) continue;
    Group& group = groups_[slot_of(text[0])];
    group.first = text[0];
    group.words.push_back(number);
    if (text[0] < 128) ascii_begins_.set(text[0]);
  }
  const auto longer = [this](int32_t a, int32_t b) { return length(a) > length(b); };
  for (Group& group : groups_) std::stable_sort(group.words.begin(), group.words.end(), longer);
}

bool Words::matches(int32_t word, const Text& low, size_t at) const {
  const std::u32string& text = texts_[static_cast<size_t>(word)];
  if (low.size - at < text.size()) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (low[at + i] != text[i]) return false;
  }
  return true;
}

int32_t Words::find(const Text& low, size_t begin, size_t end) const {
  if (end - begin > longest_) return kNoWord;
  uint64_t hash = kHashStart;
  for (size_t i = begin; i < end; ++i) hash = (hash ^ low[i]) * kHashFactor;
  const size_t mask = slots_.size() - 1;
  for (size_t slot = spread(hash) & mask; slots_[slot] != kNoWord; slot = (slot + 1) & mask) {
    if (length(slots_[slot]) == end - begin && matches(slots_[slot], low, begin)) return slots_[slot];
  }
  return kNoWord;
}

int32_t Words::longest(const Text& low, size_t at) const {
  const Group* group = group_of(low[at]);
  if (!group) return kNoWord;
  for (const int32_t word : group->words) {
    if (matches(word, low, at)) return word;
  }
  return kNoWord;
}

size_t Words::slot_of(char32_t first) const {
  const size_t mask = groups_.size() - 1;
  size_t slot = spread(first * kHashFactor) & mask;
  while (!groups_[slot].words.empty() && groups_[slot].first != first) slot = (slot + 1) & mask;
  return slot;
}

const Words::Group* Words::group_of(char32_t first) const {
  const Group& group = groups_[slot_of(first)];
  return group.words.empty() ? nullptr : &group;
}

// --- tokens

Cutter::Cutter(const std::vector<Word>& words, const std::vector<Tag>& word_tags, const Tags& tags,
               const Characters& characters)
    : words_(words), word_tags_(word_tags), tags_(tags), characters_(characters) {}

void Cutter::cut(const Text& low, bool chinese, std::vector<Token>& tokens, std::vector<Tag>& tags) const {
  for (size_t at = 0; at < low.size;) {
    Piece piece = piece_at(low, at, chinese);
    if (piece.end == at) {
      ++at;
      continue;
    }
    if (piece.word == kNotLookedUp) piece.word = words_.find(low, at, piece.end);
    tokens.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(piece.end), piece.word});
    tags.push_back(tag_of(piece, low[at]));
    at = piece.end;
  }
}

Cutter::Piece Cutter::piece_at(const Text& low, size_t at, bool chinese) const {
  const char32_t c = low[at];
  const auto while_it_is = [&](auto fits) {
    size_t end = at + 1;
    while (end < low.size && fits(low[end])) ++end;
    return end;
  };
  if (chinese && in_no_word(c)) return {while_it_is([this](char32_t d) { return in_no_word(d); }), kNoWord};
  if (closing(c)) {
    if (const size_t end = title_end(low, at); end > at) return {end, kNotLookedUp, false, true};
  }
  if (chinese) {
    if (words_.begins(c)) {
      if (const int32_t word = words_.longest(low, at); word != kNoWord) return {at + words_.length(word), word};
    }
    if (is_chinese_digit(c)) return {while_it_is(is_chinese_digit), kNotLookedUp};
  }
  if (is_letter(c)) return {while_it_is(is_letter), kNotLookedUp};
  if (is_possessive(low, at)) return {at + 2, kNotLookedUp};
  if (digit_of(c) >= 0) return number_at(low, at);
  return {c == '\n' || !is_space(c) ? at + 1 : at, kNotLookedUp};
}

// Other than ASCII, and neither the beginning of a word nor of any other token but those of one character.
bool Cutter::in_no_word(char32_t c) const {
  if (c < 128 || digit_of(c) >= 0 || closing(c) || c == U'’' || is_space(c)) return false;
  return !is_chinese_digit(c) && !words_.begins(c);
}

size_t Cutter::title_end(const Text& low, size_t at) const {
  const char32_t close = closing(low[at]);
  size_t end = at + 1;
  while (end < low.size && end - at <= kLongestTitle && low[end] != close && low[end] != '\n') {
    ++end;
  }
  return end < low.size && low[end] == close && end > at + 1 ? end + 1 : at;
}

Cutter::Piece Cutter::number_at(const Text& low, size_t at) const {
  size_t end = at + 1;
  while (end < low.size && digit_of(low[end]) >= 0) ++end;
  const auto is_ascii_digit = [&](size_t i) { return i < low.size && low[i] >= '0' && low[i] <= '9'; };
  bool dotted = false;
  for (int dots = 0; dots < 3 && end < low.size && low[end] == '.' && is_ascii_digit(end + 1); ++dots) {
    dotted = true;
    do {
      ++end;
    } while (is_ascii_digit(end));
  }
  return {end, kNotLookedUp, dotted};
}

bool Cutter::is_possessive(const Text& low, size_t at) const {
  if ((low[at] != '\'' && low[at] != U'’') || at + 1 >= low.size || low[at + 1] != 's') return false;
  return at + 2 == low.size || !characters_.is_word(low[at + 2]);
}

Tag Cutter::tag_of(const Piece& piece, char32_t first) const {
  if (piece.word != kNoWord) return word_tags_[static_cast<size_t>(piece.word)];
  if (digit_of(first) >= 0) return piece.dotted ? tags_.dotted : tags_.digits;
  if (is_chinese_digit(first)) return tags_.numeral;
  return piece.title ? tags_.title : tags_.unknown;
}

}  // namespace sic::references
