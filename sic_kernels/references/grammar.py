"""The grammar of references: word classes and forms, read from JSON files, checked, and handed to the native parser.

A sentence is cut into tokens and each token has one class of words. Forms are patterns over classes
(csrc/references/pattern.h), so they are short, however long the words are. A form matches a bounded number of tokens: that, and
one pass over the text, is why the time to parse is linear in the length of any text.
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

from ..runtime import native
from ..runtime.errors import ArgumentError
from ..runtime.values import file_path, flag
from . import numerals
from .types import Reference

SHIPPED = tuple(Path(__file__).parent / "data" / f"{name}.json" for name in ("en", "zh"))
LANGUAGES = ("en", "zh")
MEANINGS = ("nothing", "vague", "list", "from end", "first", "last", "all", "label", "letter", "title")
MOST_REPEATS = 8  # of a part of a form: keeps every form bounded
# Of a pattern with its parts put in: repeats multiplied, as they are written out; optional parts; characters.
MOST_REPEATED, MOST_OPTIONAL, MOST_CHARACTERS = 28, 16, 1 << 14
_REPEATS, _OPTIONAL = re.compile(r",(\d)\}"), re.compile(r"(?<!\()\?")
MOST_CLASSES = 256
MOST_NESTED = 8  # parts in one another

# Classes that need no words: what cuts the text fills them, or the numbers do.
_BUILT_IN = ("unknown", "digits", "dotted", "numeral", "title", "letter", "roman", "cardinal", "ordinal", "tens", "one")
_NUMBERS = {"ordinal", "cardinal", "roman", "back", "tens", "one"}  # classes whose words are read as numbers
_SPELT = {"digits", "numeral"}  # classes whose characters are read as numbers, so they have no words
_FORM_KEYS = {"means", "pattern", "starts", "ordinal", "count", "capital", "rear"}
NESTED = ("inner first", "outer first", "outer first, other noun", "fronted")
SINGLE = ("vague before", "vague after", "lead")
SETS = ("anchors", "before", "after")  # of classes
_KEYS = {"language", "numbers", "nouns", "classes", "parts", "forms", "nested", "sequence", "counted", *SINGLE, *SETS}
COUNTED = ("before", "between", "verbs")  # words around the number of a sentence that counts: counted.py
_PATTERN = re.compile(r"<([a-z|]+)>|\[([a-z_]+)\]|\{(\d),(\d)\}|\(\?(?:[=!]|<=|<!)|[()|?$]|(\s+)")


@dataclasses.dataclass(frozen=True)
class Noun:
    """What a noun fits. generic: any enumeration ("point"); structural: found only where the text
    itself names it, as what it is made of ("paragraph") or what a list is of."""

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


class Tables(NamedTuple):
    """What files say, checked. Patterns have their parts put in; a form's `starts` is a look-ahead before its pattern."""

    classes: list[str]
    words: dict[str, tuple[str, int | str | None]]  # word -> class, its number or canonical noun
    nouns: dict[str, Noun]
    forms: list[tuple[str, Form, str]]  # language, form, pattern
    rules: dict[tuple[str, str], str]  # (language, rule) -> what is around and between references
    sets: dict[tuple[str, str], list[str]]  # (language, set) -> classes
    sequence: dict[str, int | str]  # firstly -> 1, finally -> "last"
    counted: dict[tuple[str, str], list[str]]  # (language, one of COUNTED) -> words


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar made ready: immutable, shared by threads. `load_grammar` makes it.

    nouns: by their canonical names.  classes: word -> class.  values: word -> number or canonical noun.
    sequence: firstly -> 1, finally -> "last".  counted: (language, one of COUNTED) -> words.
    """

    nouns: Mapping[str, Noun]
    classes: Mapping[str, str]
    values: Mapping[str, Any]
    sequence: Mapping[str, int | str]
    counted: Mapping[tuple[str, str], list[str]]
    native: Any  # what parses: _C.ReferenceGrammar


def load_grammar(*paths: str | os.PathLike[str], extend: bool = True) -> Grammar:
    """The grammar of the given files, on top of those of the package.

    paths: JSON files; docs/references.md has the format. Words, nouns and forms are added to those of the files before; a class
    of the same name grows. A word keeps the class that it was given first.
    extend: False leaves the package's files out.

    `ArgumentError` names the file and the key. Compiling takes some milliseconds, so keep the result.
    """
    return _made_ready(read_tables(*paths, extend=extend))


def read_tables(*paths: str | os.PathLike[str], extend: bool = True) -> Tables:
    """What the files of `load_grammar` say."""
    own = [Path(file_path("load_grammar", "paths", path, "paths of JSON files")) for path in paths]
    files = [*(SHIPPED if flag("load_grammar", "extend", extend) else ()), *own]
    if not files:
        raise ArgumentError.of("load_grammar", "paths", "none", "a file, or extend=True")
    builder = _Builder()
    for path in files:
        builder.add(path)
    return builder.tables()


def _made_ready(tables: Tables) -> Grammar:
    numbers_of = {name: i for i, name in enumerate(tables.nouns)}
    words = [
        (word, cls, *((None, numbers_of[value]) if isinstance(value, str) else (value, -1)))
        for word, (cls, value) in tables.words.items()
    ]
    return Grammar(
        nouns=tables.nouns,
        classes={word: cls for word, (cls, _) in tables.words.items()},
        values={word: value for word, (_, value) in tables.words.items() if value is not None},
        sequence=tables.sequence,
        counted=tables.counted,
        native=native.module().ReferenceGrammar(
            tables.classes, words, [(name, noun.generic) for name, noun in tables.nouns.items()],
            [(language, form.means, pattern, form.ordinal, form.count, form.capital, form.rear)
             for language, form, pattern in tables.forms],
            tables.rules, tables.sets, Reference,
        ),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def shipped() -> Grammar:
    """The grammar of the package, made ready at its first use."""
    return load_grammar()


class _Source(NamedTuple):
    """A form as a file has it. starts: the classes that it can begin with."""

    form: Form
    where: str
    key: str
    pattern: str
    starts: str


class _Builder:
    """Collects what files say, then checks how it fits together."""

    def __init__(self) -> None:
        self.words: dict[str, tuple[str, Any]] = {}  # word -> (class, value)
        self.nouns: dict[str, Noun] = {}
        self.parts: dict[str, dict[str, str]] = {language: {} for language in LANGUAGES}
        self.forms: dict[str, list[_Source]] = {language: [] for language in LANGUAGES}
        self.rules: dict[tuple[str, str], tuple[str, str]] = {}
        self.sets: dict[tuple[str, str], list[str]] = {}
        self.sequence: dict[str, int | str] = {}
        self.counted: dict[tuple[str, str], list[str]] = {(lang, key): [] for lang in LANGUAGES for key in COUNTED}
        self.where = ""
        self.classes: list[str] = []
        self._add_words("roman", {word: n for word, n in numerals.roman() if len(word) > 1})

    def add(self, path: Path) -> None:
        self.where = path.name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self._refuse("file", str(error), "a readable JSON file in UTF-8")
        self._check_keys("file", data, _KEYS)
        language = data.get("language")
        if language not in LANGUAGES:
            self._refuse("language", repr(language), "|".join(LANGUAGES))
        self._add_numbers(data.get("numbers", {}))
        for name, words in self._table(data, "classes").items():
            if isinstance(words, dict):
                self._add_words(name, {w: self._number(f"classes.{name}.{w}", n, name) for w, n in words.items()})
            else:
                self._add_words(name, dict.fromkeys(self._strings(f"classes.{name}", words)))
        for name, noun in self._table(data, "nouns").items():
            self._add_noun(name, noun)
        for name, pattern in self._table(data, "parts").items():
            self.parts[language][name] = self._string(f"parts.{name}", pattern)
        self._add_forms(language, data.get("forms", []))
        nested = self._table(data, "nested")
        self._check_keys("nested", nested, set(NESTED))
        for name, pattern in [*nested.items(), *((key, data[key]) for key in SINGLE if key in data)]:
            self.rules[language, name] = (self.where, self._string(name, pattern))
        if data.get("forms") and "anchors" not in data:
            self._refuse("anchors", "none", "classes of which every form has one, as there are forms")
        for name in SETS:
            self.sets.setdefault((language, name), []).extend(self._strings(name, data.get(name, [])))
        counted = self._table(data, "counted")
        self._check_keys("counted", counted, set(COUNTED))
        for name, words in counted.items():
            self.counted[language, name] += self._strings(f"counted.{name}", words)
        for ordinal, words in self._table(data, "sequence").items():
            if ordinal not in ("next", "last") and not (ordinal.isdecimal() and len(ordinal) < 10 and int(ordinal)):
                self._refuse("sequence", repr(ordinal[:20]), "a number from 1 on of at most nine digits, next or last")
            for word in self._strings(f"sequence.{ordinal}", words):
                self.sequence[word.lower()] = int(ordinal) if ordinal.isdecimal() else ordinal

    def tables(self) -> Tables:
        self._add_words("letter", dict.fromkeys("bcdefghijklmnopqrstuvwxyz"))
        self.classes = sorted({cls for cls, _ in self.words.values()} | set(_BUILT_IN))
        if len(self.classes) > MOST_CLASSES:
            self._refuse("classes", f"{len(self.classes)} classes", f"at most {MOST_CLASSES}")
        forms = [
            (language, source.form, self._form_pattern(language, source))
            for language in LANGUAGES for source in self.forms[language]
        ]  # fmt: skip
        rules = {
            (language, name): self._expand(language, where, name, pattern)
            for (language, name), (where, pattern) in self.rules.items()
        }
        for (_, name), classes in self.sets.items():
            self._check_classes(name, classes)
        return Tables(self.classes, self.words, self.nouns, forms, rules, self.sets, self.sequence, self.counted)

    def _form_pattern(self, language: str, source: _Source) -> str:
        pattern = self._expand(language, source.where, f"{source.key}.pattern", source.pattern)
        if not source.starts:
            return pattern
        return f"(?={self._expand(language, source.where, f'{source.key}.starts', source.starts)}){pattern}"

    def _check_classes(self, key: str, names: list[str]) -> None:
        unknown = [cls for cls in names if cls not in self.classes]
        if unknown:
            self._refuse(key, f"class {unknown[0]!r}", f"one of {', '.join(self.classes)}")

    def _expand(self, language: str, where: str, key: str, pattern: str, inside: tuple[str, ...] = ()) -> str:
        """A pattern with its parts put in. inside: the parts that it is in, the outermost first."""
        self.where = where
        out, size, at = [], 2, 0
        while at < len(pattern):
            found = _PATTERN.match(pattern, at)
            if found is None:
                expected = "<class>, [part], ( ), |, ?, {m,n}, (?= ), (?! ), (?<= ), (?<! ) or $"
                self._refuse(key, repr(pattern[at : at + 20]), expected)
            names, part, _, most, space = found.groups()
            if names is not None:
                self._check_classes(key, names.split("|"))
            if part is not None:
                parts = self.parts[language]
                if part not in parts:
                    self._refuse(key, f"part {part!r}", f"one of {', '.join(sorted(parts))}")
                if part in inside:
                    self._refuse(key, f"part {part!r} inside of itself", "parts that do not contain one another")
                if len(inside) == MOST_NESTED:
                    self._refuse(
                        key, f"part {part!r} inside of {', '.join(inside)}", f"parts at most {MOST_NESTED} deep"
                    )
                out.append(self._expand(language, where, f"parts.{part}", parts[part], (*inside, part)))
                size += len(out[-1])
            elif most is not None and int(most) > MOST_REPEATS:
                self._refuse(key, found[0], f"at most {MOST_REPEATS} repeats")
            elif space is None:
                out.append(found[0])
                size += len(found[0])
            if size > MOST_CHARACTERS:  # at once: parts of parts of parts would take for ever
                self._refuse(key, f"over {MOST_CHARACTERS} characters with its parts", f"at most {MOST_CHARACTERS}")
            at = found.end()
        text = f"({''.join(out)})"
        problem = native.module().reference_pattern_problem(self.classes, text)
        if problem:
            self._refuse(key, repr(pattern), f"a pattern ({problem})")
        if not inside:
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
            if cls in _NUMBERS:
                self._refuse(f"{key}.{cls}", "a class of numbers", "a class of nouns")
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
            marks: dict[str, Any] = {n: self._number(f"{key}.{n}", form[n]) for n in ("ordinal", "count") if n in form}
            marks |= {n: self._flag(f"{key}.{n}", form[n]) for n in ("capital", "rear") if n in form}
            starts = self._string(f"{key}.starts", form.get("starts", ""))
            self.forms[language].append(_Source(Form(form["means"], **marks), self.where, key, pattern, starts))

    def _add_words(self, cls: str, words: dict[str, Any]) -> None:
        if not re.fullmatch("[a-z]+", cls):
            self._refuse("classes", repr(cls), "a name of lower-case letters")
        if cls in _SPELT and words:
            self._refuse(
                f"classes.{cls}", repr(next(iter(words))), "no words: its tokens are numbers as they are written"
            )
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

    def _number(self, key: str, value: Any, cls: str = "") -> int:
        """From 1 on; of words of `back` from -1 down: they count from the end."""
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(key, repr(value), "an integer")
        if abs(value) >= numerals.TOO_LARGE:
            self._refuse(key, "one of ten digits or more", "an integer of at most nine")
        if (value > -1) if cls == "back" else (value < 1):
            self._refuse(key, str(value), "-1 or less, from the end" if cls == "back" else "1 or more")
        return value

    def _flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self._refuse(key, repr(value), "true or false")
        return value

    def _refuse(self, key: str, got: str, expected: str) -> NoReturn:
        raise ArgumentError.of("load_grammar", f"{self.where}: {key}", got, expected)
