"""What the slicing ops are tested and measured on: one description of a case feeds tests, benches and docs.

A `Case` names an op, says its shape in words, and builds the op's inputs (in the order of the native op) from a seed.
`grid(name)` are the lists of the acceptance grid; `bench(...)` the shapes of the published tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..testing import (
    EXACT,
    JUNK,
    SHORT_NAME,
    TOLERANCE,
    Build,
    Case,
    PagedCache,
    Tolerance,
    generator,
    paged_cache,
    randn,
    random_selection,
)
from . import reference
from .reference_layout import visible

Tensor = torch.Tensor

TOKEN, PAGE = 0, 1  # unit
MAX, SOFTMAX = 0, 1  # pool
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


class AppendCase(Case):
    """One call of append_kv; its results are the cache and the index that it writes to."""

    def written(self, inputs: tuple) -> tuple[Tensor, ...]:
        _, _, k_cache, v_cache, _, _, _, bits, norm, _, summary = inputs
        return tuple(x for x in (k_cache, v_cache, bits, norm, summary) if x is not None)


def _case(op: str, build: Build, *, tolerance: Tolerance = EXACT, bytes_moved: int = 0, **shape: Any) -> Case:
    words = [f"{k}{SHORT_NAME.get(v, v)}".replace("torch.", "") for k, v in shape.items()]
    kind = AppendCase if op == "append_kv" else Case
    return kind(op, "-".join(words), MappingProxyType(shape), build, tolerance, bytes_moved)


def _bytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


# --- inputs, in the order of the native ops -------------------------------------------------------------------------


def attention_inputs(q, cache: PagedCache, selection=None, unit: int = TOKEN, **extra: Any) -> tuple:
    """Inputs of sliced_attention; `selection` is (indices, counts) or None; extras by name."""
    indices, counts = (None, None) if selection is None else selection
    return (
        q, cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens, indices, counts, unit,
        extra.get("scale"), extra.get("key_bias"), extra.get("softcap"), extra.get("window"), extra.get("sinks"),
        extra.get("k_scale"), extra.get("v_scale"), extra.get("max_seq_len"),
    )  # fmt: skip


def select_inputs(scores, seq_lens, **args: Any) -> tuple:
    """Inputs of select; names and defaults of the public function."""
    return (
        scores, seq_lens, args.get("unit", TOKEN), args.get("page_size", 1), args.get("ratio", 0.12),
        args.get("budget"), args.get("top_p"), args.get("sink", 16), args.get("recent", 32), args.get("keep"),
        args.get("capacity"),
    )  # fmt: skip


ATTEND_POLICY: dict[str, Any] = {  # of `attend`, in the order of its inputs
    "ratio": 0.12, "candidates": 0.25, "top_p": None, "sink": 16, "recent": 32, "beta": 0.5, "pool": SOFTMAX,
    "max_omitted_mass": None, "dense_layer": False, "max_sliced_T": 16, "min_len": 0, "keep": None,
}  # fmt: skip


def attend_inputs(q, cache: PagedCache, index: tuple, **args: Any) -> tuple:
    """Inputs of attend; index: bits, norm, centre, planes and summary; policy and extras by name."""
    extras = ("scale", "key_bias", "softcap", "window", "sinks", "k_scale", "v_scale", "max_seq_len")
    unknown = set(args) - {*ATTEND_POLICY, *extras}
    if unknown:
        raise TypeError(f"attend has no {sorted(unknown)}")
    return (
        q, cache.k_cache, cache.v_cache, *index, cache.block_table, cache.seq_lens,
        *(args.get(name, default) for name, default in ATTEND_POLICY.items()), *(args.get(name) for name in extras),
    )  # fmt: skip


def near_ties(gen: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Scores just above 1 that differ only in the low 10 bits of an f32: many ties, and near ties."""
    low = torch.randint(0, 1 << 10, shape, generator=gen, dtype=torch.int32)
    return (low | 0x3F800000).view(torch.float32).to(dtype)


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

    return _case(
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
    return _case(
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


def topk_grid() -> Iterator[Case]:
    """Top-k (grid 5): rows, widths, k, dtypes; normal scores and near ties; one very wide row."""
    for rows, length, k, dtype in itertools.product(
        (1, 8, 32), (1024, 4096, 8192), (64, 256, 512), (F32, F16, BF16)
    ):  # fmt: skip
        yield topk_case(rows, length, k, dtype, randn)
    for rows, dtype in itertools.product((1, 8), (F32, F16, BF16)):
        yield topk_case(rows, 4096, 256, dtype, None)
    yield topk_case(1, 300_000, 2048, F32, randn)


def topk_case(rows: int, length: int, k: int, dtype: torch.dtype, draw: Callable[..., Tensor] | None) -> Case:
    """The k best of each row; `draw` None makes near ties."""

    def build(gen: torch.Generator) -> tuple:
        shape = (rows, 1, 1, length)
        scores = near_ties(gen, shape, dtype) if draw is None else draw(gen, *shape, dtype=dtype)
        return select_inputs(scores, torch.full((rows,), length, dtype=torch.int32), budget=k, sink=0, recent=0)

    moved = rows * (length * torch.empty((), dtype=dtype).element_size() + 4 * k)
    kind = "ties" if draw is None else "normal"
    return _case("select", build, bytes_moved=moved, rows=rows, len=length, k=k, dt=dtype, draw=kind)


def summary_grid() -> Iterator[Case]:
    """Page summaries (grid 6): last page partly filled."""
    for page, D, dtype in itertools.product((1, 3, 7, 16, 31), (64, 128, 256), (F32, F16, BF16)):
        yield summary_case([5 * page + (page + 1) // 2, 2 * page + 1], page, D, dtype)


def summary_case(lens: list[int], page: int, D: int, dtype: torch.dtype) -> Case:
    def build(gen: torch.Generator) -> tuple:
        cache = paged_cache(gen, lens, 2, D, page, dtype)
        return (cache.k_cache, cache.block_table, cache.seq_lens, None, None)

    return _case("page_summary", build, page=page, D=D, dt=dtype)


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
        return _case("merge_states", build, tolerance=tolerance, rows=words, D=D, dt=dtype)
    return _case("merge_many", build, tolerance=tolerance, states=n, rows=words, D=D, dt=dtype)


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
    return _case(
        "key_sketch", build, bytes_moved=moved, lens="_".join(map(str, lens)), Hkv=heads, D=D, page=page, planes=planes,
        dt=dtype, **cache,
    )  # fmt: skip


def append_grid() -> Iterator[Case]:
    """Rows into caches without an index, with a sketch, with page summaries."""
    for index, page, dtype in itertools.product(("none", "sketch", "summary"), (1, 7, 16), (F32, F16, BF16)):
        yield append_case([3 * page + 1, page], 2, 64, page, dtype, index, planes=1 + page % 2)


def append_case(
    lens: list[int], heads: int, D: int, page: int, dtype: torch.dtype, index: str, planes: int = 2
) -> Case:
    """As many rows as there are tokens, into slots of the cache in any order; every fifth is skipped."""

    def build(gen: torch.Generator) -> tuple:
        cache, centre = paged_cache(gen, lens, heads, D, page, dtype), 0.3 * randn(gen, heads, D)
        slots = torch.randperm(cache.k_cache.shape[0] * page, generator=gen)[: sum(lens)]
        slots[::5] = -1
        k, v = (randn(gen, len(slots), heads, D, dtype=dtype) for _ in range(2))
        rows, place = (k, v, cache.k_cache, cache.v_cache, slots), (cache.k_cache, cache.block_table, cache.seq_lens)
        if index == "sketch":
            return (*rows, None, None, *reference.key_sketch(*place, centre, None, planes, None), centre, None)
        summary = reference.page_summary(*place, None, None)[0] if index == "summary" else None
        return (*rows, None, None, None, None, None, summary)

    return _case(
        "append_kv",
        build,
        lens="_".join(map(str, lens)),
        Hkv=heads,
        D=D,
        page=page,
        dt=dtype,
        index=index,
        planes=planes,
    )


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
    return _case(
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

    return _case("refine_tokens", build, share=share, **score.shape)


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

    return _case(
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
    return _case(
        "gather", build, bytes_moved=moved, lens="_".join(map(str, lens)), T=T, Hkv=heads, Dk=Dk, Dv=Dv, page=page,
        dt=dtype, unit="tp"[unit],
    )  # fmt: skip


# Spans of kept tokens of two sequences, of 300 and 90 tokens, that lie in every way to pages of 16 and 7 and to each other.
KEPT_SPANS: dict[str, list[list[tuple[int, int]]]] = {
    "none": [[], []],
    "padding": [[(-1, -1), (0, 0), (9, 3)], [(-1, -1), (500, 500), (7, 7)]],
    "one": [[(100, 131)], [(40, 41)]],
    "edges": [[(96, 112), (160, 161), (207, 208)], [(0, 16), (64, 80), (89, 90)]],
    "overlapping": [[(50, 90), (60, 70), (80, 120), (120, 125)], [(20, 40), (20, 40), (39, 60), (-1, -1)]],
    "forced": [[(0, 40), (250, 300)], [(3, 9), (85, 90)]],
    "beyond": [[(290, 1000), (299, 300), (300, 301)], [(80, 2**31 - 1), (90, 99), (1000, 2000)]],
    "most": [[(5, 280)], [(1, 2)]],
    "all": [[(0, 300)], [(0, 90)]],
    "several": [[(17 * i, 17 * i + i) for i in range(16)], [(5 * i, 5 * i + 1) for i in range(16)]],
}


def kept(name: str, dtype: torch.dtype = torch.int32) -> Tensor:
    """`KEPT_SPANS[name]` [2,n,2]."""
    rows = KEPT_SPANS[name]
    return torch.tensor(rows, dtype=dtype).view(2, len(rows[0]), 2)


def keep_select_grid() -> Iterator[Case]:
    """Selections with kept spans: every way they lie, both units, budgets below and above what is kept."""
    ways = itertools.product(KEPT_SPANS, ((TOKEN, 1), (PAGE, 16), (PAGE, 7)), (0, 40, 200))
    types = itertools.cycle((F32, torch.int16, F16, BF16))
    for (name, (unit, page), budget), dtype in zip(ways, types):
        yield keep_select_case(name, unit, page, budget, dtype)


def keep_select_case(name: str, unit: int, page: int, budget: int, dtype: torch.dtype) -> Case:
    def build(gen: torch.Generator) -> tuple:
        scores = randn(gen, 2, 2, 2, 320 if unit == TOKEN else -(-320 // page)) * 3
        scores = (scores * 256).to(dtype) if dtype == torch.int16 else scores.to(dtype)
        spans = kept(name, torch.int64 if budget == 40 else torch.int32)
        lens = torch.tensor([300, 90], dtype=torch.int32)
        args = {"sink": 4, "recent": 8} if budget else {"sink": 0, "recent": 0}
        return select_inputs(scores, lens, unit=unit, page_size=page, budget=budget, keep=spans, **args)

    return _case("select", build, lens="300_90", keep=name, unit="tp"[unit], page=page, budget=budget, dt=dtype)


def keep_attend_grid() -> Iterator[Case]:
    """Whole calls of attend with kept spans, by tokens and by pages."""
    for n, (name, page) in enumerate(itertools.product(KEPT_SPANS, (16, 7))):
        for unit, planes in ((TOKEN, 2), (TOKEN, 1)) if page == 7 else ((TOKEN, 2), (PAGE, 2)):
            yield keep_attend_case(name, unit, planes, page, top_p=0.6 if n % 3 == 2 else None)


def keep_attend_case(name: str, unit: int, planes: int, page: int, **policy: Any) -> Case:
    def build(gen: torch.Generator) -> tuple:
        q, cache, index = _problem(gen, unit, planes, page)
        return attend_inputs(q, cache, index, ratio=0.1, sink=4, recent=8, keep=kept(name), **policy)

    return _case(
        "attend", build, tolerance=Tolerance(1e-5, 1e-5, 1e-3), lens="300_90", keep=name, unit="tp"[unit], planes=planes,
        page=page, **policy,
    )  # fmt: skip


def _problem(gen: torch.Generator, unit: int, planes: int, page: int) -> tuple[Tensor, PagedCache, tuple]:
    """Queries, a cache of two sequences, of 300 and 90 tokens, and its index: bits, norm, centre, planes and summary."""
    cache = paged_cache(gen, [300, 90], 2, 64, page, F32)
    centre, keys = 0.3 * randn(gen, 2, 64), (cache.k_cache, cache.block_table, cache.seq_lens)
    if unit == TOKEN:
        index = (*reference.key_sketch(*keys, centre, None, planes, None), centre, planes, None)
    else:
        index = (None, None, None, 2, reference.page_summary(*keys, None, None)[0])
    return randn(gen, 2, 2, 6, 64) * 2, cache, index


def select_slice_grid() -> Iterator[Case]:
    """What attend reads, without reading it: by tokens in one stage and in two, by pages; some tokens kept."""
    for (unit, planes), page, top_p, name in itertools.product(
        ((TOKEN, 2), (TOKEN, 1), (PAGE, 2)), (16, 7), (None, 0.6), ("none", "edges")
    ):
        yield select_slice_case(unit, planes, page, top_p, name)


def select_slice_case(unit: int, planes: int, page: int, top_p: float | None, name: str) -> Case:
    def build(gen: torch.Generator) -> tuple:
        q, cache, index = _problem(gen, unit, planes, page)
        policy = {**ATTEND_POLICY, "ratio": 0.1, "sink": 4, "recent": 8, "top_p": top_p, "keep": kept(name)}
        names = ("ratio", "candidates", "top_p", "sink", "recent", "beta", "pool", "min_len", "keep")
        place = (cache.block_table, cache.seq_lens, page)
        return (q, *index, *place, *(policy[name] for name in names), None, None, None, None, None)

    return _case(
        "select_slice", build, tolerance=Tolerance(0.0, 0.0, 1e-3), lens="300_90", keep=name, unit="tp"[unit],
        planes=planes, page=page, top_p=top_p,
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
