"""Random numbers that follow from where they are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.arguments import described, is_dense
from ..runtime.backends import call
from ..runtime.errors import ArgumentError

Tensor = torch.Tensor


def uniform(key: Tensor | Sequence[int], *, out: Tensor, backend: str | None = None) -> Tensor:
    """Fills `out` with random numbers from [0, 1) that follow from the key alone: multiples of 2^-24.

    key: (seed, position, layer), three integers of 64 bits (of the layer 32 count); or an int64 tensor [3] of them on the device
    of `out`, which is read when the kernel runs: a captured graph follows it.
    out: float32 of any shape, contiguous, fewer than 2^34 elements.

    The numbers do not depend on the shape of `out`: of two outputs the shorter one is the beginning of the longer. Equal bits on
    every backend, from run to run, for any number of threads.  With a key tensor nothing is allocated and nothing synchronises,
    and the call can be captured in a CUDA graph.  Thread-safe. Raises ArgumentError before anything is touched.
    Method: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011), counter (block, layer, position), key the seed.
    """
    if not is_dense(out) or not out.is_contiguous():
        got = described(out) + " with gaps" * is_dense(out)
        raise ArgumentError.of("uniform", "out", got, "a contiguous float32 tensor")
    at = key if isinstance(key, torch.Tensor) else key_tensor(key, out.device)
    call("replay", "uniform", (at, out.numel()), (out.view(-1),), None, backend)
    return out


def key_tensor(key: Sequence[int], device: torch.device) -> Tensor:
    """(seed, position, layer) as `uniform` takes it from a device: the 64 bits of each."""
    numbers = list(key) if isinstance(key, Sequence) else []
    if len(numbers) != 3 or any(type(n) is not int or not -(1 << 63) <= n < 1 << 64 for n in numbers):
        raise ArgumentError.of("uniform", "key", repr(key), "three integers of 64 bits: seed, position, layer")
    return torch.tensor([n - (n >> 63 << 64) if n > 0 else n for n in numbers], dtype=torch.int64, device=device)
