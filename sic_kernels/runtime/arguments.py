"""Arguments of public functions that the native layer cannot check: names, numbers, the library's own classes, and the
arrays of what torch computes."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from .arrays import as_torch, has_negative_strides
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


def torch_device(op: str, value: Any) -> torch.device:
    """A device by its name; `ArgumentError` if torch knows none of that name."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        return torch.device(value)
    raise ArgumentError.of(op, "device", repr(value), "a device of torch")


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int32, torch.int64)


def tensor(
    op: str, arg: str, value: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: Any = None
) -> torch.Tensor:
    """A torch view of an array of one of the types and of the shape (-1: any size): for what torch itself computes.

    device: where it has to be; None: anywhere but "meta".
    """
    x = as_torch(value)
    names = "|".join(str(t).removeprefix("torch.") for t in dtypes)
    expected = f"{names}[{','.join('*' if n < 0 else str(n) for n in shape)}]"
    if not is_dense(x):
        raise ArgumentError.of(op, arg, described(value), expected)
    fits = x.ndim == len(shape) and all(want in (-1, size) for want, size in zip(shape, x.shape))
    if x.dtype not in dtypes or not fits:
        raise ArgumentError.of(op, arg, described(x), expected)
    if device is not None and x.device != device:
        raise ArgumentError.of(op, arg, f"{described(x)} on {x.device}", f"a tensor on {device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError.of(op, arg, "a tensor that requires grad", "one without: there is no backward pass")
    return x


def is_dense(x: Any) -> bool:
    """Whether it is a tensor with a number for each place of its shape."""
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested and x.device.type != "meta"


def output(op: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], device: Any) -> torch.Tensor:
    """`tensor` of `out`, to be written to by torch."""
    x = tensor(op, "out", value, (dtype,), shape, device)
    if has_negative_strides(value) or any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride())):
        raise ArgumentError.of(op, "out", f"{described(x)} with strides below 1", "an output that torch can write to")
    if not getattr(getattr(value, "flags", None), "writeable", True):
        raise ArgumentError.of(op, "out", f"{described(x)} that is read-only", "an array to write to")
    return x


def described(value: Any) -> str:
    """int64[3,4], or what it is."""
    if isinstance(value, torch.Tensor) and not value.is_nested:
        kind = "" if value.layout == torch.strided else f" that is {str(value.layout).removeprefix('torch.')}"
        kind += " on meta" if value.device.type == "meta" else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}".replace(" ", "") + kind
    return type(value).__name__


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
