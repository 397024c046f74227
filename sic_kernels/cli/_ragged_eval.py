"""What padding costs on real texts: all rows as long as the longest, in buckets, and not padded at all.

Documents of mixed lengths are drawn into batches as requests would arrive, in no order of length. Every batch is planned in
each way; tokens are added up over all batches. Nothing is computed but lengths.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from .. import ragged
from ..models import texts

SIZES = (16, 64)  # sequences of a batch
LONGEST = 4096  # tokens of a document: the rest is cut, as a server cuts
BATCHES = 500  # of each kind and size
PLAYS = 4
MIXED = "all kinds alike"
DOUBLING = tuple(32 << i for i in range(7))  # buckets of 32 to 2048 tokens
WAYS = ("padded", "bucketed", "doubling", "ragged")


def documents() -> dict[str, list[str]]:
    """Kind -> texts that are on the machine: Python's help one by one, functions of a module, scenes and speeches of plays."""
    kinds = {
        "help texts": texts.topics(),
        "functions": re.split(r"\n(?=def |class |    def )", texts.text("python:_pydecimal")),
        "scenes": [],
        "speeches": [],
    }
    for name in [name for name in texts.text_names() if not name.startswith("python")][:PLAYS]:
        play = texts.text(name)
        kinds["scenes"] += re.split(r"\n(?=#+ )", play)
        kinds["speeches"] += re.split(r"\n\n(?=\*\*)", play)
    stripped = {kind: [text.strip() for text in found if text.strip()] for kind, found in kinds.items()}
    return {kind: found for kind, found in stripped.items() if found}


def measure(count_tokens: Callable[[Sequence[str]], list[int]], documents: dict[str, list[str]]) -> dict[str, Any]:
    """Tokens computed in each way, for batches of each kind of document and of all kinds with the same chance."""
    lengths = {kind: [min(n, LONGEST) for n in count_tokens(found)] for kind, found in documents.items()}
    kinds = {**{kind: [found] for kind, found in lengths.items()}, MIXED: list(lengths.values())}
    rows = [_row(kind, pools, size) for kind, pools in kinds.items() for size in SIZES]
    return {"documents": sum(map(len, lengths.values())), "longest": LONGEST, "batches": BATCHES, "rows": rows}


def _row(kind: str, pools: list[list[int]], size: int) -> dict[str, Any]:
    """All batches of one size; each sequence from one of the pools."""
    drawn, computed = random.Random(size), dict.fromkeys(WAYS, 0)
    tokens, segments = 0, dict.fromkeys(WAYS[1:], 0.0)
    for _ in range(BATCHES):
        batch = [drawn.choice(drawn.choice(pools)) for _ in range(size)]
        plans = {
            "bucketed": ragged.plan(batch), "doubling": ragged.plan(batch, DOUBLING), "ragged": ragged.plan(batch, None),
        }  # fmt: skip
        tokens += sum(batch)
        computed["padded"] += size * max(batch)
        for way, plan in plans.items():
            computed[way] += plan.computed
            segments[way] += len(plan) / BATCHES
    wasted = {way: total - tokens for way, total in computed.items()}
    median = sorted(n for pool in pools for n in pool)[sum(map(len, pools)) // 2]
    return {
        "kind": kind, "batch": size, "tokens": tokens, "median_length": median, "segments": segments,
        "computed": computed, "wasted": wasted, "efficiency": {way: tokens / computed[way] for way in WAYS},
        "less_waste": {way: 1 - wasted[way] / wasted["padded"] if wasted["padded"] else None for way in WAYS},
    }  # fmt: skip


HEADER = (
    "documents", "median tokens", "sequences", "efficiency: padded", "bucketed", "doubling", "ragged",
    "waste: bucketed", "doubling", "segments: bucketed", "doubling",
)  # fmt: skip


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table as text; waste against that of padding to the longest."""
    return [
        (row["kind"], str(row["median_length"]), str(row["batch"]),
         *(f"{row['efficiency'][way]:.1%}" for way in WAYS),
         *(_less(row["less_waste"][way]) for way in WAYS[1:3]), *(f"{row['segments'][way]:.1f}" for way in WAYS[1:3]))
        for row in result["rows"]
    ]  # fmt: skip


def _less(share: float | None) -> str:
    return "" if share is None else f"{-share:+.0%}"


def title(result: dict[str, Any]) -> str:
    return (
        f"{result['documents']} documents in tokens of {result['tokenizer']}, {result['longest']} at most; "
        f"{result['batches']} random batches in each line"
    )
