"""The launches that tools/triton_aot.py compiles: every op of the package, in the shapes that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sic_kernels.slicing import triton_kernels as ops

B, T, H, G, D, PAGE, LENGTH = 2, 1, 8, 4, 128, 16, 4096
PAGES = LENGTH // PAGE
BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
POLICY = (0.12, 0.35, None, 16, 32, 0.5, 1, 0.1, False, 16, 0, None)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Memory that nobody reads: only shapes, strides and alignment matter here."""
    return torch.empty(*shape, dtype=dtype)


def attention(T: int = 1, cache: torch.dtype = BF16, q: torch.dtype = BF16, unit: int | None = None, D: int = D):
    """Inputs of sliced_attention; `unit` None is dense."""
    kv = (empty(PAGES, H, PAGE, D, dtype=cache), empty(PAGES, H, PAGE, D, dtype=cache))
    K = 480 if unit == 0 else 32
    listed = (None, None) if unit is None else (empty(B, T, H, K, dtype=I32), empty(B, T, H, dtype=I32))
    scales = (None, None) if cache == q else (empty(H, dtype=F32), empty(H, dtype=F32))
    place = (empty(B, PAGES, dtype=I32), empty(B, dtype=I32))
    return (empty(B, T, H * G, D, dtype=q), *kv, *place, *listed, unit or 0, *[None] * 5, *scales, None)


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(op, a call of its launcher)"""
    q, k, v, table, lens = attention()[:5]
    bits, norm = empty(PAGES, H, 2 * PAGE * D // 8, dtype=U8), empty(PAGES, H, PAGE)
    centre, summary = empty(H, D, dtype=F32), empty(PAGES, H, 2, D)
    rows, slots = empty(B, H, D), empty(B, dtype=torch.int64)
    listed, count = empty(B, T, H, 1434, dtype=I32), empty(B, T, H, dtype=I32)
    yield "append_kv", lambda: ops.append_kv(rows, rows, k, v, slots, None, None, bits, norm, centre, summary)
    yield "key_sketch", lambda: ops.key_sketch(k, table, lens, centre, None, 2, None)
    yield "page_summary", lambda: ops.page_summary(k, table, lens, None, None)
    sketch = (q, bits, norm, table, lens, PAGE)
    yield "score_tokens", lambda: ops.score_tokens(*sketch, 2, 0, None, None)
    yield "refine_tokens", lambda: ops.refine_tokens(*sketch, listed, count, 1, None, None)
    yield "score_pages", lambda: ops.score_pages(q, summary, table, lens, PAGE, 0.5, 1, None, None)
    for dtype in (torch.int16, F32):
        scores = empty(B, T, H, LENGTH, dtype=dtype)
        yield "select", lambda s=scores: ops.select(s, lens, 0, 1, 0.12, None, None, 16, 32, None, None)
    yield "select, top-p", lambda: ops.select(scores, lens, 0, 1, 0.12, None, 0.9, 16, 32, None, None)
    outs = (empty(1024, D), empty(1024, D), empty(B * T * H + 1, dtype=torch.int64))
    yield "gather", lambda: ops.gather(k, v, table, lens, listed, count, 0, outs=outs)
    for name, args in (
        ("tokens", attention(unit=0)), ("pages", attention(unit=1)), ("dense", attention()),
        ("prompt", attention(T=512)), ("f8 cache", attention(cache=torch.float8_e4m3fn, unit=0)),
        ("f32", attention(cache=F32, q=F32, unit=0)), ("f32 prompt", attention(T=512, cache=F32, q=F32)),
        ("head size 256", attention(D=256, unit=0)), ("head size 576", attention(D=576)),
    ):  # fmt: skip
        yield f"sliced_attention, {name}", lambda args=args: ops.sliced_attention(*args)
    state = (empty(B * T, H * G, D), empty(B * T, H * G, dtype=F32))
    yield "merge_states", lambda: ops.merge_states(*state, *state)
    for name, index in (("tokens", (bits, norm, centre, 2, None)), ("pages", (None, None, None, 2, summary))):
        inputs = (q, k, v, *index, table, lens, *POLICY, *[None] * 8)
        yield f"attend, {name}", lambda inputs=inputs: ops.attend(*inputs)
