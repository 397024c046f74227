"""References to an earlier answer, resolved by a grammar: "the third point above", 上文第三点, "step 2 of the last option".

    outline = sic.references.outline(answer, tokenizer=tokenizer)        # its lists, headings and paragraphs
    for ref in sic.references.parse("What do you mean by the third point?"):
        found = sic.references.resolve(ref, outline)                     # Resolved, a list, Ambiguous or Unresolved
        sic.references.pages(found.tokens, page_size=16)                 # the pages of the KV cache that hold it

Only what has a structure is resolved: an ordinal, a number, a letter, a title. What is vague ("that passage above") is refused
and never guessed, and so is what fits two points alike. No tensors, no model; `parse` is C++ (csrc/references).
"""

from .grammar import Grammar, load_grammar
from .outlining import outline
from .parsing import parse
from .points import Outline, Point, PointList
from .resolving import Ambiguous, Resolved, Unresolved, pages, resolve
from .types import Reference

__all__ = [
    "Ambiguous",
    "Grammar",
    "Outline",
    "Point",
    "PointList",
    "Reference",
    "Resolved",
    "Unresolved",
    "load_grammar",
    "outline",
    "pages",
    "parse",
    "resolve",
]
