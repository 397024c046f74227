"""What the statistics of logits and of an LM head have to move, and the launches of their CUDA kernels, from shapes alone.

In the manner of slicing/work.py; without masks and biases, rows aligned to 16 bytes, random logits.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.roofline import Launch, Work
from .cases import HeadShape

CHUNK, WARPS, MAX_SEGMENTS = 512, 8, 64  # values of a warp, warps of a block, segments of a row (logits_stats_cuda.cu)
TILE, SEGMENTS = 128, 264  # columns of a tile, segments of a vocabulary (lm_head_stats_cuda.cu)
HIDDEN_BYTES = 64 * 1024  # of hidden states that a block keeps at once (lm_head_mma_cuda.cuh)
SUMS_BYTES = 32  # of a segment, without its list
# Clocks of a multiprocessor, from the instructions of the kernels' loops at four a clock: for a value; for a row and a tile of
# an LM head; for a value that enters a list of a warp. Of a warp that waits for itself: for a value that enters at the end.
VALUE_CLOCKS, TILE_CLOCKS, ENTRY_CLOCKS, LAST_CLOCKS = 0.15, 130.0, 35.0, 100.0
PRODUCT_CLOCKS = {8: 8.0, 16: 8.0, 32: 16.0}  # for 16 rows of weights by 32 channels, by rows of hidden states


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _growing(turns: int, room: int) -> float:
    """How many values enter a list in so many turns of equally many: all of it first, then ever fewer."""
    return room * sum(1 / n for n in range(1, turns + 1))


def _finish(name: str, s: HeadShape, left: int, room: int) -> Launch:
    """A block a row joins the segments: lists of warps, then theirs."""
    return Launch(name, 0, left, s.B, s.B * (_growing(4, room) + room) * LAST_CLOCKS)


def logits_stats(s: HeadShape, k: int = 8, itemsize: int = 4) -> Iterator[Launch]:
    """logits_stats_cuda.cu on logits of so many bytes each."""
    room, stride = max(k, 1), WARPS * CHUNK
    segment = stride * max(1, ceil_div(ceil_div(s.V, stride), MAX_SEGMENTS))
    blocks = s.B * ceil_div(s.V, segment)
    left = blocks * (SUMS_BYTES + 8 * room)
    # Up to a value of each warp none enters below the least of the warps' greatest: as if the warps took turns.
    entries = _growing(WARPS, WARPS) if 1 < room <= WARPS else WARPS * room
    clocks = s.B * s.V * VALUE_CLOCKS + blocks * (entries + room) * ENTRY_CLOCKS
    yield Launch("logits_segments", s.B * s.V * itemsize, left, blocks, clocks)
    yield _finish("logits_finish", s, left, room)


def lm_head_stats(s: HeadShape, k: int = 8) -> Iterator[Launch]:
    """lm_head_stats_cuda.cu on tensor cores, without a probe (which adds blocks to the second launch)."""
    room, item = max(k, 1), s.dtype.itemsize
    rows = 8 if s.B <= 8 else 16 if s.B <= 16 else 32
    tiles, row_blocks = ceil_div(s.V, TILE), ceil_div(s.B, rows)
    each = max(1, ceil_div(tiles, SEGMENTS))
    segments = ceil_div(tiles, each)
    left = s.B * segments * (SUMS_BYTES + 8 * room)
    staged = tiles if rows * s.D * item > HIDDEN_BYTES else segments  # times that a row of hidden states is read
    again = (row_blocks - 1) * s.V * s.D * item + staged * s.B * s.D * item
    products = row_blocks * ceil_div(s.V, 16) * ceil_div(s.D, 32) * PRODUCT_CLOCKS[rows]
    clocks = products + s.B * (tiles * TILE_CLOCKS + segments * _growing(each, room) * ENTRY_CLOCKS)
    yield Launch("lm_head_mma", (s.V + s.B) * s.D * item, again + left, segments * row_blocks, clocks)
    yield _finish("lm_head_finish", s, left, room)


def work(launches: Iterator[Launch]) -> Work:
    return Work(tuple(launches))
