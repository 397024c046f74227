"""`references.parse` in plain Python, on `re`: what the native parser is held to.

A text is cut into tokens by one regular expression, each token becomes one character, its class, and forms are regular
expressions over these characters. Slow, and not safe from patterns that are made to take long.
"""

import itertools
import re
from typing import NamedTuple

from sic_kernels.references import Reference
from sic_kernels.references.grammar import LANGUAGES, Form, Tables
from sic_kernels.references.numerals import CHINESE, TOO_LARGE
from sic_kernels.references.parsing import with_antecedents

QUOTES = '"“「《'  # one by itself is no title
LONGEST_BEFORE = 6  # tokens that "vague before" describes
LONGEST_GAP = 9  # tokens between two references that may be nested, and before or after one that belong to it
RULES = ("inner first", "outer first", "outer first, other noun", "fronted", "vague before", "vague after", "lead")
_LATIN, _HAN = re.compile("[a-z]"), re.compile("[\u4e00-\u9fff]")
_TAGS = "".join(c for c in map(chr, range(0x30, 0x180)) if c.isalnum())  # they mean nothing in a regular expression

# What classes do where numbers are read. "counts": a "one" behind them is a number.
_ROLES = {
    "value": ("ordinal", "cardinal", "roman", "back"), "tens": ("tens",), "one": ("one",), "digits": ("digits",),
    "numeral": ("numeral",), "last": ("last", "zlast"), "range": ("to", "dash", "zto"),
    "counts": ("noun", "nouns", "number", "but", "znoun"),
}  # fmt: skip
CHINESE_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
CHINESE_UNITS = {"十": 10, "百": 100}


def of_digits(text: str) -> int:
    """Decimal digits, full-width ones too."""
    return int(text) if len(text) < 10 else TOO_LARGE


def of_chinese(text: str) -> int:
    """三, 十二, 二十, 一百零三, 二〇; one that is no number, as 十百, is too large for any list."""
    if len(text) > 6:
        return TOO_LARGE
    if not any(c in CHINESE_UNITS for c in text):
        return int("".join(str(CHINESE_DIGITS[c]) for c in text))
    total, digit, last_unit = 0, None, 1000
    for c in text:
        if c in CHINESE_UNITS:
            unit = CHINESE_UNITS[c]
            if unit >= last_unit:
                return TOO_LARGE
            total, digit, last_unit = total + (1 if digit is None else digit) * unit, None, unit
        elif digit:
            return TOO_LARGE
        else:
            digit = CHINESE_DIGITS[c]
    return total + (digit or 0)


def regex_of(pattern, classes):
    """A pattern of `Tables` as a regular expression over the characters of `classes`."""
    text = re.sub(r"\((?!\?)", "(?:", re.sub(r"\s", "", pattern))
    return re.sub("<([a-z|]+)>", lambda found: f"[{''.join(classes[name] for name in found[1].split('|'))}]", text)


class PlainGrammar:
    """A grammar compiled to regular expressions."""

    def __init__(self, tables: Tables) -> None:
        self.nouns = tables.nouns
        self.classes = classes = dict(zip(tables.classes, _TAGS))
        self.names = {tag: name for name, tag in classes.items()}
        self.tags = {word: classes[cls] for word, (cls, _) in tables.words.items()}
        self.values = {word: value for word, (_, value) in tables.words.items() if value is not None}
        self.roles = {classes[name]: role for role, names in _ROLES.items() for name in names if name in classes}
        self.unknown = classes["unknown"]
        self.first = dict.fromkeys("0123456789０１２３４５６７８９", classes["digits"])
        self.first |= dict.fromkeys(CHINESE, classes["numeral"])
        self.first |= dict.fromkeys(QUOTES, classes["title"])
        self.scanners = _scanners([word for word in tables.words if not word.isascii()])
        of = {lang: [(form, text) for language, form, text in tables.forms if language == lang] for lang in LANGUAGES}
        of["auto"] = [*of["en"], *of["zh"]]
        self.forms = {lang: [form for form, _ in forms] for lang, forms in of.items()}
        self.patterns = {  # an empty group behind each form, so that `lastindex` says which one matched
            lang: re.compile("|".join(f"{regex_of(text, classes)}()" for _, text in forms) or "(?!)")
            for lang, forms in of.items()
        }
        self.rules = {
            (lang, name): re.compile(regex_of(tables.rules[lang, name], classes)) if (lang, name) in tables.rules else None
            for lang in LANGUAGES for name in RULES
        }  # fmt: skip
        self.sets = {key: "".join(classes[cls] for cls in names) for key, names in tables.sets.items()}
        anchors = {lang: self.sets.get((lang, "anchors"), "") for lang in LANGUAGES}
        anchors["auto"] = "".join(anchors.values())
        self.anchors = {lang: re.compile(f"[{tags}]" if tags else "(?!)") for lang, tags in anchors.items()}

    def tokens(self, low, language):
        return self.scanners[language].findall(low)

    def tag(self, tokens):
        """One character for each token."""
        return "".join([self.tags.get(t) or self._first_of(t) for t in tokens])

    def _first_of(self, token):
        return self.unknown if token in QUOTES else self.first.get(token[0], self.unknown)


def _trie(words: list[str]) -> str:
    """A regular expression for the longest of the words: one branch for each first character, so that few are tried."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(word[1:])
    alone = "".join(re.escape(c) for c, tails in rests.items() if tails == [""])
    branches = [f"[{alone}]"] if alone else []
    for c, tails in sorted(rests.items()):
        longer = "|".join(map(re.escape, sorted(filter(None, tails), key=len, reverse=True)))
        if longer:
            branches.append(f"{re.escape(c)}(?:{longer}){'?' if '' in tails else ''}")
    return "|".join(branches) or "(?!)"


def _scanners(words):
    """What cuts texts into tokens: words, numbers, quoted titles, characters of no word, single others but spaces."""
    latin = r"[a-z]+|['’]s\b|[0-9０-９]+(?:\.[0-9]+){0,3}"
    quoted = r'"[^"\n]{1,60}"|“[^”\n]{1,60}”|「[^」\n]{1,60}」|《[^》\n]{1,60}》'
    taken = "".join({re.escape(word[0]) for word in words} | set(CHINESE))
    none = rf"[^\x00-\x7f０-９“「《’\s{taken}]+"
    both = "|".join([none, quoted, _trie(words), f"[{CHINESE}]+", latin, r"\n|\S"])
    return {"en": re.compile(f"{latin}|{quoted}|\\n|\\S"), "zh": re.compile(both), "auto": re.compile(both)}


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
    grammar: PlainGrammar
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


def parse(text: str, grammar: PlainGrammar, depth: int = 3, lang: str = "auto") -> list[Reference]:
    low = text.lower()
    if len(low) != len(text):  # some letters are longer in lower case
        low = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    language = _language(low) if lang == "auto" else lang
    tokens = grammar.tokens(low, language)
    tags = grammar.tag(tokens)
    dotted = _with_dotted(tags, tokens, grammar)
    if not grammar.anchors[language].search(tags + dotted):
        return []
    tags = dotted
    forms = list(grammar.patterns[language].finditer(tags))
    return (
        with_antecedents(_references(_Sentence(text, tokens, tags, grammar, low, language), forms, depth))
        if forms
        else []
    )


def _language(low: str) -> str:
    """The grammars that a text can need: only one where its letters are of one kind."""
    if low.isascii():
        return "en"
    return "auto" if _LATIN.search(low) or not _HAN.search(low) else "zh"


def _with_dotted(tags: str, tokens: list[str], grammar: PlainGrammar) -> str:
    """Numbers with dots (4.2) in a class of their own."""
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
        return name in self.grammar.classes and self.grammar.classes[name] in self.tags

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


def _value(role: str, token: str, grammar: PlainGrammar) -> int:
    if role == "digits":
        return of_digits(token)
    if role == "numeral":
        return of_chinese(token)
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
    before, after = sets.get((lang, "before"), ""), sets.get((lang, "after"), "")
    low, high = max(0, begin - LONGEST_GAP), min(len(tags), end + LONGEST_GAP)
    while begin > low and tags[begin - 1] in before:
        begin -= 1
    while end < high and tags[end] in after:
        end += 1
    return begin, end


# --- nouns before lists ------------------------------------------------------------------------------------------------


def mentions(low, grammar: PlainGrammar):
    """(noun or None, class, whether it is a noun in what counts points) of each token."""
    tokens = grammar.tokens(low, "auto")
    tags = grammar.tag(tokens)
    nouns = [value if isinstance(value := grammar.values.get(t), str) else None for t in tokens]
    counted = set()
    for lead in filter(None, (grammar.rules[lang, "lead"] for lang in LANGUAGES)):
        for found in lead.finditer(tags):
            counted |= {i for i in range(*found.span()) if nouns[i] is not None}
    return [(noun, grammar.names[tag], i in counted) for i, (noun, tag) in enumerate(zip(nouns, tags))]
