"""Cases of selection: the k best of a row, spans of kept tokens, alone and in `attend`, and `select_slice`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..testing import Case, Tolerance, randn
from .cases_inputs import ATTEND_POLICY, BF16, F16, F32, PAGE, TOKEN, attend_inputs, make, problem, select_inputs

Tensor = torch.Tensor


def near_ties(gen: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Scores just above 1 that differ only in the low 10 bits of an f32: many ties, and near ties."""
    low = torch.randint(0, 1 << 10, shape, generator=gen, dtype=torch.int32)
    return (low | 0x3F800000).view(torch.float32).to(dtype)


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
    return make("select", build, bytes_moved=moved, rows=rows, len=length, k=k, dt=dtype, draw=kind)


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

    return make("select", build, lens="300_90", keep=name, unit="tp"[unit], page=page, budget=budget, dt=dtype)


def keep_attend_grid() -> Iterator[Case]:
    """Whole calls of attend with kept spans, by tokens and by pages."""
    for n, (name, page) in enumerate(itertools.product(KEPT_SPANS, (16, 7))):
        for unit, planes in ((TOKEN, 2), (TOKEN, 1)) if page == 7 else ((TOKEN, 2), (PAGE, 2)):
            yield keep_attend_case(name, unit, planes, page, top_p=0.6 if n % 3 == 2 else None)


def keep_attend_case(name: str, unit: int, planes: int, page: int, **policy: Any) -> Case:
    def build(gen: torch.Generator) -> tuple:
        q, cache, index = problem(gen, unit, planes, page)
        return attend_inputs(q, cache, index, ratio=0.1, sink=4, recent=8, keep=kept(name), **policy)

    return make(
        "attend", build, tolerance=Tolerance(1e-5, 1e-5, 1e-3), lens="300_90", keep=name, unit="tp"[unit], planes=planes,
        page=page, **policy,
    )  # fmt: skip


def select_slice_grid() -> Iterator[Case]:
    """What attend reads, without reading it: by tokens in one stage and in two, by pages; some tokens kept."""
    for (unit, planes), page, top_p, name in itertools.product(
        ((TOKEN, 2), (TOKEN, 1), (PAGE, 2)), (16, 7), (None, 0.6), ("none", "edges")
    ):
        yield select_slice_case(unit, planes, page, top_p, name)


def select_slice_case(unit: int, planes: int, page: int, top_p: float | None, name: str) -> Case:
    def build(gen: torch.Generator) -> tuple:
        q, cache, index = problem(gen, unit, planes, page)
        policy = {**ATTEND_POLICY, "ratio": 0.1, "sink": 4, "recent": 8, "top_p": top_p, "keep": kept(name)}
        names = ("ratio", "candidates", "top_p", "sink", "recent", "beta", "pool", "min_len", "keep")
        place = (cache.block_table, cache.seq_lens, page)
        return (q, *index, *place, *(policy[name] for name in names), None, None, None, None, None)

    return make(
        "select_slice", build, tolerance=Tolerance(0.0, 0.0, 1e-3), lens="300_90", keep=name, unit="tp"[unit],
        planes=planes, page=page, top_p=top_p,
    )  # fmt: skip
