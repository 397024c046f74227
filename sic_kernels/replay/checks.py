"""What has to hold of a plan, of the arguments of a run, and of a cursor: each checked before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..runtime.arguments import described, integer, is_dense, real
from ..runtime.errors import ArgumentError
from .cursor import MAX_POSITIONS, Cursor, boot_id
from .cursor_word import RunRecord, process_id
from .errors import CursorExpired, FingerprintMismatch, PlanError, StaleCursor
from .segments import Buffer, Segment
from .writers import are_others

if TYPE_CHECKING:
    from .plan import ReplayPlan

Tensor = torch.Tensor

_MOST_WORK: Any = 100_000  # of NumPy, to compare two views: milliseconds

# --- segments and buffers that fit together ---------------------------------------------------------------------------


def checked_names(arg: str, names: Any) -> tuple[str, ...]:
    """Names of buffers; one string is not its letters."""
    is_several = isinstance(names, Iterable) and not isinstance(names, str)
    found = tuple(names) if is_several else ()
    if not is_several or not all(isinstance(name, str) for name in found):
        raise ArgumentError.of("ReplayPlan.capture", arg, repr(names), "a sequence of names of buffers")
    return found


def check_contract(
    segments: Sequence[Segment], buffers: Mapping[str, Buffer], inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """`ArgumentError` for an input or output that is none; `PlanError` where a segment, cut off and run again, could not find
    what it read the first time.

    in_place: it writes what it reads, or two buffers that are written share memory. no_producer: it reads what only later
    segments write (what none writes is an input, or a constant). stale_boundary: it overwrites,
    or leaves behind, a result that nobody has read: some segment reads the wrong one of two buffers.
    """
    writer = {name: segment for segment in segments for name in segment.changes}  # the last one of each buffer
    _check_ends(buffers, writer, inputs, outputs)
    _check_disjoint(buffers, writer)
    _check_flow(segments, buffers, outputs)


def _check_ends(
    buffers: Mapping[str, Buffer], writer: Mapping[str, Segment], inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Inputs and outputs are buffers, and nobody writes an input."""
    op = "ReplayPlan.capture"
    for name in outputs:
        if name not in buffers:
            raise ArgumentError.of(op, "outputs", repr(name), "the name of a buffer")
    for name in inputs:
        if name not in buffers or name in writer:
            raise ArgumentError.of(op, "inputs", repr(name), "a buffer that no segment writes")


def _check_disjoint(buffers: Mapping[str, Buffer], writer: Mapping[str, Segment]) -> None:
    """No two buffers that are written share memory."""
    before: list[str] = []  # those that reach to where the next one begins
    for name in sorted(writer, key=lambda name: _extent(buffers[name].tensor)):
        x = buffers[name].tensor
        before = [other for other in before if _extent(buffers[other].tensor)[1] > _extent(x)[0]]
        for other in before:
            if _share(x, buffers[other].tensor):
                detail = f"{other!r} and {name!r}, which are both written, share memory"
                raise PlanError(writer[name].name, "in_place", detail)
        before.append(name)


def _check_flow(segments: Sequence[Segment], buffers: Mapping[str, Buffer], outputs: Sequence[str]) -> None:
    """Every result is read, by segments behind the one that writes it, before it is overwritten."""
    written = {name for segment in segments for name in segment.writes}
    unread: dict[str, str] = {}
    fresh: set[str] = set()
    for segment in segments:
        for name in segment.reads:
            _check_apart(segment, buffers[name], [buffers[other] for other in segment.changes])
            if name in written and name not in fresh:
                raise PlanError(segment.name, "no_producer", f"reads {name!r}, which no segment before it has written")
            unread.pop(name, None)
        for name in segment.writes:
            if name in unread:
                detail = f"overwrites {name!r} of segment {unread[name]!r}, which nobody has read"
                raise PlanError(segment.name, "stale_boundary", detail)
            unread[name] = segment.name
            fresh.add(name)
    for name, by in unread.items():
        if name not in outputs:
            detail = f"writes {name!r}, which no later segment reads and which is no output"
            raise PlanError(by, "stale_boundary", detail)


def _check_apart(segment: Segment, read: Buffer, changed: Sequence[Buffer]) -> None:
    for other in changed:
        if _share(read.tensor, other.tensor):
            detail = f"reads {read.name!r} and writes {other.name!r} in the same memory: use two buffers in turn"
            raise PlanError(segment.name, "in_place", detail)


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether some byte is of both: views that are interleaved have none. What would take too long to tell is taken as one."""
    (begin, end), (first, last) = _extent(a), _extent(b)
    if not (begin < last and first < end):
        return False
    try:
        return np.shares_memory(np.asarray(_Place(a)), np.asarray(_Place(b)), max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


class _Place:
    """Where the elements of a tensor lie, on any device: NumPy compares addresses and reads nothing."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3, "data": (x.data_ptr(), True), "typestr": f"|V{size}", "shape": tuple(x.shape),
            "strides": tuple(size * stride for stride in x.stride()),
        }  # fmt: skip


def _extent(x: Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) of what a tensor can reach."""
    if x.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


# --- arguments of a run -----------------------------------------------------------------------------------------------


def checked_inputs(op: str, plan: ReplayPlan, inputs: Any) -> dict[str, Tensor]:
    """Tensors like the plan's inputs, by their names."""
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        raise ArgumentError.of(op, "inputs", type(inputs).__name__, "a mapping from names to tensors")
    for name, value in inputs.items():
        if name not in plan.inputs:
            raise ArgumentError.of(op, "inputs", repr(name), "|".join(plan.inputs) or "none: the plan has no inputs")
        want = plan.tensors[name]
        if not is_dense(value) or value.dtype != want.dtype or value.shape != want.shape:
            raise ArgumentError.of(op, f"inputs[{name!r}]", described(value), described(want))
    return dict(inputs)


def checked_span(op: str, plan: ReplayPlan, begin: Any, end: Any) -> tuple[int, int]:
    """Tokens that every buffer addressed by position has room for."""
    begin = integer(op, "begin", begin, 0, "0 to 2^28 - 2")
    end = begin + 1 if end is None else integer(op, "end", end, begin + 1, "an integer above begin, below 2^28")
    if end >= MAX_POSITIONS:
        raise ArgumentError.of(op, "end", end, "below 2^28")
    for rows in (r for s in plan.segments for r in s.rows):
        room = plan.tensors[rows.name].shape[rows.axis]
        if end > room:
            raise ArgumentError.of(op, "end", end, f"at most {room}, the rows of {rows.name!r}")
    return begin, end


def checked_seed(op: str, seed: Any) -> int:
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ArgumentError.of(op, "seed", repr(seed), "an integer of 64 bits, 0 or more")
    return seed


@dataclasses.dataclass(frozen=True)
class Limits:
    """What may stop a run."""

    nanoseconds: int | None
    asked: Callable[[], bool]
    retries: int

    @classmethod
    def of(cls, op: str, deadline_ms: Any, stop: Any, retries: Any) -> Limits:
        within = None
        if deadline_ms is not None:
            within = int(1e6 * real(op, "deadline_ms", deadline_ms, lambda x: 0 <= x < 1e12, "milliseconds, 0 or more"))
        asked = (lambda: False) if stop is None else getattr(stop, "is_set", stop)
        if not callable(asked):
            raise ArgumentError.of(op, "stop", type(stop).__name__, "an Event, or a function")
        return cls(within, asked, integer(op, "retries", retries, 0, "an integer, 0 or more"))

    def watch(self, clock: Callable[[], int], began: int) -> Callable[[], str]:
        """A function that says why to stop now, or ""."""
        limit = None if self.nanoseconds is None else began + self.nanoseconds

        def over() -> str:
            if self.asked():
                return "stop"
            return "deadline" if limit is not None and clock() >= limit else ""

        return over


# --- cursors ----------------------------------------------------------------------------------------------------------


def cursor_of(op: str, cursor: Any) -> Cursor:
    if isinstance(cursor, Cursor):
        return cursor
    if not isinstance(cursor, bytes | bytearray | memoryview):
        raise ArgumentError.of(op, "cursor", type(cursor).__name__, "a Cursor, or its bytes")
    return Cursor.from_bytes(bytes(cursor))


def mortal(plan: ReplayPlan) -> str | None:
    """A buffer that segments name and that does not outlive the process."""
    names = (name for segment in plan.segments for name in segment.names)
    return next((name for name in names if not plan.buffers[name].survives), None)


def own_record(plan: ReplayPlan, cursor: Cursor) -> RunRecord:
    """The record of the cursor's run, which must be the last one."""
    return _last_run(plan, cursor)[0]


def _last_run(plan: ReplayPlan, cursor: Cursor) -> tuple[RunRecord, Cursor]:
    """The last run, which must be the cursor's, and where it goes on."""
    last = plan.word.read()
    if last is None or last[0].epoch != cursor.epoch:
        newest = "none" if last is None else f"run {last[0].epoch}"
        raise StaleCursor(f"cursor: of run {cursor.epoch}, the last one here is {newest}")
    return last


def checked_record(plan: ReplayPlan, cursor: Cursor) -> RunRecord:
    """The record of the cursor's run, if the plan, whose buffers are alive, may resume it here and now."""
    record, mark = _last_run(plan, cursor)
    if are_others(plan.written, plan.word):
        raise StaleCursor("cursor: a run that is marked in another progress word has written the buffers since")
    if cursor.boot != boot_id():
        raise StaleCursor("cursor: made before the machine was started again")
    if cursor.plan != plan.digest:
        raise StaleCursor("cursor: of a plan with other segments or buffers")
    if record.process != process_id() and (name := mortal(plan)):
        detail = "allocate it by name in a MemoryPool with a backing file"
        raise StaleCursor(f"buffer {name!r}: died with its process: {detail}")
    if cursor.rng != record.seed:
        raise StaleCursor(f"cursor: seed {cursor.rng}, the run has {record.seed}")
    _check_place(plan, record, mark, cursor)
    if record.fingerprint != plan.fingerprint:
        field, (saved, live) = next(iter(record.fingerprint.diff(plan.fingerprint).items()))
        raise FingerprintMismatch(field, saved, live)
    if cursor.fingerprint != plan.fingerprint.digest:
        raise FingerprintMismatch("digest", cursor.fingerprint.hex(), plan.fingerprint.digest.hex())
    age = (plan.clock() - cursor.stamp) / 1e6
    if age < 0:
        raise StaleCursor("cursor: of the future: its clock is another")
    if age >= plan.timeout_ms:
        raise CursorExpired(f"cursor: {age:.0f} ms old, the limit is {plan.timeout_ms} ms")
    return record


def _check_place(plan: ReplayPlan, record: RunRecord, mark: Cursor, cursor: Cursor) -> None:
    """The cursor names a segment of the run, and the run has not gone on since."""
    offset, layers = cursor.position - record.begin, len(plan.segments)
    if cursor.layer >= layers or not 0 <= offset < record.end - record.begin or offset % record.chunk:
        detail = f"the run has {layers} segments and tokens {record.begin} to {record.end} by {record.chunk}"
        raise StaleCursor(f"cursor: layer {cursor.layer}, position {cursor.position}: {detail}")
    if (mark.layer, mark.position) != (cursor.layer, cursor.position):
        raise StaleCursor(
            f"cursor: the run has gone on to layer {mark.layer}, position {mark.position}, since it was made"
        )
