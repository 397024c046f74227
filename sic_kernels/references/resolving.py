"""`resolve`: from a reference to the one point that it describes, or the reason why there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..runtime import metrics, trace
from ..runtime.errors import ArgumentError
from ..runtime.values import integer
from .grammar import Grammar, Noun
from .parsing import checked_grammar
from .points import Outline, Point, PointList, Span
from .types import Reference


class Resolved(NamedTuple):
    """The point that a reference means.

    point: its `Point`.  span: its characters in the text; None where slots were given.  tokens: (begin, end) of its tokens, for
    `pages`; None without a tokenizer.  slot: what the given mapping has for it; None where an outline was given.
    """

    point: Point
    span: Span | None
    tokens: Span | None
    slot: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ambiguous:
    """Several points fit. candidates: one for each meaning, a `Resolved`, or a list of them where the reference is of a group."""

    candidates: tuple[Resolved | list[Resolved], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Unresolved:
    """No point fits. reason: begins with its kind: "vague: ", "too deep: ", "out of range: " or "missing: "."""

    reason: str

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


Result = Resolved | list[Resolved] | Ambiguous | Unresolved
KINDS = ("ordinal", "cardinal", "named", "vague", "too deep")
_UNKNOWN_NOUN = Noun()


def resolve(
    ref: Reference, outline_or_slots: Outline | Mapping[tuple[Any, ...], Any], *, grammar: Grammar | None = None
) -> Result:
    """What a reference means in an earlier answer.

    ref: of `parse`.
    outline_or_slots: an `Outline`; or slots by their path: a mapping whose keys are tuples of ordinals from the outermost on,
    each a number, or (noun, number): {(1,): a, (3,): b, (3, ("example", 2)): c}.  A number without a noun is of any list.
    grammar: of `load_grammar`, the one that `parse` used.

    Returns `Resolved` for one point, a list of them for a group, in the order in which they were named, `Ambiguous` if the words
    fit several points alike, `Unresolved` with the reason otherwise. Exactly one description must fit: there is no nearest match.
    1. Lists whose noun is the reference's come first; where none is, lists without a noun of their own; a general noun ("point",
       "item", none) takes any list.  Sections and paragraphs are found by their own nouns only; sections with numbers by others
       too, in an outline without lists.
    2. Of those the outermost ones (for a general noun: before the noun is looked at).
    3. Of those the ones that have the ordinal. None: out of range; several: ambiguous.
    An outer reference ("... in the third point") narrows all this to what is inside of its point.

    Counted in `sic_reference_resolution_ratio` by outcome. Deterministic; thread-safe.
    """
    if not isinstance(ref, Reference):
        raise ArgumentError.of("resolve", "ref", type(ref).__name__, "Reference, of parse")
    _check_reference(ref)
    grammar = checked_grammar("resolve", grammar)
    slots: Mapping[tuple[Any, ...], Any] | None = None
    if isinstance(outline_or_slots, Outline):
        outline = outline_or_slots
    elif isinstance(outline_or_slots, Mapping):
        outline, slots = _outline_of(outline_or_slots)
    else:
        expected = "Outline, or a mapping from paths of ordinals to slots"
        raise ArgumentError.of("resolve", "outline_or_slots", type(outline_or_slots).__name__, expected)
    result = _Search(outline, slots, grammar).result(ref)
    outcome = result.kind.replace(" ", "_") if isinstance(result, Unresolved) else "resolved"
    outcome = "ambiguous" if isinstance(result, Ambiguous) else outcome
    metrics.get("sic_reference_resolution_ratio").add(1, 1, outcome=outcome)
    if trace.active():
        tokens = [r.tokens for r in result] if isinstance(result, list) else getattr(result, "tokens", None)
        trace.record("reference", kind=ref.kind, ordinal=ref.ordinal, noun=ref.noun, outcome=outcome, tokens=tokens)
    return result


def pages(span: Span, page_size: int) -> range:
    """The pages of a KV cache that hold tokens [begin, end): `pages(resolved.tokens, 16)`. Empty for an empty span."""
    size = integer("pages", "page_size", page_size, 1, "a number of tokens, 1 or more")
    if not isinstance(span, tuple) or len(span) != 2:
        raise ArgumentError.of("pages", "span", repr(span), "(begin, end) in tokens")
    begin = integer("pages", "span", span[0], 0, "(begin, end) in tokens")
    end = integer("pages", "span", span[1], begin, "(begin, end) in tokens, begin <= end")
    return range(begin // size, -(-end // size) if end > begin else begin // size)


def _check_reference(ref: Reference) -> None:
    """Refuses what `parse` never returns: anybody can make a tuple."""
    part: Any = ref
    while part is not None:
        if not isinstance(part, Reference):
            raise ArgumentError.of("resolve", "ref", f"within={part!r}", "a Reference, of parse, or None")
        for field, fits, expected in (
            ("kind", part.kind in KINDS, "|".join(KINDS)),
            ("noun", part.noun is None or isinstance(part.noun, str), "a str or None"),
            ("total", part.total is None or type(part.total) is int, "an int or None"),
            ("labels", _are_labels(part), "a tuple of str, at least one for kind 'named', else none"),
            ("ranges", _are_ranges(part), "a tuple of (first, last), one of one point for kind 'ordinal'"),
        ):
            if not fits:
                raise ArgumentError.of("resolve", "ref", f"{field}={getattr(part, field)!r}", expected)
        part = part.within


def _are_labels(ref: Reference) -> bool:
    labels: Any = ref.labels
    if not isinstance(labels, tuple) or not all(isinstance(label, str) and label for label in labels):
        return False
    return bool(labels) == (ref.kind == "named")


def _are_ranges(ref: Reference) -> bool:
    ranges: Any = ref.ranges
    if not isinstance(ranges, tuple):
        return False
    for pair in ranges:
        if not isinstance(pair, tuple) or len(pair) != 2 or any(type(n) is not int for n in pair):
            return False
        if pair[0] > pair[1] and (pair[0] > 0) == (pair[1] > 0):  # 3 to -1 is the third to the last
            return False
    if ref.kind == "ordinal":
        return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return bool(ranges) == (ref.kind == "cardinal")


class _Search:
    """One reference in one outline."""

    def __init__(self, outline: Outline, slots: Mapping[Any, Any] | None, grammar: Grammar) -> None:
        self.outline, self.slots, self.grammar = outline, slots, grammar
        self.has_lists = any(not listed.structural and "section" not in listed.also for listed in outline.lists)

    def result(self, ref: Reference) -> Result:
        if ref.kind == "vague":
            return Unresolved("vague: there is no ordinal, number, letter or title")
        if ref.kind == "too deep":
            return Unresolved(f"too deep: nested {ref.depth} deep")
        chain = [ref]
        while (outer := chain[-1].within) is not None:
            chain.append(outer)
        chain.reverse()
        scopes: list[Point | None] = [None]
        for outer in chain[:-1]:
            found = self._in_any(outer, scopes)
            if isinstance(found, Unresolved):
                return found
            if any(len(group) > 1 for group in found):
                return Unresolved(f"missing: {_described(outer)} is a group, and only one point can have another in it")
            scopes = [group[0] for group in found]
        found = self._in_any(ref, scopes)
        if isinstance(found, Unresolved):
            return found
        results = [self._resolved(group, ref.kind == "cardinal" or len(ref.labels) > 1) for group in found]
        return results[0] if len(results) == 1 else Ambiguous(tuple(results))

    def _resolved(self, group: tuple[Point, ...], as_list: bool) -> Resolved | list[Resolved]:
        if self.slots is None:
            found = [Resolved(point, point.span, point.tokens) for point in group]
        else:
            found = [Resolved(point, None, None, self.slots[point.span]) for point in group]
        return found if as_list else found[0]

    def _in_any(self, ref: Reference, scopes: Iterable[Point | None]) -> list[tuple[Point, ...]] | Unresolved:
        """Every group of points that fits in any of the scopes; the reason of the first scope where none fits in any."""
        groups: dict[tuple[Span, ...], tuple[Point, ...]] = {}  # one point can be in two lists: a section with a number
        reason: Unresolved | None = None
        for scope in scopes:
            found = self._in(ref, scope)
            if isinstance(found, Unresolved):
                reason = reason or found
            else:
                groups |= {tuple(point.span for point in group): group for group in found}
        return list(groups.values()) or reason or Unresolved("missing: nothing to look in")

    def _in(self, ref: Reference, scope: Point | None) -> list[tuple[Point, ...]] | Unresolved:
        lists = self.outline.lists if scope is None else tuple(self.outline.within(scope))
        if ref.labels:
            return _by_label(ref, [listed for listed in lists if self._fit(listed, ref.noun) or not _is_letter(ref)])
        fitting = self._fitting(lists, ref.noun)
        if not fitting:
            return Unresolved(f"missing: no list of {_plural(ref.noun)}{_where(scope)}")
        groups = [group for listed in fitting if (group := _chosen(ref, listed)) is not None]
        if groups:
            return groups
        return Unresolved(f"out of range: {_described(ref)}, and {_sizes(fitting)}{_where(scope)}")

    def _fitting(self, lists: Iterable[PointList], noun: str | None) -> list[PointList]:
        """The lists that a noun means, the best only: see `resolve`."""
        graded = [(self._fit(listed, noun), listed) for listed in lists]
        graded = [(grade, listed) for grade, listed in graded if grade]
        general = noun is None or self.grammar.nouns.get(noun, _UNKNOWN_NOUN).generic
        if general and graded:
            outermost = min(listed.level for _, listed in graded)
            graded = [(grade, listed) for grade, listed in graded if listed.level == outermost]
        best = max((grade for grade, _ in graded), default=0)
        fitting = [listed for grade, listed in graded if grade == best]
        outermost = min((listed.level for listed in fitting), default=0)
        return [listed for listed in fitting if listed.level == outermost]

    def _fit(self, listed: PointList, noun: str | None) -> int:
        """2: the list is of this noun; 1: nothing speaks against it; 0: it is not."""
        if noun in listed.nouns or noun in listed.also:
            return 2
        if listed.structural:
            return 0
        kind = _UNKNOWN_NOUN if noun is None else self.grammar.nouns.get(noun, _UNKNOWN_NOUN)
        if noun is None or kind.generic:
            return 1
        if kind.structural:
            return 0
        own = [name for name in listed.nouns if not self.grammar.nouns.get(name, _UNKNOWN_NOUN).generic]
        return 0 if own or ("section" in listed.also and self.has_lists) else 1


def _chosen(ref: Reference, listed: PointList) -> tuple[Point, ...] | None:
    """The points of a list that a reference counts; None unless it has them all."""
    if ref.total is not None and ref.total != len(listed):
        return None
    places = {point.ordinal: place for place, point in enumerate(listed.points)}
    chosen: dict[Point, None] = {}  # a set that keeps the order
    for first, last in ref.ranges:
        if ref.total is not None or (first, last) == (1, -1):
            first, last = -len(listed), -1
        found = _between(places, first, last)
        if found is None:
            return None
        chosen.update((listed.points[place], None) for place in found)
    return tuple(chosen)


def _between(places: dict[int, int], first: int, last: int) -> Iterable[int] | None:
    """The places of a range of ordinals, all of them there; one that is counted from the end has any ordinals in it."""
    if 0 < first <= last:
        if last - first >= len(places):
            return None
        found = [places[n] for n in range(first, last + 1) if n in places]
        return found if len(found) == last - first + 1 else None
    ends = [len(places) + n if n < 0 else places.get(n, -1) if n else -1 for n in (first, last)]
    return range(min(ends), max(ends) + 1) if min(ends) >= 0 else None


def _is_letter(ref: Reference) -> bool:
    return len(ref.labels[0]) == 1 and ref.labels[0].isascii()


def _by_label(ref: Reference, lists: list[PointList]) -> list[tuple[Point, ...]] | Unresolved:
    """Points with these letters, numbers or titles, all of one list."""
    letter = _is_letter(ref)
    groups = []
    for listed in lists:
        names = {
            _bare(point.label if letter or point.label == ref.labels[0] else point.title): point
            for point in listed.points
        }
        group = tuple(names[_bare(label)] for label in ref.labels if _bare(label) in names)
        if len(group) == len(ref.labels):
            groups.append(group)
    return groups or Unresolved(f"missing: nothing is called {', '.join(map(repr, ref.labels))}")


def _bare(name: str) -> str:
    return name.strip(" \t*_:：.。").casefold()


# --- slots -------------------------------------------------------------------------------------------------------------


def _outline_of(slots: Mapping[tuple[Any, ...], Any]) -> tuple[Outline, dict[Span, Any]]:
    """An outline of paths, whose spans are places in the order of the paths: a point's holds those of the points in it."""
    paths = sorted(((_path(key), slot) for key, slot in slots.items()), key=lambda entry: entry[0])
    lists: dict[tuple[Any, ...], list[Point]] = {}
    found: dict[Span, Any] = {}
    for (path, slot), span in zip(paths, _extents([path for path, _ in paths])):
        point = Point(path[-1][1], str(path[-1][1]), "", span)
        lists.setdefault((*path[:-1], path[-1][0]), []).append(point)
        found[point.span] = slot
    made = [
        PointList(
            tuple(points),
            (points[0].span[0], points[-1].span[1]),
            frozenset(filter(None, [key[-1]])),
            level=len(key) - 1,
        )
        for key, points in lists.items()
    ]
    return Outline(tuple(made), len(paths)), found


def _extents(paths: list[tuple[tuple[str, int], ...]]) -> list[Span]:
    """For each of the sorted paths its place, and where those that begin with it end."""
    ends = [len(paths)] * len(paths)
    around: list[int] = []  # places of the paths that the present one begins with
    for place, path in enumerate(paths):
        while around and path[: len(paths[around[-1]])] != paths[around[-1]]:
            ends[around.pop()] = place
        around.append(place)
    return list(enumerate(ends))


def _path(key: Any) -> tuple[tuple[str, int], ...]:
    expected = "tuples of ordinals, each an integer from 1 on or (noun, integer)"
    if not isinstance(key, tuple) or not key:
        raise ArgumentError.of("resolve", "outline_or_slots", f"key {key!r}", expected)
    path = []
    for part in key:
        paired = isinstance(part, tuple) and len(part) == 2
        noun, ordinal = part if paired else ("", part)
        if not isinstance(noun, str) or (paired and not noun):  # (("", 1),) were (1,) again
            raise ArgumentError.of("resolve", "outline_or_slots", f"key {key!r}", expected)
        path.append((noun, integer("resolve", "outline_or_slots", ordinal, 1, expected)))
    return tuple(path)


# --- words of reasons --------------------------------------------------------------------------------------------------


def _described(ref: Reference) -> str:
    numbers = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ref.ranges)
    counted = f"all {ref.total}" if ref.total is not None else numbers or ", ".join(ref.labels)
    return f"{ref.noun or 'point'} {counted}"


def _plural(noun: str | None) -> str:
    return "points" if noun is None else f"{noun}s"


def _sizes(lists: list[PointList]) -> str:
    sizes = sorted({len(listed) for listed in lists})
    return f"{'the list has' if len(lists) == 1 else 'the lists have'} {' or '.join(map(str, sizes))}"


def _where(scope: Point | None) -> str:
    return "" if scope is None else f" in point {scope.label or scope.ordinal}"
