"""Rotations: Hadamard transforms of residuals, and RoPE as two tables.

All functions keep the type of what they are given: float32 where bits matter (encode), float64 where results are rounded
(decode, attention). Products and sums are rounded one by one.
"""

from __future__ import annotations

import math

import torch

from ..slicing.reference_sketch import blocks, butterfly, signs

Tensor = torch.Tensor

ROPE_BLOCK = 64  # position 64 i + j turns by hi[i] and lo[j]


def _norm(n: int) -> Tensor:
    """1/sqrt(n) as every backend has it: rounded to float32."""
    return torch.tensor(1.0 / math.sqrt(n), dtype=torch.float32)


def unrotate(y: Tensor) -> Tensor:
    """The inverse of the sketch's `rotate`, by which values are rotated: butterfly per block, norm, signs."""
    parts = [butterfly(part) * _norm(part.shape[-1]) for part in y.split(blocks(y.shape[-1]), dim=-1)]
    return torch.cat(parts, dim=-1) * signs(y.shape[-1]).to(y.device)


def rotate_keys(r: Tensor, k_rotation: int) -> Tensor:
    """Residuals of keys [..., D]: a butterfly over the R channels d, d + D/R, d + 2 D/R, .. of every d, times 1/sqrt(R).

    R = `k_rotation`, a power of two that divides D; 1 changes nothing. No signs: it is its own inverse.
    """
    if k_rotation == 1:
        return r
    groups = r.unflatten(-1, (k_rotation, r.shape[-1] // k_rotation)).transpose(-1, -2)
    return butterfly(groups).transpose(-1, -2).flatten(-2) * _norm(k_rotation)


def _turn(x: Tensor, table: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Pairs of the first R channels of x [..., D] times complex numbers, or their conjugates: table [..., 2, R/2]."""
    R = 2 * table.shape[-1]
    c, s = table[..., 0, :].to(x.dtype), table[..., 1, :].to(x.dtype)
    turned, rest = x[..., :R], x[..., R:]
    re, im = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.tensor_split(2, -1)
    if back:
        re, im = re * c + im * s, im * c - re * s
    else:
        re, im = re * c - im * s, re * s + im * c
    turned = torch.stack((re, im), -1).flatten(-2) if interleaved else torch.cat((re, im), -1)
    return torch.cat((turned, rest), -1)


def _rows(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """table[index], index [...] an index of x's leading dimensions, with ones for the dimensions in between."""
    rows = table[index]
    return rows.reshape(*index.shape, *[1] * (x.dim() - 1 - index.dim()), *table.shape[1:])


def apply_rope(x: Tensor, positions: Tensor, lo: Tensor, hi: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] turned to its positions, integers of x's leading dimensions: by lo, then by hi."""
    at = positions.long()
    x = _turn(x, _rows(lo, at % ROPE_BLOCK, x), interleaved, back=False)
    return _turn(x, _rows(hi, at // ROPE_BLOCK, x), interleaved, back=False)


def undo_rope(x: Tensor, positions: Tensor, lo: Tensor, undo: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] turned back from its positions: by hi, then by lo."""
    at = positions.long()
    x = _turn(x, _rows(undo, at // ROPE_BLOCK, x), interleaved, back=True)
    return _turn(x, _rows(lo, at % ROPE_BLOCK, x), interleaved, back=True)
