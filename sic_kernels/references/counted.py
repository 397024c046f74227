"""Enumerations whose points are counted by sentences: "The first reason is money. The second reason is ...", 第一个原因是…"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import operator
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import numerals
from .grammar import COUNTED, Grammar
from .lines import Lines, trimmed
from .points import Draft, Mark
from .sequences import any_of

SENTENCE_ENDS = ".!?:;。！？：；，\n*"
LONGEST_SPACE = 8  # characters before a sentence in which the end of the one before it is looked for


class _Marker(NamedTuple):
    """Where a sentence begins that counts a point. ordinal: None for the last.  noun: None where it is left out."""

    begin: int
    content: int
    ordinal: int | None
    noun: str | None
    style: str


def counted_lists(text: str, grammar: Grammar, lines: Lines, others: Iterable[Draft]) -> list[Draft]:
    """Enumerations of at least two points, from the first on, of one noun, in one language and in one section.

    others: the lists that are marked as such. In their sections such sentences speak of their points.
    """
    taken = {bisect.bisect_right(lines.breaks, draft.marks[0].begin) for draft in others}
    drafts: list[Draft] = []
    section = -1
    for marker in _markers(text, grammar):
        at = bisect.bisect_right(lines.breaks, marker.begin)
        if at in taken:
            continue
        mark = Mark(marker.begin, marker.content, _block_end(lines, marker.content), marker.ordinal)
        if marker.ordinal == 1 and marker.noun is not None:
            drafts.append(Draft(marker.style))
            drafts[-1].nouns.add(marker.noun)
            drafts[-1].marks.append(mark)
            section = at
        elif drafts and at == section and _goes_on(drafts[-1], marker):
            mark.ordinal = len(drafts[-1].marks) + 1
            drafts[-1].last.end = trimmed(lines.text, marker.begin)
            drafts[-1].marks.append(mark)
    found = [draft for draft in drafts if len(draft.marks) > 1]
    for draft, following in itertools.pairwise(found):
        draft.last.end = min(draft.last.end, trimmed(lines.text, following.marks[0].begin))
    return found


def _goes_on(draft: Draft, marker: _Marker) -> bool:
    counts = marker.style == draft.style and marker.ordinal in (None, len(draft.marks) + 1)
    return counts and (marker.noun is None or marker.noun in draft.nouns)


def _markers(text: str, grammar: Grammar) -> Iterator[_Marker]:
    """Of both languages, in the order of the text."""
    found = (_markers_of(style, pattern, text, grammar) for style, pattern in _patterns(grammar).items())
    return heapq.merge(*found, key=operator.attrgetter("begin"))


def _markers_of(style: str, pattern: re.Pattern[str], text: str, grammar: Grammar) -> Iterator[_Marker]:
    for found in pattern.finditer(text):
        begin, noun, ordinal = found.start(), found["noun"], _ordinal(found["word"], grammar)
        before = text[max(0, begin - LONGEST_SPACE) : begin].rstrip(" \t\u3000")
        name = grammar.values.get(noun) if noun else None
        known = isinstance(name, str) or not noun
        if ordinal != 0 and known and (not before or before[-1] in SENTENCE_ENDS):
            yield _Marker(begin, found.end(), ordinal, name, style)


@functools.lru_cache(maxsize=4)
def _patterns(grammar: Grammar) -> dict[str, re.Pattern[str]]:
    """A sentence's first words, by style. Runs of letters are bounded: no text makes a search take long."""
    before, between, verbs = (f"(?:{any_of(grammar.counted['en', name])})" for name in COUNTED)
    measures, copulas = (f"(?:{any_of(grammar.counted['zh', name])})" for name in COUNTED[1:])
    english = (
        rf"(?a:(?:{before} )?\b[Tt]he (?P<word>[a-z]{{1,32}}|[0-9]{{1,2}}(?=st|nd|rd|th))(?:st|nd|rd|th)?(?: {between})?"
        rf"(?: (?P<noun>(?!{verbs}\b)[a-z]{{1,32}}))?(?= {verbs}\b|[,:]))"
    )
    chinese = (
        rf"第(?P<word>[0-9]{{1,2}}|[{numerals.CHINESE}]{{1,3}}){measures}?(?P<noun>[\u4e00-\u9fff]{{1,4}}?)?"
        rf"(?={copulas}|：|，)"
    )
    return {"counted": re.compile(english), "counted_chinese": re.compile(chinese)}


def _ordinal(word: str, grammar: Grammar) -> int | None:
    """None for the last; 0 for a word that is no number."""
    if grammar.classes.get(word) == "last":
        return None
    if word[0].isdecimal():
        return numerals.of_digits(word)
    value = grammar.values.get(word) if word.isascii() else numerals.of_chinese(word)
    return value if isinstance(value, int) and value > 0 else 0


def _block_end(lines: Lines, at: int) -> int:
    block = bisect.bisect_left(lines.blocks, at, key=lambda block: block[1])
    return lines.blocks[min(block, len(lines.blocks) - 1)][1]
