"""What the slicing ops are tested and measured on: one description of a case feeds tests, benches and docs.

A `Case` names an op, says its shape in words, and builds the op's inputs (in the order of the native op) from a seed.
`grid(name)` are the lists of the acceptance grid; `bench(...)` the shapes of the published tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..testing import (
    JUNK,
    SHORT_NAME,
    TOLERANCE,
    Case,
    PagedCache,
    Tolerance,
    generator,
    paged_cache,
    randn,
    random_selection,
)
from . import reference
from .cases_append import append_grid
from .cases_inputs import BF16, F16, F32, MAX, PAGE, SOFTMAX, TOKEN, attention_inputs, make, select_inputs
from .cases_select import keep_attend_grid, keep_select_grid, select_slice_grid, topk_grid
from .reference_layout import visible

Tensor = torch.Tensor

# --- acceptance grids -----------------------------------------------------------------------------------------------


LENGTHS = (63, 127, 213, 1110, 2000, 4099, 8192, 8222, 12345, 28837)


def decode_grid() -> Iterator[Case]:
    """Paged decode attention over a token budget (grid 1); units alternate between tokens and pages."""
    sizes = itertools.product(LENGTHS, (1, 3, 7, 16, 32), (64, 128), (F32, F16, BF16), (16, 32, 64, 128))
    for n, (length, page, D, dtype, budget) in enumerate(sizes):
        yield decode_case(length, page, budget, D, dtype, unit=(n + n // 4) % 2)


def decode_case(length: int, page: int, budget: int, D: int, dtype: torch.dtype, unit: int) -> Case:
    """B = 1, Hkv = 2, G = 2, a random selection of `budget` tokens (max(1, budget // page) pages)."""

    def build(gen: torch.Generator) -> tuple:
        cache = _long_cache(length, page, D, dtype)
        q = randn(gen, 1, 1, 4, D, dtype=dtype)
        size, keep = (1, budget) if unit == TOKEN else (page, max(1, budget // page))
        units = -(-length // size)
        rows = [torch.randperm(units, generator=gen)[:keep].sort().values for _ in range(2)]
        indices = torch.stack(rows).to(torch.int32)[None, None]
        counts = torch.full((1, 1, 2), indices.shape[-1], dtype=torch.int32)
        return attention_inputs(q, cache, (indices, counts), unit)

    return make(
        "sliced_attention", build, tolerance=TOLERANCE[dtype], len=length, page=page, budget=budget, D=D, dt=dtype,
        unit="tp"[unit],
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _noise() -> Tensor:
    """Values that the long caches of a grid share, so that 1200 cases need not draw their own."""
    return randn(generator(0), 1 << 23)


@functools.lru_cache(maxsize=1)
def _long_cache(length: int, page: int, D: int, dtype: torch.dtype) -> PagedCache:
    """One sequence, Hkv = 2, in shuffled pages with two spare ones of junk.  The last is kept: cases ask in a row."""
    used = -(-length // page)
    order = torch.randperm(used + 2, generator=generator(length))

    def filled(first: int) -> Tensor:
        cache = _noise()[first:][: (used + 2) * 2 * page * D].view(used + 2, 2, page, D).to(dtype, copy=True)
        cache[order[used:]] = JUNK
        cache[order[used - 1], :, (length - 1) % page + 1 :] = JUNK
        return cache

    k, v = filled(0), filled(12345)
    table = order[:used].to(torch.int32)[None]
    none = torch.empty(0)
    return PagedCache(k, v, table, torch.tensor([length], dtype=torch.int32), none, none)


def per_head_grid() -> Iterator[Case]:
    """Per-head decode (grid 2): each KV head its own random tokens; also several query tokens."""
    for dtype, page, (heads, group), length, (density, T) in itertools.product(
        (F16, BF16), (16, 64), ((2, 8), (4, 1)), (110, 8192), ((0.35, 1), (0.75, 1), (0.5, 3))
    ):
        yield attention_case([length], T, heads, group, 128, page, dtype, density=density)


def attention_case(
    lens: list[int], T: int, heads: int, group: int, D: int, page: int, dtype: torch.dtype, *,
    density: float | None = None, unit: int = TOKEN, Dv: int | None = None, **cache: Any,
) -> Case:  # fmt: skip
    """Attention over a random share `density` of the visible units (None: dense) of every head."""

    def build(gen: torch.Generator) -> tuple:
        paged = paged_cache(gen, lens, heads, D, page, dtype, Dv=Dv, **cache)
        q = randn(gen, len(lens), T, heads * group, D, dtype=dtype)
        S = paged.block_table.shape[1] * page
        size = 1 if unit == TOKEN else page
        seen = visible(paged.seq_lens, T, S)
        chosen = None if density is None else random_selection(gen, seen, heads, S // size, density, size)
        return attention_inputs(q, paged, chosen, unit)

    extra = cache if Dv is None else {"Dv": Dv, **cache}
    return make(
        "sliced_attention", build, tolerance=TOLERANCE[dtype], lens="_".join(map(str, lens)), T=T, Hkv=heads, G=group,
        D=D, page=page, dt=dtype, density=density, unit="tp"[unit], **extra,
    )  # fmt: skip


def group_grid() -> Iterator[Case]:
    """Group sizes (grid 3): query / KV heads that peers get wrong."""
    for Hq, Hkv in ((28, 4), (9, 3), (20, 4), (24, 4), (64, 4), (7, 1)):
        for unit in (TOKEN, PAGE):
            yield attention_case([77, 130], 2, Hkv, Hq // Hkv, 64, 16, F32, density=0.4, unit=unit)


def head_size_grid() -> Iterator[Case]:
    """Odd head sizes, unaligned starts, NHD views (grid 8)."""
    for D, layout, skew in itertools.product((1, 3, 46, 80, 96, 100), ("HND", "NHD"), (0, 1)):
        for dtype in (F32, BF16):
            yield attention_case([37, 5], 2, 2, 3, D, 7, dtype, density=0.5, layout=layout, skew=skew)


def summary_grid() -> Iterator[Case]:
    """Page summaries (grid 6): last page partly filled."""
    for page, D, dtype in itertools.product((1, 3, 7, 16, 31), (64, 128, 256), (F32, F16, BF16)):
        yield summary_case([5 * page + (page + 1) // 2, 2 * page + 1], page, D, dtype)


def summary_case(lens: list[int], page: int, D: int, dtype: torch.dtype) -> Case:
    def build(gen: torch.Generator) -> tuple:
        cache = paged_cache(gen, lens, 2, D, page, dtype)
        return (cache.k_cache, cache.block_table, cache.seq_lens, None, None)

    return make("page_summary", build, page=page, D=D, dt=dtype)


def merge_grid() -> Iterator[Case]:
    """Merging (grid 7): with some states empty."""
    for D, dtype in itertools.product((32, 48, 64, 96, 128, 256), (F32, F16, BF16)):
        yield merge_case((3, 4), D, dtype)


def merge_many_grid() -> Iterator[Case]:
    """The same of one state, of a few and of many."""
    for n, D, dtype in itertools.product((1, 3, 33), (48, 128), (F32, F16, BF16)):
        yield merge_case((3, 4), D, dtype, n)


def merge_case(rows: tuple[int, ...], D: int, dtype: torch.dtype, n: int | None = None) -> Case:
    """Two states of rows [..., H], or n of them in one array; a third of their LSEs are -inf."""

    def build(gen: torch.Generator) -> tuple:
        def state() -> tuple[Tensor, Tensor]:
            lse = randn(gen, *rows) * 4
            return randn(gen, *rows, D, dtype=dtype), lse.masked_fill(
                torch.rand(rows, generator=gen) < 0.33, -torch.inf
            )

        if n is None:
            return (*state(), *state())
        return tuple(torch.stack(parts) for parts in zip(*(state() for _ in range(n))))

    tolerance, words = Tolerance(1e-3, 1e-2 if dtype == BF16 else 1e-3, 1e-5), "x".join(map(str, rows))
    if n is None:
        return make("merge_states", build, tolerance=tolerance, rows=words, D=D, dt=dtype)
    return make("merge_many", build, tolerance=tolerance, states=n, rows=words, D=D, dt=dtype)


def sketch_grid() -> Iterator[Case]:
    """Sketches (grid 11): head sizes that are no power of two; pages that are no multiple of 16; one and two planes."""
    for D, page, planes in itertools.product((32, 64, 80, 96, 128, 256), (1, 7, 16, 40), (1, 2)):
        yield sketch_case([2 * page + (page + 1) // 2, page], 2, D, page, F32 if planes == 1 else BF16, planes)


def sketch_case(lens: list[int], heads: int, D: int, page: int, dtype: torch.dtype, planes: int, **cache: Any) -> Case:
    def build(gen: torch.Generator) -> tuple:
        paged = paged_cache(gen, lens, heads, D, page, dtype, **cache)
        centre = 0.3 * randn(gen, heads, D)
        return (paged.k_cache, paged.block_table, paged.seq_lens, centre, None, planes, None)

    P_bytes = planes * -(-D // 8) + 2
    moved = sum(lens) * heads * (D * torch.empty((), dtype=dtype).element_size() + P_bytes)
    return make(
        "key_sketch", build, bytes_moved=moved, lens="_".join(map(str, lens)), Hkv=heads, D=D, page=page, planes=planes,
        dt=dtype, **cache,
    )  # fmt: skip


def score_grid() -> Iterator[Case]:
    """Integer scores from the sketch, over the sizes of the sketch grid, group sizes and both ways to join heads."""
    for D, page, planes, pool in itertools.product((32, 80, 128), (1, 7, 16, 40), (1, 2), (MAX, SOFTMAX)):
        yield score_case([3 * page + 1, page, 0], 2, 2, 3, D, page, F32, planes, pool)
    for dtype, group in itertools.product((F32, F16, BF16), (1, 4, 7)):
        yield score_case([200, 131], 1, 2, group, 64, 16, dtype, 2, MAX)


def score_case(
    lens: list[int], T: int, heads: int, group: int, D: int, page: int, dtype: torch.dtype, planes: int, pool: int
) -> Case:
    def build(gen: torch.Generator) -> tuple:
        paged = paged_cache(gen, lens, heads, D, page, dtype)
        centre = 0.3 * randn(gen, heads, D)
        index = (paged.k_cache, paged.block_table, paged.seq_lens, centre, None, planes, None)
        bits, norm = reference.key_sketch(*index)
        q = randn(gen, len(lens), T, heads * group, D, dtype=dtype) * 2
        return (q, bits, norm, paged.block_table, paged.seq_lens, page, planes, pool, None, None)

    moved = sum(lens) * heads * (-(-D // 8) + 2 + 2 * T)
    return make(
        "score_tokens", build, bytes_moved=moved, lens="_".join(map(str, lens)), T=T, Hkv=heads, G=group, D=D,
        page=page, dt=dtype, planes=planes, pool=pool,
    )  # fmt: skip


def refine_grid() -> Iterator[Case]:
    """The second stage: the cases of the score grid with two planes."""
    yield from (refine_case(case) for case in score_grid() if case.shape["planes"] == 2)


def refine_case(score: Case, share: float = 0.25) -> Case:
    """refine_tokens over the best `share` of the tokens of a score case with two planes."""

    def build(gen: torch.Generator) -> tuple:
        inputs = score.build(gen)
        scores = reference.score_tokens(*inputs)[0]
        listed = reference.select(*select_inputs(scores, inputs[4], ratio=share, sink=0, recent=0))
        return (*inputs[:6], *listed, *inputs[7:])

    return make("refine_tokens", build, share=share, **score.shape)


def page_score_grid() -> Iterator[Case]:
    """Scores of pages: group sizes, beta, both ways to join heads, dtypes."""
    for page, pool, beta, dtype in itertools.product((1, 7, 16), (MAX, SOFTMAX), (0.5, 1.0), (F32, BF16)):
        yield page_score_case([5 * page + 1, page, 0], 2, 2, 4, 64, page, dtype, beta, pool)


def page_score_case(
    lens: list[int], T: int, heads: int, group: int, D: int, page: int, dtype: torch.dtype, beta: float, pool: int
) -> Case:
    def build(gen: torch.Generator) -> tuple:
        paged = paged_cache(gen, lens, heads, D, page, dtype)
        summary = reference.page_summary(paged.k_cache, paged.block_table, paged.seq_lens, None, None)[0]
        q = randn(gen, len(lens), T, heads * group, D, dtype=dtype)
        return (q, summary, paged.block_table, paged.seq_lens, page, beta, pool, None, None)

    return make(
        "score_pages", build, tolerance=Tolerance(1e-4, 1e-5, 0.0), lens="_".join(map(str, lens)), T=T, Hkv=heads,
        G=group, D=D, page=page, dt=dtype, beta=beta, pool=pool,
    )  # fmt: skip


def gather_grid() -> Iterator[Case]:
    """Packing selected rows: dtypes, units, page sizes, Dv other than Dk."""
    for dtype, unit, page in itertools.product((F32, F16, BF16), (TOKEN, PAGE), (1, 7, 16)):
        yield gather_case([3 * page + 2, 0, 2 * page], 2, 2, 64, 40, page, dtype, unit)


def gather_case(
    lens: list[int], T: int, heads: int, Dk: int, Dv: int, page: int, dtype: torch.dtype, unit: int, keep: float = 0.4
) -> Case:
    def build(gen: torch.Generator) -> tuple:
        paged = paged_cache(gen, lens, heads, Dk, page, dtype, Dv=Dv)
        S, size = paged.block_table.shape[1] * page, 1 if unit == TOKEN else page
        seen = visible(paged.seq_lens, T, S)
        chosen = random_selection(gen, seen, heads, S // size, keep, size)
        return (paged.k_cache, paged.v_cache, paged.block_table, paged.seq_lens, *chosen, unit)

    item = torch.empty((), dtype=dtype).element_size()
    moved = int(2 * keep * sum(lens) * T * heads * (Dk + Dv) * item)
    return make(
        "gather", build, bytes_moved=moved, lens="_".join(map(str, lens)), T=T, Hkv=heads, Dk=Dk, Dv=Dv, page=page,
        dt=dtype, unit="tp"[unit],
    )  # fmt: skip


_GRIDS: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode_grid,
    "per_head": per_head_grid,
    "group": group_grid,
    "head_size": head_size_grid,
    "topk": topk_grid,
    "summary": summary_grid,
    "merge": merge_grid,
    "merge_many": merge_many_grid,
    "sketch": sketch_grid,
    "append": append_grid,
    "score": score_grid,
    "refine": refine_grid,
    "page_score": page_score_grid,
    "gather": gather_grid,
    "keep_select": keep_select_grid,
    "keep_attend": keep_attend_grid,
    "select_slice": select_slice_grid,
}


def grid(name: str) -> list[Case]:
    """The cases of one list of the acceptance grid, by name (`grids()`)."""
    return list(_GRIDS[name]())


def grids() -> list[str]:
    return list(_GRIDS)


# --- bench shapes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchShape:
    """Decode of one token: B sequences of `length` tokens, the shape of an 8B model's attention by default."""

    length: int
    B: int = 1
    heads: int = 8
    group: int = 4
    D: int = 128
    page: int = 16
    dtype: torch.dtype = BF16

    @property
    def name(self) -> str:
        return f"B{self.B}-len{self.length}-Hkv{self.heads}-G{self.group}-D{self.D}-{SHORT_NAME[self.dtype]}"

    @property
    def rows(self) -> int:
        """Key rows in the cache."""
        return self.B * self.heads * self.length

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values: what dense attention must read."""
        return 2 * self.rows * self.D * torch.empty((), dtype=self.dtype).element_size()

    def sketch_bytes(self, planes: int) -> int:
        """Bytes of sign planes and norms."""
        return self.rows * (planes * -(-self.D // 8) + 2)

    def attend_bytes(self, ratio: float) -> int:
        """Bytes that `attend` reads: both planes and norms of all tokens, K and V of the chosen."""
        return self.sketch_bytes(2) + int(ratio * self.kv_bytes)

    def cache(self, seed: int) -> PagedCache:
        """A fresh random cache; use several in turn so that none is found in the processor's cache."""
        return paged_cache(
            generator(seed), [self.length] * self.B, self.heads, self.D, self.page, self.dtype, spare_entries=0,
            spare_pages=0,
        )  # fmt: skip

    def query(self, seed: int) -> Tensor:
        return randn(generator(seed), self.B, 1, self.heads * self.group, self.D, dtype=self.dtype)


BENCH_SHAPES = (
    BenchShape(4096),
    BenchShape(8192),
    BenchShape(32768),
    BenchShape(131072),
    BenchShape(32768, B=8),
)
BENCH_RATIOS = (0.01, 0.02, 0.05, 0.12, 0.25, 1.0)
