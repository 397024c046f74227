"""How much each token or page matters to a query, and which ones to read."""

from __future__ import annotations

import numbers

from ..runtime import config
from ..runtime.arguments import code_of, instance, integer, outputs
from ..runtime.backends import call
from ..runtime.errors import ArgumentError
from .attention import selection_inputs, with_tokens, without_tokens
from .types import POOLS, UNITS, Array, KeySketch, Pool, Selection, Unit


def check_head_size(op: str, q: Array, sketch: KeySketch) -> None:
    """The sketch's bytes do not tell D; its own record does."""
    instance(op, "sketch", sketch, KeySketch)
    shape = tuple(getattr(q, "shape", ()))
    if len(shape) and shape[-1] != sketch.D:
        raise ArgumentError.of(op, "q", f"head size {shape[-1]}", f"{sketch.D} as in the sketch")


def score_tokens(
    q: Array,
    sketch: KeySketch,
    block_table: Array | None,
    seq_lens: Array,
    *,
    pool: Pool = "max",
    scale: float | None = None,
    max_seq_len: int | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Estimated logits from plane 0 of the sketch, joined over each GQA group: i16[B,T,Hkv,S] in 1/256 nat, saturating.

    pool "max": the maximum over heads of (score - the head's own maximum); "softmax": log of the sum of the heads'
    softmax. Invisible positions are -32768, visible ones at least -32767. All backends give the same integers.
    Method: the query, rotated like the keys and rounded to +-31, is dotted with the signs by table look-up ("fast scan",
    Andre et al. 2015).
    """
    check_head_size("score_tokens", q, sketch)
    keys = (sketch.bits, sketch.norm, block_table, seq_lens, sketch.page, sketch.planes)
    return _scores("score_tokens", q, keys, pool, scale, max_seq_len, out, workspace, backend)


def refine_tokens(
    q: Array,
    sketch: KeySketch,
    candidates: Selection,
    block_table: Array | None,
    seq_lens: Array,
    *,
    pool: Pool = "max",
    scale: float | None = None,
    max_seq_len: int | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> Array:
    """`score_tokens` from both planes, for the listed candidates only: i16[B,T,Hkv,K]; unused slots are -32768."""
    check_head_size("refine_tokens", q, sketch)
    if candidates is not None:
        instance("refine_tokens", "candidates", candidates, Selection)
    if candidates is not None and candidates.unit != "token":
        raise ArgumentError.of("refine_tokens", "candidates.unit", repr(candidates.unit), "'token'")
    listed = selection_inputs("refine_tokens", candidates)[:2]
    keys = (sketch.bits, sketch.norm, block_table, seq_lens, sketch.page, *listed)
    return _scores("refine_tokens", q, keys, pool, scale, max_seq_len, out, workspace, backend)


def score_pages(
    q: Array,
    summary: Array,
    block_table: Array | None,
    seq_lens: Array,
    *,
    page_size: int,
    beta: float = 0.5,
    pool: Pool = "softmax",
    scale: float | None = None,
    max_seq_len: int | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Page scores q.centre + beta * sum |q_i| radius_i, joined over each group: f32[B,T,Hkv,M], nats; invisible -inf.

    beta = 1 bounds every logit of the page from above (Quest, Tang et al. 2024); 0.5 selects better.
    """
    keys = (summary, block_table, seq_lens, page_size, beta)
    return _scores("score_pages", q, keys, pool, scale, max_seq_len, out, workspace, backend)


def _scores(
    op: str, q: Array, keys: tuple, pool: Pool, scale: float | None, max_seq_len: int | None, out: Array | None,
    workspace: Array | None, backend: str | None,
) -> Array:  # fmt: skip
    """What the three scoring ops share: q of either rank, then their own inputs, then how heads are joined."""
    q, flat = with_tokens(q)
    inputs = (q, *keys, code_of(op, "pool", pool, POOLS), scale, max_seq_len)
    out = out[:, None] if flat and out is not None else out
    return without_tokens(flat, *call("slicing", op, inputs, (out,), workspace, backend))[0]


def select(
    scores: Array,
    seq_lens: Array,
    *,
    unit: Unit = "token",
    page_size: int | None = None,
    ratio: float | None = None,
    budget: int | Array | None = None,
    top_p: float | None = None,
    sink: int = 16,
    recent: int = 32,
    keep: Array | None = None,
    capacity: int | None = None,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    backend: str | None = None,
) -> Selection:
    """The best tokens or pages of each row: ascending indices i32[B,T,Hkv,K] padded with -1, counts i32[B,T,Hkv].

    scores: [B,T,Hkv,N] (or [B,Hkv,N]), i16 in 1/256 nat or f32|f16|bf16 in nats.
    page_size: tokens a page, needed for unit "page" (of no meaning for "token").
    budget: tokens, an integer or i32|i64 [B,Hkv]; default floor(ratio * visible), ratio 0.12 (SIC_SLICE_RATIO). In pages
    max(1, budget // page_size).  sink, recent: tokens always taken at both ends.
    keep: i32|i64 [B,n,2], tokens [begin, end) of each sequence always taken, by all its query tokens and heads. An end is
    clipped to what is visible; spans may overlap; empty ones (begin >= end: -1, -1) are padding. A begin below 0 of another
    is an ArgumentError (on CUDA under SIC_CHECK=1; else it counts as 0). Contents may change between replays of a graph.
    Forced ones (sink, recent, keep) win: count = min(visible, max(budget, forced)). In pages: all pages that they touch.
    top_p: the shortest best-first prefix whose softmax mass, forced ones included, reaches top_p; never above the budget.
    capacity: K, default the largest count that max length allows (with `keep` or budgets in an array: N); ArgumentError if
    a row needs more (on CUDA under SIC_CHECK=1; else its list ends there).
    Order: score descending, then lowest index; -0 equals +0; NaN last. Exact and deterministic.
    """
    flat = getattr(scores, "ndim", 4) == 3
    scores = scores[:, None] if flat else scores
    ratio = config.current().slice_ratio if ratio is None else ratio
    unit_code = code_of("select", "unit", unit, UNITS)
    page = _page_of(unit, page_size)
    if isinstance(budget, numbers.Integral):
        budget = integer("select", "budget", budget, 0, "0 or more tokens, an integer below 2^31")
    if capacity is not None:
        capacity = integer("select", "capacity", capacity, 0, "0 or more slots, an integer below 2^31")
    inputs = (scores, seq_lens, unit_code, page, ratio, budget, top_p, sink, recent, keep, capacity)
    outs = outputs("select", out, ("indices", "counts"), flat)
    indices, counts = without_tokens(flat, *call("slicing", "select", inputs, outs, workspace, backend))
    return Selection(indices, counts, unit)


def _page_of(unit: Unit, page_size: int | None) -> int:
    """Tokens a page; a unit of pages without their size would silently be pages of one token."""
    if unit == "token" and page_size is None:
        return 1
    return integer("select", "page_size", page_size, 1, "tokens a page, an integer of 1 or more")
