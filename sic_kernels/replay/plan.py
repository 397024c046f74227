"""`ReplayPlan`: a step as a list of segments that can stop after any of them, and go on there with the bits of a run that
never stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..runtime import config, fallback, metrics, trace
from ..runtime.arguments import code_of, flag, instance, integer
from ..runtime.errors import ArgumentError, SicError
from ..runtime.fingerprint import Fingerprint
from ..runtime.log import get_logger
from .checks import (
    Limits,
    check_contract,
    checked_inputs,
    checked_names,
    checked_record,
    checked_seed,
    checked_span,
    cursor_of,
    own_record,
)
from .cursor import Cursor, boot_id
from .cursor_word import MAX_FINGERPRINT, RETIRED, CursorWord, RunRecord, process_id
from .engine import CpuEngine, Engine
from .errors import ContextPoisoned, CursorError, CursorExpired, FingerprintMismatch, PlanError, StaleCursor
from .outcomes import Explanation, Interrupted, Progress, Result
from .segments import Segment, bound, digest_of
from .verification import hazards
from .writers import are_others, claim

Tensor = torch.Tensor

_log = get_logger("replay")
MISMATCH = {"raise": 0, "recompute": 1}


class ReplayPlan:
    """Segments over named buffers, run in order over the chunks of a text, with a mark after each.

    Thread-safe: calls run one after another; one that has waited `timeout_ms` for another which made no mark in that time gives
    up (`SicError`). Deterministic if `verify` finds no hazard: a run that was stopped any number of times, after any segment, in
    the middle of one, or by the death of the process, ends with the bits of one that was not. Segments run without gradients.

    Of two plans over the same buffers that mark in two words, the one that did not run last knows nothing of them: its `length`
    is 0, its cursors are stale. Where they share rows on purpose, `rows_given` says that these are right.

    The clock is monotonic. A cursor of `timeout_ms` milliseconds (default: SIC_CURSOR_TIMEOUT_MS) or older has expired.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        buffers: Mapping[str, Any],
        fingerprint: Fingerprint,
        inputs: Sequence[str],
        outputs: Sequence[str],
        backend: str,
        word: CursorWord,
        timeout_ms: int,
    ) -> None:
        self.buffers = bound(segments, buffers)
        self.segments, self.fingerprint, self.backend = tuple(segments), fingerprint, backend
        self.inputs, self.outputs = checked_names("inputs", inputs), checked_names("outputs", outputs)
        self.word, self.timeout_ms = word, timeout_ms
        check_contract(self.segments, self.buffers, self.inputs, self.outputs)
        self.names = tuple(s.name for s in self.segments)
        self.digest = digest_of(self.segments, self.buffers, backend)
        changed = {*self.inputs, *(name for s in self.segments for name in s.changes)}
        self.written = tuple(self.buffers[name].identity for name in sorted(changed))
        self.tensors = MappingProxyType({name: b.tensor for name, b in self.buffers.items()})
        self._anew: dict[int, str] = {}  # runs of this process that stand in for refused ones, and why
        self._lock, self._process, self._running = threading.Lock(), os.getpid(), threading.local()
        self._turns = 0  # calls that have had the lock
        self._poisoned: str | None = None
        self.engine: Engine = CpuEngine(self.segments, self.tensors, word)

    @classmethod
    def capture(
        cls,
        segments: Sequence[Segment],
        *,
        buffers: Mapping[str, Any],
        fingerprint: Fingerprint,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        backend: str = "cpu",
        strategy: str = "segments",
        word: CursorWord | None = None,
        timeout_ms: int | None = None,
    ) -> ReplayPlan:
        """A plan of these segments.

        * buffers: name -> a `Block` of a `MemoryPool`, or a tensor. Only blocks of a pool with a backing file outlive a process.
        * inputs: buffers that `run` fills and no segment writes; outputs: results that no segment has to read.
        * backend: "cpu" runs the callables; "cuda" captures each as a CUDA graph (strategy "segments": a graph each; "mask": one
          graph whose nodes before the cursor are switched off), "simt" does so on the emulator.
        * word: where progress is marked, with the clock of the plan; None: in memory of the process.

        Raises ArgumentError for what does not fit together, `PlanError` for a segment that could not be repeated.
        """
        op = "ReplayPlan.capture"
        instance(op, "fingerprint", fingerprint, Fingerprint)
        size = len(fingerprint.to_json().encode())
        if size > MAX_FINGERPRINT:
            raise ArgumentError.of(op, "fingerprint", f"{size} bytes", f"at most {MAX_FINGERPRINT} bytes of JSON")
        code_of(op, "backend", backend, {"cpu": 0, "cuda": 1, "simt": 2})
        code_of(op, "strategy", strategy, {"segments": 0, "mask": 1})
        default = config.current().cursor_timeout_ms
        limit = integer(op, "timeout_ms", default if timeout_ms is None else timeout_ms, 1, "1 to 2^31 - 1")
        word = CursorWord() if word is None else word
        instance(op, "word", word, CursorWord)
        holder = None if word.holder is None else word.holder()
        plan = cls(segments, buffers, fingerprint, inputs, outputs, backend, word, limit)
        if holder is not None and holder.identities != plan.identities:
            raise ArgumentError.of(op, "word", "one that a plan of other buffers marks", "a word of its own")
        word.holder = weakref.ref(plan)
        if backend != "cpu":
            from .graph_engine import GraphEngine

            plan.engine = GraphEngine(plan.segments, plan.tensors, word, backend, strategy)
        return plan

    @property
    def identities(self) -> dict[str, Any]:
        """What each buffer is, by name."""
        return {name: buffer.identity for name, buffer in self.buffers.items()}

    @property
    def clock(self) -> Callable[[], int]:
        """Nanoseconds, monotonic."""
        return self.word.clock

    # --- running ----------------------------------------------------------------------------------------------------------

    def run(
        self,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
        chunk: int | None = None,
        seed: int = 0,
        rows_given: bool = False,
        deadline_ms: float | None = None,
        stop: Any = None,
        retries: int = 0,
    ) -> Result | Interrupted:
        """All segments over tokens begin .. end (default: begin + 1), `chunk` at a time (default: all at once).

        * inputs: name -> tensor, copied into the plan's inputs before anything runs.
        * rows_given: the caller has filled the rows before `begin`; else earlier runs of the plan must have.
        * seed: of the random numbers, 64 bits. deadline_ms: stops after the segment during which it passes. stop: an Event, or a
          function, asked before every segment. retries: how often a segment that raises is run again.

        An exception of a segment stops the run as a deadline does (`Interrupted.error`); KeyboardInterrupt and the like pass
        through, and `cursor()` then says where to go on. Raises ArgumentError before anything is touched.
        """
        op = "ReplayPlan.run"
        begin, end = checked_span(op, self, begin, end)
        chunk = end - begin if chunk is None else integer(op, "chunk", chunk, 1, "an integer, 1 or more")
        seed, given_before = checked_seed(op, seed), flag(op, "rows_given", rows_given)
        limits = Limits.of(op, deadline_ms, stop, retries)
        given = checked_inputs(op, self, inputs)
        with self._turn(op):
            self._check_alive()
            if begin > (length := self.length) and not given_before and any(segment.rows for segment in self.segments):
                expected = f"at most {length}, the tokens whose rows earlier runs have filled (or rows_given=True)"
                raise ArgumentError.of(op, "begin", begin, expected)
            epoch = self._retire(begin)
            claim(self.written, self.word)
            for name, value in given.items():
                self.tensors[name].copy_(value)
            record = RunRecord(epoch, begin, end, chunk, seed, self.digest, self.fingerprint)
            self.word.begin(record)
            return self._go(record, 0, "replay.run", limits)

    def resume(
        self,
        cursor: Cursor | bytes,
        *,
        on_mismatch: str = "raise",
        deadline_ms: float | None = None,
        stop: Any = None,
        retries: int = 0,
    ) -> Result | Interrupted:
        """The missing rest of the run that the cursor belongs to; the other arguments are those of `run`.

        Refused are a damaged cursor, one of another run, plan or process start (`StaleCursor`), an old one (`CursorExpired`), one
        of another model or setting (`FingerprintMismatch`), and any after the device context was lost (`ContextPoisoned`). With
        on_mismatch="recompute" a cursor of this plan's last run that has expired or has another fingerprint makes the whole run
        anew from its inputs (another fingerprint: only a run from token 0 on, since the rows before it are another model's): the
        result says "fallback" and why, it is counted and logged, and is an error under SIC_STRICT.
        """
        op = "ReplayPlan.resume"
        anew = code_of(op, "on_mismatch", on_mismatch, MISMATCH) == 1
        limits = Limits.of(op, deadline_ms, stop, retries)
        rate = metrics.get("sic_cursor_recovery_rate")
        with self._turn(op):
            try:
                found = cursor_of(op, cursor)
                self._check_alive()
                record = checked_record(self, found)
                first = self._index(record, found)
            except (CursorError, ContextPoisoned) as error:
                rate.add(0, 1)
                _log.warning("a cursor was refused: %s", error)
                if not anew or not self._can_be_made_anew(error, found):
                    raise
                fallback.report(_log, "run %d is computed anew: %s", found.epoch, error, level=logging.WARNING)
                record, first = self._begin_anew(own_record(self, found), str(error)), 0
            else:
                rate.add(1, 1)
                metrics.get("sic_cursor_skipped_ratio").add(first, self._total(record))
            return self._go(record, first, "replay.resume", limits)

    def _can_be_made_anew(self, error: Exception, cursor: Cursor) -> bool:
        """Not where rows before the run's first token are another model's, and not under SIC_STRICT."""
        if config.current().strict or not isinstance(error, CursorExpired | FingerprintMismatch):
            return False
        alone = own_record(self, cursor).begin == 0 or not any(segment.rows for segment in self.segments)
        return alone or isinstance(error, CursorExpired)

    @property
    def length(self) -> int:
        """Tokens whose rows are filled, by the progress word: also of a process that died. 0 where they are gone, or those of
        another plan or model, or a run that is marked in another word has written the buffers since."""
        try:
            last = self.word.read()
        except StaleCursor as error:
            _log.warning("no rows are known: %s", error)
            return 0
        if last is None or last[0].plan != self.digest or last[0].boot != boot_id():
            return 0
        if are_others(self.written, self.word):
            _log.warning("no rows are known: a run of another progress word has written the buffers since")
            return 0
        same = last[0].fingerprint == self.fingerprint
        return last[1].position if same and (last[0].process == process_id() or not self.mortal) else 0

    def cursor(self) -> Cursor | None:
        """Where the last run goes on, from the progress word: also that of a process that died. None: nothing is left to do.

        Raises `StaleCursor` where the word is damaged.
        """
        last = self.word.read()
        if last is None or last[1].position >= last[0].end or last[1].layer == RETIRED:
            return None
        return last[1]

    def explain(self, cursor: Cursor | bytes) -> Explanation:
        """What `resume` would do; runs nothing. `StaleCursor` for bytes that are no cursor, or of a run that is not the last."""
        found = cursor_of("ReplayPlan.explain", cursor)
        record = own_record(self, found)
        refusal: CursorError | None = None
        first = total = self._total(record)
        try:
            self._check_alive()
            checked_record(self, found)
            first = self._index(record, found)
        except CursorError as error:
            refusal = error
        return Explanation(found, Progress(self.names, record.begin, record.chunk, first, total), refusal)

    def verify(
        self, inputs: Mapping[str, Tensor] | None = None, *, begin: int = 0, end: int | None = None, seed: int = 1
    ) -> list[Any]:
        """Each segment run again and again on poisoned copies: the hazards seen, as a list of `PlanError`.

        One chunk of tokens begin .. end; what rows before `begin` hold is read as it is. Segments must take their buffers from
        the step: the plan's own are not touched. Costs about eight runs of the segments and three copies of the buffers.
        """
        op = "ReplayPlan.verify"
        seed = checked_seed(op, seed)
        begin, end = checked_span(op, self, begin, end)
        given = checked_inputs(op, self, inputs)
        with self._turn(op):
            self._check_alive()
            return hazards(self.segments, self.tensors, given, begin, end, seed)

    # --- inside -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, op: str) -> Iterator[None]:
        """One call at a time, by the process that made the plan, and never out of a segment."""
        if os.getpid() != self._process:
            raise SicError(f"{op}: the plan was made before this process was forked: capture it again")
        if getattr(self._running, "here", False):
            raise SicError(f"{op}: called from within a segment of the same plan")
        self._acquire(op)
        self._turns, self._running.here = self._turns + 1, True
        try:
            with torch.no_grad():  # buffers would remember every run that wrote them
                yield
        finally:
            self._running.here = False
            self._lock.release()

    def _acquire(self, op: str) -> None:
        """Waits for the call that is running for as long as it gets on; one whose segment waits for this call never does."""
        if self._lock.acquire(blocking=False):
            return
        waited, seen = metrics.get("sic_plan_wait_timeout_ratio"), None
        while (now := (self._turns, self.word.raw())) != seen:
            seen = now
            if self._lock.acquire(timeout=self.timeout_ms / 1000):
                waited.add(0, 1)
                return
        waited.add(1, 1)
        why = (
            f"another call of the plan has made no mark for {self.timeout_ms} ms: does its segment wait for this call?"
        )
        _log.error("%s: gave up: %s", op, why)
        raise SicError(f"{op}: {why}")

    def _retire(self, begin: int) -> int:
        """The last run cannot go on from here, and its rows count up to the first token of the next; the number of that."""
        try:
            last = self.word.read()
        except StaleCursor as error:
            _log.warning("the last run is forgotten: %s", error)
            return self.word.newest_epoch() + 1
        if last is None:
            return 1
        self.word.mark(last[0].epoch, RETIRED, min(begin, last[1].position))
        return last[0].epoch + 1

    def _check_alive(self) -> None:
        if self._poisoned is not None:
            raise ContextPoisoned(f"the device context was lost in segment {self._poisoned!r}: start the process anew")
        for buffer in self.buffers.values():
            buffer.check()

    def _begin_anew(self, record: RunRecord, why: str) -> RunRecord:
        """The same run as a new one of this plan."""
        epoch = self._retire(record.begin)
        new = RunRecord(
            epoch, record.begin, record.end, record.chunk, record.seed, self.digest, self.fingerprint, anew=True
        )
        self.word.begin(new)
        self._anew = {epoch: why}
        return new

    @property
    def mortal(self) -> str | None:
        """A buffer that segments name and that does not outlive the process."""
        names = (name for segment in self.segments for name in segment.names)
        return next((name for name in names if not self.buffers[name].survives), None)

    def _total(self, record: RunRecord) -> int:
        return record.index(0, record.end, len(self.segments))

    def _index(self, record: RunRecord, cursor: Cursor) -> int:
        """The number of the segment, over the whole run, that the cursor names."""
        return record.index(cursor.layer, cursor.position, len(self.segments))

    def _go(self, record: RunRecord, first: int, kind: str, limits: Limits) -> Result | Interrupted:
        """Segments `first` and later of the run."""
        began, total, layers = self.clock(), self._total(record), len(self.segments)
        over = limits.watch(self.clock, began)
        at, reason, error = first, "", None
        self.engine.begin(record)
        try:
            try:
                while at < total and not error and not (reason := over()):
                    error = self._attempt(*record.place(at, layers), limits.retries, over)
                    at += error is None
            finally:  # what is under way comes to its end, also before an interrupt passes through
                done = self.engine.settle(at)
            at = done
        except ContextPoisoned as lost:
            self._poisoned = lost.segment or self.names[at % layers]
            raise ContextPoisoned(f"segment {self._poisoned!r}: {lost}") from lost
        return self._outcome(record, (first, at, total), kind, "exception" if error else reason, error, began)

    def _outcome(
        self, record: RunRecord, span: tuple[int, int, int], kind: str, reason: str, error: Exception | None, began: int
    ) -> Result | Interrupted:
        """Of a call that ran segments span[0] up to span[1] of span[2]; into the trace, too."""
        first, at, total = span
        executed, seconds = Progress(self.names, record.begin, record.chunk, first, at), (self.clock() - began) / 1e9
        reasons = (self._anew.get(record.epoch, "computed anew"),) if record.anew else ()
        status, done = "fallback" if reasons else "active", at == total and error is None
        _, position = record.place(min(at, total - 1), len(self.segments))
        why: dict[str, Any] = {"reasons": list(reasons)} if reasons else {}
        trace.record(
            kind, segments=total, first=first, stop=at, position=position, epoch=record.epoch, why=reason or "end",
            status="interrupted" if not done else "recomputed" if reasons else "done", seconds=seconds, **why,
        )  # fmt: skip
        if done:
            return Result(record.epoch, executed, seconds, status, reasons)
        return Interrupted(self._cursor_at(record, at), reason, executed, seconds, error, status, reasons)

    def _attempt(self, layer: int, position: int, retries: int, over: Callable[[], str]) -> Exception | None:
        """Runs a segment, again where it raises; the last exception."""
        for left in range(retries, -1, -1):
            try:
                self.engine.run(layer, position)
                return None
            except (ContextPoisoned, PlanError):
                raise
            except Exception as error:
                _log.warning("segment %s at token %d: %r; %d retries left", self.names[layer], position, error, left)
                last = error
                if left and over():
                    break
        return last

    def _cursor_at(self, record: RunRecord, at: int) -> Cursor:
        (layer, position), digest = record.place(at, len(self.segments)), record.fingerprint.digest
        return Cursor(layer, position, record.epoch, digest, record.seed, self.clock(), record.plan, record.boot)
