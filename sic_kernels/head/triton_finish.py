"""A row's results in Triton: of the partial results of its tiles, or of parts that were made elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.triton_common import INF, device, larger
from .triton_tiles import (
    EMPTY_BIT,
    INF_BIT,
    NAN_BIT,
    STEPS,
    Wanted,
    column_of,
    greatest,
    inverse_temperature,
    keys_of,
    z_of,
)

TILES = 64  # partial results that are added at a time
CHUNK = 512  # keys that are looked at together


@device
def moved(d, s, t, u):
    """Sums relative to a maximum that is higher by -d."""
    weight = tl.exp(d)
    return weight * s, weight * (t + d * s), weight * (u + 2 * d * t + d * d * s)


@device
def with_more(best, keys, N: tl.constexpr, K: tl.constexpr):
    """The K greatest of best [1,K] and keys [1,N]; most keys of a long row are below all that are listed."""
    if tl.max(keys) > tl.min(best):
        best = greatest(tl.reshape(tl.join(best, greatest(keys, 1, N, K)), (1, 2 * K)), 1, 2 * K, K)
    return best


@device
def joined_row(row, tiles, m, sums, faults, keys, inverse, K: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr):
    """m, s, t, u, status bits and the greatest keys [1,K] of all tiles of a row."""
    lane = tl.arange(0, TILES)
    tops = tl.full((TILES,), -INF, tl.float32)
    bits = tl.zeros((TILES,), tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + lane
        tops = tl.maximum(tops, tl.load(m + row * tiles + tile, mask=tile < tiles, other=-INF))
        bits = bits | tl.load(faults + row * tiles + tile, mask=tile < tiles, other=0).to(tl.int32)
    top = tl.max(tops)
    status = tl.max(bits & NAN_BIT) + tl.max(bits & INF_BIT)
    s = tl.zeros((TILES,), tl.float64)
    t, u = s, s
    for first in range(0, tiles, TILES):
        tile = first + lane
        live = tile < tiles
        own = tl.load(m + row * tiles + tile, mask=live, other=-INF)
        at = sums + row * 3 * tiles + tile
        more_s = tl.load(at, mask=live, other=0).to(tl.float64) * (1.0 / STEPS)
        more_t = tl.load(at + tiles, mask=live, other=0).to(tl.float64) * (1.0 / STEPS)
        more_u = tl.load(at + 2 * tiles, mask=live, other=0).to(tl.float64) * (1.0 / STEPS)
        d = tl.where(own > -INF, own.to(tl.float64) - tl.where(top > -INF, top, 0.0), 0.0) * inverse
        more_s, more_t, more_u = moved(d, more_s, more_t, more_u)
        s, t, u = s + more_s, t + more_t, u + more_u
    s, t, u = tl.sum(s), tl.sum(t), tl.sum(u)  # one of each thread, whatever the alignment: always in the same order
    best = keys_of(tl.full((1, K), -INF, tl.float32), tl.zeros((1, K), tl.int32))
    slot = tl.arange(0, CHUNK)[None, :]
    for first in range(0, tiles * K, CHUNK):  # the first of all tiles, then the second: only few of those are listed
        more = tl.load(keys + row * K * tiles + first + slot, mask=first + slot < tiles * K, other=-(1 << 63))
        best = with_more(best, more, CHUNK, K)
    return top, s, t, u, status, best


@device
def asked_z(ids, at, mask, columns, start, into, place):
    """z of ids that tiles have stored at `place`; -inf for those of another shard, NaN for none (-1)."""
    id = tl.load(ids + at, mask=mask, other=-1).to(tl.int64)
    inside = (id >= start) & (id < start + columns)
    z = tl.load(into + place, mask=mask & inside, other=-INF)
    return tl.where(id < 0, float("nan"), z)


# --- results --------------------------------------------------------------------------------------------------------


@triton.jit
def part_kernel(
    tiles, columns, watch_ids, watch_row, watch_step, W, target_ids, target_step, start, temperature, temperature_step,
    m, sums, faults, keys, watch, target,
    out_m, out_s, out_t, out_u, out_ids, out_top, out_watch, out_target, out_status, k,
    K: tl.constexpr, WATCHED: tl.constexpr, TARGETED: tl.constexpr, TEMPERATURE: tl.constexpr, TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The part that a row's tiles are."""
    row = tl.program_id(0).to(tl.int64)
    inverse = inverse_temperature(temperature, temperature_step, row, TEMPERATURE)
    top, s, t, u, status, best = joined_row(row, tiles, m, sums, faults, keys, inverse, K, TILES, CHUNK)
    bad = status != 0
    tl.store(out_m + row, tl.where(bad, -INF, top))
    tl.store(out_s + row, tl.where(bad, 0.0, s))
    tl.store(out_t + row, tl.where(bad, 0.0, t))
    tl.store(out_u + row, tl.where(bad, 0.0, u))
    tl.store(out_status + row, status.to(tl.uint8))
    slot = tl.arange(0, K)[None, :]
    z = tl.where(bad, -INF, z_of(best))
    tl.store(out_top + row * k + slot, z, mask=slot < k)
    tl.store(out_ids + row * k + slot, tl.where(z > -INF, column_of(best) + start, -1), mask=slot < k)
    if WATCHED > 0:
        w = tl.arange(0, WATCHED)
        z = asked_z(watch_ids, row * watch_row + w * watch_step, w < W, columns, start, watch, row * W + w)
        tl.store(out_watch + row * W + w, tl.where(bad, float("nan"), z), mask=w < W)
    if TARGETED:
        z = asked_z(target_ids, row * target_step, True, columns, start, target, row)
        tl.store(out_target + row, tl.where(bad, float("nan"), z))


@device
def log_prob(z, top, inverse, log_s, bad):
    """f32; NaN of a bad row."""
    logp = (z.to(tl.float64) - top) * inverse - log_s
    return tl.where(bad, float("nan"), logp).to(tl.float32)


@device
def store_stats(
    row, top, s, t, u, status, ids, z, inverse, lse, entropy, varentropy, argmax, topk_ids, topk_logprobs, out_status, k,
    K: tl.constexpr,
):  # fmt: skip
    """Store what follows from sums and from lists ids i64, z f32 [1,K]; give back what `log_prob` takes."""
    status = tl.where((status == 0) & (s == 0), EMPTY_BIT, status)
    bad = status != 0
    tl.store(out_status + row, status.to(tl.uint8))
    top = tl.where(bad, 0.0, top).to(tl.float64)
    s = tl.where(bad, 1.0, s)
    inverse_s = 1.0 / s  # one division: each is a call, and registers live across it spill
    log_s, mean = tl.log(s), t * inverse_s
    nan = float("nan")
    tl.store(lse + row, tl.where(bad, nan, top * inverse + log_s).to(tl.float32))
    tl.store(entropy + row, tl.where(bad, nan, tl.maximum(log_s - mean, 0.0)).to(tl.float32))
    tl.store(varentropy + row, tl.where(bad, nan, tl.maximum(u * inverse_s - mean * mean, 0.0)).to(tl.float32))
    slot = tl.arange(0, K)[None, :]
    first = tl.where(slot == 0, 0, -1)
    ids = tl.where(bad, first, tl.where(z > -INF, ids, -1))
    tl.store(argmax + row, tl.max(tl.where(slot == 0, ids, -1)))
    tl.store(topk_ids + row * k + slot, ids, mask=slot < k)
    tl.store(topk_logprobs + row * k + slot, log_prob(z, top, inverse, log_s, bad), mask=slot < k)
    return top, log_s, bad


@triton.jit
def stats_kernel(
    tiles, columns, watch_ids, watch_row, watch_step, W, target_ids, target_step, start, temperature, temperature_step,
    m, sums, faults, keys, watch, target,
    lse, entropy, varentropy, argmax, topk_ids, topk_logprobs, watch_logprobs, target_logprob, out_status, k,
    K: tl.constexpr, WATCHED: tl.constexpr, TARGETED: tl.constexpr, TEMPERATURE: tl.constexpr, TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The statistics of a row, of its tiles."""
    row = tl.program_id(0).to(tl.int64)
    inverse = inverse_temperature(temperature, temperature_step, row, TEMPERATURE)
    top, s, t, u, status, best = joined_row(row, tiles, m, sums, faults, keys, inverse, K, TILES, CHUNK)
    top, log_s, bad = store_stats(
        row, top, s, t, u, status, column_of(best) + start, z_of(best), inverse, lse, entropy, varentropy, argmax, topk_ids,
        topk_logprobs, out_status, k, K,
    )  # fmt: skip
    if WATCHED > 0:
        w = tl.arange(0, WATCHED)
        z = asked_z(watch_ids, row * watch_row + w * watch_step, w < W, columns, start, watch, row * W + w)
        tl.store(watch_logprobs + row * W + w, log_prob(z, top, inverse, log_s, bad), mask=w < W)
    if TARGETED:
        z = asked_z(target_ids, row * target_step, True, columns, start, target, row)
        tl.store(target_logprob + row, log_prob(z, top, inverse, log_s, bad))


@device
def greatest_of_parts(into, n, step, at, mask, zero):
    """The greatest z of an id over the parts; NaN where it was never asked for."""
    z = zero - INF
    for i in range(n):
        z = larger(z, tl.load(into + i * step + at, mask=mask, other=-INF))
    return z


@triton.jit
def merge_stats_kernel(
    m, s, t, u, top_ids, top, watch, target, status, temperature, temperature_step, n, B, k, W,
    lse, entropy, varentropy, argmax, topk_ids, topk_logprobs, watch_logprobs, target_logprob, out_status,
    K: tl.constexpr, WATCHED: tl.constexpr, TARGETED: tl.constexpr, TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """The statistics of a row, of its n parts in their order."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K)[None, :]
    inverse = inverse_temperature(temperature, temperature_step, row, TEMPERATURE)
    highest, nan, inf = row.to(tl.float32) * 0.0 - INF, tl.program_id(0) * 0, tl.program_id(0) * 0
    best = keys_of(tl.full((1, K), -INF, tl.float32), tl.zeros((1, K), tl.int32))
    for i in range(n):
        at = i * B + row
        highest = tl.maximum(highest, tl.load(m + at))
        bits = tl.load(status + at).to(tl.int32)
        nan, inf = nan | (bits & NAN_BIT), inf | (bits & INF_BIT)
        ids = tl.load(top_ids + at * k + slot, mask=slot < k, other=-1)
        z = tl.load(top + at * k + slot, mask=slot < k, other=-INF)
        listed = (ids >= 0) & (z > -INF)  # -1 has no place in a key
        best = with_more(best, keys_of(tl.where(listed, z, -INF), tl.where(listed, ids, 0).to(tl.int32)), K, K)
    sum_s = inverse * 0.0
    sum_t, sum_u = sum_s, sum_s
    for i in range(n):
        at = i * B + row
        own = tl.load(m + at)
        d = tl.where(own > -INF, own.to(tl.float64) - tl.where(highest > -INF, highest, 0.0), 0.0) * inverse
        more_s, more_t, more_u = moved(d, tl.load(s + at), tl.load(t + at), tl.load(u + at))
        sum_s, sum_t, sum_u = sum_s + more_s, sum_t + more_t, sum_u + more_u
    highest, log_s, bad = store_stats(
        row, highest, sum_s, sum_t, sum_u, nan | inf, column_of(best), z_of(best), inverse, lse, entropy, varentropy,
        argmax, topk_ids, topk_logprobs, out_status, k, K,
    )  # fmt: skip
    if WATCHED > 0:
        w = tl.arange(0, WATCHED)
        z = greatest_of_parts(watch, n, B * W, row * W + w, w < W, tl.zeros((WATCHED,), tl.float32))
        tl.store(watch_logprobs + row * W + w, log_prob(z, highest, inverse, log_s, bad), mask=w < W)
    if TARGETED:
        z = greatest_of_parts(target, n, B, row, True, row.to(tl.float32) * 0.0)
        tl.store(target_logprob + row, log_prob(z, highest, inverse, log_s, bad))


# --- launches -------------------------------------------------------------------------------------------------------


def result_outs(dims: tuple[int, int, int, int], part: bool, device_: torch.device) -> tuple[torch.Tensor, ...]:
    """The nine outputs, for B rows, k listed and W watched ids and 0 or B targets, of parts or of statistics."""
    B, k, W, targets = dims
    sums = (torch.float64,) * 3 if part else (torch.float32, torch.float32, torch.int64)
    shapes = ((B,),) * 4 + ((B, k), (B, k), (B, W), (targets,), (B,))
    dtypes = (torch.float32, *sums, torch.int64, torch.float32, torch.float32, torch.float32, torch.uint8)
    return tuple(torch.empty(shape, dtype=dtype, device=device_) for shape, dtype in zip(shapes, dtypes))


def packed(outs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Each output, or memory in its place if it has gaps; `unpack` moves that where it belongs."""
    return tuple(x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in outs)


def unpack(from_: tuple[torch.Tensor, ...], outs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    for source, out in zip(from_, outs):
        if source is not out:
            out.copy_(source)
    return outs


def finish(w: Wanted, outs: tuple[torch.Tensor, ...], part: bool) -> tuple[torch.Tensor, ...]:
    """Results of all rows, of their tiles."""
    B, k, *_ = w.dims
    into = packed(outs)
    kernel: Any = part_kernel if part else stats_kernel
    kernel[(B,)](
        w.tiles, w.columns, *w.asked, *w.temperature, *w.partials, *into, k, **w.flags, TILES=TILES,
        CHUNK=CHUNK,
    )  # fmt: skip
    return unpack(into, outs)
