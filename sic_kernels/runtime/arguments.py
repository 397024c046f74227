"""Arguments of public functions that the native layer cannot check: names, numbers, objects of the library's own classes."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from .errors import ArgumentError


def code_of(op: str, arg: str, value: str, table: dict[str, int]) -> int:
    """The number of an enumerated argument."""
    if not isinstance(value, str) or value not in table:
        raise ArgumentError.of(op, arg, repr(value), "|".join(table))
    return table[value]


def integer(op: str, arg: str, value: Any, low: int, expected: str) -> int:
    """An integer of any kind (NumPy's too) as int; `ArgumentError` if it is none, below `low` or not below 2^31."""
    if not isinstance(value, numbers.Integral) or not low <= int(value) < 1 << 31:
        raise ArgumentError.of(op, arg, repr(value), expected)
    return int(value)


def real(op: str, arg: str, value: Any, holds: Callable[[float], bool], expected: str) -> float:
    """A real number of any kind as float; `ArgumentError` if it is none (a bool is none) or does not hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not holds(float(value)):
        raise ArgumentError.of(op, arg, repr(value), expected)
    return float(value)


def outputs(op: str, out: Any, names: tuple[str, ...], flat: bool = False) -> tuple:
    """The arrays of `out=`, or None for each; with `flat` they get the T dimension that q has not."""
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, (tuple, list)) or len(out) != len(names):
        got = f"{len(out)} arrays" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ArgumentError.of(op, "out", got, f"the {len(names)} arrays ({', '.join(names)})")
    return tuple(o[:, None] if flat and o is not None else o for o in out)


def instance(op: str, arg: str, value: Any, kind: type) -> None:
    """`ArgumentError` unless the value is of that class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise ArgumentError.of(op, arg, type(value).__name__, f"{article} {kind.__name__}")
