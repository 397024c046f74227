"""Batch sizes from a token budget: many short sequences, or few long ones."""

from __future__ import annotations

import bisect
import heapq
from typing import Any

from ..runtime.arguments import flag, integer
from ..runtime.errors import ArgumentError
from .lengths import Lengths, checked_lengths


def batch_by_tokens(
    lengths: Lengths, token_budget: int, *, max_rows: int | None = None, padded: bool = False
) -> list[list[int]]:
    """Distribute sequences over batches of at most `token_budget` tokens, so that there are few batches.

    lengths: B integers, 0 or more.  max_rows: sequences of a batch at most; None: any number.
    padded: whether a batch costs its longest sequence times its rows (it is padded) or the sum of its lengths (it is packed).

    Returns the rows of each batch, ascending; batches by their first row. Every row is in exactly one.  Raises ArgumentError for
    a row that is longer than the budget.  Deterministic: the same lengths give the same batches.
    Method: packed, the longest row first into the batch that it fills best (best fit decreasing, Johnson 1974: without max_rows
    near 11/9 of the fewest batches at worst); padded, runs of rows sorted by length, so that those of a batch are alike.
    """
    sizes = checked_lengths("batch_by_tokens", lengths)
    budget = integer("batch_by_tokens", "token_budget", token_budget, 1, "an integer, 1 or more")
    most = (
        len(sizes) if max_rows is None else integer("batch_by_tokens", "max_rows", max_rows, 1, "an integer, 1 or more")
    )
    for row, size in enumerate(sizes):
        if size > budget:
            raise ArgumentError.of("batch_by_tokens", "lengths", f"{size} at [{row}]", f"at most the budget, {budget}")
    longest_first = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    fill: Any = _runs if flag("batch_by_tokens", "padded", padded) else _best_fit
    return sorted(sorted(batch) for batch in fill(longest_first, sizes, budget, most))


def _runs(order: list[int], sizes: list[int], budget: int, most: int) -> list[list[int]]:
    """The first row of a batch, its longest, says how many rows it has."""
    batches, first = [], 0
    while first < len(order):
        longest = sizes[order[first]]
        count = min(most, budget // longest) if longest else most
        batches.append(order[first : first + count])
        first += count
    return batches


def _best_fit(order: list[int], sizes: list[int], budget: int, most: int) -> list[list[int]]:
    """Each row into the batch that has the least room for it; of several the first."""
    batches: list[list[int]] = []
    room: dict[int, list[int]] = {}  # tokens left -> a heap of the batches with so many that take rows
    lefts: list[int] = []  # its keys, ascending
    for row in order:
        at = bisect.bisect_left(lefts, sizes[row])
        if at < len(lefts):
            left = lefts[at]
            batch = heapq.heappop(room[left])
            batches[batch].append(row)
            if not room[left]:
                del room[left], lefts[at]
        else:
            left, batch = budget, len(batches)
            batches.append([row])
        left -= sizes[row]
        if len(batches[batch]) < most:
            if left not in room:
                room[left] = []
                bisect.insort(lefts, left)
            heapq.heappush(room[left], batch)
    return batches
