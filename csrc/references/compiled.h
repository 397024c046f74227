// A grammar made ready: classes as tags, patterns as programs, and which forms a token can begin.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "references/pattern.h"
#include "references/references.h"
#include "references/tokens.h"

namespace sic::references {

// What the words of a class do where numbers are read. counts: a `one` behind it is a number.
enum class Role : uint8_t { none, value, tens, one, digits, numeral, last, range, counts };

struct CompiledForm {
  Lang lang;
  Meaning means;
  Pattern pattern;
  std::optional<int64_t> ordinal, count;
  bool capital, rear;
};

struct Grammar::Compiled {
  Compiled(const Tables& tables, const Characters& characters);

  const Pattern* rule(Lang lang, Rule which) const {
    return rules[static_cast<int>(lang)][static_cast<int>(which)].get();
  }
  const ClassSet& set(Lang lang, Set which) const { return sets[static_cast<int>(lang)][static_cast<int>(which)]; }
  // The class of this name, as a set; empty where there is none.
  ClassSet named(const char* name) const;

  Classes classes;
  Characters characters;
  std::vector<int64_t> numbers;  // by word; kTooLarge where it has none
  std::vector<int32_t> nouns;    // by word
  std::vector<bool> generic;     // by noun
  std::array<Role, 256> roles{};
  std::vector<CompiledForm> forms;
  std::vector<uint32_t> starting[kLangs + 1][256];  // forms by the class of their first token, in their order
  std::unique_ptr<const Pattern> rules[kLangs][kRuleCount];
  ClassSet sets[kLangs][kSetCount];
  ClassSet anchors[kLangs + 1];
  Cutter::Tags tags;
  ClassSet but, comma, stop, dotted, letters, titles;
  std::unique_ptr<const Cutter> cutter;
};

// A text cut into tokens.
struct Sentence {
  const Grammar::Compiled& grammar;
  const Text& text;
  const Text& low;
  std::vector<Token> tokens;
  std::vector<Tag> tags;

  Window window() const { return {tags.data(), 0, static_cast<int64_t>(tags.size())}; }
  Span span(int64_t begin, int64_t end) const {
    return {tokens[static_cast<size_t>(begin)].begin, tokens[static_cast<size_t>(end - 1)].end};
  }
};

// A form that matched: tokens [begin, end), and what they say.
struct Found {
  int64_t begin, end;
  Lang lang;
  Part part;
};

}  // namespace sic::references
