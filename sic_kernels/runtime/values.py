"""Arguments that are no arrays: names, numbers, paths, the library's own classes. Only the standard library is imported."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
from collections.abc import Callable, Iterable
from typing import Any

from .errors import ArgumentError


def code_of(op: str, arg: str, value: str, table: dict[str, int]) -> int:
    """The number of an enumerated argument."""
    if not isinstance(value, str) or value not in table:
        raise ArgumentError.of(op, arg, repr(value), "|".join(table))
    return table[value]


def integer(op: str, arg: str, value: Any, low: int, expected: str, bits: int = 31) -> int:
    """An integer of any kind (NumPy's too) as int; `ArgumentError` if it is none, below `low` or not below 2^bits."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) < 1 << bits:
        raise ArgumentError.of(op, arg, repr(value), expected)
    return int(value)


def real(op: str, arg: str, value: Any, holds: Callable[[float], bool], expected: str) -> float:
    """A real number of any kind as float; `ArgumentError` if it is none, or `holds` does not; a NaN should not."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not holds(number):
        raise ArgumentError.of(op, arg, repr(value), expected)
    return number


def flag(op: str, arg: str, value: Any) -> bool:
    """True or False (NumPy's too); `ArgumentError` for what merely counts as one of them."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise ArgumentError.of(op, arg, type(value).__name__, "True or False")
    return bool(value)


def integers(op: str, arg: str, value: Any, expected: str) -> tuple[int, ...]:
    """Integers of 0 or more, of any kind (NumPy's too), in any collection but a text."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentError.of(op, arg, type(value).__name__, expected)
    return tuple(integer(op, arg, n, 0, expected, 63) for n in value)


def text(op: str, arg: str, value: Any, expected: str = "a str") -> str:
    """A string; `ArgumentError` if it is none."""
    if not isinstance(value, str):
        raise ArgumentError.of(op, arg, type(value).__name__, expected)
    return value


def file_path(op: str, arg: str, value: Any, expected: str = "a path") -> str:
    """A path as text; `ArgumentError` for what is none, for one of bytes, and for a NUL, at which others take it to end."""
    path = value if isinstance(value, str) else None
    if isinstance(value, os.PathLike):
        path = value.__fspath__()
    if not isinstance(path, str):
        raise ArgumentError.of(op, arg, type(value).__name__, expected)
    if "\0" in path:
        raise ArgumentError.of(op, arg, repr(path), f"{expected}, without a NUL")
    return path


def instance(op: str, arg: str, value: Any, kind: type) -> None:
    """`ArgumentError` unless the value is of that class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise ArgumentError.of(op, arg, type(value).__name__, f"{article} {kind.__name__}")
