"""`parse`: the structured references of a sentence."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

from ..runtime import config
from ..runtime.arguments import integer
from ..runtime.errors import ArgumentError
from . import numerals
from .grammar import Form, Grammar, shipped

MOST_DEPTH = 3
LANGS = ("auto", "en", "zh")
_LATIN, _HAN = re.compile("[a-z]"), re.compile("[\u4e00-\u9fff]")
LONGEST_BEFORE = 6  # tokens that "vague before" describes
LONGEST_GAP = 9  # tokens between two references that may be nested, and before or after one that belong to it


class Reference(NamedTuple):
    """What a part of a sentence refers to, before anything is looked up. Immutable, hashable.

    span: (begin, end) in the characters of the text, the outer references of a nested one included.
    kind: "ordinal" (one point), "cardinal" (a group), "named" (by a letter, a number such as 4.2, or a title), "vague" (no
    structure to resolve it by) or "too deep" (nested deeper than `depth`); the last two never resolve.
    ordinal: of the point, or of the first of a group; negative when counted from the end; None where there is none.
    noun: canonical ("reason" for "arguments"), None where there is none ("the third").
    depth: 1, and 1 more for every reference that it is nested in.
    ranges: of ordinals, (first, last) each, both included.  total: how many points the list must have ("all five reasons").
    labels: of a named one, as written.  within: the reference that it is nested in.
    """

    span: tuple[int, int]
    kind: str
    ordinal: int | None
    noun: str | None
    depth: int
    ranges: tuple[tuple[int, int], ...] = ()
    total: int | None = None
    labels: tuple[str, ...] = ()
    within: Reference | None = None


class _Found(NamedTuple):
    """A form that matched: tokens [begin, end), what they say, and in which language."""

    begin: int
    end: int
    reference: Reference
    lang: str


class _Sentence(NamedTuple):
    """A text cut into tokens."""

    text: str
    tokens: list[str]
    tags: str
    grammar: Grammar
    low: str
    language: str

    def places(self, end: int) -> list[tuple[int, int]]:
        """Where each token before `end` is; found again only when a reference was found."""
        scanner = self.grammar.scanners[self.language]
        return [found.span() for found in itertools.islice(scanner.finditer(self.low), end)]

    def is_all(self, lang: str, rule: str, tags: str) -> bool:
        """Whether the rule describes all of these tags."""
        pattern = self.grammar.rules[lang, rule]
        return pattern is not None and pattern.fullmatch(tags) is not None


def parse(
    text: str, *, depth: int | None = None, lang: str = "auto", grammar: Grammar | None = None
) -> list[Reference]:
    """The references of `text`, in their order.

    text: of any length, English or Chinese or both; quoted parts are not searched (they can be titles).
    depth: how deep references may be nested, 1 to 3 (default: `SIC_HASH_DEPTH`).  A text that nests deeper gives one reference
    of kind "too deep" in place of the nested one, so that nothing is resolved to a part of what was meant.
    lang: "en" or "zh" for one grammar only; "auto" takes the English one unless a text has Chinese letters and no Latin ones, and
    the Chinese one where it has other than ASCII characters.
    grammar: of `load_grammar` (default: the package's).

    Nothing is guessed: what has no ordinal, number, letter or title is of kind "vague" or is not found at all.
    Time linear in the length of the text. Deterministic; thread-safe; `ArgumentError` before anything is read.
    """
    if not isinstance(text, str):
        raise ArgumentError.of("parse", "text", type(text).__name__, "str")
    if lang not in LANGS:
        raise ArgumentError.of("parse", "lang", repr(lang), "|".join(LANGS))
    most = config.current().hash_depth if depth is None else checked_depth(depth)
    grammar = checked_grammar("parse", grammar)
    low = text.lower()
    if len(low) != len(text):  # some letters are longer in lower case
        low = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    language = _language(low) if lang == "auto" else lang
    tokens = grammar.tokens(low, language)
    tags = grammar.tag(tokens)
    if not grammar.anchors[language].search(tags):  # most sentences end here
        return []
    if "." in low and grammar.classes["digits"] in tags:
        tags = _with_dotted(tags, tokens, grammar)
    forms = list(grammar.patterns[language].finditer(tags))
    return _references(_Sentence(text, tokens, tags, grammar, low, language), forms, most) if forms else []


def _language(low: str) -> str:
    """The grammars that a text can need: only one where its letters are of one kind."""
    if low.isascii():
        return "en"
    return "auto" if _LATIN.search(low) or not _HAN.search(low) else "zh"


def checked_depth(depth: Any) -> int:
    value = integer("parse", "depth", depth, 1, f"an integer from 1 to {MOST_DEPTH}")
    if value > MOST_DEPTH:
        raise ArgumentError.of("parse", "depth", value, f"an integer from 1 to {MOST_DEPTH}")
    return value


def checked_grammar(op: str, grammar: Any) -> Grammar:
    if grammar is None:
        return shipped()
    if not isinstance(grammar, Grammar):
        raise ArgumentError.of(op, "grammar", type(grammar).__name__, "Grammar, of load_grammar")
    return grammar


def _with_dotted(tags: str, tokens: list[str], grammar: Grammar) -> str:
    """Numbers with dots (4.2) in a class of their own; rare, so not looked for in every sentence."""
    digits, dotted = grammar.classes["digits"], grammar.classes["dotted"]
    return "".join(dotted if tag == digits and "." in token else tag for tag, token in zip(tags, tokens))


def _references(sentence: _Sentence, forms: list[re.Match[str]], most: int) -> list[Reference]:
    """Matches read, then joined to nested references from left to right."""
    places = sentence.places(forms[-1].end() + LONGEST_GAP)
    found = [f for match in forms if (f := _read(sentence, places, match)) is not None]
    result: list[Reference] = []
    chain: list[_Found] = []
    for this, following in itertools.zip_longest(found, found[1:]):
        chain.append(this)
        if following is None or not _nested(sentence, this, following):
            result.append(_chained(sentence, places, chain, most))
            chain = []
    return result


def _read(sentence: _Sentence, places: list[tuple[int, int]], match: re.Match[str]) -> _Found | None:
    """What one match says; None where it says nothing."""
    begin, end = match.span()
    if begin == end:
        return None
    index = (match.lastindex or 1) - 1
    grammar = sentence.grammar
    form = grammar.forms[sentence.language][index]
    if form.means == "nothing":
        return None
    lang = sentence.language
    if lang == "auto":
        lang = "en" if index < len(grammar.forms["en"]) else "zh"
    span = (places[begin][0], places[end - 1][1])
    if form.capital and not _numero(sentence.text, span[0]):
        return None
    return _Found(begin, end, _MEANINGS[form.means](_Reader(sentence, places, begin, end), form, span), lang)


def _numero(text: str, begin: int) -> bool:
    """ "No." with its capital, and not because a sentence begins."""
    before = text[max(0, begin - 2) : begin].strip()
    return text[begin].isupper() and before not in ("", ".", "!", "?", ":")


class _Reader:
    """Numbers, nouns and labels among the tokens of one match."""

    def __init__(self, sentence: _Sentence, places: list[tuple[int, int]], begin: int, end: int) -> None:
        self.text, self.places, self.begin = sentence.text, places, begin
        self.tokens, self.tags = sentence.tokens[begin:end], sentence.tags[begin:end]
        self.grammar = sentence.grammar

    def noun(self) -> str | None:
        """The last one; a general one only where there is no other: 优点的第三条."""
        values = map(self.grammar.values.get, reversed(self.tokens))
        nouns = [value for value in values if isinstance(value, str)]
        return next((noun for noun in nouns if not self.grammar.nouns[noun].generic), nouns[0] if nouns else None)

    def has(self, name: str) -> bool:
        return self.grammar.classes.get(name, "") in self.tags

    def numbers(self) -> list[tuple[int, bool]]:
        """Ordinals and cardinals in their order, "last" as -1; whether each ends a range that the one before it begins."""
        found: list[tuple[int, bool]] = []
        roles, tens, ranged, counting = self.grammar.roles, 0, False, False
        for token, tag in zip(self.tokens, self.tags):
            role = roles.get(tag)
            if role is None:
                continue
            if role == "range":
                ranged = bool(found) and not tens
                continue
            if role == "counts":
                counting = True
                continue
            if role == "one" and not counting:  # "the second one" is no number
                continue
            counting &= role != "last"  # "the last one"
            value = _value(role, token, self.grammar)
            if tens and not 0 < value < 10:
                found.append((tens, ranged))
                tens, ranged = 0, False
            if role == "tens":
                tens, counting = value, True
            else:
                found.append((tens + value, ranged))
                tens, ranged = 0, False
        return [*found, (tens, ranged)] if tens else found

    def ranges(self) -> tuple[tuple[int, int], ...]:
        ranges: list[tuple[int, int]] = []
        for value, ranged in self.numbers():
            if ranged and ranges:
                first = ranges[-1][0]
                ranges[-1] = (min(first, value), max(first, value)) if value > 0 else (first, value)
            else:
                ranges.append((value, value))
        return tuple(ranges)

    def written(self, *names: str) -> list[str]:
        """The tokens of these classes as they stand in the text."""
        tags = {self.grammar.classes.get(name) for name in names}
        at = [self.places[self.begin + i] for i, tag in enumerate(self.tags) if tag in tags]
        return [self.text[begin:end] for begin, end in at]


def _value(role: str, token: str, grammar: Grammar) -> int:
    if role == "digits":
        return numerals.of_digits(token)
    if role == "numeral":
        return numerals.of_chinese(token)
    return -1 if role == "last" else grammar.values[token]


# --- what forms mean ---------------------------------------------------------------------------------------------------


def _one_or_group(span: tuple[int, int], noun: str | None, ranges: tuple[tuple[int, int], ...]) -> Reference:
    if not ranges:  # a form of a file may match without a number
        return Reference(span, "vague", None, noun, 1)
    single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return Reference(span, "ordinal" if single else "cardinal", ranges[0][0], noun, 1, ranges)


def _vague(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    return Reference(span, "vague", None, read.noun(), 1)


def _list(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    if any(left and right for (_, left), (_, right) in itertools.pairwise(read.numbers())):  # "2 to the second to last"
        return _vague(read, form, span)
    return _one_or_group(span, read.noun(), read.ranges())


def _from_end(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    numbers = [abs(n) for n, _ in read.numbers() if n != -1]
    place = form.ordinal or (numbers[0] if numbers else 2)  # "next to last" has no number
    place += read.has("but")  # "the last but one"
    return _one_or_group(span, read.noun(), ((-place, -place),))


def _first(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    numbers = [n for n, _ in read.numbers()]
    if len(numbers) > 1 and numbers[0] != 1:  # "the second two"
        return _vague(read, form, span)
    if not numbers or numbers[-1] < 2:  # 前一点: the one before some place
        return _vague(read, form, span)
    return _one_or_group(span, read.noun(), ((1, numbers[-1]),))


def _last(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    count = next((n for n, _ in read.numbers() if n != -1), 1)
    if count < 1 or (count == 1 and form.rear):
        return _vague(read, form, span)
    return _one_or_group(span, read.noun(), ((-count, -1),))


def _all(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    count = form.count or next((n for n, _ in read.numbers()), None)
    if count == 1:  # 这一点
        return _vague(read, form, span)
    return Reference(span, "cardinal", 1, read.noun(), 1, ((1, -1),), count)


def _named(read: _Reader, form: Form, span: tuple[int, int], labels: list[str]) -> Reference:
    if not labels or "" in labels:
        return _vague(read, form, span)
    return Reference(span, "named", None, read.noun(), 1, labels=tuple(labels))


def _label(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    return _named(read, form, span, read.written("dotted"))


def _letter(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    letters = read.written("letter", "a")
    if not all(letter.isupper() for letter in letters):  # "give the reason a name"
        return _vague(read, form, span)
    return _named(read, form, span, letters)


def _title(read: _Reader, form: Form, span: tuple[int, int]) -> Reference:
    return _named(
        read, form, span, [title.strip('"“”「」《》') for title in read.written("title", "heading", "zheading")]
    )


_MEANINGS = {
    "vague": _vague, "list": _list, "from end": _from_end, "first": _first, "last": _last, "all": _all, "label": _label,
    "letter": _letter, "title": _title,
}  # fmt: skip


# --- nesting -----------------------------------------------------------------------------------------------------------


def _nested(sentence: _Sentence, left: _Found, right: _Found) -> str:
    """How two neighbours are nested: "inner first", "outer first", or "" for not at all."""
    lang = left.lang
    if lang != right.lang or right.begin - left.end > LONGEST_GAP:
        return ""
    gap = sentence.tags[left.end : right.begin]
    for way in ("inner first", "outer first"):
        if sentence.is_all(lang, way, gap):
            return way
    nouns = {left.reference.noun, right.reference.noun}
    other = len(nouns) == 2 and None not in nouns
    if other and (sentence.is_all(lang, "outer first, other noun", gap) or _fronted(sentence, left, gap)):
        return "outer first"
    return ""


def _fronted(sentence: _Sentence, left: _Found, gap: str) -> bool:
    """ "In the third point, what do you mean by ...": a preposition before, a comma behind, and no other sentence begins."""
    begin, _ = _stretched(sentence, left.begin, left.end, left.lang)
    names = [sentence.grammar.names[tag] for tag in gap]
    preposition = sentence.is_all(left.lang, "fronted", sentence.tags[max(0, begin - 1) : begin])
    return preposition and names[:1] == ["comma"] and "stop" not in names


def _chained(sentence: _Sentence, places: list[tuple[int, int]], chain: list[_Found], most: int) -> Reference:
    """One reference of nested ones, each with the one that it is in."""
    first, last, count = chain[0], chain[-1], len(chain)
    begin, end = _stretched(sentence, first.begin, last.end, first.lang)
    span = (places[begin][0], places[end - 1][1])
    if count > most:
        return Reference(span, "too deep", None, first.reference.noun, count)
    if "vague" in [f.reference.kind for f in chain] or _made_vague(sentence, first, last):
        return Reference(span, "vague", None, first.reference.noun, count)
    within: Reference | None = None
    for depth, found in enumerate(_order(sentence, chain) if count > 1 else chain, 1):
        _, kind, ordinal, noun, _, ranges, total, labels, _ = part = found.reference
        within = Reference(
            span if depth == count else part.span, kind, ordinal, noun, depth, ranges, total, labels, within
        )
    assert within is not None
    return within


def _order(sentence: _Sentence, chain: list[_Found]) -> list[_Found]:
    """From the outermost to the innermost: each link says on which side the inner one is."""
    ordered = chain[:1]
    for left, right in itertools.pairwise(chain):
        at = ordered.index(left)
        ordered.insert(at + 1 if _nested(sentence, left, right) == "outer first" else at, right)
    return ordered


def _made_vague(sentence: _Sentence, first: _Found, last: _Found) -> bool:
    """Words around a reference that make it another one: "the third point below", 第三点后面那一点."""
    rules, tags = sentence.grammar.rules, sentence.tags
    after, before = rules[first.lang, "vague after"], rules[first.lang, "vague before"]
    if after is not None and after.match(tags, last.end):
        return True
    return before is not None and any(
        before.fullmatch(tags, begin, first.begin) for begin in range(max(0, first.begin - LONGEST_BEFORE), first.begin)
    )


def _stretched(sentence: _Sentence, begin: int, end: int, lang: str) -> tuple[int, int]:
    """The tokens around that belong to it: "your ... you just gave"."""
    tags, sets = sentence.tags, sentence.grammar.sets
    before, after = sets[lang, "before"], sets[lang, "after"]
    low, high = max(0, begin - LONGEST_GAP), min(len(tags), end + LONGEST_GAP)
    while begin > low and tags[begin - 1] in before:
        begin -= 1
    while end < high and tags[end] in after:
        end += 1
    return begin, end
