"""How segments are run: the interface, and the engine that calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .cursor_word import CursorWord, RunRecord
from .errors import StaleCursor
from .segments import Segment, Step


class Engine(Protocol):
    """Runs the segments of one run in order and marks each."""

    def begin(self, record: RunRecord) -> None:
        """What follows belongs to this run."""

    def run(self, layer: int, position: int, alone: bool = False) -> None:
        """Segment `layer` at `position`, then its mark. It may be under way when this returns.

        alone: no other segment with it; fault injection asks for it, to cut off a graph of several where it likes.
        """

    def settle(self, at: int) -> int:
        """Waits for what is under way; `at` segments of the run were run; returns how many are done."""


class CpuEngine:
    """Calls one segment after another."""

    def __init__(self, segments: Sequence[Segment], tensors: Mapping[str, torch.Tensor], word: CursorWord) -> None:
        self.segments, self.tensors, self.word = segments, tensors, word

    def begin(self, record: RunRecord) -> None:
        self.record = record
        self.step = Step(self.tensors, record.epoch, record.seed)

    def run(self, layer: int, position: int, alone: bool = False) -> None:
        step, record = self.step, self.record
        step.layer, step.position, step.count = layer, position, min(record.chunk, record.end - position)
        self.segments[layer].fn(step)
        if layer + 1 < len(self.segments):
            self.word.mark(record.epoch, layer + 1, position)
        else:
            self.word.mark(record.epoch, 0, position + step.count)

    def settle(self, at: int) -> int:
        return segments_done(self.record, self.word, len(self.segments))


def segments_done(record: RunRecord, word: CursorWord, layers: int) -> int:
    """How many segments of the run the word says are done."""
    found = word.read()
    if found is None or found[0].epoch != record.epoch:
        raise StaleCursor(f"progress word: run {record.epoch} was going on, and the word is of another")
    cursor = found[1]
    return record.index(cursor.layer, cursor.position, layers)
