// The contract of the references family: a grammar made of tables, and the references to an earlier answer that it
// finds in a text ("the third point above").
//
// A text is cut into tokens (tokens.h), each of one class of words. Forms are patterns over classes (pattern.h). What
// forms match is read as numbers, nouns and labels (reading.h), and neighbours are nested in one another (nesting.h).
// Time and memory are linear in the length of the text, whatever the text and the patterns are.
#pragma once
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "references/text.h"

namespace sic::references {

enum class Lang : uint8_t { en, zh, both };  // both: the forms of en, then those of zh
constexpr int kLangs = 2;
inline constexpr const char* kLangNames[] = {"en", "zh"};
static_assert(std::size(kLangNames) == kLangs && kLangs == static_cast<int>(Lang::both));

// The grammars that a text in lower case can need: that of en unless it has Chinese letters and no Latin ones, that of
// zh where it has other than ASCII characters.
Lang lang_of(const Text& low);

// How the numbers of a form are read. By name: kMeanings.
enum class Meaning : uint8_t { nothing, vague, list, from_end, first, last, all, label, letter, title };
inline constexpr const char* kMeanings[] = {"nothing", "vague", "list",  "from end", "first",
                                            "last",    "all",   "label", "letter",   "title"};
static_assert(std::size(kMeanings) == static_cast<size_t>(Meaning::title) + 1);

// Patterns for what is around and between references. By name: kRules.
enum class Rule : uint8_t {
  inner_first,
  outer_first,
  outer_first_other_noun,
  fronted,
  vague_before,
  vague_after,
  lead
};
inline constexpr const char* kRules[] = {
    "inner first", "outer first", "outer first, other noun", "fronted", "vague before", "vague after", "lead"};
constexpr int kRuleCount = static_cast<int>(std::size(kRules));
static_assert(kRuleCount == static_cast<int>(Rule::lead) + 1);

// Sets of classes. By name: kSets.
enum class Set : uint8_t { anchors, before, after };
inline constexpr const char* kSets[] = {"anchors", "before", "after"};
constexpr int kSetCount = static_cast<int>(std::size(kSets));
static_assert(kSetCount == static_cast<int>(Set::after) + 1);

struct Word {
  std::u32string text;  // in lower case
  std::string cls;
  std::optional<int64_t> number{};  // at most 10^9 (kTooLarge) from 0, as all numbers of tables
  int32_t noun = -1;                // which of the nouns it stands for; -1: none
};

struct Form {
  Lang lang;
  Meaning means;
  std::string pattern;
  std::optional<int64_t> ordinal{}, count{};  // fixed by the words
  bool capital = false;                       // only where the first letter is a capital: "No. 4"
  bool rear = false;                          // counts what is behind a place, so one is not "the last"
};

// What a grammar is made of. Of equal words the first counts; of the forms, too.
//
// Some classes mean something by their names. Those of the first line must be there, the others may:
//   unknown digits dotted numeral title   what cuts the text fills them (4.2 is dotted, 十二 a numeral)
//   ordinal cardinal roman back           words with numbers
//   tens                                  as well; a number below ten that follows is added: twenty-first
//   one                                   as well, if tens or a class of the next line are before it: point one
//   noun nouns znoun number but           see one
//   last zlast                            the number -1
//   to dash zto                           between two numbers: a range
//   but                                   in Meaning::from_end: one place more, "the last but one"
//   dotted                                labels of Meaning::label
//   letter a                              labels of Meaning::letter
//   title heading zheading                labels of Meaning::title
//   comma stop                            Rule::fronted: a comma behind the outer reference, no stop before the inner
struct Tables {
  std::vector<std::string> classes;  // at most 256, no two alike
  std::vector<Word> words;
  std::vector<bool> generic;  // by noun: fits any list
  std::vector<Form> forms;
  std::optional<std::string> rules[kLangs][kRuleCount];
  std::vector<std::string> sets[kLangs][kSetCount];
};

// [begin, end) in the code points of the text.
struct Span {
  uint32_t begin, end;
};

enum class Kind : uint8_t { ordinal, cardinal, named, vague, too_deep };
inline constexpr const char* kKinds[] = {"ordinal", "cardinal", "named", "vague", "too deep"};
static_assert(std::size(kKinds) == static_cast<size_t>(Kind::too_deep) + 1);

struct Range {
  int64_t first, last;  // ordinals, both included; negative: from the end
};

// One reference, or the outer part of one. Its ordinal is that of its first range.
struct Part {
  Span span;
  Kind kind;
  bool nested = false;  // in the part before this one
  int32_t noun = -1;
  int64_t depth = 1;
  std::optional<int64_t> total{};
  uint32_t ranges = 0, range_count = 0;  // where they begin in References::ranges
  uint32_t labels = 0, label_count = 0;  // where they begin in References::labels
};

// In the order of the text, of nested ones the outermost first: a reference is a part that none is nested in.
struct References {
  std::vector<Part> parts;
  std::vector<Range> ranges;
  std::vector<Span> labels;
};

// A token of a text in which the noun of a list is looked for.
struct Mention {
  int32_t noun;  // -1: none
  uint8_t cls;   // an index of Tables::classes
  bool counted;  // a noun in what "lead" matches: "three good reasons"
};

// Immutable: any thread may use it.
class Grammar {
 public:
  // PatternError (pattern.h) for a malformed pattern, ArgumentError for other tables that do not fit.
  Grammar(const Tables& tables, const Characters& characters);
  ~Grammar();

  // `low`: the text in lower case, a character for each of `text`. `depth`, 1 or more: a reference that is nested
  // deeper is Kind::too_deep as a whole. ArgumentError also for 2^32 - 1 characters and more.
  References parse(const Text& text, const Text& low, Lang lang, int depth) const;

  // One for each token, read as both languages.
  std::vector<Mention> mentions(const Text& low) const;

  struct Compiled;  // compiled.h

 private:
  std::unique_ptr<const Compiled> compiled_;
};

// Problems of a pattern over these classes; "" if it has none.
std::string pattern_problem(const std::vector<std::string>& classes, const std::string& pattern);

}  // namespace sic::references
