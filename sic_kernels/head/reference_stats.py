"""Statistics of logits: a part of the vocabulary, and parts merged.

z = softcap * tanh(x / softcap) + bias, -inf for ids that do not take part; m = max z; y = (z - m) / temperature
s = sum e^y    t = sum y e^y    u = sum y^2 e^y
lse = m / temperature + log s    entropy = log s - t/s    varentropy = u/s - (t/s)^2
"""

from __future__ import annotations

from typing import Any

import torch

from .reference_probe import probe

Tensor = torch.Tensor
NAN_BIT, INF_BIT, EMPTY_BIT = 1, 2, 4
NEVER = -torch.inf


def _divisor(temperature: Any, rows: int) -> Tensor:
    """f64 [rows]: what y is divided by; 1 where the temperature is 0 (greedy) or not given."""
    if temperature is None:
        return torch.ones(rows, dtype=torch.float64)
    t = torch.as_tensor(temperature, dtype=torch.float32).double().expand(rows)
    return torch.where(t > 0, t, 1.0)


def _shaped(x: Tensor, bias: Any, softcap: Any, valid_vocab: Any, mask_bits: Any, vocab_start: int) -> Tensor:
    """z [B,V], numbers of f32."""
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    z = z if bias is None else z + bias.double()
    ids = torch.arange(x.shape[1])
    live = torch.ones(x.shape, dtype=torch.bool)
    if mask_bits is not None:
        live = (mask_bits[:, ids // 32] >> (ids % 32)) & 1 == 1
    if valid_vocab is not None:
        live = live & (ids + vocab_start < valid_vocab)
    return torch.where(live, z.float().double(), NEVER)


def _listed(z: Tensor, k: int, vocab_start: int) -> tuple[Tensor, Tensor]:
    """The greatest k, of equals the lowest id; -1, -inf where there are fewer."""
    top, ids = z.sort(dim=1, descending=True, stable=True)
    room = max(0, k - z.shape[1])
    top = torch.nn.functional.pad(top[:, :k], (0, room), value=NEVER)
    ids = torch.nn.functional.pad(ids[:, :k] + vocab_start, (0, room), value=-1)
    return torch.where(top > NEVER, ids, -1), top


def _at(z: Tensor, ids: Tensor, vocab_start: int) -> Tensor:
    """z of ids [B,n]; -inf for those of another shard."""
    local = ids.long() - vocab_start
    inside = (local >= 0) & (local < z.shape[1])
    if z.shape[1] == 0:
        return torch.full(ids.shape, NEVER, dtype=z.dtype)
    return torch.where(inside, z.gather(1, local.clamp(0, z.shape[1] - 1)), NEVER)


def _part(x: Tensor, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start):
    z = _shaped(x.double(), bias, softcap, valid_vocab, mask_bits, vocab_start)
    B = len(z)
    status = NAN_BIT * z.isnan().any(1) + INF_BIT * (z == torch.inf).any(1)
    bad = (status > 0)[:, None]
    z = torch.where(bad, NEVER, z)  # as if no id took part: the status says why
    m = torch.cat((z, torch.full((B, 1), NEVER, dtype=z.dtype)), 1).amax(1).float()
    y = (z - m.double()[:, None]) / _divisor(temperature, B)[:, None]
    y = torch.where(z > NEVER, y, 0.0)
    e = torch.where(z > NEVER, y.exp(), 0.0)
    top_ids, top = _listed(z, k, vocab_start)
    watch, target = torch.empty(B, 0), torch.empty(0)
    if watch_ids is not None:
        watch = _at(z, watch_ids.expand(B, -1), vocab_start).masked_fill(bad, torch.nan)
    if target_ids is not None:
        none = bad[:, 0] | (target_ids == -1)
        target = _at(z, target_ids[:, None], vocab_start)[:, 0].masked_fill(none, torch.nan)
    sums = e.sum(1), (y * e).sum(1), (y * y * e).sum(1)
    return m, *sums, top_ids, top.float(), watch.float(), target.float(), status.to(torch.uint8)


def logits_part(
    logits, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start
) -> tuple[Tensor, ...]:
    """m f32, s, t, u f64 [B], top_ids i64, top f32 [B,k], watch f32 [B,W], target f32 [B] or [0], status u8 [B]."""
    return _part(logits, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start)


def lm_head_part(
    hidden, weight, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start
) -> tuple[Tensor, ...]:
    """`logits_part` of hidden . weight."""
    x = hidden.double() @ weight.double().T
    return _part(x, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start)


def merge_stats(m, s, t, u, top_ids, top, watch, target, status, temperature) -> tuple[Tensor, ...]:
    """lse, entropy, varentropy f32 [B], argmax i64 [B], topk_ids, topk_logprobs, watch_logprobs, target_logprob, status.

    Parts [n,B,...] of the same rows, each with one listed id at least. On a new maximum with the distance
    d = (m - m') / temperature <= 0, in this order: u <- e^d (u + 2 d t + d^2 s), t <- e^d (t + d s), s <- e^d s.
    """
    n, B = m.shape
    k = top.shape[2]
    scale = _divisor(temperature, B)
    highest = m.double().amax(0)
    d = torch.where(m > NEVER, (m.double() - highest) / scale, 0.0)
    u = (d.exp() * (u + 2 * d * t + d * d * s)).sum(0)
    t = (d.exp() * (t + d * s)).sum(0)
    s = (d.exp() * s).sum(0)
    bits = torch.zeros(B, dtype=torch.long)
    for part in status:
        bits |= part.long()
    bits |= EMPTY_BIT * ((s == 0) & (bits == 0))
    bad = bits > 0

    flat_ids, flat = (x.transpose(0, 1).reshape(B, n * k) for x in (top_ids, top))
    order = flat_ids.sort(dim=1, stable=True).indices  # by id, then (stable) by z
    order = order.gather(1, flat.gather(1, order).sort(dim=1, descending=True, stable=True).indices)[:, :k]
    ids, z = flat_ids.gather(1, order), flat.gather(1, order)
    lse = highest / scale + s.log()

    def log_prob(z: Tensor) -> Tensor:
        shift = (z.double() - highest.reshape(-1, *[1] * (z.ndim - 1))) / scale.reshape(-1, *[1] * (z.ndim - 1))
        return (shift - s.log().reshape(-1, *[1] * (z.ndim - 1))).float()

    def unless_bad(x: Tensor, value: float = torch.nan) -> Tensor:
        return torch.where(bad.reshape(-1, *[1] * (x.ndim - 1)), value, x)

    mean = t / s
    entropy, varentropy = (s.log() - mean).clamp(min=0), (u / s - mean * mean).clamp(min=0)
    return (
        unless_bad(lse.float()), unless_bad(entropy.float()), unless_bad(varentropy.float()),
        unless_bad(ids[:, 0], 0), _bad_first(ids, bad), unless_bad(log_prob(z)),
        unless_bad(log_prob(watch.amax(0))), unless_bad(log_prob(target.amax(0))) if target.shape[1] else target[0],
        bits.to(torch.uint8),
    )  # fmt: skip


def _bad_first(ids: Tensor, bad: Tensor) -> Tensor:
    """Lists of rows with a status: id 0, and no other."""
    blank = torch.full_like(ids, -1)
    blank[:, :1] = 0
    return torch.where(bad[:, None], blank, ids)


def _stats(part: tuple[Tensor, ...], temperature: Any, k: int) -> tuple[Tensor, ...]:
    stats = list(merge_stats(*(x[None] for x in part), temperature))
    stats[4:6] = stats[4][:, :k], stats[5][:, :k]
    return tuple(stats)


def logits_stats(
    logits, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start
) -> tuple[Tensor, ...]:
    """The results of `merge_stats` for one whole vocabulary."""
    shape = temperature, bias, softcap, valid_vocab, mask_bits
    return _stats(logits_part(logits, *shape, max(k, 1), watch_ids, target_ids, vocab_start), temperature, k)


def lm_head_stats(
    hidden, weight, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids, target_ids, vocab_start, of_probe
) -> tuple[Tensor, ...]:
    """`logits_stats` of hidden . weight, and the score of a probe (projection, vector, bias, activation, link) or [B,0]."""
    shape = temperature, bias, softcap, valid_vocab, mask_bits
    part = lm_head_part(hidden, weight, *shape, max(k, 1), watch_ids, target_ids, vocab_start)
    score = torch.empty(len(hidden), 0) if of_probe[0] is None else probe(hidden, *of_probe)[0]
    return *_stats(part, temperature, k), score
