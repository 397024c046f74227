"""What `parse` returns: plain data."""

from __future__ import annotations

from typing import NamedTuple


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

    The native parser fills the fields by their order (csrc/bind/references_bind.cc), and refuses others.
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
