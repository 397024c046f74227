"""Rows of a padded batch behind each other, and back."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.arguments import described, integer, is_dense, real
from ..runtime.arrays import as_torch
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .lengths import Array, Lengths, bounds_of, checked_lengths, integers, integral

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(padded: Array, lengths: Lengths, *, out: Array | None = None, backend: str | None = None) -> Array:
    """The tokens of all sequences behind each other, without their padding: [N,...].

    padded: [B,S,...]; a token's row contiguous, rows and sequences anywhere (a slice of a larger array, a broadcast one).
    lengths: B of them, a list or an array of integers; or B + 1 cumulative ones (`cu_seqlens`), a list or an i32|i64 array on the
    rows' device, which is used as it is.  All else is made into one first, in memory of its own.
    out: [N or more,...]; rows behind the last token are not touched.

    Sequence b is the rows cu_seqlens[b] up to cu_seqlens[b + 1].  Raises ArgumentError for a length above S.
    Without `out` the number of rows is read from cumulative lengths, which waits for the device; a list of lengths needs no
    wait.  With `out` and cumulative lengths on the device nothing is allocated, nothing synchronises, and the call can be
    captured in a CUDA graph.  Deterministic: the bits of the rows.
    Source: batches by cumulative lengths, as in FlashAttention (Dao et al. 2022) and ByteTransformer (Zhai et al. 2023).
    """
    bounds, rows = _bounds(padded, lengths)
    return call("ragged", "pack", (padded, bounds, rows), (out,), None, backend)[0]


def unpack(
    packed: Array,
    cu_seqlens: Lengths,
    max_len: int,
    *,
    fill: float = 0,
    out: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Packed sequences side by side, each padded to `max_len` tokens: [B,max_len,...]. The inverse of `pack`.

    packed: [N or more,...]; a token's row contiguous.  cu_seqlens: B + 1 cumulative lengths, a list or an i32|i64 array.
    max_len: at least the longest length; an error if not.  fill: a number of the rows' type, for what is behind a sequence.
    out: [B,max_len,...]; a token's row contiguous, rows and sequences anywhere.

    Every element of the result is written.  With `out` and `cu_seqlens` on the device nothing is allocated, nothing
    synchronises, and the call can be captured in a CUDA graph.  Deterministic: the bits of the rows.
    """
    if not hasattr(cu_seqlens, "dtype"):
        cu_seqlens = torch.tensor(
            integers("unpack", "cu_seqlens", cu_seqlens), device=_device(packed), dtype=torch.int64
        )
    most = integer("unpack", "max_len", max_len, 0, "an integer, 0 or more")
    return call("ragged", "unpack", (packed, cu_seqlens, most, _bits(packed, fill)), (out,), None, backend)[0]


def _bounds(padded: Array, lengths: Lengths) -> tuple[Array, int | None]:
    """Cumulative lengths on the rows' device, and the number of packed rows where it is known."""
    rows_of = as_torch(padded)
    if not is_dense(rows_of) or rows_of.ndim < 2:  # the native layer says what is wrong with it
        return lengths if hasattr(lengths, "dtype") else torch.zeros(1, dtype=torch.int64), None
    shape = rows_of.shape
    B = shape[0]
    array: Any = as_torch(lengths) if hasattr(lengths, "dtype") else None
    count = len(array) if is_dense(array) and array.ndim == 1 else _count(lengths)
    if count not in (B, B + 1):
        got = described(as_torch(lengths)) if count < 0 or hasattr(lengths, "dtype") else f"{count} values"
        raise ArgumentError.of("pack", "lengths", got, f"{B} lengths, or {B + 1} cumulative ones")
    if count == B + 1:
        if hasattr(lengths, "dtype"):
            return lengths, None
        bounds = integers("pack", "lengths", lengths)
        return torch.tensor(bounds, dtype=torch.int64, device=_device(padded)), bounds[-1]
    if array is not None and array.device.type != "cpu" and integral(array.dtype):
        return torch.nn.functional.pad(array.cumsum(0, dtype=torch.int64), (1, 0)), None
    sizes = checked_lengths("pack", lengths)
    for row, size in enumerate(sizes):
        if size > shape[1]:
            raise ArgumentError.of("pack", "lengths", f"{size} at [{row}]", f"0 to {shape[1]}")
    return bounds_of(sizes, _device(padded)), sum(sizes)


def _count(lengths: Any) -> int:
    return len(lengths) if isinstance(lengths, Sequence) and not isinstance(lengths, (str, bytes)) else -1


def _device(array: Array) -> torch.device:
    """Of a torch view of the array; what is none is left to the native layer."""
    view = as_torch(array)
    return view.device if isinstance(view, torch.Tensor) else torch.device("cpu")


def _bits(packed: Array, fill: Any) -> int:
    """The bits of `fill` in the type of the rows, as a signed integer."""
    view = as_torch(packed)
    if not is_dense(view) or view.dtype not in (*_FLOATS, *_INTEGERS):
        return 0  # the native layer says what is wrong with it
    dtype = view.dtype
    expected = f"a number that {str(dtype).removeprefix('torch.')} has"
    if dtype in _INTEGERS:
        limits = torch.iinfo(dtype)
        if not isinstance(fill, numbers.Integral) or not limits.min <= int(fill) <= limits.max:
            raise ArgumentError.of("unpack", "fill", repr(fill), expected)
        value = torch.tensor(int(fill), dtype=dtype)
    else:
        # Conversions saturate, or make infinities of what is too large; not every type has those.
        rounded = lambda x: torch.tensor(x, dtype=torch.float64).to(dtype)
        known = lambda x: abs(x) <= torch.finfo(dtype).max or rounded(x).double().item() == x
        is_nan = isinstance(fill, numbers.Real) and fill != fill
        value = rounded(math.nan if is_nan else real("unpack", "fill", fill, known, expected))
    return int(value.view(_BITS[dtype.itemsize]))
