"""Cases of append_kv, which writes to caches that are there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ..testing import Case, paged_cache, randn
from . import reference
from .cases_inputs import BF16, F16, F32, make

Tensor = torch.Tensor


class AppendCase(Case):
    """One call of append_kv; its results are the cache and the index that it writes to."""

    def written(self, inputs: tuple) -> tuple[Tensor, ...]:
        _, _, k_cache, v_cache, _, _, _, bits, norm, _, summary = inputs
        return tuple(x for x in (k_cache, v_cache, bits, norm, summary) if x is not None)


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

    return make(
        "append_kv",
        build,
        kind=AppendCase,
        lens="_".join(map(str, lens)),
        Hkv=heads,
        D=D,
        page=page,
        dt=dtype,
        index=index,
        planes=planes,
    )
