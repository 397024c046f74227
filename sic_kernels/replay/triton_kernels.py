"""The ops of the replay family in Triton.

Each function takes the inputs of the native op of its name, in the same order, and `outs`. It launches and returns, so that it
can be captured.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["uniform"]

BLOCKS = 256  # of four numbers, of a program


@triton.jit
def store_unit_floats(out, index, bits, count):
    """The 24 high bits as a fraction, exactly."""
    tl.store(out + index, (bits >> 8).to(tl.float32) * (1.0 / 16777216.0), mask=index < count)


@triton.jit
def uniform_kernel(key, out, count, BLOCKS: tl.constexpr):
    """The numbers of a program's blocks."""
    seed, position, layer = tl.load(key), tl.load(key + 1), tl.load(key + 2)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    zero = tl.zeros([BLOCKS], tl.int64)
    low, high = (zero + position).to(tl.uint32), (zero + (position >> 32)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, block.to(tl.uint32), (zero + layer).to(tl.uint32), low, high)
    store_unit_floats(out, 4 * block, a, count)
    store_unit_floats(out, 4 * block + 1, b, count)
    store_unit_floats(out, 4 * block + 2, c, count)
    store_unit_floats(out, 4 * block + 3, d, count)


def uniform(key: torch.Tensor, count: int, *, outs: Any) -> None:
    """out f32 [count]: the numbers at the key."""
    if count:
        uniform_kernel[(triton.cdiv(count, 4 * BLOCKS),)](key, outs[0], count, BLOCKS=BLOCKS)
