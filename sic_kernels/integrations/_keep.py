"""Spans of tokens that a cache's user wants read, in the user's columns and in the cache's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.arguments import integer
from ..runtime.errors import ArgumentError

Tensor = torch.Tensor
Spans = Sequence[Sequence[tuple[int, int]]]  # of each row: (begin, end) in columns


class KeptSpans:
    """Spans of each row, given in columns (padding counted), as `attend` takes them: in stored tokens (padding takes no place).

    One row's spans are those of every row. The translation is made once and kept until something changes it.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self._columns = _columns(spans)  # int64 [rows,n,2], empty spans at the end; None: nothing is kept
        self._stored: Tensor | None = None

    def check(self, batch: int) -> None:
        """There must be spans for every row, or of one for all."""
        if self._columns is not None and self._columns.shape[0] not in (1, batch):
            got = f"spans of {self._columns.shape[0]} rows"
            raise ArgumentError.of("keep", "spans", got, f"those of 1 or {batch}, as the rows of the cache")

    def stored(self, batch: int, live: Tensor | None, device: torch.device) -> Tensor | None:
        """int64 `[batch,n,2]`; live bool `[batch,seen]`: which columns so far are stored (None: all). Those to come are."""
        if self._columns is None or self._stored is not None:
            return self._stored
        spans = self._columns.to(device).expand(batch, -1, -1)
        if live is not None:
            seen = live.shape[1]
            before = torch.nn.functional.pad(live.cumsum(1), (1, 0))  # tokens stored before each column
            known = before.gather(1, spans.clamp(max=seen).flatten(1)).view_as(spans)
            spans = known + (spans - seen).clamp(min=0)
        self._stored = spans
        return spans

    def changed(self) -> None:
        """Another set of columns is stored now."""
        self._stored = None

    def crop(self, columns: int) -> None:
        """Only the first so many columns are left; spans end there, since other tokens will follow."""
        if self._columns is not None:
            self._columns = self._columns.clamp(max=columns)
        self.changed()

    def select(self, rows: Tensor) -> None:
        """New row i is old row rows[i]."""
        if self._columns is not None and self._columns.shape[0] > 1:
            self._columns = self._columns.to(rows.device)[rows]
        self.changed()

    def repeat(self, times: int) -> None:
        """Every row `times` times, copies side by side."""
        if self._columns is not None and self._columns.shape[0] > 1:
            self._columns = self._columns.repeat_interleave(times, dim=0)
        self.changed()


def _columns(spans: Any) -> Tensor | None:
    if spans is None:
        return None
    expected = "for each row a list of (begin, end) columns with 0 <= begin <= end"
    try:
        rows = [[(begin, end) for begin, end in row] for row in spans]
    except (TypeError, ValueError) as error:
        raise ArgumentError.of("keep", "spans", repr(spans), expected) from error
    for begin, end in (span for row in rows for span in row):
        first = integer("keep", "spans", begin, 0, expected)
        integer("keep", "spans", end, first, expected)
    most = max(map(len, rows), default=0)
    if most == 0:
        return None
    return torch.tensor([row + [(0, 0)] * (most - len(row)) for row in rows], dtype=torch.int64)
