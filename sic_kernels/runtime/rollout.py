"""A new way of answering goes live by measurement: shadow, then a share of the requests, then all of them.

    rollout = sic.rollout.Rollout(share=0.1)
    decision = rollout.decide(request_id, context_length, session=session_id)
    answer = sliced(request) if decision.use_sliced else dense(request)
    if decision.run_shadow:                       # now also the other way, to compare
        rollout.record(agreement=same, hit=(sliced_head_steps, eligible), seconds_before=t_dense, seconds_after=t_sliced)

In "shadow" dense answers and sliced runs beside it; in "mixed" a share of the requests, chosen by a hash of their ids, is
answered sliced; in "full" all are. The gate moves one stage on when a stage has lasted a whole window (two hours) and every
required measure, over that window and on enough samples, is within its threshold; and one stage back as soon as one is not.
Only a monotonic clock is read. Thread-safe. Only the standard library is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import numbers
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from . import fallback, log, metrics
from .errors import ArgumentError

STAGES = ("shadow", "mixed", "full")
VERSION = 1
WINDOW = 7200.0  # seconds
BUCKETS = 24  # of a window: what is older than it leaves in steps of five minutes
JUMP = 1024  # tokens by which the context of a session may change between two of its requests
SESSIONS = 65536  # remembered at most, the latest
LARGEST = 2.0**53  # of a count or a time: sums of any number of them stay finite
SHORTEST = 1e-9  # seconds of a dense answer
LEAST_TARGET = 1e-9  # of the saving: the residual rate divides by it
SUMS = ("agreement", "hit", "recovery", "collision", "replay", "rer")  # what a bucket adds up

Pair = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A ratio that the gate looks at. required: without it the gate does not move on; others count where they are recorded."""

    name: str
    above: bool  # has to be above its threshold, else below
    threshold: float
    required: bool

    def holds(self, value: float) -> bool:
        return value > self.threshold if self.above else value < self.threshold


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """What has to hold. All are ratios; `rrr` is the residual rate (RER - rer_target) / rer_target.

    RER is the time saved over the time before. An rrr of -0.1 means: at most a tenth of the promised saving is missing.
    """

    agreement: float = 0.99  # of shadowed answers, above
    hit: float = 0.85  # head-steps answered sliced, above
    rer_target: float = 0.3
    rrr: float = -0.1  # above
    recovery: float = 0.9995  # cursors resumed, above
    collision: float = 0.005  # look-ups, below
    replay: float = 0.92  # launches that replayed a graph, above

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = {"rrr": -1.0, "rer_target": LEAST_TARGET}.get(field.name, 0.0)
            _number("Thresholds", field.name, value, low, 1.0, f"a number from {low:g} to 1")

    def measures(self) -> tuple[Measure, ...]:
        return (
            Measure("agreement", True, self.agreement, True),
            Measure("hit", True, self.hit, True),
            Measure("rrr", True, self.rrr, True),
            Measure("recovery", True, self.recovery, False),
            Measure("collision", False, self.collision, False),
            Measure("replay", True, self.replay, False),
        )


@dataclasses.dataclass(frozen=True)
class Decision:
    """How to answer one request.

    status: "active" when it is answered as the stage says, also where that is dense; "fallback" when it is answered dense and
    the gate went back to this stage, which the log says. reasons: why it is not answered sliced. run_shadow: run it the other
    way too, and `record` whether they agree. alarm: what is odd about the request, "" mostly.
    """

    stage: str
    use_sliced: bool
    run_shadow: bool
    status: str
    reasons: tuple[str, ...] = ()
    alarm: str = ""


class Rollout:
    """The stage, the window of measures, and the gate between stages.

    share: of the requests that "mixed" answers sliced. shadow_share: of the requests that are compared in "mixed" and "full".
    min_samples: `record`s of a measure before it says anything. clock: seconds, monotonic. salt: other ids are chosen by another.
    """

    def __init__(
        self,
        *,
        share: float = 0.1,
        shadow_share: float = 0.01,
        thresholds: Thresholds | None = None,
        window: float = WINDOW,
        min_samples: int = 1000,
        salt: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        above = math.ulp(0.0)  # the least number above 0
        self.share = _number("Rollout", "share", share, above, 1.0, "a number above 0, at most 1")
        self.shadow_share = _number("Rollout", "shadow_share", shadow_share, above, 1.0, "a number above 0, at most 1")
        self.window = _number("Rollout", "window", window, SHORTEST, LARGEST, "seconds above 0")
        self.min_samples = _count("Rollout", "min_samples", min_samples, 1, "an integer from 1 on")
        self.thresholds = Thresholds() if thresholds is None else thresholds
        if not isinstance(self.thresholds, Thresholds):
            raise ArgumentError.of("Rollout", "thresholds", _shown(thresholds), "Thresholds(...)")
        if not callable(clock) or not math.isfinite(_real(clock())):
            raise ArgumentError.of("Rollout", "clock", _shown(clock), "a function that gives seconds")
        self._salt, self._clock, self._log = _text("Rollout", "salt", salt), clock, log.get_logger("rollout")
        self._lock = threading.RLock()
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self.held = False
        self._begin("shadow", ())

    def _begin(self, stage: str, reasons: tuple[str, ...], *, went_back: bool = False) -> None:
        self.stage, self.reasons, self.went_back, self._since = stage, reasons, went_back, self._clock()
        self._buckets: list[_Bucket] = []
        metrics.get("sic_rollout_stage_ratio").set(STAGES.index(stage), len(STAGES) - 1)

    # --- each request ---------------------------------------------------------------------------------------------------

    def decide(self, request_id: str, context_length: int, *, session: str | None = None) -> Decision:
        """How to answer; the same id gets the same answer for as long as the stage lasts.

        context_length: tokens. session: what is one conversation; a change of its context by more than `JUMP` tokens is an
        alarm (logged, counted, in the decision): state kept for the session is likely not of this context.
        """
        _text("decide", "request_id", request_id)
        _count("decide", "context_length", context_length, 0, "tokens, an integer from 0 on")
        if session is not None:
            _text("decide", "session", session)
        with self._lock:
            stage, since, went_back = self.stage, self.reasons, self.went_back
            alarm = self._jump(session, context_length) if session is not None else ""
        chosen = stage == "full" or (stage == "mixed" and self._draw("answer", request_id) < self.share)
        compared = stage == "shadow" or self._draw("shadow", request_id) < self.shadow_share
        reasons = () if chosen else ("not in the share" if stage == "mixed" else "shadow", *since)
        metrics.get("sic_rollout_sliced_ratio").add(chosen, 1)
        status = "fallback" if went_back and not chosen else "active"
        return Decision(stage, chosen, compared, status, reasons, alarm)

    def _draw(self, what: str, request_id: str) -> float:
        """A number in [0, 1) that is a function of the id."""
        text = f"{what}\0{self._salt}\0{request_id}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64

    def _jump(self, session: str, length: int) -> str:
        before = self._sessions.pop(session, None)
        self._sessions[session] = length
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        if before is None:
            return ""
        jumped = abs(length - before) > JUMP
        metrics.get("sic_context_jump_ratio").add(jumped, 1)
        if not jumped:
            return ""
        alarm = f"context went from {before} to {length} tokens"
        self._log.warning("session %s: %s between two requests", session, alarm)
        return alarm

    def record(
        self,
        *,
        agreement: bool | float | Pair | None = None,
        hit: bool | float | Pair | None = None,
        recovery: bool | float | Pair | None = None,
        collision: bool | float | Pair | None = None,
        replay: bool | float | Pair | None = None,
        seconds_before: float | None = None,
        seconds_after: float | None = None,
    ) -> str:
        """What was measured of one request; returns the stage that the gate is in now.

        Ratios are (numerator, denominator), or a number from 0 to 1, or True or False; a denominator of 0 is no sample.
        seconds_before, seconds_after: dense and sliced, for the same tokens; both or none. Going back a stage is logged as a
        warning, and a `SicError` under SIC_STRICT=1 (after the stage was changed).
        """
        given = {"agreement": agreement, "hit": hit, "recovery": recovery, "collision": collision, "replay": replay}
        pairs = {name: _pair(name, value) for name, value in given.items() if value is not None}
        parts = {name: pair for name, pair in pairs.items() if pair[1] > 0}
        if (seconds_before is None) != (seconds_after is None):
            missing = "seconds_after" if seconds_after is None else "seconds_before"
            raise ArgumentError.of("record", missing, None, "both times or none")
        if seconds_before is not None and seconds_after is not None:
            parts["rer"] = _saving(seconds_before, seconds_after)
        if "agreement" in parts:
            metrics.get("sic_rollout_agreement_ratio").add(*parts["agreement"])
        with self._lock:
            self._bucket().add(parts)
            moved = self._gate()
            stage = self.stage
        if moved:
            metrics.get("sic_rollout_fallback_ratio").add(1, 0, stage=moved)
            message = "from %s back to %s: %s"
            fallback.report(self._log, message, moved, stage, "; ".join(self.reasons), level=logging.WARNING)
        return stage

    # --- the gate -------------------------------------------------------------------------------------------------------

    def _bucket(self) -> _Bucket:
        """The bucket of now; those older than the window are dropped."""
        now, width = self._clock(), self.window / BUCKETS
        self._buckets = [b for b in self._buckets if b.begin + width > now - self.window]
        if not self._buckets or now >= self._buckets[-1].begin + width:
            self._buckets.append(_Bucket(now))
        return self._buckets[-1]

    def _sums(self) -> dict[str, tuple[float, float, int]]:
        """Measure -> numerator, denominator and samples over the window; "rrr" from the times."""
        sums: dict[str, tuple[float, float, int]] = {}
        for bucket in self._buckets:
            for name, (top, bottom, n) in bucket.sums.items():
                old = sums.get(name, (0.0, 0.0, 0))
                sums[name] = (old[0] + top, old[1] + bottom, old[2] + n)
        if "rer" in sums:
            saved, before, n = sums["rer"]
            target = self.thresholds.rer_target * before
            sums["rrr"] = (saved - target, target, n)
            metrics.get("sic_redundancy_residual_ratio").set(saved - target, target)
        return sums

    def _gate(self) -> str:
        """Move on or back; returns the stage that was left for an earlier one, else ""."""
        sums = self._sums()
        at = STAGES.index(self.stage)
        broken, waiting = [], []
        for measure in self.thresholds.measures():
            top, bottom, samples = sums.get(measure.name, (0.0, 0.0, 0))
            if samples < self.min_samples or bottom == 0:
                waiting += [measure.name] if measure.required else []
            elif not measure.holds(top / bottom):
                sign = "not above" if measure.above else "not below"
                broken.append(f"{measure.name} {top / bottom:.4g} is {sign} {measure.threshold:g}")
        metrics.get("sic_rollout_fallback_ratio").add(0, 1, stage=self.stage)
        if broken and at > 0:
            left = self.stage
            self._begin(STAGES[at - 1], tuple(broken), went_back=True)
            return left
        if broken:
            self.reasons = tuple(broken)
        elif not waiting and not self.held:
            if not self.went_back:  # else they stay, as long as it is a fallback
                self.reasons = ()
            if at < len(STAGES) - 1 and self._clock() - self._since >= self.window:
                self._log.info("from %s to %s", self.stage, STAGES[at + 1])
                self._begin(STAGES[at + 1], ())
        return ""

    def move(self, stage: str, reason: str, *, hold: bool = False) -> None:
        """To any stage by hand, for a reason that the log and the decisions name. The window begins anew.

        hold: the gate does not move on from here until the next `move`; it still goes back.
        """
        if stage not in STAGES:
            raise ArgumentError.of("move", "stage", _shown(stage), "|".join(STAGES))
        _text("move", "reason", reason)
        if not isinstance(hold, bool):
            raise ArgumentError.of("move", "hold", _shown(hold), "True or False")
        with self._lock:
            self._log.warning("from %s to %s by hand: %s", self.stage, stage, reason)
            self._begin(stage, (reason,))
            self.held = hold

    def report(self) -> dict[str, Any]:
        """JSON data: stage, its age in seconds, reasons, and every measure with its value (None: not measured), threshold
        and samples over the window."""
        with self._lock:
            self._bucket()
            sums = self._sums()
            measures = {}
            for m in self.thresholds.measures():
                top, bottom, samples = sums.get(m.name, (0.0, 0.0, 0))
                value = top / bottom if bottom else None
                measures[m.name] = {
                    "value": value, "above" if m.above else "below": m.threshold, "samples": samples,
                    "holds": None if value is None or samples < self.min_samples else m.holds(value),
                }  # fmt: skip
            age = self._clock() - self._since
            return {"stage": self.stage, "age": age, "reasons": list(self.reasons), "measures": measures}

    # --- the state ------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Stage and window, for another process. Times are ages: no clock is shared. Sessions are not in it."""
        with self._lock:
            now = self._clock()
            buckets = [{"age": now - b.begin, "sums": {k: list(v) for k, v in b.sums.items()}} for b in self._buckets]
            return json.dumps(
                {
                    "version": VERSION, "stage": self.stage, "age": now - self._since, "reasons": list(self.reasons),
                    "held": self.held, "went_back": self.went_back, "buckets": buckets,
                },
                sort_keys=True,
            )  # fmt: skip

    @classmethod
    def from_json(cls, text: str, *, elapsed: float = 0.0, **options: Any) -> Rollout:
        """The roll-out that `to_json` wrote, `elapsed` seconds ago; options: of `Rollout`. `ArgumentError` for anything else."""
        _number("Rollout", "elapsed", elapsed, 0.0, LARGEST, "seconds from 0 on")
        if not isinstance(text, str):
            raise ArgumentError.of("Rollout", "text", type(text).__name__, "what to_json wrote")
        made = cls(**options)
        try:
            made._restore(json.loads(text), made._clock() - elapsed)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArgumentError.of("Rollout", "text", repr(text[:80]), f"what to_json wrote ({error!r})") from None
        return made

    def _restore(self, saved: dict[str, Any], now: float) -> None:
        """Take over a state, looked through before; any of the errors that data of another shape gives."""
        if type(saved["version"]) is not int or saved["version"] != VERSION:
            raise ValueError(f"version {saved['version']}")
        stage, reasons, held, went_back = (saved[name] for name in ("stage", "reasons", "held", "went_back"))
        if stage not in STAGES or not isinstance(held, bool) or not isinstance(went_back, bool):
            raise ValueError("stage, held, went_back")
        if went_back and stage == STAGES[-1]:
            raise ValueError("went back to the last stage")
        if not isinstance(reasons, list) or not isinstance(saved["buckets"], list):
            raise ValueError("reasons, buckets")
        for reason in reasons:
            _text("Rollout", "reasons", reason)
        age = _age(saved["age"], LARGEST)
        buckets = [_Bucket.restored(now - _age(b["age"], age), b["sums"]) for b in saved["buckets"]]
        self._begin(stage, tuple(reasons), went_back=went_back)
        self.held, self._since = held, now - age
        self._buckets = sorted(buckets, key=lambda b: b.begin)


class _Bucket:
    """Sums of what was recorded in a twenty-fourth of the window."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.sums: dict[str, tuple[float, float, int]] = {}

    def add(self, parts: dict[str, Pair]) -> None:
        for name, (top, bottom) in parts.items():
            old = self.sums.get(name, (0.0, 0.0, 0))
            self.sums[name] = (old[0] + top, old[1] + bottom, old[2] + 1)

    @classmethod
    def restored(cls, begin: float, sums: dict[str, Any]) -> _Bucket:
        bucket = cls(begin)
        for name, (top, bottom, samples) in sums.items():
            if name not in SUMS or type(samples) is not int or samples < 1:
                raise ValueError(name)
            most = _real(samples) * LARGEST
            least = -most if name == "rer" else 0.0  # slower than before is a negative saving
            saved, whole = _real(top), _real(bottom)
            if not (least <= saved <= whole and 0 < whole <= most < math.inf):
                raise ValueError(name)
            bucket.sums[name] = (saved, whole, samples)
        return bucket


def _age(value: Any, most: float) -> float:
    """Seconds from 0 to `most`: nothing in a stage is older than the stage."""
    return _number("Rollout", "age", value, 0.0, most, f"seconds from 0 to {most:g}")


# --- arguments: without those of `arguments`, which need torch ----------------------------------------------------------


def _shown(value: Any) -> str:
    """For a message: cut, and also what has no text, as an integer of thousands of digits."""
    try:
        text = repr(value)
    except Exception:
        return type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _real(value: Any) -> float:
    """A real number as float; NaN for what is none, or too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _number(op: str, arg: str, value: Any, low: float, high: float, expected: str) -> float:
    number = _real(value)
    if not low <= number <= high:
        raise ArgumentError.of(op, arg, _shown(value), expected)
    return number


def _count(op: str, arg: str, value: Any, low: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 63:
        raise ArgumentError.of(op, arg, _shown(value), expected)
    return value


def _text(op: str, arg: str, value: Any) -> str:
    """A string that can be written: one with half of a surrogate pair has no bytes."""
    if not isinstance(value, str):
        raise ArgumentError.of(op, arg, type(value).__name__, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentError.of(op, arg, _shown(value), "a string of whole characters") from None
    return value


def _pair(name: str, value: Any) -> Pair:
    pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, 1)
    top, bottom = (float(x) if isinstance(x, bool) else _real(x) for x in pair)
    if not 0 <= top <= bottom <= LARGEST:
        raise ArgumentError.of("record", name, _shown(value), "(part, whole), a number from 0 to 1, True or False")
    return top, bottom


def _saving(before: Any, after: Any) -> Pair:
    dense = _number("record", "seconds_before", before, SHORTEST, LARGEST, "seconds above 0")
    return dense - _number("record", "seconds_after", after, 0.0, LARGEST, "seconds from 0 on"), dense
