"""What an outline is made of: points in lists, with the characters and the tokens that they take."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from ..runtime.values import instance

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One enumerated point, section or paragraph.

    ordinal: its number as written, else its place in the list, from 1 on.  label: as written ("3", "B", "4.2", "三"), "" for a
    bullet.  title: of a heading, or what is in bold at the beginning.
    span: (begin, end) in the characters of the text, its marker and all that is nested in it included.
    tokens: (begin, end) of the tokens that hold any of these characters; None without a tokenizer.
    """

    ordinal: int
    label: str
    title: str
    span: Span
    tokens: Span | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PointList:
    """Points that are counted together.

    nouns: what its points are called, canonical, from their markers, the words before the list or the heading that it is under.
    also: what it may be called as well: by its form ("bullet", "section"), or by nouns that are only mentioned before it.
    structural: sections without numbers, or paragraphs: only their own nouns refer to them.
    level: of how many points of other lists it is a part.
    """

    points: tuple[Point, ...]
    span: Span
    nouns: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    structural: bool = False
    level: int = 0

    def __len__(self) -> int:
        return len(self.points)


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """The lists of a text, by where they begin. Immutable. `outline` makes it.

    length: of the text, in characters.
    """

    lists: tuple[PointList, ...]
    length: int

    @property
    def points(self) -> tuple[Point, ...]:
        """All points that are counted (no paragraphs, no sections without numbers), in the order of the text."""
        found = [point for listed in self.lists if not listed.structural for point in listed.points]
        return tuple(sorted(found, key=lambda point: (point.span[0], -point.span[1])))

    def within(self, point: Point) -> Iterator[PointList]:
        """The lists inside of a point, at any depth."""
        instance("Outline.within", "point", point, Point)
        begin, end = point.span
        first = bisect.bisect_left(self.lists, begin, key=lambda listed: listed.span[0])
        for listed in itertools.islice(self.lists, first, None):
            if listed.span[0] >= end:
                return
            if listed.span[1] <= end and listed.points != (point,):
                yield listed


class Draft:
    """A list while it is being found: mutable."""

    def __init__(self, style: str, indent: int = 0, also: tuple[str, ...] = ()) -> None:
        self.style, self.indent, self.also = style, indent, also
        self.structural = False
        self.nouns: set[str] = set()
        self.marks: list[Mark] = []
        self.nested = False  # surely inside of the list around it
        self.interrupted = False  # by text that belongs to no point, unless the list goes on
        self.loose = False  # text between its points belongs to them
        self.follow: int | None = None  # where the first block of text after an interruption ends
        self.follow_block = 0  # and which block that is

    @property
    def last(self) -> Mark:
        return self.marks[-1]

    def close(self) -> None:
        """No point follows: the last one has the text behind it if those before it have."""
        if self.loose and self.follow is not None:
            self.last.end = max(self.last.end, self.follow)


@dataclasses.dataclass(slots=True)
class Mark:
    """A point while it is being found: where it begins, where its own words begin, where it ends."""

    begin: int
    content: int
    end: int
    ordinal: int | None  # None: its place in the list
    label: str = ""
    title: str = ""
    line_end: int = 0  # of a heading
