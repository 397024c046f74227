"""What people say about an earlier answer, with what it means: cases for tests and for `python -m sic_kernels eval references`.

cases/answers*.txt have the answers, cases/cases.txt what is said and what is expected; the other lists the same in other words,
each written when the one before it had been used for mending, and measured once before the grammar was mended by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..runtime.errors import ArgumentError
from .outlining import outline
from .parsing import parse
from .points import Outline
from .resolving import Ambiguous, Resolved, Result, Unresolved, resolve

FOLDER = Path(__file__).parent / "cases"
LISTS = ("cases", "heldout", "fresh", *(f"fresh{n}" for n in range(2, 9)))
UNRESOLVED = {"range": "out of range", "deep": "too deep", "missing": "missing"}
NEAR = 14  # a point begins at most so many characters before the words that name it: its marker


class Case(NamedTuple):
    """answer: its name in answers*.txt.  text: what is said.  expected: "= words; words" (points), "? n" (ambiguous), or
    range|vague|deep|missing|none."""

    answer: str
    text: str
    expected: str

    @property
    def language(self) -> str:
        return self.answer.partition("-")[0]

    @property
    def kind(self) -> str:
        """points|ambiguous|range|vague|deep|missing|none."""
        return {"=": "points", "?": "ambiguous"}.get(self.expected[0], self.expected)


class Verdict(NamedTuple):
    """exact: as expected.  wrong: resolved to what was not meant, or resolved although nothing can be.  seen: in words."""

    exact: bool
    wrong: bool
    seen: str


@functools.lru_cache(maxsize=1)
def answers() -> dict[str, str]:
    """Name -> text."""
    parts = [part for path in sorted(FOLDER.glob("answers*.txt")) for part in _answers_of(path)]
    return {name: text.rstrip("\n") for name, _, text in (part.partition("\n") for part in parts)}


def _answers_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("=== ")[1:]


@functools.lru_cache(maxsize=16)
def cases(name: str = "cases") -> list[Case]:
    """The cases of one of `LISTS`."""
    if name not in LISTS:
        raise ArgumentError.of("cases", "name", repr(name), "|".join(LISTS))
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [Case(*map(str.strip, line.split("|"))) for line in lines if line and not line.startswith("#")]


@functools.lru_cache(maxsize=64)
def outline_of(answer: str) -> Outline:
    return outline(answers()[answer])


def judge(case: Case, resolver: Callable[[str, Outline], list[Result]] | None = None) -> Verdict:
    """Resolve what a case says and compare. resolver: (text, outline) -> results, in place of `parse` and `resolve`."""
    found = outline_of(case.answer)
    results = _resolved(case.text, found) if resolver is None else resolver(case.text, found)
    text = answers()[case.answer]
    points = [p for r in results for p in (r if isinstance(r, list) else [r]) if isinstance(p, Resolved)]
    ambiguous = [r for r in results if isinstance(r, Ambiguous)]
    reasons = [r.kind for r in results if isinstance(r, Unresolved)]
    seen = [text[p.point.span[0] : p.point.span[1]][:24].replace("\n", " ") for p in points]
    seen += [f"? {len(r.candidates)}" for r in ambiguous] + reasons
    if case.kind == "points":
        named = [words.strip() for words in case.expected[1:].split(";")]
        wanted = [text.index(words) for words in named]
        right = len(points) == len(wanted) and all(
            0 <= at - p.point.span[0] <= NEAR and at + len(words) <= p.point.span[1]
            for at, words, p in zip(wanted, named, points)
        )
        return Verdict(right and not ambiguous, bool(points) and not right, "; ".join(seen))
    if case.kind == "ambiguous":
        exact = [len(r.candidates) for r in ambiguous] == [int(case.expected[1:])]
    elif case.kind == "vague":
        exact = not ambiguous
    elif case.kind == "none":
        exact = not results
    else:
        exact = not ambiguous and UNRESOLVED[case.kind] in reasons
    return Verdict(exact and not points, bool(points), "; ".join(seen))


def _resolved(text: str, found: Outline) -> list[Result]:
    return [resolve(ref, found) for ref in parse(text, depth=3)]
