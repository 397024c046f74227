"""Fault injection: stop a plan's run wherever it can be stopped, damage what can be damaged, and see whether it goes on as if
nothing had happened.

    report = sic.replay.faults.campaign(plan, inputs, count=6000, seed=1, end=64, chunk=16)
    assert report.failures == []

For your own segments: `stop_at` interrupts one run at one place, `tear` leaves a half-written progress word, `poison` fills
buffers, `Clock` is a clock to inject, `churn` allocates and frees at random between an interruption and its resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..runtime.arguments import code_of, instance, integer, real
from ..runtime.errors import ArgumentError, SicError
from .cursor import Cursor
from .cursor_word import RunRecord
from .engine import Engine
from .errors import PoolExhausted
from .outcomes import Interrupted
from .plan import ReplayPlan
from .pool import Block, MemoryPool
from .verification import BITS, PLAIN, SMALL, fill, same_bits

Tensor = torch.Tensor

# before: nothing of the segment was done; mid_write: its results are half there; before_mark: all is done, the mark is missing;
# after: the mark is made.
MOMENTS = ("before", "mid_write", "before_mark", "after")


class Injected(SicError):
    """The exception of a planted fault."""


class Clock:
    """A monotonic clock that stands still until it is told: nanoseconds, for `CursorWord(clock=...)`."""

    def __init__(self, now: int = 1_000_000_000) -> None:
        self.now = integer("faults.Clock", "now", now, 0, "nanoseconds, 0 or more", 63)

    def __call__(self) -> int:
        return self.now

    def advance(self, milliseconds: float) -> None:
        self.now += int(1e6 * real("faults.Clock.advance", "milliseconds", milliseconds, math.isfinite, "a number"))


@dataclasses.dataclass(frozen=True)
class StopPoint:
    """Segment number `index` of a run, counted over all chunks, and the moment at which it is cut off."""

    index: int
    moment: str


class _Faulty:
    """An engine that raises at a place. The chunk of that place is run segment by segment, also where one graph has them all."""

    def __init__(self, plan: ReplayPlan, engine: Engine, point: StopPoint) -> None:
        self.plan, self.engine, self.point = plan, engine, point

    def begin(self, record: RunRecord) -> None:
        self.record = record
        self.engine.begin(record)

    def run(self, layer: int, position: int, alone: bool = False) -> None:
        layers = len(self.plan.segments)
        index = self.record.index(layer, position, layers)
        alone |= index // layers == self.point.index // layers
        if index != self.point.index:
            return self.engine.run(layer, position, alone)
        moment = self.point.moment
        if moment != "before":
            self.engine.run(layer, position, alone)
        self.engine.settle(index)
        if moment in ("mid_write", "before_mark"):  # the mark is taken back
            self.plan.word.mark(self.record.epoch, layer, position)
        if moment == "mid_write":
            self._spoil(layer, position)
        raise Injected(f"stopped {moment} at segment {index}")

    def _spoil(self, layer: int, position: int) -> None:
        """Half of what the segment wrote is something else."""
        segment, tensors = self.plan.segments[layer], self.plan.tensors
        end = min(position + self.record.chunk, self.record.end)
        parts = [tensors[name] for name in segment.writes]
        parts += [tensors[r.name].narrow(r.axis, position, end - position) for r in segment.rows]
        for part in parts:
            half = part.shape[0] // 2 if part.ndim else 0
            fill(part.narrow(0, half, part.shape[0] - half) if part.ndim else part, BITS)

    def settle(self, at: int) -> int:
        return self.engine.settle(at)


@contextlib.contextmanager
def stop_at(plan: ReplayPlan, index: int, moment: str = "mid_write") -> Iterator[None]:
    """Within, the plan's calls stop with `Injected` when they reach segment `index` of the run (counted over all chunks)."""
    instance("faults.stop_at", "plan", plan, ReplayPlan)
    code_of("faults.stop_at", "moment", moment, {name: i for i, name in enumerate(MOMENTS)})
    point = StopPoint(integer("faults.stop_at", "index", index, 0, "the number of a segment"), moment)
    engine = plan.engine
    plan.engine = _Faulty(plan, engine, point)
    try:
        yield
    finally:
        plan.engine = engine


def tear(plan: ReplayPlan, before: Cursor, after: Cursor, low: int = 4) -> None:
    """Leaves a word whose `low` low bytes are of `after` and the others of `before`, as if its store had been cut in two."""
    op = "faults.tear"
    instance(op, "plan", plan, ReplayPlan)
    for arg, cursor in (("before", before), ("after", after)):
        instance(op, arg, cursor, Cursor)
    if integer(op, "low", low, 0, "0 to 8 bytes") > 8:
        raise ArgumentError.of(op, "low", low, "0 to 8 bytes")
    word = plan.word
    pieces = []
    for cursor in (before, after):
        word.mark(cursor.epoch, cursor.layer, cursor.position)
        pieces.append(word.raw())
    word.set_raw(pieces[1][:low] + pieces[0][low:])


def poison(plan: ReplayPlan, names: Sequence[str]) -> None:
    """Fills every byte of these buffers with 0xff: NaN, -1, true."""
    op = "faults.poison"
    instance(op, "plan", plan, ReplayPlan)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ArgumentError.of(op, "names", repr(names), "names of buffers")
    for name in names:
        if not isinstance(name, str) or name not in plan.tensors:
            raise ArgumentError.of(op, "names", repr(name), "|".join(plan.tensors))
    for name in names:
        fill(plan.tensors[name], BITS)


def churn(pool: MemoryPool, seed: int, steps: int = 64, part: str | None = None) -> None:
    """Random allocations and frees in a pool, all given back; what was allocated before must not notice."""
    op = "faults.churn"
    instance(op, "pool", pool, MemoryPool)
    steps = integer(op, "steps", steps, 0, "0 or more")
    rng = random.Random(integer(op, "seed", seed, 0, "an integer, 0 or more", 64))
    held: list[Block] = []
    options: dict[str, Any] = {} if part is None else {"part": part}
    for _ in range(steps):
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.randrange(len(held))))
            continue
        with contextlib.suppress(PoolExhausted):
            held.append(pool.alloc(rng.randrange(1, 1 << 14), **options))
            fill(held[-1].tensor, rng.choice((BITS, SMALL, PLAIN)))
    for block in held:
        pool.free(block)


@dataclasses.dataclass(frozen=True)
class Report:
    """Of a campaign: runs that were interrupted, how often in all, and each one that did not end as it should, in words."""

    runs: int
    interruptions: int
    failures: list[str]


def campaign(
    plan: ReplayPlan,
    inputs: Mapping[str, Tensor],
    *,
    count: int,
    seed: int = 0,
    begin: int = 0,
    end: int,
    chunk: int | None = None,
    pool: MemoryPool | None = None,
) -> Report:
    """`count` runs, each stopped at one to three places drawn from `seed` and resumed until it ends, against one that is not.

    A run fails unless all buffers that segments write hold the same bits and exactly the segments from each cursor on were run.
    chunk: a divisor of end - begin.  pool: churned between interruption and resume.
    """
    op = "faults.campaign"
    instance(op, "plan", plan, ReplayPlan)
    if pool is not None:
        instance(op, "pool", pool, MemoryPool)
    count = integer(op, "count", count, 1, "1 or more")
    begin = integer(op, "begin", begin, 0, "0 or more")
    end = integer(op, "end", end, begin + 1, "an integer above begin")
    chunk = end - begin if chunk is None else integer(op, "chunk", chunk, 1, "1 or more")
    options: dict[str, Any] = {"begin": begin, "end": end, "chunk": chunk, "seed": seed, "rows_given": True}
    if (end - begin) % chunk:  # what a shorter chunk leaves of a boundary buffer nobody has declared
        raise ArgumentError.of(op, "chunk", chunk, f"a divisor of the {end - begin} tokens")
    whole = plan.run(inputs, **options)
    if isinstance(whole, Interrupted):
        raise SicError(f"campaign: the run without faults was interrupted: {whole.error!r}")
    want = {name: x.clone() for name, x in _results(plan, begin, end).items()}
    rng, interruptions, failures = random.Random(seed), 0, []
    for number in range(count):
        points = _points(rng, len(whole.executed))
        interruptions += len(points)
        for x in _results(plan, begin, end).values():
            fill(x, BITS)
        problem = _one(plan, inputs, options, points, len(whole.executed), (pool, rng)) or _difference(
            want, _results(plan, begin, end)
        )
        if problem:
            failures.append(f"run {number}, stopped at {', '.join(f'{p.index} {p.moment}' for p in points)}: {problem}")
    return Report(count, interruptions, failures)


def _points(rng: random.Random, total: int) -> list[StopPoint]:
    """One to three places that a run comes to one after another."""
    indices = sorted(rng.randrange(total) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return [StopPoint(index, rng.choice(MOMENTS)) for index in indices]


def _one(
    plan: ReplayPlan,
    inputs: Mapping[str, Tensor],
    options: dict[str, Any],
    points: list[StopPoint],
    total: int,
    churned: Any,
) -> str:
    """A run with these stops; what went wrong, or ""."""
    pool, rng = churned
    done = 0
    outcome: Any = None
    for point in points:
        if point.index < done:  # the stop before was after this segment's mark
            continue
        with stop_at(plan, point.index, point.moment):
            outcome = plan.run(inputs, **options) if outcome is None else plan.resume(outcome.cursor.to_bytes())
        if not isinstance(outcome, Interrupted):
            return "it was not interrupted"
        reached = point.index + (point.moment == "after")
        if (outcome.executed.first, outcome.executed.last) != (done, reached):
            return f"segments {outcome.executed.first} to {outcome.executed.last} were run, not {done} to {reached}"
        done = reached
        if pool is not None:
            churn(pool, rng.randrange(1 << 30), 8)
    if done == total:
        return "" if plan.cursor() is None else "a cursor is left of a run that is done"
    outcome = plan.resume(outcome.cursor)
    if not outcome.done or (outcome.executed.first, outcome.executed.last) != (done, total):
        return f"the rest was not run: {outcome}"
    return ""


def _results(plan: ReplayPlan, begin: int, end: int) -> dict[str, Tensor]:
    """What a run over these tokens writes: boundary buffers, and the rows of the tokens."""
    found = {name: plan.tensors[name] for segment in plan.segments for name in segment.writes}
    rows = {r.name: r for segment in plan.segments for r in segment.rows}
    return found | {name: plan.tensors[name].narrow(r.axis, begin, end - begin) for name, r in rows.items()}


def _difference(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    wrong = [name for name in want if not same_bits(want[name], got[name])]
    return f"other bits in {', '.join(wrong)}" if wrong else ""
