"""What the ragged ops mean.  Inputs in the order of the native ops."""

from __future__ import annotations

import itertools

import torch

Tensor = torch.Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(padded: Tensor, cu_seqlens: Tensor, rows: int | None) -> tuple[Tensor]:
    """out [N,...]: the first cu_seqlens[b + 1] - cu_seqlens[b] rows of every sequence, one behind the other."""
    bounds = cu_seqlens.tolist()
    parts = [padded[b, : end - begin] for b, (begin, end) in enumerate(itertools.pairwise(bounds))]
    return (torch.cat(parts) if parts else padded.new_empty(0, *padded.shape[2:]),)


def unpack(packed: Tensor, cu_seqlens: Tensor, max_len: int, fill: int) -> tuple[Tensor]:
    """out [B,max_len,...]: every sequence from its first place on, then elements whose bits are those of `fill`."""
    bounds, bits = cu_seqlens.tolist(), _BITS[packed.element_size()]
    out = torch.full((len(bounds) - 1, max_len, *packed.shape[1:]), fill, dtype=bits, device=packed.device).view(
        packed.dtype
    )
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        out[b, : end - begin] = packed[begin:end]
    return (out,)
