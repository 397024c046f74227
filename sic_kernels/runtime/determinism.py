"""Does a function give the same bits every time, with the same memory, in about the same time?"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

from . import run_costs
from .arguments import flag, integer
from .errors import ArgumentError
from .log import describe
from .run_costs import Costs


@dataclasses.dataclass(frozen=True)
class DeterminismReport:
    """The outcome of `verify_determinism`; true when every run gave the bits of the first, and needed as much memory."""

    runs: int
    equal: bool
    digest: str  # of the first result: compare it across processes, thread counts, machines
    difference: str = ""  # where the first differing run differs, for people
    costs: Costs | None = None  # with measure=True: peak memory, times

    def __bool__(self) -> bool:
        return self.equal and (self.costs is None or self.costs.memory_equal)

    def as_dict(self) -> dict[str, Any]:
        """JSON data; "costs" as in `Costs.as_dict`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "costs": None if self.costs is None else self.costs.as_dict()}


def verify_determinism(fn: Callable[[], Any], runs: int = 10, measure: bool = False) -> DeterminismReport:
    """Call `fn()` `runs` times and compare dtype, shape and every bit with the first result.

    `fn` returns a tensor (torch, NumPy, CuPy, JAX) or numbers, strings, None, and tuples, lists, dicts and
    dataclasses of them. Bits are compared: two NaNs of the same bits are equal, -0.0 and 0.0 are not. All runs
    are made even after a difference, so that the cost is the same. Raises ArgumentError for runs < 2.

    measure: after that, `fn` runs again as often for its peak memory, which has to be equal, and as often for its time,
    which is reported (`report.costs`): no machine gives equal times, so a spread is for people to judge.
    """
    flag("verify_determinism", "measure", measure)
    if not callable(fn):
        raise ArgumentError.of("verify_determinism", "fn", type(fn).__name__, "a function without arguments")
    runs = integer("verify_determinism", "runs", runs, 2, "at least 2")
    first = dict(_leaves(fn()))
    difference = ""
    for run in range(1, runs):
        found = _difference(first, dict(_leaves(fn())))
        if found and not difference:
            difference = f"run {run + 1} of {runs}: {found}"
    costs = run_costs.measure(fn, runs) if measure else None
    return DeterminismReport(runs, not difference, _digest(first), difference, costs)


Leaf = tuple[str, bytes]  # description, bits


def _leaves(value: Any, path: str = "result") -> Iterator[tuple[str, Leaf]]:
    """(path, (description, bits)) of everything in a result, in a fixed order."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        yield path, (describe(value), _bits(value))
    elif isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif hasattr(value, "_asdict"):
        for key, item in value._asdict().items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path}.length", ("int", str(len(value)).encode())
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from _leaves(getattr(value, key), f"{path}.{key}")
    elif isinstance(value, float):
        yield path, ("float", struct.pack("<d", value))
    elif value is None or isinstance(value, (bool, int, str, bytes)):
        yield path, (type(value).__name__, repr(value).encode())
    else:
        raise ArgumentError.of(
            "verify_determinism", path, type(value).__name__, "tensors, numbers, strings, containers"
        )


def _bits(value: Any) -> bytes:
    """The elements as bytes in row-major order, whatever the library, dtype and device."""
    if type(value).__module__.split(".")[0] == "torch":
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if hasattr(value, "get"):  # CuPy
        value = value.get()
    import numpy

    return numpy.ascontiguousarray(value).tobytes()


def _difference(first: dict[str, Leaf], other: dict[str, Leaf]) -> str:
    """The first place where two results differ, or ""."""
    if list(first) != list(other):
        odd = sorted(set(first) ^ set(other))
        return f"other fields: {', '.join(odd)}" if odd else "other order of fields"
    for path, (kind, bits) in first.items():
        other_kind, other_bits = other[path]
        if kind != other_kind:
            return f"{path}: {other_kind} instead of {kind}"
        if bits != other_bits:
            at = next((i for i, (a, b) in enumerate(zip(bits, other_bits)) if a != b), min(len(bits), len(other_bits)))
            return f"{path}: {kind} differs from byte {at}"
    return ""


def _digest(leaves: dict[str, Leaf]) -> str:
    total = hashlib.sha256()
    for path, (kind, bits) in leaves.items():
        total.update(f"{path}\0{kind}\0{len(bits)}\0".encode())
        total.update(bits)
    return total.hexdigest()[:16]
