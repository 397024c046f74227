"""What the lists of cases of slicing are made of: how a case is named, and inputs in the order of the native ops."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from ..testing import EXACT, SHORT_NAME, Build, Case, PagedCache, Tolerance, paged_cache, randn
from . import reference

Tensor = torch.Tensor

TOKEN, PAGE = 0, 1  # unit
MAX, SOFTMAX = 0, 1  # pool
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def make(
    op: str,
    build: Build,
    *,
    kind: Callable[..., Case] = Case,
    tolerance: Tolerance = EXACT,
    bytes_moved: int = 0,
    **shape: Any,
) -> Case:
    """A case named by its shape, in words. kind: which class of case."""
    words = [f"{k}{SHORT_NAME.get(v, v)}".replace("torch.", "") for k, v in shape.items()]
    return kind(op, "-".join(words), MappingProxyType(shape), build, tolerance, bytes_moved)


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


def problem(gen: torch.Generator, unit: int, planes: int, page: int) -> tuple[Tensor, PagedCache, tuple]:
    """Queries, a cache of two sequences, of 300 and 90 tokens, and its index: bits, norm, centre, planes and summary."""
    cache = paged_cache(gen, [300, 90], 2, 64, page, F32)
    centre, keys = 0.3 * randn(gen, 2, 64), (cache.k_cache, cache.block_table, cache.seq_lens)
    if unit == TOKEN:
        index = (*reference.key_sketch(*keys, centre, None, planes, None), centre, planes, None)
    else:
        index = (None, None, None, 2, reference.page_summary(*keys, None, None)[0])
    return randn(gen, 2, 2, 6, 64) * 2, cache, index
