"""`outline`: the enumerated points of an earlier answer."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.values import integer
from .counted import counted_lists
from .grammar import Grammar
from .lines import FENCES, Lines, title_number
from .parsing import checked_grammar
from .points import Draft, Mark, Outline, Point, PointList, Span
from .sequences import named, sequences

LONGEST_TITLE = 3  # tokens of a line that is the title of a list: "Advantages:"
LATE = 6  # tokens from a noun in the plural to the end of its line
LONGEST_LEAD = 200  # characters before a list in which its noun is looked for
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=\S)|(?<=[。！？])(?=.)")
Offsets = Sequence[Span] | Callable[[int, int], Span]


def outline(
    text: str,
    offsets: Any = None,
    tokenizer: Any = None,
    *,
    first_token: int = 0,
    grammar: Grammar | None = None,
) -> Outline:
    """The lists, headings and paragraphs of a text, as `resolve` looks them up.

    text: an earlier answer, in Markdown or plain.  Found are lists by "1.", "1)", "(1)", "a.", "iv.", bullets, 一、 （一） ①,
    nested by indentation; headings by # or in bold; "Step 1:", "Option A:", 第一步：; 第一，… 第二，…; 首先 … 最后;
    firstly … finally; "The first reason is ...", 第一个原因是…; paragraphs.  Blocks of code are passed over.
    offsets: what brings characters to tokens: a sequence of (begin, end) in characters, one for each token, as a tokenizer's
    offset mapping is; or a function (begin, end) in characters -> (begin, end) in tokens.
    tokenizer: in its place, a fast tokenizer of transformers; it is called on the text without special tokens.
    first_token: where the text's first token is in the cache: added to all token spans.

    The points' token spans are what they take in the cache, for `pages` and for kept spans.
    Time linear in the length of the text. Deterministic; thread-safe; `ArgumentError` before anything is read.
    """
    if not isinstance(text, str):
        raise ArgumentError.of("outline", "text", type(text).__name__, "str")
    if offsets is not None and tokenizer is not None:
        raise ArgumentError.of("outline", "tokenizer", "both offsets and tokenizer", "one of them")
    first = integer("outline", "first_token", first_token, 0, "an integer, 0 or more")
    grammar = checked_grammar("outline", grammar)
    if tokenizer is not None:
        offsets = _of_tokenizer(text, tokenizer)
    return _Assembly(text, grammar, _tokens_of(offsets, first)).outline()


class _Assembly:
    """Turns what was found into lists with nouns, levels and tokens."""

    def __init__(self, text: str, grammar: Grammar, tokens_of: Callable[[int, int], Span | None]) -> None:
        self.text, self.grammar, self.tokens_of = text, grammar, tokens_of
        self.lines = Lines(text)
        self.prose = _without_code(text)
        marks = [mark for draft in self.lines.headings for mark in draft.marks]
        self.titles = sorted((mark.begin, mark.line_end, mark.title) for mark in marks)

    def outline(self) -> Outline:
        drafts = [draft for draft in self.lines.drafts if _is_list(draft)]
        drafts += sequences(self.prose, self.grammar, self.lines)
        drafts += counted_lists(self.prose, self.grammar, self.lines, drafts)
        found: list[PointList] = []
        for draft in drafts:
            for mark in draft.marks:
                self._named_item(draft, mark)
            if not draft.nouns:
                nouns, mentioned = self._nouns_before(draft.marks[0].begin)
                draft.nouns |= nouns
                draft.also = (*draft.also, *mentioned)
            if draft.style == "chinese":
                draft.also = (*draft.also, "section")
            found.append(self._list(draft))
        found += itertools.chain.from_iterable(map(self._of_headings, self.lines.headings))
        found += self._paragraphs()
        found += self._lists_as_points(found)
        found.sort(key=lambda listed: (listed.span[0], -listed.span[1]))
        return Outline(tuple(_with_levels(found)), len(self.text))

    def _list(self, draft: Draft) -> PointList:
        points = tuple(
            Point(
                place if mark.ordinal is None else mark.ordinal, mark.label, mark.title or self._title(draft, mark),
                (mark.begin, mark.end), self.tokens_of(mark.begin, mark.end),
            )
            for place, mark in enumerate(_numbered(draft), 1)
        )  # fmt: skip
        bounds = [bound for point in points for bound in point.span]
        assert bounds == sorted(bounds), f"points of a {draft.style} list overlap: {bounds}"
        assert all(begin < end for begin, end in (point.span for point in points)), f"a point of {draft.style} is empty"
        span = (bounds[0], bounds[-1])
        return PointList(points, span, frozenset(draft.nouns), frozenset(draft.also), draft.structural)

    def _title(self, draft: Draft, mark: Mark) -> str:
        """What is in bold at the beginning; all of a line that 一、 begins."""
        if draft.style == "chinese":
            return self.text[mark.content : mark.end].partition("\n")[0].strip()
        found = re.compile(r"\s?\*\*([^*\n]{1,80})\*\*").match(self.text, mark.content, mark.end)
        return found[1].strip(":： .") if found else ""

    def _named_item(self, draft: Draft, mark: Mark) -> None:
        """A bullet that says "Option A: ...": its label, and the list's noun."""
        at = mark.content
        while self.text[at : at + 1] in (" ", "*"):
            at += 1
        found = named(self.grammar, self.text, at, mark.end) if draft.style == "bullet" else None
        if found is not None:
            draft.nouns.add(found.noun)
            mark.label, mark.ordinal = found.label, found.ordinal

    def _of_headings(self, draft: Draft) -> list[PointList]:
        """Sections in their order, and, where they have numbers of their own, these as a list."""
        numbered = Draft(draft.style, also=("section",))
        for mark in draft.marks:
            title, noun = mark.title, None
            marker = title_number(title)
            found = named(self.grammar, title) if marker is None else None
            if marker is not None:
                mark.title = title[marker.content :]
                number: tuple[int | None, str] = (marker.ordinal, marker.label)
            elif found is not None:
                mark.title, noun = title[found.content :], found.noun
                number = (found.ordinal, found.label)
            else:
                continue
            numbered.nouns |= {noun} if noun else set()
            numbered.marks.append(Mark(mark.begin, mark.content, mark.end, *number, title=mark.title))
        if len(draft.marks) == 1 and draft.marks[0].begin == self.titles[0][0] and len(self.titles) > 1:
            return []  # the title of all
        draft.structural = True
        lists = [self._list(numbered)] if numbered.marks else []
        return lists if len(numbered.marks) == len(draft.marks) else [self._list(draft), *lists]

    def _paragraphs(self) -> list[PointList]:
        draft = Draft("paragraph", also=("paragraph",))
        draft.structural = True
        draft.marks = [Mark(begin, begin, end, None) for begin, end in self.lines.paragraphs]
        return [self._list(draft)] if draft.marks else []

    def _lists_as_points(self, lists: list[PointList]) -> list[PointList]:
        """For "the second list": those that are in no other, in their order."""
        draft = Draft("list", also=("list",))
        draft.structural, end = True, 0
        for begin, stop in sorted(
            listed.span for listed in lists if not listed.structural and "section" not in listed.also
        ):
            if begin >= end:
                draft.marks.append(Mark(begin, begin, stop, None))
                end = stop
        return [self._list(draft)] if draft.marks else []

    # --- nouns

    def _nouns_before(self, begin: int) -> tuple[set[str], set[str]]:
        """What the words before a list call its points, else the heading over it: see `_nouns_in`."""
        low = max(0, begin - LONGEST_LEAD)
        lead = self.text[low:begin].rstrip()
        index = bisect.bisect_right(self.titles, (begin, len(self.text))) - 1
        heading = self.titles[index] if index >= 0 else None
        if heading is not None and heading[1] > low:
            lead = lead[max(0, heading[1] - low) :]
        line = _SENTENCE_END.split(lead.rpartition("\n")[2].strip())[-1]
        found = self._nouns_in(line[-LONGEST_LEAD:]) if line else (set[str](), set[str]())
        return self._nouns_in(heading[2]) if heading is not None and not any(found) else found

    def _nouns_in(self, text: str) -> tuple[set[str], set[str]]:
        """What points are called, and what they may be called as well as anything else.

        Of the first kind are counted nouns ("three reasons"), else those of a title or in the plural, near the end of the line.
        Far from it they are only mentioned, and Chinese ones can be verbs: 建议按下面的顺序排查：
        """
        mentions = self.grammar.native.mentions(text.lower())
        counted = {noun for noun, _, is_counted in mentions if is_counted}
        if counted:
            return self._sure(counted)
        kinds = ("nouns", "znoun") if len(mentions) > LONGEST_TITLE else ("nouns", "znoun", "noun")
        found = [(i, noun, cls) for i, (noun, cls, _) in enumerate(mentions) if noun is not None and cls in kinds]
        late = {n for i, n, cls in found if i >= len(mentions) - (LONGEST_TITLE if cls == "znoun" else LATE)}
        sure, unsure = self._sure(late)
        return sure, unsure | {noun for _, noun, _ in found} - sure

    def _sure(self, nouns: set[str]) -> tuple[set[str], set[str]]:
        """Structural nouns are found wherever they are mentioned, and never keep a list from being called otherwise."""
        sure = {noun for noun in nouns if not self.grammar.nouns[noun].structural}
        return sure, nouns - sure


def _is_list(draft: Draft) -> bool:
    """One item by itself is a list if it is a bullet or has the number 1."""
    first = draft.marks[0]
    if len(draft.marks) > 1:
        return True
    return draft.style == "bullet" or (draft.style == "digits" and first.ordinal == 1)


def _numbered(draft: Draft) -> list[Mark]:
    """Marks whose ordinals can be told apart: "1. 1. 1." counts for nothing, so the place does."""
    ordinals = [mark.ordinal for mark in draft.marks]
    if len(set(ordinals)) < len(ordinals):
        for mark in draft.marks:
            mark.ordinal = None
    return draft.marks


def _with_levels(lists: list[PointList]) -> Iterable[PointList]:
    """Each list with the number of points around it; lists in the order of the text, outer ones first."""
    events: list[tuple[int, int, PointList | None, int]] = []
    for listed in lists:
        events.append((listed.span[0], -1, listed, listed.span[1]))
        if not listed.structural:
            events += [(point.span[0], 0, None, point.span[1]) for point in listed.points]
    # Ends of the points that are open, ascending: a text may have thousands that end with their block.
    around: list[int] = []
    for begin, _, opened, end in sorted(events, key=lambda event: event[:2]):
        del around[: bisect.bisect_right(around, begin)]
        if opened is None:
            bisect.insort(around, end)
        else:
            yield dataclasses.replace(opened, level=len(around) - bisect.bisect_left(around, end))


def _without_code(text: str) -> str:
    """The text with the same length and blanks for blocks of code."""
    if not any(fence in text for fence in FENCES):
        return text
    lines, fenced = [], False
    for line in text.split("\n"):
        fence = line.lstrip().startswith(FENCES)
        lines.append(" " * len(line) if fence or fenced else line)
        fenced ^= fence
    return "\n".join(lines)


# --- tokens ------------------------------------------------------------------------------------------------------------


def _of_tokenizer(text: str, tokenizer: Any) -> Any:
    try:
        return tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    except (TypeError, KeyError, NotImplementedError, ValueError) as error:
        expected = "a fast tokenizer of transformers (return_offsets_mapping=True)"
        raise ArgumentError.of("outline", "tokenizer", f"{type(tokenizer).__name__} ({error})", expected) from None


def _tokens_of(offsets: Any, first: int) -> Callable[[int, int], Span | None]:
    """A function from characters to tokens."""
    if offsets is None:
        return lambda begin, end: None
    if callable(offsets):
        return lambda begin, end: _shifted(offsets(begin, end), first)
    begins, ends = _checked_offsets(offsets)

    def tokens_of(begin: int, end: int) -> Span:
        low, high = bisect.bisect_right(ends, begin), bisect.bisect_left(begins, end)
        return first + low, first + max(low, high)

    return tokens_of


def _shifted(span: Any, first: int) -> Span:
    expected = "a function that returns (begin, end) in tokens, 0 <= begin <= end"
    try:
        begin, end = map(operator.index, span)
    except (TypeError, ValueError):
        raise ArgumentError.of("outline", "offsets", f"one that returned {span!r}", expected) from None
    if not 0 <= begin <= end:
        raise ArgumentError.of("outline", "offsets", f"one that returned {span!r}", expected)
    return first + begin, first + end


def _checked_offsets(offsets: Any) -> tuple[list[int], list[int]]:
    """Ascending begins and ends; a special token, (0, 0), is where the token before it ends."""
    expected = "a (begin, end) in characters for each token, ascending"
    begins: list[int] = []
    ends: list[int] = []
    try:
        pairs = [(operator.index(begin), operator.index(end)) for begin, end in offsets]
    except (TypeError, ValueError):
        raise ArgumentError.of("outline", "offsets", type(offsets).__name__, expected) from None
    for begin, end in pairs:
        before = ends[-1] if ends else 0
        begin, end = (before, before) if begin == end else (begin, end)
        if begin > end or end < before or begin < (begins[-1] if begins else 0):
            raise ArgumentError.of("outline", "offsets", f"({begin}, {end}) after {before}", expected)
        begins.append(begin)
        ends.append(end)
    return begins, ends
