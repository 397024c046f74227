"""The launches that tools/triton_aot.py compiles: every op, family by family, in the shapes that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sic_kernels.delta import triton_kernels as delta_ops
from sic_kernels.delta.reference_layout import TAG_BYTES, code_bytes
from sic_kernels.head import triton_kernels as head_ops
from sic_kernels.ragged import triton_kernels as ragged_ops
from sic_kernels.replay import triton_kernels as replay_ops
from sic_kernels.slicing import triton_kernels as ops

B, T, H, G, D, PAGE, LENGTH = 2, 1, 8, 4, 128, 16, 4096
PAGES = LENGTH // PAGE
HEAD_B, VOCABULARY, HIDDEN = 32, 128256, 4096
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


def slicing_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
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


def coded(D: int = D, k_bits: int = 4, v_bits: int = 4, rope: bool = True) -> tuple[tuple, tuple]:
    """Pages and codec of delta ops: 64 templates, keys rotated 8 channels together."""
    groups = 4
    templates = (
        empty(H, 16 * groups, D, dtype=torch.float16), empty(H, groups, -(-D // 4), 16, 4, dtype=torch.int8),
        empty(H, 16 * groups, dtype=F32), empty(H, D, dtype=F32), empty(H, dtype=F32), empty(H, dtype=F32),
    )  # fmt: skip
    widths = (code_bytes(D, k_bits), code_bytes(D, v_bits), TAG_BYTES)
    rows = (empty(H, PAGES, PAGE, bytes_, dtype=U8).transpose(0, 1) for bytes_ in widths)
    raw = (empty(512, 2 * D, dtype=torch.float16), empty(512, dtype=torch.int64), empty(2, dtype=I32))
    tables = tuple(empty(64, 2, D // 2, dtype=F32) if rope else None for _ in range(3))
    return (*rows, *raw), (k_bits, v_bits, 8, templates, templates, tables, False)


def coded_attention(
    T: int = 1, q: torch.dtype = BF16, unit: int | None = None, D: int = D, tail: bool = True, bits: int = 4
) -> tuple:
    """Inputs of delta_attention; `unit` None is dense."""
    pages, codec = coded(D, bits, bits)
    K = 480 if unit == 0 else 32
    listed = (None, None) if unit is None else (empty(B, T, H, K, dtype=I32), empty(B, T, H, dtype=I32))
    place = (empty(B, PAGES, dtype=I32), empty(B, dtype=I32))
    newest = (*[empty(B, H, 64, D, dtype=q)] * 2, empty(B, dtype=I32)) if tail else (None,) * 3
    return (empty(B, T, H * G, D, dtype=q), pages, codec, *place, *listed, unit or 0, None, *newest, *[None] * 6)


def delta_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(op, a call of its launcher)"""
    place = (empty(512, dtype=torch.int64), empty(512, dtype=torch.int64))
    sketch = (empty(PAGES, H, 2 * PAGE * D // 8, dtype=U8), empty(PAGES, H, PAGE), empty(H, D, dtype=F32))
    for k_bits, v_bits, size, rope in ((4, 4, 128, True), (3, 8, 128, True), (2, 5, 256, True), (4, 4, 80, False)):
        pages, codec = coded(size, k_bits, v_bits, rope)
        rows, name = empty(512, H, size), f"{k_bits}+{v_bits} bits of {size}"
        index = sketch if size == D else (None,) * 3
        inputs = (rows, rows, *place, codec, 4, pages, *index)
        yield f"delta_encode, {name}", lambda inputs=inputs: delta_ops.delta_encode(*inputs)
        inputs = (empty(B, dtype=I32), empty(B, PAGES, dtype=I32), pages, codec, None, None, 2)
        yield f"delta_decode, {name}", lambda inputs=inputs: delta_ops.delta_decode(*inputs)
    for name, args in (
        ("tokens", coded_attention(unit=0)), ("pages", coded_attention(unit=1)), ("dense", coded_attention()),
        ("prompt", coded_attention(T=512)), ("8 bits", coded_attention(unit=0, tail=False, bits=8)),
        ("f32", coded_attention(q=F32, unit=0)), ("head size 256", coded_attention(D=256, unit=0)),
        ("3 bits of 80", coded_attention(D=80, unit=0, bits=3)),
    ):  # fmt: skip
        yield f"delta_attention, {name}", lambda args=args: delta_ops.delta_attention(*args)


def ragged_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(op, a call of its launcher)"""
    bounds = empty(B + 1, dtype=I32)
    for name, row, dtype in (("wide rows", 1024, BF16), ("odd rows", 3, torch.float16), ("numbers", 1, torch.int64)):
        padded, packed = empty(B, LENGTH, row, dtype=dtype), empty(B * LENGTH, row, dtype=dtype)
        yield f"pack, {name}", lambda x=padded, y=packed: ragged_ops.pack(x, bounds, None, outs=(y,))
        yield f"unpack, {name}", lambda x=padded, y=packed: ragged_ops.unpack(y, bounds, LENGTH, 0, outs=(x,))


def logits_options(V: int, k: int, every: bool = False) -> tuple:
    """What follows the logits; every option or none."""
    if not every:
        return (None, None, None, None, None, k, None, None, 0)
    watch, target = empty(4, dtype=I32), empty(HEAD_B, dtype=torch.int64)
    mask = empty(HEAD_B, -(-V // 32), dtype=I32)
    return (empty(HEAD_B, dtype=F32), empty(V, dtype=F32), 30.0, V - 7, mask, k, watch, target, 0)


def head_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(op, a call of its launcher)"""
    probe, no_probe = (empty(16, HIDDEN), empty(1, 16, dtype=F32), empty(1, dtype=F32), 0, 0), (None, None, None, 0, 0)
    for dtype, k in ((F32, 0), (BF16, 8), (BF16, 64)):
        options, name = logits_options(VOCABULARY, k, k > 0), f"{dtype}, k {k}"
        x = empty(HEAD_B, VOCABULARY, dtype=dtype)
        yield f"logits_stats, {name}", lambda x=x, o=options: head_ops.logits_stats(x, *o)
        hidden, weight = empty(HEAD_B, HIDDEN, dtype=dtype), empty(VOCABULARY, HIDDEN, dtype=dtype)
        inputs = (hidden, weight, *options, probe if k == 8 else no_probe)
        yield f"lm_head_stats, {name}", lambda inputs=inputs: head_ops.lm_head_stats(*inputs)
    shard = logits_options(VOCABULARY // 4, 8, True)
    yield "logits_part", lambda: head_ops.logits_part(empty(HEAD_B, VOCABULARY // 4), *shard)
    odd = empty(HEAD_B, 77), empty(1001, 77, dtype=torch.float16)
    yield "lm_head_part, odd sizes", lambda: head_ops.lm_head_part(*odd, *logits_options(1001, 5, True))
    parts = [empty(4, HEAD_B, dtype=F32), *(empty(4, HEAD_B, dtype=torch.float64) for _ in range(3))]
    parts += [empty(4, HEAD_B, 8, dtype=torch.int64), empty(4, HEAD_B, 8, dtype=F32)]
    parts += [empty(4, HEAD_B, 4, dtype=F32), empty(4, HEAD_B, dtype=F32), empty(4, HEAD_B, dtype=U8)]
    yield "merge_stats", lambda: head_ops.merge_stats(*parts, empty(HEAD_B, dtype=F32))
    wide = (empty(64, HIDDEN), empty(16, 64, dtype=F32), empty(16, dtype=F32), 1, 1)
    yield "probe", lambda: head_ops.probe(empty(HEAD_B, HIDDEN), *wide)
    rows = [empty(HEAD_B, dtype=I32) for _ in range(4)]  # tokens, lengths of the prompts, generated, streak
    step = (
        rows[0],
        empty(HEAD_B, dtype=F32),
        empty(HEAD_B, dtype=F32),
        empty(HEAD_B, dtype=U8),
        empty(HEAD_B, dtype=U8),
    )
    state = (*rows[1:], empty(HEAD_B, 16, dtype=F32), empty(HEAD_B, dtype=U8))
    rule = (0.92, 0.01, 0.99, 0.05, 3, 1, 500, 8, 0.1, (2, 7))
    yield "termination_step", lambda: head_ops.termination_step(*step, *state, *rule)


def replay_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(op, a call of its launcher)"""
    yield "uniform", lambda: replay_ops.uniform(empty(3, dtype=torch.int64), 4096, outs=(empty(4096, dtype=F32),))


FAMILIES = {
    "slicing": slicing_calls, "delta": delta_calls, "ragged": ragged_calls, "head": head_calls, "replay": replay_calls,
}  # fmt: skip
