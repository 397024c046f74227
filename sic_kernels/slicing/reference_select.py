"""Selection: which tokens or pages are read.  Integers and comparisons only, so that every backend chooses the same."""

from __future__ import annotations

import torch

from .reference_layout import Tensor, visible
from .reference_sketch import STEPS_PER_NAT, weights

_NAN_RANK = -(1 << 40)  # below -inf
_UNSEEN_RANK = -(1 << 41)  # below NaN
_FORCED_LIFT = 1 << 42  # above every score


def rank(scores: Tensor) -> Tensor:
    """int64 with the order of the scores: -0 equals +0, NaN is below everything."""
    if not scores.dtype.is_floating_point:
        return scores.long()
    s = scores.float() + 0.0  # -0 becomes +0
    raw = s.view(torch.int32)
    ordered = torch.where(raw < 0, raw ^ 0x7FFFFFFF, raw).long()
    return ordered.masked_fill(s.isnan(), _NAN_RANK)


def mass(scores: Tensor, seen: Tensor) -> Tensor:
    """int64 weights W of log-weight scores, 2^24 for the best visible one.

    Float scores are nats, and their distance from the best is rounded to 1/256; integers are 1/256 nat already.
    """
    order = rank(scores).masked_fill(~seen, _UNSEEN_RANK)
    top = order.amax(-1, keepdim=True)
    if scores.dtype.is_floating_point:
        best = scores.float().gather(-1, order.argmax(-1, keepdim=True))
        steps = torch.round((best - scores.float()) * STEPS_PER_NAT)
        steps = torch.where(steps.isnan(), torch.full_like(steps, 1e6), steps).clamp(0, 1e6).long()
        # What ties with the best has its weight even where the difference is no number (infinities, NaN).
        steps = torch.where(order == top, torch.zeros_like(steps), steps)
    else:
        steps = (top - order).clamp(min=0)
    return weights(steps).masked_fill(~seen, 0)


def _span(lo: Tensor, hi: Tensor, units: int) -> Tensor:
    """bool[..., units]: lo <= position < hi."""
    pos = torch.arange(units, device=lo.device)
    return (pos >= lo[..., None]) & (pos < hi[..., None])


def forced_units(seen: Tensor, units: int, size: int, sink: int, recent: int, keep: Tensor | None) -> Tensor:
    """bool[B,T,units]: units of `size` tokens that a visible sink token, recent token or kept span touches."""

    def touched(lo: Tensor, hi: Tensor) -> Tensor:
        lo, hi = lo.clamp(min=0), torch.minimum(hi, seen if hi.dim() == seen.dim() else seen[..., None])
        return _span(lo // size, torch.where(hi > lo, -(-hi // size), 0), units)

    forced = touched(torch.zeros_like(seen), torch.full_like(seen, sink)) | touched(seen - recent, seen)
    if keep is not None:
        lo, hi = keep.long()[:, None, :, 0], keep.long()[:, None, :, 1]
        forced = forced | touched(lo.expand(-1, seen.shape[1], -1), hi.expand(-1, seen.shape[1], -1)).any(-2)
    return forced


def budget_units(seen: Tensor, unit: int, page: int, ratio: float, budget) -> Tensor:
    """int64[B,T,Hkv or 1]: how many tokens (unit 0) or pages (unit 1) may be chosen."""
    if budget is None:
        tokens = torch.floor(seen.double() * ratio).long()[..., None]
    elif isinstance(budget, Tensor):
        tokens = budget.long()[:, None].expand(-1, seen.shape[1], -1)
    else:
        tokens = torch.full_like(seen, int(budget))[..., None]
    if unit == 0:
        return tokens
    # A budget of all visible tokens covers the partly filled last page too.
    whole = tokens >= seen[..., None]
    return torch.where(whole, -(-seen // page)[..., None], (tokens // page).clamp(min=1))


def default_capacity(units: int, unit: int, page: int, ratio: float, budget, sink: int, recent: int, keep) -> int:
    """K: the most that any row can hold, from the arguments alone."""
    if keep is not None or isinstance(budget, Tensor):
        return units
    tokens = int(budget) if budget is not None else int(ratio * (units if unit == 0 else units * page))
    if unit == 0:
        return min(units, max(tokens, sink + recent))
    # Only a given budget can cover all tokens and end within a page; a ratio below 1 never covers all.
    budgeted = tokens // page if budget is None else -(-tokens // page)
    straddled = -(-recent // page) + 1 if recent else 0
    return min(units, max(1, budgeted, -(-sink // page) + straddled))


def choose(scores: Tensor, seen: Tensor, forced: Tensor, limit: Tensor, top_p: float | None, eligible=None) -> Tensor:
    """bool[B,T,Hkv,units]: all forced units, then the best others up to `limit` in all (fewer where top_p is reached).

    Order: score descending, lowest index first among equals.  `eligible` narrows what may be chosen unforced.
    """
    forced = (forced & seen).expand_as(scores)
    allowed = seen.expand_as(scores) if eligible is None else (seen & eligible) | forced
    order = rank(scores).masked_fill(~allowed, _UNSEEN_RANK) + forced * _FORCED_LIFT
    # Forced units by index, whatever their scores: their order does not matter.
    by_rank = torch.argsort(-order, dim=-1, stable=True)
    count = torch.minimum(torch.maximum(limit, forced.sum(-1)), allowed.sum(-1))
    if top_p is not None and top_p < 1:  # 1 is no limit
        w = mass(scores, seen.expand_as(scores))
        reached = w.gather(-1, by_rank).cumsum(-1).double() >= float(top_p) * w.sum(-1, keepdim=True).double()
        enough = torch.where(reached.any(-1), reached.int().argmax(-1) + 1, scores.shape[-1])
        count = torch.minimum(count, torch.maximum(enough, forced.sum(-1)))
    taken = torch.arange(scores.shape[-1], device=scores.device) < count[..., None]
    return torch.zeros_like(taken).scatter_(-1, by_rank, taken)


def as_indices(chosen: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """bool[..., units] -> ascending indices i32[..., K] padded with -1, counts i32[...]."""
    units = chosen.shape[-1]
    counts = chosen.sum(-1).to(torch.int32)
    if counts.numel() and int(counts.max()) > K:
        raise ValueError(f"select: capacity: got {K}, expected at least {int(counts.max())}")
    pos = torch.where(chosen, torch.arange(units, device=chosen.device), units).sort(-1).values[..., :K]
    pos = torch.nn.functional.pad(pos, (0, K - pos.shape[-1]), value=units)
    return torch.where(pos < units, pos, -1).to(torch.int32), counts


def select(scores, seq_lens, unit, page_size, ratio, budget, top_p, sink, recent, keep, capacity):
    """Scores [B,T,Hkv,units] -> indices i32[B,T,Hkv,K] (ascending, padded with -1), counts i32[B,T,Hkv].

    count = min(visible, max(budget, forced)); forced units (sink, recent, keep) are all taken, then the best others.
    """
    units, size = scores.shape[-1], 1 if unit == 0 else page_size
    seen_tokens = visible(seq_lens, scores.shape[1], units * size)
    seen_units = -(-seen_tokens // size)
    seen = torch.arange(units, device=scores.device) < seen_units[:, :, None, None]
    forced = forced_units(seen_tokens, units, size, sink, recent, keep)[:, :, None]
    limit = budget_units(seen_tokens, unit, size, ratio, budget)
    K = default_capacity(units, unit, size, ratio, budget, sink, recent, keep) if capacity is None else int(capacity)
    return as_indices(choose(scores, seen, forced, limit, top_p), K)
