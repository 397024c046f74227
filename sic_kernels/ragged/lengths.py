"""Lengths of sequences: read from whatever holds them, and added up."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.arguments import INTS, described, is_dense, torch_device
from ..runtime.arrays import as_torch
from ..runtime.errors import ArgumentError

Array = Any  # torch.Tensor, numpy.ndarray, cupy.ndarray, jax.Array
Lengths = Any  # Sequence[int] or an Array of integers

MOST = (1 << 31) - 1  # tokens of a batch: attention kernels take i32 bounds


def integers(op: str, arg: str, values: Lengths) -> list[int]:
    """The values as a list, from a sequence or a one-dimensional array; an array on a device is read back.

    `ArgumentError` with the place of what is no integer, is below 0, or takes the sum beyond 2^31 - 1.
    """
    if hasattr(values, "dtype"):
        values = as_torch(values)
        if not is_dense(values) or values.ndim != 1 or not integral(values.dtype):
            raise ArgumentError.of(op, arg, described(values), "integers, one for each sequence")
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ArgumentError.of(op, arg, type(values).__name__, "a list or an array of integers")
    for i, n in enumerate(values):
        if not isinstance(n, numbers.Integral) or isinstance(n, bool) or int(n) >> 63:
            raise ArgumentError.of(op, arg, f"{n!r} at [{i}]", "integers, 0 or more")
    return [int(n) for n in values]


def checked_lengths(op: str, lengths: Lengths) -> list[int]:
    """Lengths as a list; their sum must fit into 32 bits."""
    values = integers(op, "lengths", lengths)
    if sum(values) > MOST:
        raise ArgumentError.of(op, "lengths", f"{sum(values)} tokens", f"at most {MOST}")
    return values


def cu_seqlens(
    lengths: Lengths, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Cumulative lengths [B+1] from 0 on: sequence b is the packed rows bounds[b] up to bounds[b + 1].

    lengths: B integers, a list or an array (one on a device is read back).  dtype: int32 or int64.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in INTS:
        raise ArgumentError.of("cu_seqlens", "dtype", repr(dtype), "int32|int64")
    return bounds_of(checked_lengths("cu_seqlens", lengths), torch_device("cu_seqlens", device), dtype)


def bounds_of(lengths: list[int], device: torch.device | str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """`cu_seqlens` of lengths that are right."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def integral(dtype: torch.dtype) -> bool:
    """Whether numbers of that type can be lengths."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
