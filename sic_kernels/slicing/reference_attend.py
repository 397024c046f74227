"""The launch chain of `attend`, composed from the references of its parts."""

from __future__ import annotations

import math

import torch

from .reference_attention import sliced_attention
from .reference_layout import Tensor, softmax_scale, visible, width
from .reference_pages import score_pages
from .reference_select import as_indices, budget_units, choose, default_capacity, forced_units
from .reference_sketch import (
    LOWEST,
    STEPS_PER_NAT,
    UNREAD_SHRINK,
    UNSEEN,
    head_scores,
    refine_tokens,
    score_tokens,
    weights,
)
from .types import STATUS

SLICED, DENSE_LAYER, DENSE_SHORT, DENSE_PREFILL, FALLBACK_MASS = range(len(STATUS))


def _page_bias(key_bias: Tensor, seen_tokens: Tensor, pages: int, page: int) -> Tensor:
    """f32[B,T,pages]: the largest bias among a page's visible positions; -inf where there is none."""
    pos = torch.arange(pages * page)
    bias = torch.nn.functional.pad(key_bias.float(), (0, max(0, pages * page - key_bias.shape[1])))[:, : pages * page]
    visible_bias = torch.where(pos < seen_tokens[..., None], bias[:, None], -torch.inf)
    return visible_bias.unflatten(-1, (pages, page)).amax(-1)


def _before_window(seen_tokens: Tensor, units: int, size: int, window: int | None) -> Tensor:
    """bool[B,T,1,units]: units that end before the sliding window begins."""
    ends = torch.minimum((torch.arange(units) + 1) * size, seen_tokens[..., None])
    return (ends <= seen_tokens[..., None] - (window or 1 << 40))[:, :, None]


def _biased(scores: Tensor, key_bias: Tensor | None, page: int, seen_tokens: Tensor) -> Tensor:
    """Scores plus the bias f32[B,S] of their token, or the largest visible bias of their page (float scores)."""
    if key_bias is None:
        return scores
    if scores.dtype.is_floating_point:
        return scores + _page_bias(key_bias, seen_tokens, scores.shape[-1], page)[:, :, None]
    bias = key_bias.float()
    steps = torch.round(bias * STEPS_PER_NAT).clamp(-(1 << 20), 1 << 20).long()[:, None, None, : scores.shape[-1]]
    moved = (scores.long() + steps).clamp(LOWEST, -LOWEST)
    return torch.where(scores == UNSEEN, UNSEEN, moved).to(torch.int16)


def _select_policy(scores, unit, page, seq_lens, ratio, top_p, sink, recent, keep, min_len, eligible=None):
    """`select` with a policy's rules: at least one token; sequences of at most min_len tokens are taken whole."""
    size, units = 1 if unit == 0 else page, scores.shape[-1]
    seen_tokens = visible(seq_lens, scores.shape[1], units * size)
    seen = torch.arange(units) < (-(-seen_tokens // size))[:, :, None, None]
    forced = forced_units(seen_tokens, units, size, sink, recent, keep)[:, :, None]
    limit = budget_units(seen_tokens, unit, size, ratio, None).clamp(min=1)
    short = (seen_tokens <= min_len)[..., None]
    limit = torch.where(short, units, limit)
    if eligible is not None:  # where everything fits, nothing is shortlisted
        eligible = eligible | (limit >= seen_tokens[..., None])[..., None]
    K = max(
        default_capacity(units, unit, size, ratio, None, sink, recent, keep), min(units, max(1, -(-min_len // size)))
    )
    chosen = torch.where(short[..., None], seen, choose(scores, seen, forced, limit, top_p, eligible))
    return as_indices(chosen, K)


def select_tokens(
    q, bits, norm, planes, block_table, page, candidates, pool, scale, key_bias, max_seq_len, seq_lens, ratio, top_p,
    sink, recent, keep, min_len, window,
):  # fmt: skip
    """indices, counts of the two-stage sketch, and each head's plane-0 scores.

    Plane 0 ranks all tokens (heads joined by maximum), both planes the best `candidates` of them (joined by `pool`).
    Beyond the forced tokens only candidates are chosen.
    """
    rest = (seq_lens, ratio, top_p, sink, recent, keep, min_len)
    first = head_scores(q, bits, norm, block_table, seq_lens, page, planes, scale, max_seq_len)
    first_pool = pool if planes == 1 else 0
    scores = score_tokens(q, bits, norm, block_table, seq_lens, page, planes, first_pool, scale, max_seq_len)[0]
    seen_tokens = visible(seq_lens, q.shape[1], scores.shape[-1])
    scores = _biased(scores, key_bias, page, seen_tokens)
    scores = scores.masked_fill(_before_window(seen_tokens, scores.shape[-1], 1, window), UNSEEN)
    if planes == 1:
        return *_select_policy(scores, 0, page, *rest), first
    S = width(block_table, page, max_seq_len)
    share = max(candidates, ratio)
    listed, count = _select_policy(scores, 0, page, seq_lens, share, None, 0, 0, None, 0)
    fine = refine_tokens(q, bits, norm, block_table, seq_lens, page, listed, count, pool, scale, max_seq_len)[0]
    target = torch.where(listed >= 0, listed.long(), S)
    wide = torch.full((*scores.shape[:-1], S + 1), UNSEEN, dtype=torch.int16, device=q.device)
    wide = _biased(wide.scatter(-1, target, fine)[..., :S], key_bias, page, seen_tokens)
    eligible = torch.zeros(*scores.shape[:-1], S + 1, dtype=torch.bool, device=q.device)
    eligible = eligible.scatter(-1, target, True)[..., :S]
    return *_select_policy(wide, 0, page, *rest, eligible), first


def _unread(q, first, indices, counts, centre, seen, scale, key_bias, softcap, window):
    """f32[B,T,Hq]: log of the sum of exp(estimated logit) over the visible tokens that are not listed.

    first: plane-0 scores of each head, int64[B,T,Hkv,G,S]. Their centre's share is added back.
    """
    B, T, Hkv, G, S = first.shape
    listed = torch.arange(indices.shape[-1], device=q.device) < counts[..., None]
    read = torch.zeros(B, T, Hkv, S + 1, dtype=torch.bool, device=q.device)
    read = read.scatter(-1, torch.where(listed, indices.long(), S), True)[..., :S]
    visible_heads = seen[..., None, :].expand_as(first)
    top = first.masked_fill(~visible_heads, -(1 << 40)).amax(-1, keepdim=True)
    w = weights((top - first).clamp(min=0), UNREAD_SHRINK).masked_fill(~visible_heads | read[..., None, :], 0).sum(-1)
    logit = torch.einsum("bthgd,hd->bthg", q.double().unflatten(2, (Hkv, G)), centre.double()) * softmax_scale(
        scale, q.shape[-1]
    )
    if key_bias is not None or softcap or window:  # a logit is more than its score
        logits = UNREAD_SHRINK * first.double() / STEPS_PER_NAT + logit[..., None]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if key_bias is not None:
            logits = logits + key_bias.double()[:, None, None, None, :S]
        return torch.logsumexp(logits.masked_fill(~visible_heads | read[..., None, :], -torch.inf), -1).flatten(2)
    unread = w.double().log() - 24 * math.log(2) + UNREAD_SHRINK * top[..., 0].double() / STEPS_PER_NAT + logit
    return torch.where(w > 0, unread, -torch.inf).flatten(2)


def _unread_pages(q, summary, indices, counts, block_table, seen_tokens, page, scale, key_bias, softcap, window):
    """The same for pages: every token of an unread page is taken to have the page's centre for its key."""
    B, T, Hq = q.shape[:3]
    Hkv = summary.shape[1]
    table = torch.arange(B, device=q.device)[:, None] if block_table is None else block_table.long()
    M = table.shape[1]
    starts = torch.arange(M, device=q.device) * page
    live = (seen_tokens[..., None] - starts).clamp(0, page)  # [B,T,M]
    used = starts < seen_tokens.amax(1, keepdim=True)  # the tail of a table row holds anything
    centre = summary[torch.where(used, table, 0), :, 0].double()  # [B,M,Hkv,D]
    logit = torch.einsum("bthgd,bmhd->bthgm", q.double().unflatten(2, (Hkv, Hq // Hkv)), centre) * softmax_scale(
        scale, q.shape[-1]
    )
    listed = torch.arange(indices.shape[-1], device=q.device) < counts[..., None]
    read = torch.zeros(B, T, Hkv, M + 1, dtype=torch.bool, device=q.device)
    read = read.scatter(-1, torch.where(listed, indices.long(), M), True)[..., :M]
    if softcap:
        logit = softcap * torch.tanh(logit / softcap)
    if key_bias is not None:
        logit = logit + _page_bias(key_bias, seen_tokens, M, page)[:, :, None, None]
    skipped = read | (live == 0)[:, :, None] | _before_window(seen_tokens, M, page, window)
    weighed = (logit + live.double().log()[:, :, None, None]).masked_fill(skipped[..., None, :], -torch.inf)
    return torch.logsumexp(weighed, -1).flatten(2)


def select_slice(
    q, bits, norm, centre, planes, summary, block_table, seq_lens, page, ratio, candidates, top_p, sink, recent, beta,
    pool, min_len, keep, scale, key_bias, softcap, window, max_seq_len,
):  # fmt: skip
    """indices, counts, log_unread: score all, refine the best, select; what the others weigh.

    Tokens by the sketch (bits, norm) or, where `summary` is given, pages.
    """
    S = width(block_table, page, max_seq_len)
    seen_tokens = visible(seq_lens, q.shape[1], S)
    select_args = (seq_lens, ratio, top_p, sink, recent, keep, min_len)
    if summary is None:
        indices, counts, first = select_tokens(
            q, bits, norm, planes, block_table, page, candidates, pool, scale, key_bias, max_seq_len, *select_args, window
        )  # fmt: skip
        seen = torch.arange(S) < seen_tokens[:, :, None, None]
        seen = seen & ~_before_window(seen_tokens, S, 1, window)
        unread = _unread(q, first, indices, counts, centre, seen, scale, key_bias, softcap, window)
    else:
        scores = score_pages(q, summary, block_table, seq_lens, page, beta, pool, scale, max_seq_len)[0]
        scores = scores.masked_fill(_before_window(seen_tokens, scores.shape[-1], page, window), -torch.inf)
        indices, counts = _select_policy(_biased(scores, key_bias, page, seen_tokens), 1, page, *select_args)
        unread = _unread_pages(
            q, summary, indices, counts, block_table, seen_tokens, page, scale, key_bias, softcap, window
        )
    return indices, counts, unread.float()


def attend(
    q, k_cache, v_cache, bits, norm, centre, planes, summary, block_table, seq_lens, ratio, candidates, top_p, sink,
    recent, beta, pool, max_omitted_mass, dense_layer, max_sliced_T, min_len, keep, scale, key_bias, softcap, window,
    sinks, k_scale, v_scale, max_seq_len,
):  # fmt: skip
    """out, lse, indices, counts, omitted_mass, status: `select_slice`, then attend to what was selected."""
    page, T, Hkv = k_cache.shape[2], q.shape[1], k_cache.shape[1]
    extras = (scale, key_bias, softcap, window, sinks, k_scale, v_scale, max_seq_len)
    dense, dense_lse = sliced_attention(q, k_cache, v_cache, block_table, seq_lens, None, None, 0, *extras)
    shape = q.shape[:3]
    if dense_layer or max_sliced_T < T:
        nothing = (
            torch.zeros(*q.shape[:2], Hkv, 0, dtype=torch.int32),
            torch.zeros(*q.shape[:2], Hkv, dtype=torch.int32),
        )
        status = torch.full(shape, DENSE_LAYER if dense_layer else DENSE_PREFILL, dtype=torch.uint8)
        return dense, dense_lse, *nothing, torch.zeros(shape), status
    indices, counts, unread = select_slice(
        q, bits, norm, centre, planes, summary, block_table, seq_lens, page, ratio, candidates, top_p, sink, recent, beta,
        pool, min_len, keep, scale, key_bias, softcap, window, max_seq_len,
    )  # fmt: skip
    unit = 0 if summary is None else 1
    out, lse = sliced_attention(q, k_cache, v_cache, block_table, seq_lens, indices, counts, unit, *extras)
    omitted = torch.where(unread == -torch.inf, 0, torch.sigmoid(unread.double() - lse.double())).float()
    units = -(-visible(seq_lens, T, width(block_table, page, max_seq_len)) // (page if unit else 1))
    whole = (counts == units[..., None]).repeat_interleave(q.shape[2] // Hkv, -1)
    status = torch.where(whole, DENSE_SHORT, SLICED).to(torch.uint8)
    if max_omitted_mass is not None:
        again = ~(omitted <= max_omitted_mass)  # NaN too
        out, lse = torch.where(again[..., None], dense, out), torch.where(again, dense_lse, lse)
        status, omitted = torch.where(again, FALLBACK_MASS, status), torch.where(again, 0, omitted)
    return out, lse, indices, counts, omitted, status.to(torch.uint8)
