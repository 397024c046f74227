"""What one step did: which pages were read, with which scores, and how each head was answered.

    with sic.trace() as step:
        model(next_token, past_key_values=cache)
    step.save("step.json")

`slicing.attend` and the integrations call `record`, which costs one context-variable look-up when nobody traces. While
tracing, tensors are copied when they are recorded (outputs may be reused), which synchronises a GPU: tracing is for
looking, not for timing, and not for graph capture. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from . import config
from .log import describe
from .values import file_path, integer

VERSION = 1

_active: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("sic_trace", default=None)


class Trace:
    """The records of one `trace()` block, in the order in which they were made.

    A record is {"op", "layer", ...}; what fell back has "reasons", a list of names (docs/trace.md lists all kinds).
    An array is {"array": "int32[1,1,3,8]@cpu", "values": [...]} with its first `max_values` elements flat, in row-major
    order, and "cut": the number left out. At most `max_records` are kept; `dropped` counts the rest, so that a forgotten
    trace cannot eat the memory.
    """

    def __init__(self, max_values: int = 65536, max_records: int = 4096) -> None:
        self.max_values = integer("trace", "max_values", max_values, 0, "a number of elements")
        self.max_records = integer("trace", "max_records", max_records, 0, "a number of records")
        self.records: list[dict[str, Any]] = []
        self.dropped = 0
        self._lock = threading.Lock()

    def add(self, op: str, layer: int | None, fields: dict[str, Any]) -> None:
        with self._lock:
            if len(self.records) >= self.max_records:
                self.dropped += 1
                return
        entry = {"op": op, "layer": layer, **{k: _plain(v, self.max_values) for k, v in fields.items()}}
        with self._lock:
            self.records.append(entry)

    def as_dict(self) -> dict[str, Any]:
        """ "status" is "fallback" if any record has reasons, with "reasons" naming each and how many records it is in."""
        records = list(self.records)
        reasons = Counter(reason for record in records for reason in record.get("reasons") or ())
        return {
            "version": VERSION,
            "config": {**config.current().as_dict(), "digest": config.current().digest},
            "status": "fallback" if reasons else "active",
            "reasons": dict(reasons),
            "records": records,
            "dropped": self.dropped,
        }

    def to_json(self, indent: int | None = None) -> str:
        """Strict JSON: infinities and NaN are the strings "inf", "-inf", "nan"."""
        if indent is not None:
            integer("Trace.to_json", "indent", indent, 0, "a number of spaces, or None")
        return json.dumps(self.as_dict(), indent=indent, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        with open(file_path("Trace.save", "path", path), "w", encoding="utf-8") as file:
            file.write(self.to_json(indent=1))


@contextlib.contextmanager
def trace(*, max_values: int = 65536, max_records: int = 4096) -> Iterator[Trace]:
    """Record what operations of this thread (or task) report inside the block; the innermost `trace()` gets the records.

    Recorded are: every `slicing.attend` (what was read, page scores, estimated omitted mass, status), under transformers
    every layer that ran it, and what `sic.replay` and `sic.references` do: runs, resumes, slots, resolved references.
    Other operations (scores, selection, dense attention by themselves) are not.
    """
    current = Trace(max_values, max_records)
    token = _active.set(current)
    try:
        yield current
    finally:
        _active.reset(token)


def active() -> bool:
    """Whether someone traces: ask before computing something only a trace needs."""
    return _active.get() is not None


def record(op: str, *, layer: int | None = None, **fields: Any) -> None:
    """Add one record to the active trace, if any. Fields: arrays, numbers, strings, None, and containers of them."""
    current = _active.get()
    if current is not None:
        current.add(op, layer, fields)


def _plain(value: Any, limit: int) -> Any:
    """JSON data, copied out of `value`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v, limit) for k, v in value.items()}
    if hasattr(value, "shape") and hasattr(value, "reshape"):
        flat = value.reshape(-1)
        head = flat[:limit].tolist()
        entry: dict[str, Any] = {"array": describe(value), "values": [_plain(v, limit) for v in head]}
        if len(head) < flat.shape[0]:
            entry["cut"] = int(flat.shape[0]) - len(head)
        return entry
    if hasattr(value, "_asdict"):  # named tuples: Selection, SliceResult
        return {k: _plain(v, limit) for k, v in value._asdict().items()}
    if hasattr(value, "__dataclass_fields__"):
        return {k: _plain(getattr(value, k), limit) for k in value.__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        return [_plain(v, limit) for v in value]
    return str(value)
