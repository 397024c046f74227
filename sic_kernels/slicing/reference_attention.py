"""Attention over the selected tokens, in float64; gathering them; merging partial results."""

from __future__ import annotations

import torch

from .reference_layout import Tensor, per_position, scaled_keys, selected_positions, softmax_scale, visible, width


def sliced_attention(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    indices,
    counts,
    unit,
    scale,
    key_bias,
    softcap,
    window,
    sinks,
    k_scale,
    v_scale,
    max_seq_len,
):
    """out [B,T,Hq,Dv] (q's dtype), lse f32[B,T,Hq] (natural log) over the selected and visible positions.

    indices None is dense.  logit = scale * q.k, soft-capped (c * tanh(logit / c)), plus key_bias f32[B,S]; `window` w
    keeps positions above query position - w; `sinks` f32[Hq] are logits that only enlarge the denominator.
    A row that reads no position gives out 0, lse -inf, with or without sinks.
    """
    B, T, Hq, D = q.shape
    H, page = k_cache.shape[1:3]
    S = width(block_table, page, max_seq_len)
    seen = visible(seq_lens, T, S)
    pos = torch.arange(S, device=q.device)
    mask = (pos < seen[:, :, None, None]).expand(-1, -1, H, -1)
    if indices is not None:
        mask = selected_positions(indices, counts, unit, page, seen, S)
    if window is not None:
        query_pos = seq_lens.long()[:, None] - T + torch.arange(T, device=q.device)
        mask = mask & (pos > (query_pos - window)[:, :, None, None])
    keys = per_position(scaled_keys(k_cache, k_scale), block_table, seq_lens, page, S).double()
    logits = torch.einsum("bthgd,bhsd->bthgs", q.double().reshape(B, T, H, Hq // H, D), keys)
    logits = logits * softmax_scale(scale, D)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if key_bias is not None:
        bias = key_bias.double()[:, :S]
        logits = logits + torch.nn.functional.pad(bias, (0, S - bias.shape[1]))[:, None, None, None]
    logits = logits.masked_fill(~mask[:, :, :, None], -torch.inf)
    values = per_position(scaled_keys(v_cache, v_scale), block_table, seq_lens, page, S).double()
    extra = None if sinks is None else sinks.double().reshape(1, 1, H, Hq // H)
    out, lse = _softmax_times(logits, values, extra)
    return out.reshape(B, T, Hq, v_cache.shape[-1]).to(q.dtype), lse.reshape(B, T, Hq).float()


def _softmax_times(logits: Tensor, values: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits f64[B,T,H,G,S], values f64[B,H,S,Dv] -> out f64[B,T,H,G,Dv], lse f64[B,T,H,G]."""
    if logits.shape[-1] == 0:
        logits = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    top = logits.amax(-1)
    empty = top == -torch.inf
    if sinks is not None:
        top = torch.maximum(top, sinks.expand_as(top))
    top = top.masked_fill(empty, 0)
    # Divided by the sum, not by exp(lse): at a logit of -1e30 the logarithm of the sum is lost in the LSE.
    p = (logits - top[..., None]).exp()
    total = p.sum(-1)
    if sinks is not None:
        total = total + (sinks - top).exp()
    if values.isfinite().all():
        out = torch.einsum("bthgs,bhsv->bthgv", p, values) / total[..., None]
    else:  # what has no weight does not count, whatever its value is
        terms = p[..., None] * values[:, None, :, None]
        out = terms.masked_fill((p == 0)[..., None], 0).sum(-2) / total[..., None]
    return out.masked_fill(empty[..., None], 0), (top + total.log()).masked_fill(empty, -torch.inf)


def gather(k_cache, v_cache, block_table, seq_lens, indices, counts, unit):
    """k [N,Dk], v [N,Dv], indptr i64[B*T*Hkv+1]: the selected visible rows, packed by (b, t, head), bit for bit."""
    H, page = k_cache.shape[1:3]
    B, T = indices.shape[:2]
    S = width(block_table, page, None)
    chosen = selected_positions(indices, counts, unit, page, visible(seq_lens, T, S), S)
    b, _, h, s = chosen.nonzero(as_tuple=True)
    row_page = b if block_table is None else block_table.long()[b, s // page]
    k, v = k_cache[row_page, h, s % page], v_cache[row_page, h, s % page]
    indptr = torch.zeros(B * T * H + 1, dtype=torch.int64, device=k.device)
    indptr[1:] = chosen.sum(-1).reshape(-1).cumsum(0)
    return k, v, indptr


def merge_many(outs, lses):
    """outs [n,...,H,D], lses f32[n,...,H] -> the attention over the union of n disjoint sets of keys: out, lse f32.

    A state of LSE -inf has no keys, and neither its output nor NaN in it counts; +inf, FlashAttention 2's mark for an
    empty state, means the same.
    """
    known = lses.double()
    known = known.masked_fill(known == torch.inf, -torch.inf)
    top = known.amax(0)
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0)
    weight = (known - top).exp()
    total = weight.sum(0)
    out = (outs.double() * weight[..., None]).masked_fill(weight[..., None] == 0, 0).sum(0) / total[..., None]
    lse = (top + total.log()).masked_fill(empty, -torch.inf)
    return out.masked_fill(empty[..., None], 0).to(outs.dtype), lse.float()


def merge_states(out_a, lse_a, out_b, lse_b):
    """merge_many of two states: out [...,H,D], lse f32[...,H]."""
    return merge_many(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)))
