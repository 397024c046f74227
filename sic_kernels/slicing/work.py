"""What each benchmark of this family has to move, and the launches of its CUDA kernels, from shapes alone.

The bytes are those that the benchmarks state; the launches follow the launchers in csrc/slicing. Both are for decoding one
token on a cache in pages of a multiple of 16 with a head size that is a multiple of 32, as `BenchShape` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..runtime.roofline import MEMSET, Launch, Work
from .cases import BenchShape
from .types import SlicePolicy

SPLIT = 256  # tokens of a part of a list, and ...
BUSY_BLOCKS = 512  # ... blocks with which lists are not split (attention_cuda.cu)
FEW_ROWS, LONG_ROW = 2 * 132, 16384  # rows of scores that one block does not select from alone (select_cuda.cu)
SCAN_BLOCKS = 4 * 132  # that a scan aims at (scan_mma_cuda.cu)
# Rows whose selection is one launch (attend_rows_cuda.cu): positions that fit the shared memory of a cluster on both devices.
ROW_POSITIONS = 8 * 93_000
ROW_BLOCK, ROW_BLOCKS = 8192, 8  # a block's positions, beyond which there are more blocks, and the most of them
ROW_HELD = 32 * 1024  # bytes of a block's shortlist whose scores are read once
# Clocks of a multiprocessor for a position of a row, from the instructions of its loops: selecting twice; of each head the
# join and the unread mass; for an entry of the shortlist, its place; of each head, ranking it.
ROW_CLOCKS, ROW_HEAD_CLOCKS, ENTRY_CLOCKS, ENTRY_HEAD_CLOCKS = 1.0, 0.13, 0.65, 0.41
# What blocks of a row tell each other: two digits, twice; the heads' tops, then weights; the unread mass.
ROW_EXCHANGES = 7
CLUSTER_BLOCKS = 2 * 132  # of such blocks that run at once
SCAN_CLOCKS = {1: 1.3, 2: 2.0}  # of a multiprocessor for a token and KV head, by planes, at D = 128 and G = 4


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def listed_tokens(s: BenchShape, ratio: float) -> int:
    """Tokens of a (sequence, KV head) that a selection lists."""
    policy = SlicePolicy(ratio=ratio)
    return min(s.length, max(math.floor(ratio * s.length), policy.sink + policy.recent))


def listed_pages(s: BenchShape, ratio: float) -> int:
    policy, pages = SlicePolicy(ratio=ratio), ceil_div(s.length, s.page)
    recent = pages - (s.length - policy.recent) // s.page
    forced = ceil_div(policy.sink, s.page) + recent
    return min(pages, max(1, math.floor(ratio * s.length) // s.page, forced))


def row_bytes(s: BenchShape) -> int:
    """K and V of a token and head."""
    return s.kv_bytes // s.rows


# --- launches -----------------------------------------------------------------------------------------------------------


def attention(s: BenchShape, tokens: int, nbytes: int) -> Iterator[Launch]:
    """attention_cuda.cu on lists of so many tokens, on tensor cores; nbytes: of K and V."""
    splits, blocks = ceil_div(tokens, SPLIT), s.B * s.heads * ceil_div(s.group, 8)
    if splits == 1 or blocks >= BUSY_BLOCKS:
        yield Launch("attention_mma", nbytes, blocks=blocks)
        return
    heads = s.B * s.heads * s.group
    partials = heads * splits * (s.D + 2) * 4
    yield Launch("attention_mma", nbytes, partials, blocks * splits)
    yield Launch("attention_merge", 0, partials, heads)


def scan(s: BenchShape, planes: int) -> Iterator[Launch]:
    """scan_cuda.cu: integer queries, then scores of every head by each plane."""
    columns = 8 * ceil_div(s.group, 8)
    units, scores = s.B * s.heads, s.rows * s.group * 2 * planes
    chunk = min(4096, max(512, 256 * ceil_div(s.length * units // SCAN_BLOCKS, 256)))
    clocks = s.rows * SCAN_CLOCKS[planes] * s.D / 128
    yield Launch("scan_prepare", 0, units * s.group * s.D * 2, ceil_div(units * columns, 8))
    yield Launch("scan_mma", s.sketch_bytes(planes), scores, units * ceil_div(s.length, chunk), clocks)


def join(s: BenchShape, *kernels: str) -> Iterator[Launch]:
    """join_cuda.cu: each kernel goes over the scores of all heads of a group."""
    blocks = s.B * s.heads * ceil_div(s.length, 2048)
    for kernel in kernels:
        written = s.rows * 2 if kernel == "join_write" else 0
        yield Launch(kernel, 0, s.rows * s.group * 2 + written, blocks)


def selecting(s: BenchShape, count: int, width: int, item: int, first: bool) -> Iterator[Launch]:
    """select_cuda.cu: `count` of `width` scores of `item` bytes a row. first: the scores have not been read before."""
    rows = s.B * s.heads
    scores, indices = rows * width * item, rows * count * 4
    new, old = (scores, 0) if first else (0, scores)
    if rows >= FEW_ROWS or width <= LONG_ROW:
        passes = item + 2  # a digit each, what lies above and at the cut, writing
        yield Launch("select_rows", new + (indices if first else 0), old + (passes - 1) * scores, rows)
        return
    slots = ceil_div(width * item, 16)
    blocks = rows * ceil_div(slots, (slots * rows // (2 * FEW_ROWS) // 256 + 1) * 256)
    yield Launch(MEMSET, 0, rows * item * 256 * 4)
    for digit in range(item):
        yield Launch("select_digit", *((0, scores) if digit else (new, old)), blocks)
    yield Launch("select_count", 0, scores, blocks)
    yield Launch("select_write", indices if first else 0, scores, blocks)


# --- the benchmarks -----------------------------------------------------------------------------------------------------


def dense(s: BenchShape) -> Iterator[Launch]:
    yield from attention(s, s.length, s.kv_bytes)


def sliced(s: BenchShape, ratio: float) -> Iterator[Launch]:
    tokens = listed_tokens(s, ratio)
    yield from attention(s, tokens, s.B * s.heads * tokens * row_bytes(s))


def score_tokens(s: BenchShape) -> Iterator[Launch]:
    yield from scan(s, 1)
    yield from join(s, "join_write")


def select(s: BenchShape, ratio: float = 0.12) -> Iterator[Launch]:
    yield from selecting(s, listed_tokens(s, ratio), s.page * ceil_div(s.length, s.page), 2, True)


def gather(s: BenchShape, ratio: float = 0.12) -> Iterator[Launch]:
    lists, tokens = s.B * s.heads, listed_tokens(s, ratio)
    if lists > 1024:
        yield Launch("list_totals_kernel", 0, lists * 4, ceil_div(lists, 1024))
    yield Launch("list_starts_kernel", 0, lists * 4, ceil_div(lists, 1024))
    yield Launch("gather_rows_kernel", 2 * lists * tokens * row_bytes(s), lists * tokens * 4,
                 lists * min(64, ceil_div(tokens, 64)))  # fmt: skip


def key_sketch(s: BenchShape) -> Iterator[Launch]:
    blocks = s.B * s.heads * min(64, ceil_div(s.length, 128))
    yield Launch("key_sketch_kernel", s.kv_bytes // 2 + s.sketch_bytes(2), blocks=blocks)


def attend(s: BenchShape, ratio: float) -> Iterator[Launch]:
    """attend_cuda.cu with a key sketch: plane 0 makes a shortlist, both planes rank it, the best are read."""
    tokens = listed_tokens(s, ratio)
    candidates = listed_tokens(s, max(ratio, SlicePolicy(ratio=ratio).candidates))
    width = s.page * ceil_div(s.length, s.page)
    yield from scan(s, 2)
    if width <= ROW_POSITIONS:
        yield attend_rows(s, tokens, candidates)
    else:
        yield from attend_steps(s, tokens, candidates, width)
    yield from attention(s, tokens, s.attend_bytes(ratio) - s.sketch_bytes(2))


def attend_rows(s: BenchShape, tokens: int, candidates: int) -> Launch:
    """attend_rows_cuda.cu: plane 0 is read twice, both planes where candidates are, which is nearly everywhere."""
    lists, scores = s.B * s.heads, s.rows * s.group * 2
    blocks = row_blocks(s.page * ceil_div(s.length, s.page))
    fine = 1 if candidates * s.group * 2 <= blocks * ROW_HELD else 3
    listed = lists * 4 * (candidates * (2 + fine) + tokens)
    clocks = s.rows * (ROW_CLOCKS + s.group * ROW_HEAD_CLOCKS)
    clocks += lists * candidates * (ENTRY_CLOCKS + s.group * ENTRY_HEAD_CLOCKS)
    waves = ceil_div(lists * blocks, CLUSTER_BLOCKS)
    exchanges = ROW_EXCHANGES * waves if blocks > 1 else 0
    return Launch("attend_rows", 0, (2 + fine) * scores + listed, lists * blocks, clocks, exchanges)


def row_blocks(width: int) -> int:
    """Of the cluster that selects from a row."""
    blocks = 1
    while blocks < ROW_BLOCKS and width > blocks * ROW_BLOCK:
        blocks *= 2
    return blocks


def attend_steps(s: BenchShape, tokens: int, candidates: int, width: int) -> Iterator[Launch]:
    """The same in many blocks a row."""
    heads = s.B * s.heads * s.group
    yield from join(s, "join_write")
    yield from selecting(s, candidates, width, 2, False)
    yield Launch(MEMSET, 0, heads * 4)
    yield Launch(MEMSET, 0, heads * 8)
    yield from join(s, "join_tops", "join_weights", "join_write")
    yield from selecting(s, tokens, width, 2, False)
    spans = ceil_div(s.length, 2048)
    yield Launch("unread_tokens", 0, s.rows * s.group * 2 + s.B * s.heads * tokens * 4, s.B * s.heads * spans)
    yield Launch("unread_total", 0, heads * spans * 8, ceil_div(heads, 256))


def attend_pages(s: BenchShape, ratio: float = 0.12) -> Iterator[Launch]:
    """attend_cuda.cu with a page summary."""
    lists, pages, listed = s.B * s.heads, ceil_div(s.length, s.page), listed_pages(s, ratio)
    scores, summary = lists * s.group * pages * 4, lists * pages * row_bytes(s)
    spans = ceil_div(pages, 256)
    yield Launch("score_pages_kernel", summary, scores, lists * min(64, ceil_div(pages, 64)))
    yield Launch("join_pages_kernel", 0, scores + lists * pages * 4, lists * ceil_div(pages, 256))
    yield from selecting(s, listed, pages, 4, False)
    yield Launch("unread_pages", 0, summary // 2, lists * spans)
    yield Launch("unread_total", 0, lists * s.group * spans * 8, ceil_div(lists * s.group, 256))
    yield from attention(s, listed * s.page, lists * listed * s.page * row_bytes(s))


_WORK: dict[str, Callable[[BenchShape], Iterator[Launch]]] = {
    "attend 12 %": lambda s: attend(s, 0.12),
    "attend 6 %": lambda s: attend(s, 0.06),
    "attend pages 12 %": attend_pages,
    "dense": dense,
    "sliced 12 %": lambda s: sliced(s, 0.12),
    "score_tokens": score_tokens,
    "select": select,
    "gather": gather,
    "key_sketch": key_sketch,
}


def work(name: str, shape: BenchShape) -> Work:
    """Of the benchmark of that name (`benches.NAMES`)."""
    return of(_WORK[name](shape))


def of(launches: Iterator[Launch]) -> Work:
    return Work(tuple(launches))
