"""Enumerations inside of running text: (1) ... (2) ..., ① ..., "Step 1: ...", 第一，..., "firstly ... finally"."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from . import numerals
from .grammar import Grammar
from .lines import Lines, ordinal_of
from .points import Draft, Mark

SENTENCE_ENDS = ".;:!?,。；：！？，、\n*"
_PAREN = (
    r"[(（](?:(?P<digits>[0-9０-９]{1,3})|(?P<chinese>[一二三四五六七八九十]{1,3})"
    r"|(?P<roman>[ivx]{2,4})|(?P<letter>[a-z]))[)）]"
)
_BARE = r"(?<![\w(（.])(?P<bare>[0-9]{1,2})\)(?=\s)"
_CIRCLED = f"(?P<circled>[{numerals.CIRCLED}])"


_AND = re.compile(r"\s(?:and|or)$")
LONGEST_SPACE = 80  # characters before a marker that are looked at


class Named(NamedTuple):
    """A marker with a noun: "Step 2", "Option B", 第二步. content: where its own words begin."""

    noun: str
    style: str
    ordinal: int
    label: str
    content: int


@functools.lru_cache(maxsize=4)
def named_pattern(grammar: Grammar) -> re.Pattern[str]:
    """What may stand before a point's own words: a noun with a number or a letter, then a colon, a dash or the end.

    Case is ignored for ASCII letters only: else "ſ" matched "s", whose lower case is no word.
    """
    units, latin = any_of(_nouns(grammar, "zcounter", "zpoint", "znoun")), any_of(_nouns(grammar, "noun"))
    chinese = any_of(_nouns(grammar, "znoun"))
    return re.compile(
        rf"(?:(?P<latin>(?ai:{latin}))[ ]?#?{_label('a')}"
        rf"|(?P<noun>{chinese})[ ]?{_label('b')}"
        rf"|第{_label('c')}(?:[个种类大](?=(?:{units})))?(?P<unit>{units})(?:{chinese})?)"
        r"\*{0,2}(?:[ ]?[:：.、，,)）–—-](?:\*\*)?|$|(?=\n))[ \t]*"
    )


def _label(prefix: str) -> str:
    return (
        rf"(?:(?P<{prefix}_digits>[0-9０-９]{{1,3}})|(?P<{prefix}_chinese>[{numerals.CHINESE}]{{1,4}})"
        rf"|(?P<{prefix}_letter>[A-Z])(?![A-Za-z]))"
    )


def named(grammar: Grammar, text: str, begin: int = 0, end: int | None = None) -> Named | None:
    """The marker with a noun at `begin`."""
    found = named_pattern(grammar).match(text, begin, len(text) if end is None else end)
    if found is None:
        return None
    noun = next(word for name in ("latin", "noun", "unit") if (word := found[name]))
    for group, label in found.groupdict().items():
        if label and "_" in group:
            style = group.partition("_")[2]
            return Named(grammar.values[noun.lower()], style, ordinal_of(style, label), label, found.end())
    return None


def sequences(text: str, grammar: Grammar, lines: Lines) -> list[Draft]:
    """The enumerations of a text, with at least two points each, that begin with the first."""
    finder = _Finder(text, grammar, lines)
    for begin, end in lines.blocks:
        finder.named_line(begin, end)
    for found in _pattern(grammar).finditer(text):
        finder.take(found)
    return finder.finished()


class _Finder:
    """Open enumerations by their style; a heading ends them all."""

    def __init__(self, text: str, grammar: Grammar, lines: Lines) -> None:
        self.text, self.grammar, self.lines = text, grammar, lines
        self.ends = [end for _, end in lines.blocks]
        self.open: dict[str, Draft] = {}
        self.section: dict[str, int] = {}  # in which section each was begun
        self.taken: set[int] = set()  # where markers with nouns are
        self.done: list[Draft] = []

    def named_line(self, begin: int, end: int) -> None:
        """Markers with nouns at the beginnings of lines that are no items."""
        while begin < end:
            stop = self.text.find("\n", begin, end)
            stop = end if stop < 0 else stop
            at = begin
            while at < stop and self.text[at] in " \t　*":
                at += 1
            if (
                at not in self.lines.marked
                and begin not in self.lines.marked
                and self.text[at : at + 1] not in ("#", "")
            ):
                found = named(self.grammar, self.text, at, stop)
                if found is not None:
                    self.taken.add(at)
                    mark = Mark(begin, found.content, found.content, found.ordinal, found.label)
                    self._add(f"{found.noun} {found.style}", mark, found.noun)
            begin = stop + 1

    def take(self, found: re.Match[str]) -> None:
        style, begin = found.lastgroup or "", found.start()
        label = found[style]
        if begin in self.lines.marked or begin in self.taken:
            return
        if style == "word":
            self._word(label, begin, found.end())
        elif style == "chinese_ordinal":
            if self._sentence_begins(begin):
                self._add(style, Mark(begin, found.end(), found.end(), _number(label), label))
        else:
            ordinal = numerals.CIRCLED.index(label) + 1 if style == "circled" else ordinal_of(
                "digits" if style == "bare" else style, label
            )  # fmt: skip
            self._add(style, Mark(begin, found.end(), found.end(), ordinal, label))

    def _word(self, word: str, begin: int, end: int) -> None:
        if not self._sentence_begins(begin):
            return
        ordinal = self.grammar.sequence.get(word.lower(), self.grammar.values.get(word.lower()))
        style = "word" if word.isascii() else "chinese_word"
        draft = self.open.get(style)
        if isinstance(ordinal, str):
            if draft is None:
                return
            closing, ordinal = ordinal == "last", (draft.last.ordinal or 0) + 1
            self._add(style, Mark(begin, end, end, ordinal, word))
            if closing and style in self.open:  # another section has begun otherwise
                self._finish(style)
        elif ordinal is not None:
            self._add(style, Mark(begin, end, end, ordinal, word))

    def _add(self, style: str, mark: Mark, noun: str | None = None) -> None:
        section = bisect.bisect_right(self.lines.breaks, mark.begin)
        draft = self.open.get(style)
        if draft is not None and self.section[style] != section:
            self._finish(style)
            draft = None
        if mark.ordinal == 1 and draft is not None:
            self._finish(style)
            draft = None
        if draft is None:
            if mark.ordinal != 1:
                return
            draft = self.open[style] = Draft(style)
            self.section[style] = section
            draft.nouns |= {noun} if noun else set()
        elif mark.ordinal != (draft.last.ordinal or 0) + 1:
            return
        else:
            draft.last.end = self._before(mark.begin)
        draft.marks.append(mark)

    def _finish(self, style: str) -> None:
        draft = self.open.pop(style)
        block = bisect.bisect_left(self.ends, draft.last.content)
        draft.last.end = self.ends[min(block, len(self.ends) - 1)]
        if len(draft.marks) > 1:
            self.done.append(draft)

    def finished(self) -> list[Draft]:
        for style in list(self.open):
            self._finish(style)
        return self.done

    def _before(self, end: int) -> int:
        """Where the point before a marker ends: spaces and the "and" of an enumeration are no part of it."""
        before = self.text[max(0, end - LONGEST_SPACE) : end]
        return end - len(before) + len(_AND.sub("", before.rstrip()))

    def _sentence_begins(self, begin: int) -> bool:
        before = self.text[max(0, begin - 8) : begin].rstrip(" \t　")
        return not before or before[-1] in SENTENCE_ENDS


def _number(label: str) -> int:
    return numerals.of_digits(label) if label[0].isdecimal() else numerals.of_chinese(label)


@functools.lru_cache(maxsize=4)
def _pattern(grammar: Grammar) -> re.Pattern[str]:
    """Markers that may stand anywhere in a line."""
    units = any_of(_nouns(grammar, "zcounter", "zpoint"))
    chinese = rf"第(?P<chinese_ordinal>[0-9]{{1,3}}|[{numerals.CHINESE}]{{1,4}})(?:个?(?:{units}))?(?:[，,：:、]|是)"
    firm = [word for word in grammar.sequence if word.isascii() and word.endswith("ly")]
    loose = [word for word in grammar.sequence if word.isascii() and word not in firm]
    loose += [word for word, cls in grammar.classes.items() if cls == "ordinal"]
    other = [word for word in grammar.sequence if not word.isascii()]
    words = rf"\b(?ai:{any_of(firm)})\b(?=[,\s])|\b(?ai:{any_of(loose)})\b(?=,)|{any_of(other)}"
    return re.compile(f"{_PAREN}|{_BARE}|{_CIRCLED}|{chinese}|(?P<word>{words})")


def any_of(words: Iterable[str]) -> str:
    """A regular expression for one of the words, the longest that there is; for nothing where there are none."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


def _nouns(grammar: Grammar, *classes: str) -> list[str]:
    """The words of these classes that stand for a noun: a file may add others."""
    return [
        word for word, cls in grammar.classes.items() if cls in classes and isinstance(grammar.values.get(word), str)
    ]
