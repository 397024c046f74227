"""The launch chain of `attend`, composed from the references of its parts."""

from __future__ import annotations

import torch

from .reference_attention import sliced_attention
from .reference_layout import Tensor, visible, width
from .reference_pages import score_pages
from .reference_select import as_indices, budget_units, choose, default_capacity, forced_units, select
from .reference_sketch import LOWEST, STEPS_PER_NAT, UNSEEN, refine_tokens, score_tokens


def _biased(scores: Tensor, key_bias: Tensor | None, page: int) -> Tensor:
    """Scores plus the bias f32[B,S] of their token, or the largest bias of their page (float scores)."""
    if key_bias is None:
        return scores
    bias = key_bias.float()
    if scores.dtype.is_floating_point:
        short = scores.shape[-1] * page - bias.shape[1]
        best = torch.nn.functional.pad(bias, (0, short), value=-torch.inf).unflatten(1, (-1, page)).amax(-1)
        return scores + best[:, None, None]
    steps = torch.round(bias * STEPS_PER_NAT).clamp(-(1 << 20), 1 << 20).long()[:, None, None, : scores.shape[-1]]
    moved = (scores.long() + steps).clamp(LOWEST, -LOWEST)
    return torch.where(scores == UNSEEN, UNSEEN, moved).to(torch.int16)


def select_tokens(
    q, bits, norm, planes, block_table, seq_lens, page, ratio, candidates, top_p, sink, recent, pool, scale, key_bias,
    max_seq_len,
):  # fmt: skip
    """indices, counts of the two-stage sketch: plane 0 over all tokens, both planes over the best `candidates` of them.

    Beyond the forced tokens only candidates are chosen.
    """
    scores = score_tokens(q, bits, norm, block_table, seq_lens, page, planes, pool, scale, max_seq_len)[0]
    scores = _biased(scores, key_bias, page)
    if planes == 1:
        return select(scores, seq_lens, 0, page, ratio, None, top_p, sink, recent, None, None)
    S = width(block_table, page, max_seq_len)
    seen_tokens = visible(seq_lens, q.shape[1], S)
    seen = torch.arange(S, device=q.device) < seen_tokens[:, :, None, None]
    listed, count = select(scores, seq_lens, 0, page, candidates, None, None, 0, 0, None, None)
    fine = refine_tokens(q, bits, norm, block_table, seq_lens, page, listed, count, pool, scale, max_seq_len)[0]
    target = torch.where(listed >= 0, listed.long(), S)
    wide = torch.full((*scores.shape[:-1], S + 1), UNSEEN, dtype=torch.int16, device=q.device)
    wide = _biased(wide.scatter(-1, target, fine)[..., :S], key_bias, page)
    eligible = torch.zeros(*scores.shape[:-1], S + 1, dtype=torch.bool, device=q.device)
    eligible = eligible.scatter(-1, target, True)[..., :S]
    forced = forced_units(seen_tokens, S, 1, sink, recent, None)[:, :, None]
    chosen = choose(wide, seen, forced, budget_units(seen_tokens, 0, 1, ratio, None), top_p, eligible)
    return as_indices(chosen, default_capacity(S, 0, 1, ratio, None, sink, recent, None))


def attend(
    q, k_cache, v_cache, bits, norm, planes, summary, block_table, seq_lens, ratio, candidates, top_p, sink, recent,
    beta, pool, scale, key_bias, softcap, window, sinks, k_scale, v_scale, max_seq_len,
):  # fmt: skip
    """out, lse, indices, counts: score all, refine the best, select, attend to what was selected.

    Tokens by the sketch (bits, norm) or, where `summary` is given, pages.  No row is recomputed dense here.
    """
    page = k_cache.shape[2]
    if summary is None:
        indices, counts = select_tokens(
            q, bits, norm, planes, block_table, seq_lens, page, ratio, candidates, top_p, sink, recent, pool, scale,
            key_bias, max_seq_len,
        )  # fmt: skip
    else:
        scores = score_pages(q, summary, block_table, seq_lens, page, beta, pool, scale, max_seq_len)[0]
        scores = _biased(scores, key_bias, page)
        indices, counts = select(scores, seq_lens, 1, page, ratio, None, top_p, sink, recent, None, None)
    out, lse = sliced_attention(
        q, k_cache, v_cache, block_table, seq_lens, indices, counts, 0 if summary is None else 1, scale, key_bias,
        softcap, window, sinks, k_scale, v_scale, max_seq_len,
    )  # fmt: skip
    return out, lse, indices, counts
