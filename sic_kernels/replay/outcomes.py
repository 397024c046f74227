"""What a run or a resume has come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .cursor import Cursor
from .errors import CursorError


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a call of `run` or `resume` did: segments `first` up to `last`, counted over the whole run."""

    names: tuple[str, ...]
    begin: int
    chunk: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """(position, name of the segment), in the order of execution."""
        for i in range(self.first, self.last):
            chunk, layer = divmod(i, len(self.names))
            yield self.begin + chunk * self.chunk, self.names[layer]


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that came to its end. status: "active", or "fallback" with the reasons: it was computed anew, not resumed."""

    epoch: int
    executed: Progress
    seconds: float
    status: str = "active"
    reasons: tuple[str, ...] = ()

    done = True


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """A run that stopped. reason: "deadline", "stop" or "exception" (`error` has it); `cursor` says where it goes on; status and
    reasons as in `Result`."""

    cursor: Cursor
    reason: str
    executed: Progress
    seconds: float
    error: Exception | None = None
    status: str = "active"
    reasons: tuple[str, ...] = ()

    done = False


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What resuming a cursor would run, and why it would be refused (None: it would not)."""

    cursor: Cursor
    remaining: Progress
    refusal: CursorError | None

    def __str__(self) -> str:
        steps = list(self.remaining)
        what = f"{len(steps)} segments" + (f", from {steps[0][1]!r} at token {steps[0][0]}" if steps else "")
        return f"refused: {self.refusal}" if self.refusal else f"runs {what}"
