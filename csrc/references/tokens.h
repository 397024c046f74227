// Words, and how a text is cut into them.
#pragma once
#include <cstdint>
#include <vector>

#include "references/pattern.h"
#include "references/references.h"

namespace sic::references {

// [begin, end) in the text, and which word it is; kNoWord: none.
struct Token {
  uint32_t begin, end;
  int32_t word;
};
constexpr int32_t kNoWord = -1;

// All words of a grammar. A look-up compares the whole word.
class Words {
 public:
  explicit Words(const std::vector<Word>& words);

  int32_t find(const Text& low, size_t begin, size_t end) const;
  // The longest of those with other than ASCII characters that begins here.
  int32_t longest(const Text& low, size_t at) const;
  // Whether any of these begins with c.
  bool begins(char32_t c) const { return c < 128 ? ascii_begins_[c] : group_of(c) != nullptr; }
  size_t length(int32_t word) const { return texts_[static_cast<size_t>(word)].size(); }

 private:
  struct Group {  // words with one first character, the longest first
    char32_t first = 0;
    std::vector<int32_t> words;
  };
  bool matches(int32_t word, const Text& low, size_t at) const;
  const Group* group_of(char32_t first) const;
  size_t slot_of(char32_t first) const;

  std::vector<std::u32string> texts_;
  std::vector<int32_t> slots_;  // by hash, kNoWord: empty; two for each word at least
  size_t longest_ = 0;
  std::vector<Group> groups_;  // by hash of the first character; no words: empty
  std::bitset<128> ascii_begins_;
};

// Cuts a text in lower case into tokens: words of Latin letters, 's, numbers with up to three dots, titles in quotation
// marks, line ends, any other character that is no space by itself; in Chinese before all that what belongs to no word,
// the longest word that there is, and numerals.
class Cutter {
 public:
  struct Tags {
    Tag unknown, digits, dotted, numeral, title;
  };
  Cutter(const std::vector<Word>& words, const std::vector<Tag>& word_tags, const Tags& tags,
         const Characters& characters);

  // `chinese`: whether the text may have any.
  void cut(const Text& low, bool chinese, std::vector<Token>& tokens, std::vector<Tag>& tags) const;

 private:
  // What begins at a place; nothing where it ends at once.
  struct Piece {
    size_t end;
    int32_t word;
    bool dotted = false;  // a number with dots
    bool title = false;   // in quotation marks
  };
  Piece piece_at(const Text& low, size_t at, bool chinese) const;
  Piece number_at(const Text& low, size_t at) const;
  size_t title_end(const Text& low, size_t at) const;
  bool is_possessive(const Text& low, size_t at) const;
  bool in_no_word(char32_t c) const;
  Tag tag_of(const Piece& piece, char32_t first) const;

  Words words_;
  std::vector<Tag> word_tags_;
  Tags tags_;
  Characters characters_;
};

}  // namespace sic::references
