// The references family without Python: patterns, tokens and numbers by hand, and sentences of a small grammar.
#include "references/references.h"

#include <gtest/gtest.h>

#include <ctime>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "references/numbers.h"
#include "references/pattern.h"
#include "references/tokens.h"

namespace sic::references {
namespace {

bool is_ascii_upper(char32_t c) { return c >= 'A' && c <= 'Z'; }
bool is_ascii_lower(char32_t c) { return c >= 'a' && c <= 'z'; }
bool is_ascii_word(char32_t c) { return is_ascii_upper(c) || is_ascii_lower(c) || (c >= '0' && c <= '9') || c == '_'; }
constexpr Characters kAscii{is_ascii_word, is_ascii_upper, is_ascii_lower};

Text view(const std::u32string& text) { return {text.data(), 4, text.size()}; }

std::u32string lower(std::u32string text) {
  for (char32_t& c : text)
    if (is_ascii_upper(c)) c += 'a' - 'A';
  return text;
}

// --- patterns

// Where a pattern over classes a, b, c ends in the letters of `tags`, from the first on; -1: nowhere.
int64_t match(const std::string& pattern, const std::string& letters, Matcher::Goal goal = Matcher::any,
              int64_t at = 0) {
  std::vector<Tag> tags;
  for (const char c : letters) tags.push_back(static_cast<Tag>(c - 'a'));
  const Window window{tags.data(), 0, static_cast<int64_t>(tags.size())};
  return Matcher().match(Pattern(pattern, {{"a", 0}, {"b", 1}, {"c", 2}}), window, at, goal);
}

TEST(ReferencePattern, TakesTheFirstAlternativeThatLetsTheRestMatch) {
  EXPECT_EQ(match("<a> | <a><b>", "ab"), 1);
  EXPECT_EQ(match("(<a> | <a><b>) <c>", "abc"), 3);
  EXPECT_EQ(match("<a|b>{2,3}", "abab"), 3);
  EXPECT_EQ(match("<a>{1,3} <a>", "aaa"), 3);
  EXPECT_EQ(match("<a>{1,3}?", "aaa"), 1);
  EXPECT_EQ(match("<a>?", "b"), 0);
  EXPECT_EQ(match("<a>?", "b", Matcher::some), Matcher::kNone);
  EXPECT_EQ(match("<a> | <a><b>", "ab", Matcher::whole), 2);
  EXPECT_EQ(match("", ""), 0);
  EXPECT_EQ(match("<a>{0,0}", "a"), 0);
}

TEST(ReferencePattern, AnIterationThatTakesNothingIsTheLast) {
  EXPECT_EQ(match("(|<a>){0,2} $", "aa"), 2);
  EXPECT_EQ(match("(|<a>|<a><a><a>){0,2} (?<= <a><a>)", "aaa"), 2);  // 3 if the second one began after nothing
  EXPECT_EQ(match("(|<a>|<a><a><a>){2,2} (?<= <a><a>)", "aaa"), 3);  // as here, where two are wanted
  EXPECT_EQ(match("(|<a>|<a><a><a>){0,2}", "aaa", Matcher::some), 1);
  EXPECT_EQ(match("(<a>?<b>?){1,4} <c>", "abbac"), 5);
  EXPECT_EQ(match("((<a>?){2,2} | <b>){3,3}", "aaaaa"), 5);
}

TEST(ReferencePattern, LooksAround) {
  EXPECT_EQ(match("<a> (?= <b>)", "ab"), 1);
  EXPECT_EQ(match("<a> (?! <b>)", "ab"), Matcher::kNone);
  EXPECT_EQ(match("(?<= <a>) <b>", "ab", Matcher::any, 1), 2);
  EXPECT_EQ(match("(?<= <a>) <b>", "bb", Matcher::any, 1), Matcher::kNone);
  EXPECT_EQ(match("(?<! <a><a>) <b>", "ab", Matcher::any, 1), 2);
  EXPECT_EQ(match("<a> $", "ab"), Matcher::kNone);
}

TEST(ReferencePattern, KnowsWhatItCanBeginWith) {
  const Classes classes{{"a", 0}, {"b", 1}, {"c", 2}};
  EXPECT_EQ(Pattern("<a>? <b> | (?= <c>) <a|c>", classes).first().to_ulong(), 0b111u);
  EXPECT_EQ(Pattern("(?= <c>) <a|c>", classes).first().to_ulong(), 0b100u);
  EXPECT_EQ(Pattern("(?! <c>) <a|c>", classes).first().to_ulong(), 0b101u);
  EXPECT_EQ(Pattern("$ <a>?", classes).first().to_ulong(), 0b001u);
}

TEST(ReferencePattern, NoMatchTakesMoreStepsThanInstructionsTimesTokens) {
  std::string optional;
  for (int i = 0; i < 16; ++i) optional += "<a>?";
  const std::vector<Tag> tags(100, 0);
  const Window window{tags.data(), 0, 100};
  Matcher matcher;
  for (const std::string& text : {"(" + optional + "){1,8} <b>", "(?= (" + optional + "){1,8} <b>) <a>"}) {
    const Pattern pattern(text, {{"a", 0}, {"b", 1}});
    EXPECT_EQ(matcher.match(pattern, window, 0, Matcher::any), Matcher::kNone);
    EXPECT_GT(matcher.steps(), 512);  // else nothing had to be remembered
    EXPECT_LT(matcher.steps(), 512 + 2 * static_cast<int64_t>(pattern.size()) * 101);
  }
  EXPECT_EQ(match("(" + optional + "){1,8} <b>", std::string(100, 'a') + "b"), 101);
  EXPECT_EQ(match("(?= (" + optional + "){1,8} <b>) <a>", std::string(100, 'a') + "b"), 1);
}

// What a look went through at one place is asked for again at the next one, when steps are remembered.
TEST(ReferencePattern, LooksAtTwoPlacesAgreeAfterManySteps) {
  const std::string slow = "(<a>|<a><a>){0,8}?", text = std::string(14, 'a') + "b";
  EXPECT_EQ(match(slow + "(?= (<a>|<a><a>) <b>) <a><b>", text), 15);
  EXPECT_EQ(match(slow + "(?! (<a>|<a><a>) <b>) <a><b>", text), Matcher::kNone);
  EXPECT_EQ(match(slow + "(?! <a> (?! (<a>|<a><a>) <b>)) <a><a><b>", text), 15);
}

TEST(ReferencePattern, RefusesWhatIsNone) {
  const std::vector<std::string> malformed{"(",  ")",   "(<a>", "<a>)", "?",          "<a>?\?\?",  "<a>{2,1}", "<a>{1}",
                                           "$?", "<d>", "<a",   "*",    "(?<= <a>?)", "<a>?{1,2}", "(|?)",     "a"};
  for (const std::string& pattern : malformed) {
    EXPECT_NE(pattern_problem({"a", "b"}, pattern), "") << pattern;
  }
  EXPECT_EQ(pattern_problem({"a", "b"}, " ( <a|b> )? "), "");
}

TEST(ReferencePattern, SaysWhatIsWrongAsAllArgumentsDo) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      Pattern(text, {{"a", 0}});
    } catch (const ArgumentError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message("<a"), "Grammar: pattern: got <a, expected a pattern (a < without its >)");
  EXPECT_EQ(message(std::string(90, '(')),
            "Grammar: pattern: got " + std::string(80, '(') + ", expected a pattern (a ( without its ))");
}

// --- numbers and tokens

TEST(ReferenceNumbers, ByHand) {
  const std::vector<std::pair<std::u32string, int64_t>> chinese{
      {U"三", 3},
      {U"十", 10},
      {U"十二", 12},
      {U"二十", 20},
      {U"一百零三", 103},
      {U"二〇", 20},
      {U"两", 2},
      {U"二百五十", 250},
      {U"十百", kTooLarge},
      {U"一一十", kTooLarge},
      {U"九九九九九九九", kTooLarge},
  };
  for (const auto& [text, number] : chinese) EXPECT_EQ(number_of_chinese(view(text), 0, text.size()), number);
  EXPECT_EQ(number_of_digits(view(U"0１2"), 0, 3), 12);
  EXPECT_EQ(number_of_digits(view(U"999999999"), 0, 9), 999'999'999);
  EXPECT_EQ(number_of_digits(view(U"9999999999"), 0, 10), kTooLarge);
}

Tables tables() {
  Tables t;
  t.classes = {"unknown", "digits", "dotted", "numeral", "title", "the",      "ordinal", "last", "noun",
               "nouns",   "of",     "comma",  "letter",  "to",    "zordinal", "zpoint",  "zof",  "below"};
  t.generic = {true, false, false};  // point, example, section
  t.words = {{U"the", "the"},
             {U"second", "ordinal", 2},
             {U"third", "ordinal", 3},
             {U"last", "last"},
             {U"point", "noun", {}, 0},
             {U"points", "nouns", {}, 0},
             {U"example", "noun", {}, 1},
             {U"section", "noun", {}, 2},
             {U"of", "of"},
             {U",", "comma"},
             {U"b", "letter"},
             {U"to", "to"},
             {U"below", "below"},
             {U"第", "zordinal"},
             {U"点", "zpoint", {}, 0},
             {U"例子", "zpoint", {}, 1},
             {U"例", "unknown"},
             {U"的", "zof"}};
  const auto form = [&](Lang lang, Meaning means, const char* pattern) { t.forms.push_back({lang, means, pattern}); };
  form(Lang::en, Meaning::list, "<ordinal|last> <noun>");
  form(Lang::en, Meaning::last, "<last> <digits> <nouns>");
  form(Lang::en, Meaning::list, "<nouns> <digits> (<comma|to> <digits>){0,7}");
  form(Lang::en, Meaning::letter, "<noun> <letter>");
  form(Lang::en, Meaning::label, "<noun> <dotted>");
  form(Lang::en, Meaning::title, "<noun> <title>");
  form(Lang::zh, Meaning::list, "<zordinal> <digits|numeral> <zpoint>");
  const auto set = [&](Lang lang, Set which) -> auto& {
    return t.sets[static_cast<int>(lang)][static_cast<int>(which)];
  };
  set(Lang::en, Set::anchors) = {"noun", "nouns"};
  set(Lang::en, Set::before) = {"the"};
  set(Lang::zh, Set::anchors) = {"zordinal"};
  const auto rule = [&](Lang lang, Rule which) -> auto& {
    return t.rules[static_cast<int>(lang)][static_cast<int>(which)];
  };
  rule(Lang::en, Rule::inner_first) = "<of> <the>?";
  rule(Lang::en, Rule::vague_after) = "<below>";
  rule(Lang::en, Rule::lead) = "<digits> <nouns>";
  rule(Lang::zh, Rule::outer_first) = "<zof>";
  return t;
}

constexpr Tag kWord = 9;  // of all words in cut()

// The tokens of a text with blanks between: begin-end:class, which is 0 unknown, 1 digits, 2 dotted, 3 numeral, 4
// title.
std::string cut(const std::u32string& text, bool chinese) {
  const Tables t = tables();
  const Cutter cutter(t.words, std::vector<Tag>(t.words.size(), kWord), {0, 1, 2, 3, 4}, kAscii);
  std::vector<Token> tokens;
  std::vector<Tag> tags;
  cutter.cut(view(text), chinese, tokens, tags);
  std::string cut;
  for (size_t i = 0; i < tokens.size(); ++i)
    cut += std::to_string(tokens[i].begin) + "-" + std::to_string(tokens[i].end) + ":" + std::to_string(tags[i]) + " ";
  return cut;
}

TEST(ReferenceTokens, ByHand) {
  EXPECT_EQ(cut(U"the 1.2.3.4.5 b's", false), "0-3:9 4-11:2 11-12:0 12-13:1 14-15:9 15-17:0 ");
  EXPECT_EQ(cut(U"it'sx", false), "0-2:0 2-3:0 3-5:0 ");
  EXPECT_EQ(cut(U"“a b” \"", false), "0-5:4 6-7:0 ");
  EXPECT_EQ(cut(U"“”“「第", true), "0-1:0 1-2:0 2-3:0 3-4:0 4-5:9 ");  // no title by itself
  EXPECT_EQ(cut(U"好好第十二例子例", true), "0-2:0 2-3:9 3-5:3 5-7:9 7-8:9 ");
  EXPECT_EQ(cut(U"好好", false), "0-1:0 1-2:0 ");
  EXPECT_EQ(cut(U"\u3000\n １２", true), "1-2:0 3-5:1 ");
  EXPECT_EQ(cut(std::u32string(1, '"') + std::u32string(61, 'x') + U'"', false), "0-1:0 1-62:0 62-63:0 ");
  EXPECT_EQ(cut(std::u32string{0xD800, 0x10FFFF}, true), "0-2:0 ");
}

TEST(ReferenceTokens, AreTheSameInEveryWidth) {
  const std::string narrow = "the third point of 4.2";
  const std::u16string wide(narrow.begin(), narrow.end());
  const std::u32string widest(narrow.begin(), narrow.end());
  const Grammar grammar(tables(), kAscii);
  for (const Text& text : {Text{narrow.data(), 1, narrow.size()}, Text{wide.data(), 2, wide.size()}, view(widest)}) {
    const References found = grammar.parse(text, text, Lang::en, 3);
    ASSERT_EQ(found.parts.size(), 1u);
    EXPECT_EQ(found.parts[0].span.end, 15u);
  }
}

// --- sentences

// Each reference in words, of nested ones the outer first: kind [begin,end) noun ranges labels.
std::string parse(const std::u32string& text, Lang lang = Lang::both, int depth = 3) {
  const Grammar grammar(tables(), kAscii);
  const std::u32string low = lower(text);
  const References found = grammar.parse(view(text), view(low), lang, depth);
  std::string out;
  for (const Part& p : found.parts) {
    out += std::string(out.empty() ? ""
                       : p.nested  ? " > "
                                   : "; ") +
           kKinds[static_cast<int>(p.kind)] + " [" + std::to_string(p.span.begin) + "," + std::to_string(p.span.end) +
           ") " + std::to_string(p.noun);
    for (uint32_t i = p.ranges; i < p.ranges + p.range_count; ++i)
      out += " " + std::to_string(found.ranges[i].first) + ".." + std::to_string(found.ranges[i].last);
    for (uint32_t i = p.labels; i < p.labels + p.label_count; ++i)
      out += " " + std::to_string(found.labels[i].begin) + "-" + std::to_string(found.labels[i].end);
  }
  return out;
}

TEST(References, ByHand) {
  EXPECT_EQ(parse(U"Is the third point true?"), "ordinal [3,18) 0 3..3");
  EXPECT_EQ(parse(U"points 2, 4 to 7"), "cardinal [0,16) 0 2..2 4..7");
  EXPECT_EQ(parse(U"points 7 to 4"), "cardinal [0,13) 0 4..7");
  EXPECT_EQ(parse(U"the last 2 points"), "cardinal [0,17) 0 -2..-1");
  EXPECT_EQ(parse(U"the last point"), "ordinal [0,14) 0 -1..-1");
  EXPECT_EQ(parse(U"section B"), "named [0,9) 2 8-9");
  EXPECT_EQ(parse(U"section b"), "vague [0,9) 2");
  EXPECT_EQ(parse(U"section 4.2, section “Costs”"), "named [0,11) 2 8-11; named [13,28) 2 22-27");
  EXPECT_EQ(parse(U"第十二点"), "ordinal [0,4) 0 12..12");
  EXPECT_EQ(parse(U"the third point below"), "vague [0,15) 0");
  EXPECT_EQ(parse(U"points 99999999999"), "ordinal [0,18) 0 1000000000..1000000000");
  EXPECT_EQ(parse(U"nothing third of it"), "");
  EXPECT_EQ(parse(U""), "");
}

TEST(References, AreNestedFromTheOutermostIn) {
  EXPECT_EQ(parse(U"the second example of the third point"), "ordinal [26,37) 0 3..3 > ordinal [0,37) 1 2..2");
  EXPECT_EQ(parse(U"第三点的第二例子"), "ordinal [0,3) 0 3..3 > ordinal [0,8) 1 2..2");
  EXPECT_EQ(parse(U"the third point, the second example"), "ordinal [0,15) 0 3..3; ordinal [17,35) 1 2..2");
  EXPECT_EQ(parse(U"the second example of the third point", Lang::en, 1), "too deep [0,37) 1");
}

// The text of n references, each in the one behind it or before it, and where the outermost ends.
void expect_nested(size_t n, bool inner_first) {
  std::u32string text;
  for (size_t i = 0; i < n; ++i) text += inner_first ? U"third point of " : U"第三点的";
  const auto begin = std::clock();
  const References found = Grammar(tables(), kAscii).parse(view(text), view(text), Lang::both, static_cast<int>(n));
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  ASSERT_EQ(found.parts.size(), n);
  for (size_t i = 0; i + 1 < n; ++i) {  // the innermost has the span of all
    const size_t place = inner_first ? n - 1 - i : i;
    ASSERT_EQ(found.parts[i].span.begin, place * (inner_first ? 15 : 4));
    ASSERT_EQ(found.parts[i].nested, i > 0);
    ASSERT_EQ(found.parts[i].depth, static_cast<int64_t>(i + 1));
  }
  EXPECT_LT(seconds, 3);
}

TEST(References, AreNestedAsDeepAsIsAllowedInLinearTime) {
  expect_nested(5, true);
  expect_nested(5, false);
  expect_nested(400'000, true);
  expect_nested(400'000, false);
}

TEST(References, NeedTheirLanguage) {
  EXPECT_EQ(parse(U"第三点", Lang::en), "");
  EXPECT_EQ(parse(U"the third point", Lang::zh), "");
  const auto of = [](const std::u32string& low) { return lang_of(view(low)); };
  EXPECT_EQ(of(U"a?"), Lang::en);
  EXPECT_EQ(of(U"第三点"), Lang::zh);
  EXPECT_EQ(of(U"a 第三点"), Lang::both);
  EXPECT_EQ(of(U"é"), Lang::both);
}

TEST(References, MentionsOfNouns) {
  const std::u32string low = U"3 points, example";
  const std::vector<Mention> found = Grammar(tables(), kAscii).mentions(view(low));
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[1].noun, 0);
  EXPECT_TRUE(found[1].counted);
  EXPECT_EQ(found[3].noun, 1);
  EXPECT_FALSE(found[3].counted);
  EXPECT_EQ(tables().classes[found[3].cls], "noun");
}

TEST(References, RefuseTablesThatDoNotFit) {
  const auto refused = [](auto change) {
    Tables t = tables();
    change(t);
    EXPECT_THROW(Grammar(t, kAscii), ArgumentError);
  };
  refused([](Tables& t) {
    while (t.classes.size() < 257) t.classes.push_back("class" + std::to_string(t.classes.size()));
  });
  refused([](Tables& t) { t.classes.push_back("the"); });
  refused([](Tables& t) { t.words.push_back({U"x", "none"}); });
  refused([](Tables& t) { t.words.push_back({U"x", "noun", {}, 3}); });
  refused([](Tables& t) { t.classes[0] = "known"; });
  for (const int64_t number : {INT64_MIN, INT64_MAX, -kTooLarge - 1, kTooLarge + 1}) {
    refused([=](Tables& t) { t.words.push_back({U"x", "ordinal", number}); });
    refused([=](Tables& t) { t.forms[0].ordinal = number; });
    refused([=](Tables& t) { t.forms[0].count = number; });
  }
  Tables t = tables();
  t.forms[0].pattern = "<none>";
  EXPECT_THROW(Grammar(t, kAscii), PatternError);
  const std::u32string text = U"ab";
  EXPECT_THROW(Grammar(tables(), kAscii).parse(view(text), {text.data(), 4, 1}, Lang::en, 3), ArgumentError);
}

TEST(References, OfLongTextsInManyThreads) {
  std::u32string text;
  for (int i = 0; i < 20'000; ++i) text += U"the second example of the third point, \xD800 ";
  const Grammar grammar(tables(), kAscii);
  std::vector<std::thread> threads;
  std::vector<size_t> counts(4);
  for (size_t& count : counts)
    threads.emplace_back([&] { count = grammar.parse(view(text), view(text), Lang::both, 3).parts.size(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counts, std::vector<size_t>(4, 40'000));
}

}  // namespace
}  // namespace sic::references
