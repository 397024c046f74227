"""Stop strings: when does the text that comes token by token hold one, and what of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import native
from ..runtime.arguments import flag, integer
from ..runtime.errors import ArgumentError
from .rows import row_numbers


class StopStep(NamedTuple):
    """What one `StopMatcher.feed` says of B rows.

    matched: bool[B], a stop is complete.  safe: B times bytes that may be emitted now.  trim: i64[B], how many bytes at the end
    of the text fed so far are not output: the stop and whatever follows it (0 while no stop was seen).
    """

    matched: torch.Tensor
    safe: list[bytes]
    trim: torch.Tensor


class StopMatcher:
    """Looks for stop strings in B texts that come in pieces of any size, byte by byte.

        matcher = StopMatcher(["\\n\\n", "</answer>"], batch=2)
        matched, safe, trim = matcher.feed([b"4", b"</ans"])     # safe: [b"4", b""]; what may begin a stop is held back
        matched, safe, trim = matcher.feed([b"2", b"wer>. "])    # matched: [False, True]; trim: [0, 11]
        rest = matcher.finish()                                   # [b"", b""]: what was held back when the texts ended

    stops: bytes or str (its UTF-8 bytes); none of them empty.  None and [] never stop.  Since bytes are compared, a stop may
    begin and end inside of a token or of a character.
    batch: rows, each with a state of its own (24 bytes and no buffer).
    include: the stop is part of the output, and only what follows it is cut; then nothing is held back.

    Of several stops the one that ends first wins, of those that end with the same byte the longest. `safe` never holds the
    beginning of a stop that may still complete: all pieces of a row, joined, are the text before the stop, at any moment as much
    of it as is certain. A matched row stays matched and emits nothing more, until `reset`.

    Time is proportional to the bytes fed, whatever the number of stops. A call holds the GIL and is atomic, so threads may
    share a matcher; the order of their pieces is theirs to keep.  Source: Aho and Corasick 1975.
    """

    def __init__(self, stops: Sequence[bytes | str] | None, batch: int = 1, *, include: bool = False) -> None:
        self.stops = _bytes_of(stops)
        rows = integer("StopMatcher", "batch", batch, 1, "1 to 2^24")
        self._native = native.module().StopMatcher(self.stops, rows, flag("StopMatcher", "include", include))

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self._native.rows()

    def feed(self, chunks: Sequence[bytes]) -> StopStep:
        """The next bytes of every row: a list or tuple of B times bytes (b"" where a row has none)."""
        rows = self._native.rows()
        matched, trim = torch.empty(rows, dtype=torch.bool), torch.empty(rows, dtype=torch.int64)
        return StopStep(matched, self._native.feed(chunks, matched, trim), trim)

    def finish(self, rows: Sequence[int] | None = None) -> list[bytes]:
        """The texts have ended: what is still held back of these rows (None: all), b"" where there is nothing or a match."""
        return self._native.finish(self._rows("finish", rows))

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """These rows (None: all) begin a new text."""
        self._native.reset(self._rows("reset", rows))

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row rows[i]: for beams (transformers' beam_idx), forks, and batches that shrink or grow."""
        chosen = self._rows("reorder", rows)
        if not chosen:
            raise ArgumentError.of("StopMatcher.reorder", "rows", rows, "the row that each new row continues")
        self._native.reorder(chosen)

    def nbytes(self) -> int:
        """Bytes of the automaton and of the rows' states."""
        return self._native.nbytes()

    def _rows(self, op: str, rows: Any) -> list[int] | None:
        return None if rows is None else row_numbers(f"StopMatcher.{op}", rows, self.batch).tolist()

    def __repr__(self) -> str:
        return f"StopMatcher({len(self.stops)} stops, batch={self.batch})"


def _bytes_of(stops: Any) -> list[bytes]:
    expected = "a list of bytes or str, none of them empty"
    if stops is None:
        return []
    if isinstance(stops, (str, bytes)) or not isinstance(stops, Sequence):
        raise ArgumentError.of("StopMatcher", "stops", type(stops).__name__, expected)
    result = []
    for i, stop in enumerate(stops):
        if not isinstance(stop, (bytes, str)):
            raise ArgumentError.of("StopMatcher", "stops", f"{type(stop).__name__} at [{i}]", expected)
        try:
            result.append(stop.encode() if isinstance(stop, str) else stop)
        except UnicodeEncodeError:
            got = f"a string with lone surrogates at [{i}]"
            raise ArgumentError.of("StopMatcher", "stops", got, "one that has a UTF-8 form") from None
    return result
