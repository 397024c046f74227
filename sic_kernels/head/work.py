"""What the statistics of logits and of an LM head have to move, and the launches of their CUDA kernels, from shapes alone.

In the manner of slicing/work.py; without masks and biases, rows aligned to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.roofline import Launch, Work
from .cases import HeadShape

CHUNK, WARPS, MAX_SEGMENTS = 512, 8, 128  # values of a warp, warps of a block, segments of a row (logits_stats_cuda.cu)
TILE, SEGMENTS = 128, 264  # columns of a tile, segments of a vocabulary (lm_head_stats_cuda.cu)
HIDDEN_BYTES = 64 * 1024  # of hidden states that a block keeps at once (lm_head_mma_cuda.cuh)
SUMS_BYTES = 32  # of a segment, without its list
# Clocks of a multiprocessor, from the instructions of the kernels' loops: for a value and its sums; for a value that enters
# the list of a warp.
VALUE_CLOCKS, ENTRY_CLOCKS = 0.1, 30.0
PRODUCT_CLOCKS = {8: 7.0, 16: 10.0, 32: 16.0}  # for 16 rows of weights by 32 channels, by rows of hidden states


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _entries(lists: int, room: int) -> int:
    """What enters the lists of 8 warps that hold as many values each: about room * (1 + 1/2 + .. + 1/8), if each has one."""
    return lists * max(1, round(2.7 * min(room, WARPS))) if room <= WARPS else lists * WARPS * room


def logits_stats(s: HeadShape, k: int = 8, itemsize: int = 4) -> Iterator[Launch]:
    """logits_stats_cuda.cu on logits of so many bytes each."""
    room, stride = max(k, 1), WARPS * CHUNK
    segment = stride * max(1, ceil_div(ceil_div(s.V, stride), MAX_SEGMENTS))
    blocks = s.B * ceil_div(s.V, segment)
    left = blocks * (SUMS_BYTES + 8 * room)
    clocks = s.B * s.V * VALUE_CLOCKS + _entries(blocks, room) * ENTRY_CLOCKS
    yield Launch("logits_segments", s.B * s.V * itemsize, left, blocks, clocks)
    yield Launch("logits_finish", 0, left, s.B, s.B * 2 * room * 4 * ENTRY_CLOCKS)


def lm_head_stats(s: HeadShape, k: int = 8) -> Iterator[Launch]:
    """lm_head_stats_cuda.cu on tensor cores, without a probe (which adds blocks to the second launch)."""
    room, item = max(k, 1), s.dtype.itemsize
    rows = 8 if s.B <= 8 else 16 if s.B <= 16 else 32
    tiles, row_blocks = ceil_div(s.V, TILE), ceil_div(s.B, rows)
    each = max(1, ceil_div(tiles, SEGMENTS))
    segments = ceil_div(tiles, each)
    left = s.B * segments * (SUMS_BYTES + 8 * room)
    staged = tiles if rows * s.D * item > HIDDEN_BYTES else segments  # times that a block of rows is read
    again = (row_blocks - 1) * s.V * s.D * item + staged * s.B * s.D * item
    products = row_blocks * ceil_div(s.V, 16) * ceil_div(s.D, 32) * PRODUCT_CLOCKS[rows]
    clocks = products + s.B * s.V * VALUE_CLOCKS + s.B * segments * 2 * room * ENTRY_CLOCKS
    yield Launch("lm_head_mma", (s.V + s.B) * s.D * item, again + left, segments * row_blocks, clocks)
    yield Launch("lm_head_finish", 0, left, s.B, s.B * 2 * room * 4 * ENTRY_CLOCKS)


def work(launches: Iterator[Launch]) -> Work:
    return Work(tuple(launches))
