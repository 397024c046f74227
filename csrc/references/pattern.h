// Patterns over classes of words: <class|class>, ( ), |, ?, {m,n}, (?= ), (?! ), (?<= ), (?<! ), $; spaces are ignored.
//
// They match as Python's regular expressions do: of alternatives the first with which all matches, repeats as often as
// they can (with ? behind them: as rarely), and an iteration that takes nothing is the last.
#pragma once
#include <bitset>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/check.h"

namespace sic::references {

using Tag = uint8_t;  // a class
using ClassSet = std::bitset<256>;
using Classes = std::map<std::string, Tag, std::less<>>;

// Grammar: pattern: got <a, expected a pattern (a < without its >)
class PatternError : public ArgumentError {
 public:
  PatternError(std::string_view pattern, const std::string& problem);
  const std::string& problem() const { return problem_; }

 private:
  std::string problem_;
};

// A pattern as a program without loops: repeats are written out, for what a grammar accepts repeats a few times.
class Pattern {
 public:
  struct Instruction {
    enum Op : uint8_t { take, split, look, end, accept } op;
    bool negated = false;  // look
    uint16_t behind = 0;   // look: where its own program begins, in tokens before the place
    uint32_t next = 0;     // all but accept
    uint32_t other = 0;    // take: a set of classes; split: what is tried second; look: its own program
  };

  Pattern(std::string_view text, const Classes& classes);  // PatternError

  uint32_t entry() const { return entry_; }
  const Instruction& at(uint32_t i) const { return code_[i]; }
  size_t size() const { return code_.size(); }
  bool takes(uint32_t set, Tag tag) const { return sets_[set][tag]; }
  // The classes that a match of at least one token can begin with.
  const ClassSet& first() const { return first_; }

 private:
  std::vector<Instruction> code_;  // what follows an instruction is before it
  std::vector<ClassSet> sets_;
  uint32_t entry_ = 0;
  ClassSet first_;
};

// What a match can see of a sentence: tokens [begin, end).
struct Window {
  const Tag* tags;
  int64_t begin, end;
};

// Tries patterns; keeps its memory from one match to the next. For one thread.
//
// Backtracks, and if that takes more than some steps begins again and remembers what came of each: no match takes more
// steps than the program has instructions, times the tokens that it can reach.
class Matcher {
 public:
  enum Goal { any, some, whole };  // some: at least one token; whole: all up to the window's end
  static constexpr int64_t kNone = -1;

  // Where the match that begins at `at` ends; kNone if there is none.
  int64_t match(const Pattern& pattern, const Window& window, int64_t at, Goal goal);
  // That the last match took.
  int64_t steps() const { return steps_; }

 private:
  static constexpr int64_t kTooLong = -2;
  static constexpr int64_t kPlainSteps = 512;
  static constexpr size_t kKeptBuckets = 1 << 12;

  enum class Outcome : uint8_t { unknown, fails, ends };

  struct Choice {
    uint32_t instruction;
    int64_t at;
    size_t trail = 0;  // how long the way to it is
  };
  struct Search {
    const Pattern& pattern;
    const Window& window;
    int64_t start;
  };
  int64_t explore(const Search& search, Choice from, Goal goal);
  int64_t look(const Search& search, const Pattern::Instruction& instruction, int64_t at);
  Outcome outcome(Choice from);
  void forget();

  std::vector<Choice> choices_;
  std::unordered_map<uint64_t, Outcome> known_;  // by instruction and token
  std::vector<uint64_t> trail_;                  // of these, where what is tried has come along
  bool remembers_ = false;
  int64_t steps_ = 0;
};

}  // namespace sic::references
