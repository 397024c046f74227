"""Ordinals without a noun of their own: "the first problem is solved, but how do I fix the second?" """

from __future__ import annotations

from collections.abc import Iterable

from . import parsing
from .grammar import Grammar
from .parsing import Reference

COUNTED = ("ordinal", "cardinal")


def parse(
    text: str, *, depth: int | None = None, lang: str = "auto", grammar: Grammar | None = None
) -> list[Reference]:
    """The references of `text`, in their order.

    text: of any length, English or Chinese or both; quoted parts are not searched (they can be titles).
    depth: how deep references may be nested, 1 to 3 (default: `SIC_HASH_DEPTH`).  A text that nests deeper gives one reference
    of kind "too deep" in place of the nested one, so that nothing is resolved to a part of what was meant.
    lang: "en" or "zh" for one grammar only; "auto" takes the English one unless a text has Chinese letters and no Latin ones, and
    the Chinese one where it has other than ASCII characters.
    grammar: of `load_grammar` (default: the package's).

    Nothing is guessed: what has no ordinal, number, letter or title is of kind "vague" or is not found at all. An ordinal without
    a noun has that of the reference before it in the text, if there is one, and is in what that one is in.
    Time linear in the length of the text. Deterministic; thread-safe; `ArgumentError` before anything is read.
    """
    found = parsing.parse(text, depth=depth, lang=lang, grammar=grammar)
    return with_antecedents(found) if len(found) > 1 else found


def with_antecedents(references: Iterable[Reference]) -> list[Reference]:
    """Each ordinal without a noun gets the noun, and the outer reference, of the last one before it that has a noun."""
    result: list[Reference] = []
    before: Reference | None = None
    for this in references:
        if this.noun is not None:
            before = this if this.kind in (*COUNTED, "named") else None
        elif before is not None and this.within is None and this.kind in COUNTED:
            this = this._replace(noun=before.noun, within=before.within, depth=before.depth)
        result.append(this)
    return result
