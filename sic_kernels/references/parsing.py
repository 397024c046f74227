"""`parse`: the structured references of a sentence. The parser is native (csrc/references)."""

from __future__ import annotations

from typing import Any

from ..runtime import config
from ..runtime.errors import ArgumentError
from ..runtime.values import integer
from .grammar import LANGUAGES, Grammar, shipped
from .types import Reference

MOST_DEPTH = 3
LANGS = ("auto", *LANGUAGES)


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
    Time and memory linear in the length of the text. Deterministic; thread-safe; `ArgumentError` before anything is read.
    """
    if not isinstance(text, str):
        raise ArgumentError.of("parse", "text", type(text).__name__, "str")
    if lang not in LANGS:
        raise ArgumentError.of("parse", "lang", repr(lang), "|".join(LANGS))
    most = config.current().hash_depth if depth is None else checked_depth(depth)
    grammar = checked_grammar("parse", grammar)
    low = str.lower(text)
    if len(low) != len(text):  # some letters are longer in lower case
        low = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    found = grammar.native.parse(text, low, LANGS.index(lang) - 1, most)
    return with_antecedents(found) if len(found) > 1 else found


def with_antecedents(references: list[Reference]) -> list[Reference]:
    """Each ordinal without a noun gets the noun, and the outer reference, of the last one before it that has a noun: "the first
    problem is solved, but how do I fix the second?" """
    result: list[Reference] = []
    before: Reference | None = None
    for this in references:
        if this.noun is not None:
            before = this if this.kind in ("ordinal", "cardinal", "named") else None
        elif before is not None and this.within is None and this.kind in ("ordinal", "cardinal"):
            this = this._replace(noun=before.noun, within=before.within, depth=before.depth)
        result.append(this)
    return result


def checked_depth(depth: Any) -> int:
    if type(depth) is int and 1 <= depth <= MOST_DEPTH:  # nearly always
        return depth
    value = integer("parse", "depth", depth, 1, f"an integer from 1 to {MOST_DEPTH}")
    if value > MOST_DEPTH:
        raise ArgumentError.of("parse", "depth", value, f"an integer from 1 to {MOST_DEPTH}")
    return value


def checked_grammar(op: str, grammar: Any) -> Grammar:
    if grammar is None:
        return shipped()
    if not isinstance(grammar, Grammar):
        raise ArgumentError.of(op, "grammar", type(grammar).__name__, "Grammar, of load_grammar")
    return grammar
