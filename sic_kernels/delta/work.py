"""What each delta op has to move, and the launches of its CUDA kernels, from shapes alone.

In the manner of slicing/work.py; for decoding one token on a cache with a head size of 128 and rows of half types.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.roofline import Launch, Work
from ..slicing.cases import BenchShape
from ..slicing.work import BUSY_BLOCKS, SPLIT, ceil_div, of
from .reference_layout import TAG_BYTES, code_bytes

ENCODE_ROWS = 16  # rows of a head that a block takes (encode_rows_cuda.cuh)
TABLE_ITEMS = 512  # that the side table's block takes at a time (encode_table_cuda.cuh)
# Clocks of a multiprocessor for a token and KV head at D = 128, from the instructions of the kernels' loops.
CODES_CLOCKS = {2: 16.0, 3: 21.0, 4: 15.0, 8: 12.0}  # of attention on tensor cores, by bits
ROTATION_CLOCKS = {1: 0.0, 8: 1.5, 128: 4.0}  # and more, by the channels of a key that are rotated together
ROWS_CLOCKS = 150.0  # of attention on CUDA cores
ENCODE_CLOCKS, DECODE_CLOCKS = 230.0, 100.0  # of both rows
TABLE_CLOCKS = 1500.0  # of a round


def coded_bytes(s: BenchShape, bits: tuple[int, int] = (4, 4)) -> int:
    """Codes and tags of all rows."""
    return s.rows * (code_bytes(s.D, bits[0]) + code_bytes(s.D, bits[1]) + TAG_BYTES)


def encode(s: BenchShape, tokens: int, bits: tuple[int, int] = (4, 4)) -> Iterator[Launch]:
    """encode_cuda.cu: `tokens` new rows of every head, keys and values; those of a decode step or of a prompt."""
    items = tokens * s.heads
    blocks = 2 * s.heads * ceil_div(tokens, ENCODE_ROWS)
    moved = items * (s.kv_bytes // s.rows + code_bytes(s.D, bits[0]) + code_bytes(s.D, bits[1]) + TAG_BYTES)
    yield Launch("encode_rows", moved, blocks=blocks, clocks=items * ENCODE_CLOCKS)
    yield Launch("settle_table", 0, items * 5, 1, ceil_div(items, TABLE_ITEMS) * TABLE_CLOCKS)
    yield Launch("write_raw_rows", 0, items * 4, s.heads * ceil_div(tokens, 8))


def decode(s: BenchShape, bits: tuple[int, int] = (4, 4)) -> Iterator[Launch]:
    """decode_cuda.cu: keys, then values, to half types."""
    lanes = max(2, min(32, s.D // 8))
    blocks = s.B * s.heads * ceil_div(s.length, 8 * (32 // lanes))
    for part in bits:
        moved = s.rows * (code_bytes(s.D, part) + TAG_BYTES // 2) + s.kv_bytes // 2
        yield Launch("decode_rows", moved, s.rows * TAG_BYTES // 2, blocks, s.rows * DECODE_CLOCKS / 2)


def attention(s: BenchShape, tokens: int, k_rotation: int = 8, bits: tuple[int, int] = (4, 4)) -> Iterator[Launch]:
    """attention_cuda.cu on lists of so many tokens; on CUDA cores where tensor cores do not take the bits."""
    rows = s.B * s.heads * tokens
    on_codes = bits[0] == bits[1] and bits[0] in CODES_CLOCKS and s.D == 128
    kernel, per_block, clocks = "attention_coded_rows", 8 if s.group > 4 else 4, ROWS_CLOCKS
    if on_codes:
        reach = min(c for c in ROTATION_CLOCKS if c >= k_rotation)
        kernel, per_block, clocks = "attention_codes", 8, CODES_CLOCKS[bits[0]] + ROTATION_CLOCKS[reach]
    nbytes = rows * (coded_bytes(s, bits) // s.rows)
    splits, blocks = ceil_div(tokens, SPLIT), s.B * s.heads * ceil_div(s.group, per_block)
    # The launcher counts blocks of 8 query rows.
    if splits == 1 or s.B * s.heads * ceil_div(s.group, 8) >= BUSY_BLOCKS:
        yield Launch(kernel, nbytes, blocks=blocks, clocks=rows * clocks)
        return
    heads = s.B * s.heads * s.group
    partials = heads * splits * (s.D + 2) * 4
    yield Launch(kernel, nbytes, partials, blocks * splits, rows * clocks)
    yield Launch("attention_merge", 0, partials, heads)


def work(launches: Iterator[Launch]) -> Work:
    return of(launches)
