"""Arrays of every kind: torch inside, the caller's kind outside, no copies.

The native layer reads torch, NumPy, CuPy and JAX arrays by itself (DLPack, `__cuda_array_interface__`). This file is for the
two other directions: a torch view of any array, and results in the kind of the first argument.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

Array = Any  # torch.Tensor, numpy.ndarray, cupy.ndarray, jax.Array


def as_torch(array: Array) -> Any:
    """A torch tensor over the same memory; anything that is not an array (None, numbers) as it is."""
    if array is None or isinstance(array, (torch.Tensor, bool, int, float)):
        return array
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        array = array.copy()  # torch has no negative strides, and its importer ends the process on them
    if hasattr(array, "__dlpack__"):
        return torch.from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return torch.as_tensor(array, device="cuda")
    return array


def like(results: tuple[torch.Tensor, ...], first: Array) -> tuple[Array, ...]:
    """The results as arrays of the kind of `first`, over the same memory.

    A type that the kind does not have (NumPy has no bfloat16) stays a torch tensor.
    """
    kind = type(first).__module__.partition(".")[0]
    return tuple(_convert(r, kind) if isinstance(r, torch.Tensor) else r for r in results)


def _convert(tensor: torch.Tensor, kind: str) -> Array:
    if kind == "numpy":
        return tensor if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor.numpy()
    if kind == "cupy":
        return importlib.import_module("cupy").from_dlpack(tensor)
    if kind in ("jax", "jaxlib"):
        return importlib.import_module("jax.dlpack").from_dlpack(tensor)
    return tensor
