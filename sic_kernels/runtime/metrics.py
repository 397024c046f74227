"""Metrics: every one is a numerator over a denominator, so that figures can be added across processes.

A ratio without its two parts cannot be summed, and hides how many events it stands on. A zero denominator
is `None` (null in JSON, NaN for Prometheus), never 0 or 100 %: nothing was measured.

    from sic_kernels.runtime import metrics
    metrics.get("sic_slice_hit_ratio").add(30, 32)       # 30 of 32 head-steps were answered sliced
    metrics.get("sic_slice_fallback_ratio").add(2, 0, reason="omitted_mass")
    metrics.snapshot(); metrics.prometheus_text()

Thread-safe: one lock per metric, held for two additions. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError
from .values import integer, real, text

if TYPE_CHECKING:
    from .exporter import Exporter

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("_numerator", "_denominator", "_total")

Labels = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """One reading. `ratio` is None when the denominator is zero."""

    numerator: float
    denominator: float

    @property
    def ratio(self) -> float | None:
        return None if self.denominator == 0 else self.numerator / self.denominator


class Metric:
    """A named ratio. kind "counter": both parts only grow (`add`); kind "gauge": both are levels (`set`)."""

    def __init__(self, name: str, about: str, numerator: str, denominator: str, kind: str, label: str | None) -> None:
        for arg, value in (("name", name), ("about", about), ("numerator", numerator), ("denominator", denominator)):
            text("metric", arg, value)
        if not _NAME.fullmatch(name) or name.endswith(_RESERVED):
            raise ArgumentError.of("metric", "name", repr(name), "a Prometheus name without a reserved ending")
        if label is not None and not (isinstance(label, str) and _LABEL.fullmatch(label)):
            raise ArgumentError.of("metric", "label", repr(label), "a Prometheus label name")
        if kind not in ("counter", "gauge"):
            raise ArgumentError.of("metric", "kind", repr(kind), "counter|gauge")
        self.name, self.about, self.kind, self.label = name, about, kind, label
        self.numerator, self.denominator = numerator, denominator  # what is counted, in words
        self._lock = threading.Lock()
        self._numerators: dict[str, float] = {}  # label value ("" when the metric has none) -> sum
        self._denominator = 0.0  # shared by all label values: each reason's share of the same whole

    def add(self, numerator: float, denominator: float, **labels: str) -> None:
        """Add to both parts; counters only, neither part negative."""
        key = self._key(labels)
        if self.kind != "counter":
            raise ArgumentError.of(self.name, "add", "a gauge", "a counter (use set)")
        self._check(numerator, denominator, signed=False)
        with self._lock:
            self._numerators[key] = self._numerators.get(key, 0.0) + numerator
            self._denominator += denominator

    def set(self, numerator: float, denominator: float, **labels: str) -> None:
        """Replace both parts; gauges only."""
        key = self._key(labels)
        if self.kind != "gauge":
            raise ArgumentError.of(self.name, "set", "a counter", "a gauge (use add)")
        self._check(numerator, denominator, signed=True)
        with self._lock:
            self._numerators[key] = float(numerator)
            self._denominator = float(denominator)

    def read(self) -> dict[str, Value]:
        """Label value -> reading, sorted; the key is "" for a metric without a label."""
        with self._lock:
            numerators, denominator = dict(self._numerators), self._denominator
        if self.label is None:
            numerators.setdefault("", 0.0)
        return {key: Value(numerators[key], denominator) for key in sorted(numerators)}

    def reset(self) -> None:
        with self._lock:
            self._numerators.clear()
            self._denominator = 0.0

    def _key(self, labels: dict[str, str]) -> str:
        expected = [] if self.label is None else [self.label]
        if list(labels) != expected:
            raise ArgumentError.of(self.name, "labels", list(labels), expected)
        return "" if self.label is None else str(labels[self.label])

    def _check(self, numerator: float, denominator: float, signed: bool) -> None:
        for arg, value in (("numerator", numerator), ("denominator", denominator)):
            try:
                fits = math.isfinite(value) and (value >= 0 or (signed and arg == "numerator"))
            except (TypeError, OverflowError):
                fits = False
            if not fits:
                raise ArgumentError.of(self.name, arg, repr(value), "a finite number, not negative")


@dataclasses.dataclass(frozen=True)
class Family:
    """Samples of one Prometheus name: label value ("" without a label) -> number, NaN where nothing was measured."""

    name: str
    kind: str  # gauge | counter
    about: str
    label: str | None
    samples: dict[str, float]

    def text(self) -> str:
        about = self.about.replace("\\", r"\\").replace("\n", r"\n")
        lines = [f"# HELP {self.name} {about}", f"# TYPE {self.name} {self.kind}"]
        for key, value in self.samples.items():
            label = "" if self.label is None else f'{{{self.label}="{_escape(key)}"}}'
            lines.append(f"{self.name}{label} {_number(value)}")
        return "\n".join(lines) + "\n"


class Registry:
    """A set of metrics with unique names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}

    def register(
        self,
        name: str,
        about: str,
        numerator: str,
        denominator: str,
        *,
        kind: str = "counter",
        label: str | None = None,
    ) -> Metric:
        """Add a metric; a name that exists already is an error."""
        metric = Metric(name, about, numerator, denominator, kind, label)
        with self._lock:
            if name in self._metrics:
                raise ArgumentError.of("metrics", "name", repr(name), "a name that is not registered yet")
            self._metrics[name] = metric
        return metric

    def get(self, name: str) -> Metric:
        """The metric of that name; an unknown one is an error that lists the known."""
        text("metrics", "name", name, "the name of a metric")
        with self._lock:
            metric = self._metrics.get(name)
            known = "|".join(sorted(self._metrics))
        if metric is None:
            raise ArgumentError.of("metrics", "name", repr(name), known)
        return metric

    def _sorted(self) -> list[Metric]:
        with self._lock:
            return [self._metrics[name] for name in sorted(self._metrics)]

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """name -> {"ratio", "numerator", "denominator"}; with a label: name -> {"by_<label>": {value: the same}}.

        JSON-serialisable; `ratio` is None when the denominator is zero.
        """
        result: dict[str, dict[str, Any]] = {}
        for metric in self._sorted():
            readings = {
                key: {"ratio": v.ratio, "numerator": v.numerator, "denominator": v.denominator}
                for key, v in metric.read().items()
            }
            result[metric.name] = readings[""] if metric.label is None else {f"by_{metric.label}": readings}
        return result

    def families(self) -> Iterator[Family]:
        """What Prometheus gets: of each metric a gauge for the ratio and a family for each part."""
        for metric in self._sorted():
            readings = metric.read()
            ending, kind = ("_total", "counter") if metric.kind == "counter" else ("", "gauge")
            ratios = {key: math.nan if v.ratio is None else v.ratio for key, v in readings.items()}
            tops = {key: v.numerator for key, v in readings.items()}
            bottoms = {key: v.denominator for key, v in readings.items()}
            yield Family(metric.name, "gauge", metric.about, metric.label, ratios)
            yield Family(f"{metric.name}_numerator{ending}", kind, metric.numerator, metric.label, tops)
            yield Family(f"{metric.name}_denominator{ending}", kind, metric.denominator, metric.label, bottoms)

    def prometheus_text(self) -> str:
        """Text exposition format 0.0.4 of all `families`."""
        return "".join(family.text() for family in self.families())

    def reset(self) -> None:
        """Every metric back to nothing counted (tests, or a new measuring window)."""
        for metric in self._sorted():
            metric.reset()


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


REGISTRY = Registry()
register, get = REGISTRY.register, REGISTRY.get
snapshot, prometheus_text, reset = REGISTRY.snapshot, REGISTRY.prometheus_text, REGISTRY.reset

# The metrics of the mission. A family may register more.
# fmt: off
register("sic_slice_hit_ratio", "Share of eligible head-steps that were answered sliced.",
         "head-steps answered from the slice", "head-steps eligible for slicing")
register("sic_slice_fallback_ratio", "Share of eligible head-steps that fell back to dense attention, by reason.",
         "head-steps recomputed dense", "head-steps eligible for slicing", label="reason")
register("sic_slice_read_ratio", "Share of the KV bytes that were read, index included.",
         "bytes read", "bytes of the visible keys and values")
register("sic_cursor_recovery_rate", "Share of resumed cursors that went on where they stopped.",
         "cursors resumed", "cursors presented")
register("sic_hash_collision_rate", "Share of look-ups whose digest matched but whose tokens did not.",
         "digest collisions", "look-ups")
register("sic_index_hit_ratio", "Share of block look-ups that found their block.",
         "blocks found", "look-ups")
register("sic_index_eviction_ratio", "Blocks evicted per block inserted.",
         "blocks evicted", "blocks inserted")
register("sic_mem_pool_utilization", "Share of the reserved pool in use.",
         "bytes in use", "bytes reserved", kind="gauge")
register("sic_slot_hit_ratio", "Share of kept hidden states asked for that were there.",
         "states found", "states asked for")
register("sic_cursor_skipped_ratio", "Share of a resumed run's segments that were done and not run again.",
         "segments skipped", "segments of resumed runs")
register("sic_plan_wait_timeout_ratio", "Share of a plan's calls that waited for another one and gave up.",
         "calls that gave up", "calls that waited")
register("sic_graph_replay_ratio", "Share of a plan's launches on a device that replayed a captured graph.",
         "launches that replayed a captured graph", "those, and first calls of segments that were then captured")
register("sic_redundancy_elimination_ratio", "RER: time saved per token over the time before.",
         "seconds before minus seconds after", "seconds before", kind="gauge")
register("sic_termination_accuracy_ratio", "TA: share of stops that were at a complete answer.",
         "stops at a complete answer", "stops")
register("sic_stop_reason_ratio", "Share of stops that had a reason among theirs.",
         "stops for the reason", "stops", label="reason")
register("sic_cache_hit_drift_ratio", "CHD: change of the hit rate between two windows over the old rate.",
         "absolute change of the hit rate", "hit rate of the old window", kind="gauge")
register("sic_token_efficiency_ratio", "TER: share of computed tokens that were useful.",
         "useful tokens", "tokens computed, with padding and discarded drafts")
register("sic_padding_efficiency_ratio", "Share of the tokens computed for a batch that are not padding.",
         "useful tokens", "tokens computed, padding included")
register("sic_delta_lost_raw_ratio", "Rows that were to be kept raw and were coded, for want of room.",
         "rows without room", "rows coded", kind="gauge")
register("sic_delta_other_weights_ratio", "Models whose templates were fitted on other weights.",
         "models with other weights", "models checked")
register("sic_gate_refusal_ratio", "Findings that the hardware gate refused, by finding.",
         "findings refused", "findings required", label="finding")
register("sic_delta_size_ratio", "Size of the coded cache over the uncoded one.",
         "bytes coded", "bytes uncoded", kind="gauge")
register("sic_reference_resolution_ratio", "Share of the references that were looked up, by outcome.",
         "references with this outcome", "references looked up", label="outcome")
register("sic_redundancy_residual_ratio", "RRR: what the saving is above or below its target, over the target.",
         "seconds saved minus the target", "seconds saved by the target", kind="gauge")
register("sic_rollout_stage_ratio", "How far the roll-out is: 0 shadow, 0.5 mixed, 1 full.",
         "stages reached", "stages ahead of the first", kind="gauge")
register("sic_rollout_sliced_ratio", "Share of requests that the roll-out answered sliced.",
         "requests answered sliced", "requests")
register("sic_rollout_agreement_ratio", "Share of compared answers in which dense and sliced agreed.",
         "answers that agreed", "answers compared")
register("sic_rollout_fallback_ratio", "Times that the gate went back from a stage, by the stage left.",
         "stages left for an earlier one", "looks of the gate", label="stage")
register("sic_context_jump_ratio", "Share of a session's further requests whose context changed by more than 1024 tokens.",
         "requests with a jump", "requests of known sessions")
register("sic_prediction_latency_seconds", "Mean time of one termination or confidence prediction.",
         "seconds in predictions", "predictions")
# fmt: on


def serve(port: int, addr: str = "127.0.0.1") -> Exporter:
    """Answer Prometheus at http://addr:port/metrics with the registry, from a thread of its own, until `close()`.

    port: 0 takes a free one (`Exporter.port`). Needs prometheus_client (extra `prometheus`; `SicError` with the remedy
    without it). The default address is reached from this machine only: there is no authentication.
    """
    from .exporter import Exporter  # its package is optional

    return Exporter(REGISTRY, port, addr)


# --- what a runner measures itself ------------------------------------------------------------------------------------


def record_time_per_token(before: float, after: float) -> float | None:
    """RER: seconds a token before and after; (before - after) / before, negative if it became slower."""
    for arg, seconds in (("before", before), ("after", after)):
        real("record_time_per_token", arg, seconds, lambda x: 0 <= x < math.inf, "seconds a token, 0 or more")
    get("sic_redundancy_elimination_ratio").set(before - after, before)
    return Value(before - after, before).ratio


def record_hit_rates(old: float, new: float) -> float | None:
    """CHD: hit rates of two windows, 0 to 1; |new - old| / old."""
    for arg, rate in (("old", old), ("new", new)):
        real("record_hit_rates", arg, rate, lambda x: 0 <= x <= 1, "a rate from 0 to 1")
    get("sic_cache_hit_drift_ratio").set(abs(new - old), old)
    return Value(abs(new - old), old).ratio


def record_tokens(useful: int, computed: int) -> None:
    """TER: tokens that reached the output, of all that were computed: padding, discarded drafts and what follows a stop."""
    for arg, count in (("useful", useful), ("computed", computed)):
        integer("record_tokens", arg, count, 0, "a number of tokens", 63)
    if useful > computed:
        raise ArgumentError.of("record_tokens", "useful", useful, f"at most the tokens computed ({computed})")
    get("sic_token_efficiency_ratio").add(useful, computed)


@contextlib.contextmanager
def timed_predictions(count: int = 1) -> Iterator[None]:
    """Prediction latency: the host's time within, for `count` predictions. On a device synchronise inside, or time the launch."""
    integer("timed_predictions", "count", count, 0, "a number of predictions", 63)
    begin = time.perf_counter()
    yield
    get("sic_prediction_latency_seconds").add(time.perf_counter() - begin, count)
