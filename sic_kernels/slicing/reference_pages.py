"""Page summaries: a centre and a radius per channel that enclose every live key of a page, and the scores from them."""

from __future__ import annotations

import torch

from .reference_layout import Tensor, live_slots, per_position, scaled_keys, softmax_scale, visible, width


def _difference_up(a: Tensor, b: Tensor) -> Tensor:
    """a - b in f32, rounded towards +inf: the rounding error is exact (TwoSum, Knuth), so bump only if it is lost."""
    d = a - b
    part = d - a
    error = (a - (d - part)) + (-b - part)
    return torch.where(error > 0, torch.nextafter(d, torch.full_like(d, torch.inf)), d)


def _round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """f32 to dtype, rounded towards +inf."""
    y = x.to(dtype)
    return torch.where(y.float() < x, torch.nextafter(y, torch.full_like(y, torch.inf)), y)


def summarise(keys: Tensor, dtype: torch.dtype, live: Tensor | None = None) -> Tensor:
    """Keys f32[P,Hkv,page,D] -> [P,Hkv,2,D] of dtype: centre, then a radius that covers centre +- every live key.

    live bool[P,page]; pages without a live key give 0.
    """
    if live is None:
        live = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
    dead = ~live[:, None, :, None]
    lo = keys.masked_fill(dead, torch.inf).amin(2)
    hi = keys.masked_fill(dead, -torch.inf).amax(2)
    centre = (lo * 0.5 + hi * 0.5).to(dtype)
    c = centre.float()
    radius = _round_up(torch.maximum(_difference_up(hi, c), _difference_up(c, lo)), dtype)
    empty = ~live.any(1)[:, None, None, None]
    return torch.stack((centre, radius), dim=2).masked_fill(empty, 0)


def page_summary(k_cache, block_table, seq_lens, k_scale, start):
    """[P,Hkv,2,D] in the cache's dtype (f32 for f8 caches): centre and radius of each page's live keys; else 0.

    With `start` only pages from that token's page on are given, but of all their live keys.
    """
    P, page = k_cache.shape[0], k_cache.shape[2]
    dtype = torch.float32 if k_cache.dtype == torch.float8_e4m3fn else k_cache.dtype
    live = live_slots(block_table, seq_lens, start, P, page)
    return (summarise(scaled_keys(k_cache, k_scale), dtype, live),)


def score_pages(q, summary, block_table, seq_lens, page, beta, pool, scale, max_seq_len):
    """f32[B,T,Hkv,M]: (q.c + beta * sum |q_i| r_i) * scale of each page, joined over the group; -inf if not visible.

    beta = 1 bounds every logit in the page from above (Quest's bound); smaller values estimate.
    pool 0: maximum of (score - the head's own maximum); pool 1: log of the summed softmax, in nats.
    """
    B, T, Hq, D = q.shape
    H = summary.shape[1]
    S = width(block_table, page, max_seq_len)
    M = -(-S // page)
    pages = (seq_lens.long() + page - 1) // page
    # A page is here what a token is elsewhere: "page size" 1, sequences of ceil(seq_len / page) pages.
    at = per_position(summary.double()[:, :, None], block_table, pages, 1, M)[:, None, :, None]  # [B,1,H,1,M,2,D]
    grouped = q.double().reshape(B, T, H, Hq // H, 1, D)
    s = (grouped * at[..., 0, :]).sum(-1) + beta * (grouped.abs() * at[..., 1, :]).sum(-1)
    s = s * softmax_scale(scale, D)
    seen = torch.arange(M, device=q.device) < ((visible(seq_lens, T, S) + page - 1) // page)[:, :, None, None]
    s = s.masked_fill(~seen[..., None, :], -torch.inf)
    if pool == 0:
        joined = (s - s.amax(-1, keepdim=True)).amax(-2)
    else:
        joined = s.log_softmax(-1).logsumexp(-2)
    return (joined.masked_fill(~seen, -torch.inf).float(),)
