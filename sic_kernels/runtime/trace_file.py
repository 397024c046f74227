"""A saved trace, read back: arrays with their shapes, and what each KV head read of each page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .errors import ArgumentError
from .trace import VERSION

_DESCRIPTION = re.compile(r"(\w+)\[([\d,]*)\]")
PAGES = 1 << 22  # of a sequence at most
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class HeadRow:
    """One KV head for one query token in one layer: `read[i]` of `size[i]` tokens of page i, whose best score is `score[i]`.

    dense: everything was read. answered: query heads of its group by status. omitted: the group's largest estimate.
    """

    layer: int | None  # None: the caller did not say
    head: int
    dense: bool
    answered: dict[str, int]
    omitted: float | None
    read: list[int]
    size: list[int]
    score: list[float | None]  # nats

    @property
    def fell_back(self) -> bool:
        """Whether a head of the group was recomputed over everything."""
        return any(name.startswith("fallback") for name in self.answered)

    @property
    def tokens(self) -> int:
        """Tokens of keys and values read: the selection, and all of them once more by heads that fell back."""
        return sum(self.read) + sum(self.size) * self.fell_back


@dataclasses.dataclass(frozen=True)
class Step:
    """The rows of one pass through the layers, for one sequence and one query token."""

    number: int
    sequence: int
    token: int
    page_size: int
    rows: list[HeadRow]


def load(text: str) -> Record:
    """A trace from its JSON; `ArgumentError` for anything else."""
    try:
        trace = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, TypeError, RecursionError) as error:
        raise ArgumentError.of("trace", "file", f"no JSON ({error})", "what Trace.save wrote") from None
    records = trace.get("records") if isinstance(trace, dict) else None
    if not isinstance(records, list) or not all(isinstance(r, dict) and isinstance(r.get("op"), str) for r in records):
        raise ArgumentError.of("trace", "file", "JSON without records", "what Trace.save wrote")
    if trace.get("version") != VERSION:
        raise ArgumentError.of("trace", "version", trace.get("version"), VERSION)
    for name, kind in (("config", dict), ("reasons", dict), ("status", str), ("dropped", int)):
        if not isinstance(trace.get(name, kind()), kind):
            raise ArgumentError.of("trace", name, type(trace[name]).__name__, "what Trace.save wrote")
    return trace


def _finite(text: str) -> float:
    """Infinities and NaN are strings in a trace, not numbers."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


def steps(trace: Record) -> tuple[list[Step], int]:
    """All steps that `attend` recorded whole, and how many of its records were cut (`max_values`) and cannot be drawn."""
    found: dict[tuple[int, int, int], Step] = {}
    seen: dict[Any, int] = {}
    cut = 0
    for at, record in enumerate(trace["records"]):
        if record["op"] != "attend":
            continue
        is_cut = any(isinstance(value, dict) and "cut" in value for value in record.values())
        try:
            layer = record["layer"] if record["layer"] is None else _count(record, "layer", 0)
            rows = [] if is_cut else list(_rows(record))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ArgumentError.of("trace", f"records[{at}]", repr(error), "the fields of an attend") from None
        number = seen[layer] = seen.get(layer, -1) + 1
        cut += is_cut
        for sequence, token, row in rows:
            key = (number, sequence, token)
            found.setdefault(key, Step(*key, record["page_size"], [])).rows.append(row)
    return [found[key] for key in sorted(found)], cut


def _rows(record: Record) -> Iterator[tuple[int, int, HeadRow]]:
    """(sequence, query token, row) of one `attend`."""
    (B, T, query_heads), status = array(record["status"])
    if query_heads < 1:  # else any number of rows would need no values
        raise ValueError(f"{query_heads} query heads")
    heads, page, lengths = _count(record, "kv_heads"), _count(record, "page_size"), array(record["seq_lens"])[1]
    omitted, group = array(record["omitted_mass"])[1], query_heads // heads
    step = 1.0 if record.get("page_scores") is None else float(record["score_step"])
    if query_heads % heads:
        raise ValueError(f"{query_heads} query heads of {heads} KV heads")
    chosen, scores = (_split(record.get(name), B * T * heads) for name in ("selection", "page_scores"))
    for at in range(B * T * heads):
        place, head = divmod(at, heads)
        sequence, token = divmod(place, T)
        visible = max(0, lengths[sequence] - T + token + 1)
        if visible > page * PAGES:
            raise ValueError(f"{visible} tokens in pages of {page}")
        size = [min(page, visible - first) for first in range(0, visible, page)]
        mine = slice(at * group, (at + 1) * group)
        answered = _names(record, status[mine])
        dense = all(name.startswith("dense") for name in answered)
        row = HeadRow(
            layer=record["layer"],
            head=head,
            dense=dense,
            answered=answered,
            omitted=max((x for x in omitted[mine] if isinstance(x, float)), default=None),
            read=size if dense else _read(chosen[at], size, page, record["unit"]),
            size=size,
            score=[_nats(x, step) for x in scores[at][: len(size)]],
        )
        yield sequence, token, row


def _count(record: Record, name: str, least: int = 1) -> int:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} {value!r}")
    return value


def _split(entry: Record | None, parts: int) -> list[list[Any]]:
    """The values of an array, in equal parts; a call that ran dense has none."""
    values = [] if entry is None else array(entry)[1]
    each = len(values) // parts
    return [values[at * each : (at + 1) * each] for at in range(parts)]


def _names(record: Record, codes: list[int]) -> dict[str, int]:
    """Status name -> query heads."""
    return dict(Counter(record["status_names"][code] for code in codes))


def _read(chosen: list[int], size: list[int], page: int, unit: str) -> list[int]:
    """Tokens read of each page."""
    read = [0] * len(size)
    for index in chosen:
        if index >= 0 and unit == "page":
            read[index] = size[index]
        elif index >= 0:
            read[index // page] += 1
    return read


def _nats(value: Any, step: float) -> float | None:
    return None if isinstance(value, str) else value * step


def array(entry: Record) -> tuple[list[int], list[Any]]:
    """Shape and flat values of a recorded array."""
    match = _DESCRIPTION.match(entry["array"])
    if match is None:
        raise ValueError(entry["array"])
    shape, values = [int(n) for n in match[2].split(",") if n], entry["values"]
    if not isinstance(values, list) or len(values) != math.prod(shape):
        raise ValueError(f"values of {entry['array']}")
    return shape, values
