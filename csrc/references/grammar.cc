#include <algorithm>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "references/compiled.h"
#include "references/nesting.h"
#include "references/numbers.h"
#include "references/reading.h"

namespace sic::references {
namespace {

// references.h has what they mean.
constexpr std::pair<const char*, Role> kRoles[] = {
    {"ordinal", Role::value}, {"cardinal", Role::value}, {"roman", Role::value},   {"back", Role::value},
    {"tens", Role::tens},     {"one", Role::one},        {"digits", Role::digits}, {"numeral", Role::numeral},
    {"last", Role::last},     {"zlast", Role::last},     {"to", Role::range},      {"dash", Role::range},
    {"zto", Role::range},     {"noun", Role::counts},    {"nouns", Role::counts},  {"number", Role::counts},
    {"but", Role::counts},    {"znoun", Role::counts},
};

Classes classes_of(const std::vector<std::string>& names) {
  Check("Grammar").require(names.size() <= 256, "classes", std::to_string(names.size()), "at most 256");
  Classes classes;
  for (size_t i = 0; i < names.size(); ++i) {
    const bool is_new = classes.emplace(names[i], static_cast<Tag>(i)).second;
    Check("Grammar").require(is_new, "classes", names[i] + " twice", "names that differ");
  }
  return classes;
}

Tag tag_of(const Classes& classes, const std::string& name) {
  const auto found = classes.find(name);
  if (found == classes.end()) Check("Grammar").fail("classes", "none that is called " + name, "one");
  return found->second;
}

// So that numbers can be added and counted from the end.
std::optional<int64_t> checked(const char* arg, std::optional<int64_t> number) {
  if (number && (*number < -kTooLarge || *number > kTooLarge)) {
    Check("Grammar").fail(arg, "number " + std::to_string(*number), "-10^9 to 10^9");
  }
  return number;
}

Sentence cut(const Grammar::Compiled& grammar, const Text& text, const Text& low, Lang lang) {
  if (low.size >= UINT32_MAX) {
    Check("parse").fail("text", std::to_string(low.size) + " characters", "fewer than 2^32 - 1");
  }
  Sentence sentence{grammar, text, low, {}, {}};
  const size_t likely = std::min<size_t>(low.size, 64);
  sentence.tokens.reserve(likely);
  sentence.tags.reserve(likely);
  grammar.cutter->cut(low, lang != Lang::en, sentence.tokens, sentence.tags);
  return sentence;
}

// Most sentences have none, and end there. A number with dots is one of digits, too.
bool has_anchor(const Sentence& sentence, const ClassSet& anchors) {
  ClassSet looked_for = anchors;
  if (anchors[sentence.grammar.tags.digits]) looked_for.set(sentence.grammar.tags.dotted);
  return std::any_of(sentence.tags.begin(), sentence.tags.end(), [&](Tag tag) { return looked_for[tag]; });
}

}  // namespace

Grammar::Compiled::Compiled(const Tables& tables, const Characters& characters)
    : classes(classes_of(tables.classes)), characters(characters), generic(tables.generic) {
  std::vector<Tag> word_tags;
  for (const Word& word : tables.words) {
    Check("Grammar").require(word.noun >= -1 && word.noun < static_cast<int64_t>(generic.size()), "words",
                             "noun " + std::to_string(word.noun), "-1, or one of the nouns");
    word_tags.push_back(tag_of(classes, word.cls));
    numbers.push_back(checked("words", word.number).value_or(kTooLarge));
    nouns.push_back(word.noun);
  }
  tags = {tag_of(classes, "unknown"), tag_of(classes, "digits"), tag_of(classes, "dotted"), tag_of(classes, "numeral"),
          tag_of(classes, "title")};
  cutter = std::make_unique<Cutter>(tables.words, word_tags, tags, characters);
  for (const auto& [name, role] : kRoles) {
    if (const auto found = classes.find(name); found != classes.end()) roles[found->second] = role;
  }
  but = named("but"), comma = named("comma"), stop = named("stop"), dotted = named("dotted");
  letters = named("letter") | named("a"), titles = named("title") | named("heading") | named("zheading");

  for (int lang = 0; lang < kLangs; ++lang) {
    for (int i = 0; i < kRuleCount; ++i) {
      if (const auto& rule = tables.rules[lang][i]) rules[lang][i] = std::make_unique<Pattern>(*rule, classes);
    }
    for (int i = 0; i < kSetCount; ++i) {
      for (const std::string& name : tables.sets[lang][i]) sets[lang][i].set(tag_of(classes, name));
    }
    anchors[lang] = set(static_cast<Lang>(lang), Set::anchors);
    anchors[kLangs] |= anchors[lang];
    for (const Form& form : tables.forms) {
      if (form.lang != static_cast<Lang>(lang)) continue;
      forms.push_back({form.lang, form.means, Pattern(form.pattern, classes), checked("forms", form.ordinal),
                       checked("forms", form.count), form.capital, form.rear});
    }
  }
  for (uint32_t i = 0; i < forms.size(); ++i) {
    for (size_t tag = 0; tag < 256; ++tag) {
      if (!forms[i].pattern.first()[tag]) continue;
      for (const Lang lang : {forms[i].lang, Lang::both}) starting[static_cast<int>(lang)][tag].push_back(i);
    }
  }
}

ClassSet Grammar::Compiled::named(const char* name) const {
  ClassSet set;
  if (const auto found = classes.find(name); found != classes.end()) set.set(found->second);
  return set;
}

Grammar::Grammar(const Tables& tables, const Characters& characters)
    : compiled_(std::make_unique<Compiled>(tables, characters)) {}
Grammar::~Grammar() = default;

Lang lang_of(const Text& low) {
  bool ascii = true, latin = false, han = false;
  for (size_t i = 0; i < low.size; ++i) {
    const char32_t c = low[i];
    ascii &= c < 128;
    latin |= c >= 'a' && c <= 'z';
    han |= c >= 0x4E00 && c <= 0x9FFF;
  }
  if (ascii) return Lang::en;
  return latin || !han ? Lang::both : Lang::zh;
}

References Grammar::parse(const Text& text, const Text& low, Lang lang, int depth) const {
  if (text.size != low.size) Check("parse").fail("low", std::to_string(low.size) + " characters", "those of text");
  if (depth < 1) Check("parse").fail("depth", std::to_string(depth), "1 or more");
  References found;
  const Sentence sentence = cut(*compiled_, text, low, lang);
  if (!has_anchor(sentence, compiled_->anchors[static_cast<int>(lang)])) return found;
  Matcher matcher;
  Reader reader(sentence, found);
  Nesting nesting(sentence, matcher, depth, found);
  const Window all = sentence.window();
  for (int64_t at = 0; at < all.end;) {
    int64_t end = Matcher::kNone;
    for (const uint32_t i : compiled_->starting[static_cast<int>(lang)][all.tags[at]]) {
      const CompiledForm& form = compiled_->forms[i];
      end = matcher.match(form.pattern, all, at, Matcher::some);
      if (end == Matcher::kNone) continue;
      if (const auto found_here = reader.read(form, at, end)) nesting.add(*found_here);
      break;
    }
    at = end == Matcher::kNone ? at + 1 : end;
  }
  nesting.finish();
  return found;
}

std::vector<Mention> Grammar::mentions(const Text& low) const {
  Sentence sentence = cut(*compiled_, low, low, Lang::both);
  std::vector<Mention> found;
  for (size_t i = 0; i < sentence.tokens.size(); ++i) {
    const int32_t word = sentence.tokens[i].word;
    const int32_t noun = word == kNoWord ? -1 : compiled_->nouns[static_cast<size_t>(word)];
    // Rule::lead counts with numbers of any form, and its patterns have digits for them: "2.0 reasons".
    if (word == kNoWord && sentence.tags[i] == compiled_->tags.dotted) sentence.tags[i] = compiled_->tags.digits;
    found.push_back({noun, sentence.tags[i], false});
  }
  Matcher matcher;
  const Window all = sentence.window();
  for (const Lang lang : {Lang::en, Lang::zh}) {
    const Pattern* lead = compiled_->rule(lang, Rule::lead);
    for (int64_t at = 0; lead && at < all.end;) {
      const int64_t end = matcher.match(*lead, all, at, Matcher::some);
      for (int64_t i = at; i < end; ++i) {
        Mention& mention = found[static_cast<size_t>(i)];
        mention.counted |= mention.noun >= 0;
      }
      at = end == Matcher::kNone ? at + 1 : end;
    }
  }
  return found;
}

std::string pattern_problem(const std::vector<std::string>& classes, const std::string& pattern) {
  try {
    Pattern(pattern, classes_of(classes));
  } catch (const PatternError& error) {
    return error.problem();
  }
  return "";
}

}  // namespace sic::references
