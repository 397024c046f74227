"""Arguments of public functions that the native layer cannot check: those of `values`, and the arrays of what torch computes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .arrays import as_torch, has_negative_strides
from .errors import ArgumentError
from .values import code_of as code_of
from .values import file_path as file_path
from .values import flag as flag
from .values import instance as instance
from .values import integer as integer
from .values import integers as integers
from .values import real as real
from .values import text as text


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
