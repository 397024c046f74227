"""The grammar of references: word classes and forms, read from JSON files and compiled to regular expressions.

A sentence is cut into tokens and each token becomes one character, its class. Forms are regular expressions over these
characters, so they are short, however long the words are. A form matches a bounded number of tokens: that, and one pass over
the text, is why the time to parse is linear in the length of any text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..runtime.errors import ArgumentError
from . import numerals

SHIPPED = tuple(Path(__file__).parent / "data" / f"{name}.json" for name in ("en", "zh"))
LANGUAGES = ("en", "zh")
MEANINGS = ("nothing", "vague", "list", "from end", "first", "last", "all", "label", "letter", "title")
MOST_REPEATS = 8  # of a part of a form: keeps every form bounded
# In all of a form, repeats multiplied and optional parts: each can be a choice, and a match may have to try all that there are.
MOST_REPEATED, MOST_OPTIONAL = 28, 16
_REPEATS, _OPTIONAL = re.compile(r",(\d)\}"), re.compile(r"(?<!\()\?")

# Characters that mean nothing in a regular expression, one for each class of words.
_TAGS = "".join(c for c in map(chr, range(0x30, 0x180)) if c.isalnum())
# Classes that need no words: the scanner or the numbers fill them.
_BUILT_IN = ("unknown", "digits", "dotted", "numeral", "title", "letter", "roman", "cardinal", "ordinal", "tens", "one")
# What classes do where numbers are read. "counts": a "one" behind them is a number.
_ROLES = {
    "value": ("ordinal", "cardinal", "roman", "back"), "tens": ("tens",), "one": ("one",), "digits": ("digits",),
    "numeral": ("numeral",), "last": ("last", "zlast"), "range": ("to", "dash", "zto"),
    "counts": ("noun", "nouns", "number", "but", "znoun"),
}  # fmt: skip
_NUMBERS = {*_ROLES["value"], *_ROLES["tens"], *_ROLES["one"]}  # classes whose words are read as numbers
_FORM_KEYS = {"means", "pattern", "starts", "ordinal", "count", "capital", "rear"}
_NESTED = ("inner first", "outer first", "outer first, other noun", "fronted")
_SINGLE = ("vague before", "vague after", "lead")
_SETS = ("anchors", "before", "after")  # of classes
_PATTERN = re.compile(r"<([a-z|]+)>|\[([a-z_]+)\]|\{(\d),(\d)\}|\(\?(?:[=!]|<=|<!)|[()|?$]|(\s+)")


@dataclasses.dataclass(frozen=True)
class Noun:
    """What a noun fits. generic: any enumeration ("point"); structural: what the text is made of ("paragraph"), never a list."""

    generic: bool = False
    structural: bool = False


@dataclasses.dataclass(frozen=True)
class Form:
    """One pattern over word classes. means: how its numbers are read, one of `MEANINGS`; ordinal, count: fixed by the words."""

    means: str
    ordinal: int | None = None
    count: int | None = None
    capital: bool = False  # only where the first letter is a capital: "No. 4"
    rear: bool = False  # counts what is behind a place, so one is not "the last": 后一点


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar: immutable, shared by threads. `load_grammar` makes it.

    nouns: by their canonical names.  tags: word -> class character.  values: word -> number or canonical noun.
    """

    nouns: Mapping[str, Noun]
    tags: Mapping[str, str]
    values: Mapping[str, Any]
    classes: Mapping[str, str]  # class -> its character
    names: Mapping[str, str]  # and back
    roles: Mapping[str, str]  # class character -> what its words do in numbers
    first: Mapping[str, str]  # first character of a token that is no word -> class character
    scanners: Mapping[str, re.Pattern[str]]
    forms: Mapping[str, tuple[Form, ...]]  # by language, in the order of the groups of `patterns`
    patterns: Mapping[str, re.Pattern[str]]
    rules: Mapping[tuple[str, str], re.Pattern[str] | None]  # (language, rule) -> what is around and between references
    sets: Mapping[tuple[str, str], str]  # (language, set) -> class characters
    anchors: Mapping[str, re.Pattern[str]]  # by language: a sentence without any of these has no reference
    sequence: Mapping[str, int | str]  # firstly -> 1, finally -> "last"
    unknown: str  # class character of what no class has

    def tokens(self, low: str, language: str) -> list[str]:
        """The tokens of a text in lower case."""
        return self.scanners[language].findall(low)

    def tag(self, tokens: list[str]) -> str:
        """One character for each token."""
        known, first, unknown = self.tags.get, self.first.get, self.unknown
        return "".join([known(t) or first(t[0], unknown) for t in tokens])


def load_grammar(*paths: str | os.PathLike[str], extend: bool = True) -> Grammar:
    """The grammar of the given files, on top of those of the package.

    paths: JSON files; docs/references.md has the format. Words, nouns and forms are added to those of the files before; a class
    of the same name grows. A word keeps the class that it was given first.
    extend: False leaves the package's files out.

    `ArgumentError` names the file and the key. Compiling takes some milliseconds, so keep the result.
    """
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError.of("load_grammar", "paths", repr(path), "paths of JSON files")
    files = [*(SHIPPED if extend else ()), *map(Path, paths)]
    if not files:
        raise ArgumentError.of("load_grammar", "paths", "none", "a file, or extend=True")
    builder = _Builder()
    for path in files:
        builder.add(path)
    return builder.grammar()


@functools.lru_cache(maxsize=1)
def shipped() -> Grammar:
    """The grammar of the package, compiled at its first use."""
    return load_grammar()


class _Source(NamedTuple):
    """A form as a file has it. starts: the classes that it can begin with, for speed."""

    where: str
    key: str
    pattern: str
    starts: str


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


class _Builder:
    """Collects what files say, then compiles it."""

    def __init__(self) -> None:
        self.words: dict[str, tuple[str, Any]] = {}  # word -> (class, value)
        self.nouns: dict[str, Noun] = {}
        self.parts: dict[str, dict[str, str]] = {language: {} for language in LANGUAGES}
        self.forms: dict[str, list[tuple[Form, _Source]]] = {language: [] for language in LANGUAGES}
        self.rules: dict[tuple[str, str], tuple[str, str]] = {}
        self.sets: dict[tuple[str, str], list[str]] = {}
        self.sequence: dict[str, int | str] = {}
        self.where = ""
        self._add_words("unknown", dict.fromkeys('"“「《'))  # a quotation mark by itself
        self._add_words("roman", {word: n for word, n in numerals.roman() if len(word) > 1})

    def add(self, path: Path) -> None:
        self.where = path.name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self._refuse("file", str(error), "a readable JSON file in UTF-8")
        known = {"language", "numbers", "nouns", "classes", "parts", "forms", "nested", "sequence", *_SINGLE, *_SETS}
        self._check_keys("file", data, known)
        language = data.get("language")
        if language not in LANGUAGES:
            self._refuse("language", repr(language), "|".join(LANGUAGES))
        self._add_numbers(data.get("numbers", {}))
        for name, words in self._table(data, "classes").items():
            if isinstance(words, dict):
                self._add_words(name, {w: self._integer(f"classes.{name}.{w}", n) for w, n in words.items()})
            else:
                self._add_words(name, dict.fromkeys(self._strings(f"classes.{name}", words)))
        for name, noun in self._table(data, "nouns").items():
            self._add_noun(name, noun)
        for name, pattern in self._table(data, "parts").items():
            self.parts[language][name] = self._string(f"parts.{name}", pattern)
        self._add_forms(language, data.get("forms", []))
        nested = self._table(data, "nested")
        self._check_keys("nested", nested, set(_NESTED))
        for name, pattern in [*nested.items(), *((key, data[key]) for key in _SINGLE if key in data)]:
            self.rules[language, name] = (self.where, self._string(name, pattern))
        if data.get("forms") and "anchors" not in data:
            self._refuse("anchors", "none", "classes of which every form has one, as there are forms")
        for name in _SETS:
            self.sets.setdefault((language, name), []).extend(self._strings(name, data.get(name, [])))
        for ordinal, words in self._table(data, "sequence").items():
            if ordinal not in ("next", "last") and not ordinal.isdecimal():
                self._refuse("sequence", repr(ordinal), "a number, next or last")
            for word in self._strings(f"sequence.{ordinal}", words):
                self.sequence[word] = int(ordinal) if ordinal.isdecimal() else ordinal

    def grammar(self) -> Grammar:
        self._add_words("letter", dict.fromkeys("bcdefghijklmnopqrstuvwxyz"))
        names = sorted({cls for cls, _ in self.words.values()} | set(_BUILT_IN))
        classes = dict(zip(names, _TAGS))
        if len(names) > len(_TAGS):
            self._refuse("classes", f"{len(names)} classes", f"at most {len(_TAGS)}")
        compiled = {language: self._alternatives(language, classes) for language in LANGUAGES}
        every = dict.fromkeys((*LANGUAGES, "auto"), "")
        every |= compiled | {"auto": "|".join(filter(None, compiled.values()))}
        rules = {
            (language, name): self._rule(language, name, classes) if (language, name) in self.rules else None
            for language in LANGUAGES for name in (*_NESTED, *_SINGLE)
        }  # fmt: skip
        sets = {(language, name): self._set(language, name, classes) for language in LANGUAGES for name in _SETS}
        anchors = {language: sets[language, "anchors"] for language in LANGUAGES}
        anchors["auto"] = "".join(anchors.values())
        first = dict.fromkeys("0123456789０１２３４５６７８９", classes["digits"])
        first |= dict.fromkeys(numerals.CHINESE, classes["numeral"]) | dict.fromkeys('"“「《', classes["title"])
        forms = {language: tuple(form for form, _ in self.forms[language]) for language in LANGUAGES}
        return Grammar(
            nouns=self.nouns,
            tags={word: classes[cls] for word, (cls, _) in self.words.items()},
            values={word: value for word, (_, value) in self.words.items() if value is not None},
            classes=classes,
            names={tag: name for name, tag in classes.items()},
            roles={classes[name]: role for role, names in _ROLES.items() for name in names if name in classes},
            first=first,
            scanners=self._scanners(),
            forms={**forms, "auto": (*forms["en"], *forms["zh"])},
            patterns={language: re.compile(text or "(?!)") for language, text in every.items()},
            rules=rules,
            sets=sets,
            anchors={language: re.compile(f"[{tags}]" if tags else "(?!)") for language, tags in anchors.items()},
            sequence=self.sequence,
            unknown=classes["unknown"],
        )

    def _alternatives(self, language: str, classes: dict[str, str]) -> str:
        """All forms of a language, an empty group behind each so that `lastindex` says which one matched."""
        branches = []
        for starts, forms in itertools.groupby((source for _, source in self.forms[language]), lambda s: s.starts):
            group = [f"{self._expand(language, s.where, f'{s.key}.pattern', s.pattern, classes)}()" for s in forms]
            if starts:  # one look at the next token in place of a try for each form
                ahead = self._expand(language, self.where, "starts", starts, classes)
                group = [f"(?={ahead})(?:{'|'.join(group)})"]
            branches += group
        return "|".join(branches)

    def _rule(self, language: str, name: str, classes: dict[str, str]) -> re.Pattern[str]:
        where, pattern = self.rules[language, name]
        return re.compile(self._expand(language, where, name, pattern, classes))

    def _set(self, language: str, name: str, classes: dict[str, str]) -> str:
        names = self.sets.get((language, name), [])
        unknown = [cls for cls in names if cls not in classes]
        if unknown:
            self._refuse(name, f"class {unknown[0]!r}", f"one of {', '.join(sorted(classes))}")
        return "".join(classes[cls] for cls in names)

    def _scanners(self) -> dict[str, re.Pattern[str]]:
        """What cuts texts into tokens: words, numbers, quoted titles, characters of no word, single others but spaces."""
        latin = r"[a-z]+|['’]s\b|[0-9０-９]+(?:\.[0-9]+){0,3}"
        quoted = r'"[^"\n]{1,60}"|“[^”\n]{1,60}”|「[^」\n]{1,60}」|《[^》\n]{1,60}》'
        words = [word for word in self.words if not word.isascii()]
        taken = "".join({re.escape(word[0]) for word in words} | set(numerals.CHINESE))
        none = rf"[^\x00-\x7f０-９“「《’\s{taken}]+"
        both = "|".join([none, quoted, _trie(words), f"[{numerals.CHINESE}]+", latin, r"\n|\S"])
        return {"en": re.compile(f"{latin}|{quoted}|\\n|\\S"), "zh": re.compile(both), "auto": re.compile(both)}

    def _expand(
        self, language: str, where: str, key: str, pattern: str, classes: dict[str, str], depth: int = 0
    ) -> str:
        """A pattern over classes as a regular expression over their characters."""
        self.where = where
        out, at = [], 0
        while at < len(pattern):
            found = _PATTERN.match(pattern, at)
            if found is None or depth > 8:
                self._refuse(
                    key, repr(pattern[at : at + 20]), "<class>, [part], ( ), |, ?, {m,n}, (?= ), (?! ), (?<= ) or $"
                )
            names, part, _, most, space = found.groups()
            if names is not None:
                unknown = [name for name in names.split("|") if name not in classes]
                if unknown:
                    self._refuse(key, f"class {unknown[0]!r}", f"one of {', '.join(sorted(classes))}")
                tags = "".join(classes[name] for name in names.split("|"))
                out.append(f"[{tags}]" if len(tags) > 1 else tags)
            elif part is not None:
                parts = self.parts[language]
                if part not in parts:
                    self._refuse(key, f"part {part!r}", f"one of {', '.join(sorted(parts))}")
                out.append(self._expand(language, where, f"parts.{part}", parts[part], classes, depth + 1))
            elif most is not None and int(most) > MOST_REPEATS:
                self._refuse(key, found[0], f"at most {MOST_REPEATS} repeats")
            elif space is None:
                out.append("(?:" if found[0] == "(" else found[0])
            at = found.end()
        text = f"(?:{''.join(out)})"
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            self._refuse(key, repr(pattern), f"a pattern ({error})")
        if depth == 0:
            self._check_choices(key, text)
        return text

    def _check_choices(self, key: str, text: str) -> None:
        repeated = math.prod(max(1, int(most)) for most in _REPEATS.findall(text))
        optional = len(_OPTIONAL.findall(text))
        if repeated > MOST_REPEATED:
            self._refuse(key, f"repeats of {repeated} in all", f"repeats whose product is at most {MOST_REPEATED}")
        if optional > MOST_OPTIONAL:
            self._refuse(key, f"{optional} optional parts", f"at most {MOST_OPTIONAL}")

    def _add_numbers(self, numbers: Any) -> None:
        """Ordinal and cardinal words; what is made of two words ("twenty-first") is made of two tokens."""
        self._check_keys("numbers", numbers, {"cardinals", "ordinals", "tens", "tenths"})
        for key, cls, start, step in (
            ("cardinals", "cardinal", 1, 1), ("ordinals", "ordinal", 1, 1),
            ("tens", "tens", 20, 10), ("tenths", "ordinal", 20, 10),
        ):  # fmt: skip
            words = self._strings(f"numbers.{key}", numbers.get(key, []))
            values = dict(zip(words, itertools.count(start, step)))
            if key == "cardinals" and words:  # "the second one": a number or a noun
                self._add_words("one", {words[0]: values.pop(words[0])})
            self._add_words(cls, values)

    def _add_noun(self, name: str, noun: Any) -> None:
        key = f"nouns.{name}"
        self._check_keys(key, noun, None)
        marks = {n: self._flag(f"{key}.{n}", noun.get(n, False)) for n in ("generic", "structural")}
        self.nouns.setdefault(name, Noun(**marks))
        for cls, words in noun.items():
            if cls not in marks:
                self._add_words(cls, dict.fromkeys(self._strings(f"{key}.{cls}", words), name))

    def _add_forms(self, language: str, forms: Any) -> None:
        if not isinstance(forms, list):
            self._refuse("forms", type(forms).__name__, "a list")
        for i, form in enumerate(forms):
            key = f"forms[{i}]"
            self._check_keys(key, form, _FORM_KEYS)
            if form.get("means") not in MEANINGS:
                self._refuse(f"{key}.means", repr(form.get("means")), "|".join(MEANINGS))
            pattern = self._string(f"{key}.pattern", form.get("pattern"))
            marks: dict[str, Any] = {n: self._integer(f"{key}.{n}", form[n]) for n in ("ordinal", "count") if n in form}
            marks |= {n: self._flag(f"{key}.{n}", form[n]) for n in ("capital", "rear") if n in form}
            starts = self._string(f"{key}.starts", form.get("starts", ""))
            self.forms[language].append((Form(form["means"], **marks), _Source(self.where, key, pattern, starts)))

    def _add_words(self, cls: str, words: dict[str, Any]) -> None:
        if not re.fullmatch("[a-z]+", cls):
            self._refuse("classes", repr(cls), "a name of lower-case letters")
        for word, value in words.items():
            if value is None and cls in _NUMBERS and word.lower() not in self.words:
                self._refuse(f"classes.{cls}", f"{word!r} without a number", "words with their numbers")
            self.words.setdefault(word.lower(), (cls, value))

    def _table(self, data: dict[str, Any], key: str) -> dict[str, Any]:
        self._check_keys(key, data.get(key, {}), None)
        return data.get(key, {})

    def _check_keys(self, key: str, value: Any, known: set[str] | None) -> None:
        if not isinstance(value, dict):
            self._refuse(key, type(value).__name__, "an object")
        unknown = [name for name in value if known is not None and name not in known]
        if unknown:
            self._refuse(key, f"key {unknown[0]!r}", "|".join(sorted(known or ())))

    def _string(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            self._refuse(key, repr(value), "a string")
        return value

    def _strings(self, key: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
            self._refuse(key, repr(value), "a list of words")
        return value

    def _integer(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(key, repr(value), "an integer")
        return value

    def _flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self._refuse(key, repr(value), "true or false")
        return value

    def _refuse(self, key: str, got: str, expected: str) -> NoReturn:
        raise ArgumentError.of("load_grammar", f"{self.where}: {key}", got, expected)
