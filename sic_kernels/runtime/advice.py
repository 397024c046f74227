"""What a snapshot of the metrics says should be changed, and why: one table of rules.

The targets are the project's own. A ratio that nothing was measured for is not judged; one on too few events is said to be so.
Parts that cannot be those of a share are not usable: a target is never met by them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from .errors import ArgumentError
from .extras import extra
from .metrics import Value

MET, MISSED, UNKNOWN, UNUSABLE = "met", "missed", "not measured", "not usable"
_PART = re.compile(r"(.+)_(numerator|denominator)(?:_total)?")
Snapshot = dict[str, dict[str, Value]]  # metric -> label value ("" without a label) -> reading


@dataclasses.dataclass(frozen=True)
class Rule:
    """A metric has to be above `low` and below `high`; what to do where it is not. label: only this reason of the metric."""

    metric: str
    low: float | None
    high: float | None
    too_low: str = ""
    too_high: str = ""
    label: str = ""
    counts_events: bool = True  # the denominator is a number of independent events
    signed: bool = False  # the numerator may be negative; none of them is above its denominator

    @property
    def target(self) -> str:
        bounds = ((">", self.low), ("<", self.high))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def usable(self, reading: Value) -> bool:
        """Whether the parts can be what the metric counts: those of a share of a whole."""
        top, bottom = reading.numerator, reading.denominator
        return math.isfinite(top) and math.isfinite(bottom) and (self.signed or top >= 0) and max(0.0, top) <= bottom

    def events_needed(self) -> int:
        """How many events, all of them good, make the target sure at 95 %: log 0.05 / log(share that may be)."""
        if not self.counts_events:
            return 0
        share = self.low if self.high is None else 1 - self.high
        return math.ceil(math.log(0.05) / math.log(share)) if share is not None and 0 < share < 1 else 0


RULES = (
    Rule("sic_slice_hit_ratio", 0.85, None,
         "heads fall back to dense: see sic_slice_fallback_ratio by reason; for omitted_mass raise SIC_SLICE_RATIO or "
         "SlicePolicy.candidates, or put the layers that fall back most (cache.stats()) into dense_layers"),
    Rule("sic_slice_fallback_ratio", None, 0.0001, label="no_sliced_cache",
         too_high="sliced attention gets keys of another cache and reads all of them: pass a SlicedCache to generate"),
    Rule("sic_cursor_recovery_rate", 0.9995, None,
         "cursors are refused: the log names the reason (expired: raise SIC_CURSOR_TIMEOUT_MS; stale: buffers were freed or "
         "the plan was captured anew; fingerprint: settings or weights changed); run plan.verify()"),
    Rule("sic_hash_collision_rate", None, 0.005,
         too_high="digests collide, so they are too short: use BlockIndex(digest='blake2b')"),
    Rule("sic_mem_pool_utilization", 0.65, 0.85, counts_events=False,
         too_low="the pool is larger than needed: lower MemoryPool(fraction=...) and give the memory to the cache",
         too_high="the pool is nearly full and will refuse: raise MemoryPool(fraction=...), evict slots earlier, or trim()"),
    Rule("sic_graph_replay_ratio", 0.92, None,
         "segments are called and captured instead of being replayed: keep one plan for all runs, and chunks of few sizes "
         "(the graphs of 8 are kept)"),
    Rule("sic_redundancy_elimination_ratio", 0.0, None, counts_events=False, signed=True,
         too_low="a token takes longer than before: compare `python -m sic_kernels bench` on this machine, and whether "
         "sequences are long enough for slices (SlicePolicy.min_len)"),
    Rule("sic_delta_lost_raw_ratio", None, 0.0001, counts_events=False,
         too_high="rows that should be exact are coded: lower DeltaKVCache(rows_per_outlier=...), or reserve capacity"),
    Rule("sic_padding_efficiency_ratio", 0.85, None, counts_events=False,
         too_low="batches are padded: group by length with ragged.plan, or pack them"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Advice:
    """One rule held against a snapshot. change: what to do, "" if nothing; note: how sure the figure is, or why not usable."""

    metric: str
    value: float | None
    target: str
    verdict: str  # met | missed | not measured | not usable
    change: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def advise(snapshot: Snapshot) -> list[Advice]:
    """Every rule, in the order of the table. snapshot: of `read`."""
    if not isinstance(snapshot, Mapping) or not all(isinstance(readings, Mapping) for readings in snapshot.values()):
        raise ArgumentError.of("advise", "snapshot", type(snapshot).__name__, "a snapshot, of read")
    return [_judged(rule, snapshot.get(rule.metric, {}).get(rule.label)) for rule in RULES]


def _judged(rule: Rule, reading: Value | None) -> Advice:
    name = rule.metric + (f" ({rule.label})" if rule.label else "")
    if reading is not None and not rule.usable(reading):
        parts = f"{reading.numerator:g} of {reading.denominator:g} is no share: whoever counts or adds up does it wrong"
        return Advice(name, None, rule.target, UNUSABLE, note=parts)
    ratio = None if reading is None else reading.ratio
    if reading is None or ratio is None:
        return Advice(name, None, rule.target, UNKNOWN)
    if rule.low is not None and ratio <= rule.low:
        return Advice(name, ratio, rule.target, MISSED, rule.too_low)
    if rule.high is not None and ratio >= rule.high:
        return Advice(name, ratio, rule.target, MISSED, rule.too_high)
    needed = rule.events_needed()
    few = f"{reading.denominator:,.0f} events; {needed:,} without a failure would make it sure (95 %)"
    return Advice(name, ratio, rule.target, MET, note=few if reading.denominator < needed else "")


def read(text: str) -> Snapshot:
    """A snapshot from the JSON of `metrics.snapshot()` or from Prometheus text (needs prometheus_client).

    `ArgumentError` for anything else; parts that are numbers are taken as they are, `advise` says which are not usable.
    """
    if not isinstance(text, str):
        raise ArgumentError.of("advise", "snapshot", type(text).__name__, "a string")
    return _from_json(text) if text.lstrip().startswith("{") else _from_prometheus(text)


def _from_json(text: str) -> Snapshot:
    try:
        saved = json.loads(text)
        return {name: dict(_readings(name, entry)) for name, entry in saved.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError.of("advise", "snapshot", f"JSON ({error!r})", "what metrics.snapshot() gave") from None


def _readings(name: str, entry: dict[str, Any]) -> list[tuple[str, Value]]:
    """(label value, reading) of one metric."""
    labelled = [values for key, values in entry.items() if key.startswith("by_")]
    pairs = labelled[0].items() if labelled else [("", entry)]
    return [(key, Value(_part(v["numerator"]), _part(v["denominator"]))) for key, v in pairs]


def _part(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _from_prometheus(text: str) -> Snapshot:
    parser = extra("prometheus_client.parser", "snapshots in Prometheus text", "prometheus")
    parts: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                match = _PART.fullmatch(sample.name)
                label = next((v for k, v in sample.labels.items() if k not in ("instance", "job")), "")
                if match:
                    reading = parts.setdefault(match[1], {}).setdefault(label, {"numerator": 0.0, "denominator": 0.0})
                    reading[match[2]] += sample.value  # several processes: parts add up, that is what they are for
    except (ValueError, KeyError, IndexError) as error:
        raise ArgumentError.of("advise", "snapshot", f"text ({error!r})", "Prometheus text") from None
    if not parts:
        raise ArgumentError.of("advise", "snapshot", "text without metrics of this library", "Prometheus text")
    return {name: {k: Value(v["numerator"], v["denominator"]) for k, v in rs.items()} for name, rs in parts.items()}
