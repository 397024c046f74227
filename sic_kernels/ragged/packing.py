"""Rows of a padded batch behind each other, and back."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

from ..runtime.arguments import integer
from ..runtime.arrays import as_torch
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .lengths import Array, Lengths, bounds_of, checked_lengths, described, integers, integral

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
    shape: Any = getattr(padded, "shape", ())
    if len(shape) < 2:  # the native layer says what is wrong with it
        return lengths, None
    B = int(shape[0])
    count = int(lengths.shape[0]) if hasattr(lengths, "dtype") and len(lengths.shape) == 1 else _count(lengths)
    if count not in (B, B + 1):
        got = f"{count} values" if isinstance(lengths, (list, tuple)) else described(as_torch(lengths))
        raise ArgumentError.of("pack", "lengths", got, f"{B} lengths, or {B + 1} cumulative ones")
    if count == B + 1:
        if hasattr(lengths, "dtype"):
            return lengths, None
        bounds = integers("pack", "lengths", lengths)
        return torch.tensor(bounds, dtype=torch.int64, device=_device(padded)), bounds[-1]
    here = as_torch(lengths)
    if isinstance(here, torch.Tensor) and here.device.type != "cpu" and integral(here.dtype):
        return torch.nn.functional.pad(here.cumsum(0, dtype=torch.int64), (1, 0)), None
    sizes = checked_lengths("pack", lengths)
    for row, size in enumerate(sizes):
        if size > shape[1]:
            raise ArgumentError.of("pack", "lengths", f"{size} at [{row}]", f"0 to {shape[1]}")
    return bounds_of(sizes, _device(padded)), sum(sizes)


def _count(lengths: Any) -> int:
    return len(lengths) if isinstance(lengths, (list, tuple)) else -1


def _device(array: Array) -> torch.device:
    """Of a torch view of the array; what is none is left to the native layer."""
    view = as_torch(array)
    return view.device if isinstance(view, torch.Tensor) else torch.device("cpu")


def _bits(packed: Array, fill: Any) -> int:
    """The bits of `fill` in the type of the rows, as a signed integer."""
    view = as_torch(packed)
    if not isinstance(view, torch.Tensor) or view.dtype.is_complex:
        return 0  # the native layer says what is wrong with it
    dtype = view.dtype
    if dtype.is_floating_point:
        right = isinstance(fill, numbers.Real)
        value = torch.tensor(float(fill) if right else 0.0, dtype=torch.float64).to(dtype)
        # Conversions saturate, or make infinities of what is too large; not every type has those.
        right = right and (abs(fill) <= torch.finfo(dtype).max or math.isnan(fill) or value.double().item() == fill)
    else:
        limits = torch.iinfo(dtype if dtype != torch.bool else torch.uint8)
        right = isinstance(fill, numbers.Integral) and limits.min <= int(fill) <= limits.max
        value = torch.tensor(int(fill) if right else 0, dtype=dtype)
    if not right:
        raise ArgumentError.of("unpack", "fill", repr(fill), f"a number that {str(dtype).removeprefix('torch.')} has")
    return int(value.view(_BITS[dtype.itemsize]))
