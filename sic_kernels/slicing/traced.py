"""What a trace says of one `attend`: what was read, and the scores that led to it."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import trace
from ..runtime.arrays import as_torch
from .scoring import score_pages, score_tokens
from .types import STATUS, Array, KeySketch, SlicePolicy

INVISIBLE = -32768  # as a score
_LARGEST, _BLOCK = 64, 16  # a cache with larger pages, or without any, is shown in blocks of tokens


def record_attend(
    layer: int | None,
    policy: SlicePolicy,
    q: Array,
    index: KeySketch | Array,
    block_table: Array | None,
    seq_lens: Array,
    k_cache: Array,
    results: tuple[Array, ...],
    dense: bool,
    **options: Any,
) -> None:
    """Add the record. q and results have their T dimension; dense: nothing was selected.

    options: what changes scores (scale, max_seq_len, backend). They are computed again, for the trace only, without bias.
    """
    _, _, indices, listed, omitted, status = results
    page = as_torch(k_cache).shape[2]
    if policy.unit == "token" and page > _LARGEST:
        page = _BLOCK
    scores = {} if dense else _page_scores(page, policy, q, index, block_table, seq_lens, options)
    heads = torch.bincount(as_torch(status).flatten().long().cpu(), minlength=len(STATUS)).tolist()
    answered = {name: n for name, n in zip(STATUS, heads) if n}
    trace.record(
        "attend",
        layer=layer,
        unit=policy.unit,
        page_size=page,
        kv_heads=as_torch(k_cache).shape[1],
        seq_lens=seq_lens,
        selection=None if dense else indices,
        counts=None if dense else listed,
        **scores,
        omitted_mass=omitted,
        status=status,
        status_names=STATUS,
        status_counts=answered,
        reasons=[name for name in answered if name.startswith("fallback")],
    )


def _page_scores(
    page: int, policy: SlicePolicy, q: Array, index: KeySketch | Array, block_table: Array | None, seq_lens: Array,
    options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The best score in each page [B,T,Hkv,M], in steps of `score_step` nats: of its tokens, or the page's own."""
    if not isinstance(index, KeySketch):
        pages = score_pages(q, index, block_table, seq_lens, page_size=page, beta=policy.beta, **options)
        return {"page_scores": pages, "score_step": 1.0}
    tokens = as_torch(score_tokens(q, index, block_table, seq_lens, **options)).int()
    padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[-1] % page), value=INVISIBLE)
    return {"page_scores": padded.unflatten(-1, (-1, page)).amax(-1), "score_step": 1 / 256}
