"""Which sequences of a batch are computed together, and what padding costs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..runtime import metrics
from ..runtime.arguments import integer, is_dense, real
from ..runtime.errors import ArgumentError
from .lengths import MOST, Lengths, bounds_of, checked_lengths

SLACK = 1 / 8  # of a bucket's bound: 512 +- 64, 1024 +- 128


@dataclasses.dataclass(frozen=True)
class Segment:
    """Sequences that are computed together.

    kind: "bucket" (padded, of one bucket), "long" (padded, longer than any bucket takes), "ragged" (not padded).
    bound: of the bucket, in tokens; None for the other kinds.
    rows: which sequences, ascending.  lengths: theirs.
    padded_length: tokens each of them is padded to, the longest one's; of a ragged segment nothing is padded.
    """

    kind: str
    bound: int | None
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def padded_length(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        """Useful tokens."""
        return sum(self.lengths)

    @property
    def computed(self) -> int:
        """Tokens computed, padding included."""
        return self.tokens if self.kind == "ragged" else len(self.rows) * self.padded_length

    @property
    def wasted(self) -> int:
        """Tokens of padding."""
        return self.computed - self.tokens

    @property
    def padding_efficiency(self) -> float | None:
        """tokens / computed; None where nothing is computed."""
        return _ratio(self.tokens, self.computed)

    @functools.cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """i32 [rows+1] on the CPU: cumulative lengths, for `pack`, `unpack` and attention kernels. Made once."""
        return bounds_of(list(self.lengths), "cpu")


@dataclasses.dataclass(frozen=True)
class Segments(Sequence[Segment]):
    """The plan of a batch: a sequence of `Segment`s, short ones first; every sequence of the batch is in exactly one."""

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return len(self.segments)

    def __getitem__(self, i: Any) -> Any:
        return self.segments[i]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    @property
    def order(self) -> tuple[int, ...]:
        """The sequences as the segments have them, one segment behind the other."""
        return tuple(row for segment in self for row in segment.rows)

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self)

    @property
    def computed(self) -> int:
        return sum(segment.computed for segment in self)

    @property
    def wasted(self) -> int:
        return self.computed - self.tokens

    @property
    def padding_efficiency(self) -> float | None:
        """Useful tokens over tokens computed, of all segments; None where nothing is computed."""
        return _ratio(self.tokens, self.computed)

    def restore(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """One result for each sequence, in the order of the batch.

        results: for each segment one result for each of its rows (a list, or a tensor with that first dimension).
        """
        got = [_length(part) for part in results] if _length(results) >= 0 else type(results).__name__
        if got != [len(s.rows) for s in self]:
            raise ArgumentError.of("restore", "results", f"lengths {got}", [len(s.rows) for s in self])
        restored: list[Any] = [None] * len(self.order)
        for part, segment in zip(results, self):
            for row, result in zip(segment.rows, part):
                restored[row] = result
        return restored

    def record(self) -> None:
        """Count this batch in the metric `sic_padding_efficiency_ratio`: call it when the batch is computed."""
        metrics.get("sic_padding_efficiency_ratio").add(self.tokens, self.computed)


def plan(
    lengths: Lengths,
    buckets: Sequence[int] | None = (512, 1024, 2048),
    slack: float | int | Sequence[int] = SLACK,
) -> Segments:
    """Group the sequences of a batch by length, so that little is padded; with `buckets=None` nothing is.

    lengths: B integers, 0 or more, a list or an array (one on a device is read back).
    buckets: ascending bounds in tokens.  A sequence belongs to the smallest bucket whose bound + slack holds it; what is longer
    than any bucket takes is in a segment of its own kind.  A segment is padded to its longest sequence, which is at most
    bound + slack.  None: one segment of all sequences, to be computed by cumulative lengths.
    slack: a share of each bound (float), tokens (int), or tokens for each bucket.

    Segments ascend by length and are never empty; within one, rows keep their order.  The same lengths give the same plan.
    Source: segmented dynamic padding, 512 +- 64 and 1024 +- 128; cumulative lengths as in FlashAttention (Dao et al. 2022).
    """
    sizes = checked_lengths("plan", lengths)
    if buckets is None:
        rows = tuple(range(len(sizes)))
        return Segments((Segment("ragged", None, rows, tuple(sizes)),) if rows else ())
    bounds = _bounds(buckets)
    limits = [bound + extra for bound, extra in zip(bounds, _slacks(slack, bounds))]
    groups: list[list[int]] = [[] for _ in range(len(bounds) + 1)]
    for row, size in enumerate(sizes):
        groups[next((i for i, limit in enumerate(limits) if size <= limit), len(bounds))].append(row)
    kinds = [*(("bucket", bound) for bound in bounds), ("long", None)]
    return Segments(
        tuple(
            Segment(kind, bound, tuple(rows), tuple(sizes[row] for row in rows))
            for (kind, bound), rows in zip(kinds, groups)
            if rows
        )
    )


def padding_efficiency(lengths: Lengths, padded: int | Segments) -> float | None:
    """Useful tokens over tokens computed: 1 is no padding; None where nothing is computed.

    lengths: B integers.  padded: the length that all B are padded to, or the `Segments` of exactly these lengths.
    """
    sizes = checked_lengths("padding_efficiency", lengths)
    if isinstance(padded, Segments):
        if padded.restore([s.lengths for s in padded]) != sizes:
            raise ArgumentError.of("padding_efficiency", "padded", "the plan of other lengths", "one of `lengths`")
        return padded.padding_efficiency
    if not isinstance(padded, numbers.Integral) or padded < max(sizes, default=0):
        raise ArgumentError.of(
            "padding_efficiency", "padded", repr(padded), f"Segments, or at least the longest, {max(sizes, default=0)}"
        )
    return _ratio(sum(sizes), len(sizes) * int(padded))


def _length(values: Any) -> int:
    """-1 of what has none."""
    if isinstance(values, torch.Tensor):
        return len(values) if is_dense(values) and values.ndim > 0 else -1
    try:
        return len(values) if hasattr(values, "__getitem__") else -1
    except TypeError:
        return -1


def _ratio(tokens: int, computed: int) -> float | None:
    return tokens / computed if computed else None


def _bounds(buckets: Any) -> list[int]:
    expected = "ascending numbers of tokens, or None"
    several = isinstance(buckets, (list, tuple)) and len(buckets) > 0
    bounds = [integer("plan", "buckets", b, 1, expected) for b in buckets] if several else []
    if not several or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ArgumentError.of("plan", "buckets", repr(buckets), expected)
    return bounds


def _slacks(slack: Any, bounds: list[int]) -> list[int]:
    """Tokens for each bucket."""
    expected = f"a share, tokens, or tokens for each of {len(bounds)} buckets"
    if isinstance(slack, (list, tuple)):
        if len(slack) != len(bounds):
            raise ArgumentError.of("plan", "slack", repr(slack), expected)
        tokens = [integer("plan", "slack", s, 0, expected) for s in slack]
    elif isinstance(slack, numbers.Integral):
        tokens = [integer("plan", "slack", slack, 0, expected)] * len(bounds)
    else:
        share = real("plan", "slack", slack, lambda x: 0 <= x <= MOST, expected)
        tokens = [math.floor(share * b) for b in bounds]
    limits = [bound + extra for bound, extra in zip(bounds, tokens)]
    if any(a >= b for a, b in itertools.pairwise(limits)):
        raise ArgumentError.of("plan", "slack", repr(slack), f"less than takes a bucket beyond the next: {limits}")
    return tokens
