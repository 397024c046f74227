"""Arrays of every kind: torch inside, the caller's kind outside, no copies.

The native layer reads torch, NumPy, CuPy and JAX arrays by itself (DLPack, `__cuda_array_interface__`). This file is for the
two other directions: a torch view of any array, and results in the kind of the first argument.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

Array = Any  # torch.Tensor, numpy.ndarray, cupy.ndarray, jax.Array

_DLPACK_CPU, _DLPACK_CUDA_HOST = 1, 3


def as_torch(array: Array) -> Any:
    """A torch tensor over the same memory; what is no array, or none that torch can read, as it is.

    torch has no negative strides, and its importer ends the process on them: such an array is copied.
    """
    if array is None or isinstance(array, (torch.Tensor, bool, int, float)):
        return array
    with contextlib.suppress(Exception):  # whoever needs a tensor says what it got instead
        return _viewed(array)
    return array


def _viewed(array: Array) -> Any:
    if has_negative_strides(array):
        array = array.copy()
    if hasattr(array, "__dlpack__"):
        return torch.from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        stream = array.__cuda_array_interface__.get("stream")
        if stream is not None:  # torch does not look at it
            torch.cuda.current_stream().wait_stream(_stream_at(stream))
        return torch.as_tensor(array, device="cuda")
    return array


def has_negative_strides(array: Array) -> bool:
    """Whether torch can see the array only as a copy."""
    return not isinstance(array, torch.Tensor) and any(stride < 0 for stride in getattr(array, "strides", None) or ())


def device_type(array: Array) -> str:
    """ "cpu", "cuda", or what else torch calls a device."""
    if isinstance(array, torch.Tensor):
        return array.device.type
    with contextlib.suppress(Exception):  # the native layer says what is wrong with it
        if hasattr(array, "__dlpack_device__"):
            return "cpu" if int(array.__dlpack_device__()[0]) in (_DLPACK_CPU, _DLPACK_CUDA_HOST) else "cuda"
        return "cuda" if hasattr(array, "__cuda_array_interface__") else "cpu"
    return "cpu"


def stream_of(array: Array) -> contextlib.AbstractContextManager:
    """Makes the stream that work on the array belongs to torch's: CuPy's current one for CuPy's arrays."""
    if _kind(array) != "cupy":
        return contextlib.nullcontext()
    current = importlib.import_module("cupy").cuda.get_current_stream()
    return torch.cuda.stream(_stream_at(current.ptr))


def _stream_at(pointer: int) -> torch.cuda.Stream:
    """torch's name for a cudaStream_t; 0 and 1 are the default stream."""
    return torch.cuda.default_stream() if pointer in (0, 1) else torch.cuda.ExternalStream(pointer)


def like(results: tuple[torch.Tensor, ...], first: Array) -> tuple[Array, ...]:
    """The results as arrays of the kind of `first`, over the same memory.

    A type that the kind does not have (NumPy has no bfloat16) stays a torch tensor.
    """
    kind = _kind(first)
    return tuple(_convert(r, kind) if isinstance(r, torch.Tensor) else r for r in results)


def _kind(array: Array) -> str:
    return type(array).__module__.partition(".")[0]


def _convert(tensor: torch.Tensor, kind: str) -> Array:
    if kind == "numpy":
        return tensor if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor.numpy()
    if kind == "cupy":
        return importlib.import_module("cupy").from_dlpack(tensor)
    if kind in ("jax", "jaxlib"):
        return importlib.import_module("jax.dlpack").from_dlpack(tensor)
    return tensor
