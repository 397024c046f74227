"""score_tokens and refine_tokens in Triton: integer scores from the sketch, the same on every backend.

Queries are rotated and quantised once; every head's scores are integer dot products on the matrix units, bits unpacked
to bytes; a second pass joins the heads of a group relative to each head's best score.  Scores of single heads lie in a
scratch tensor i16[B*T*Hkv, G, N], -32768 where a query sees nothing, so that what follows need not know why.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_common import (
    EXACT,
    GAIN,
    LEVELS,
    LOWEST_SCORE,
    SMALLEST_QUERY,
    STEP_LOG2E,
    STEPS,
    UNSEEN_SCORE,
    byte_at,
    cdiv,
    device,
    exp_weight,
    kind,
    log_steps,
    page_at,
    power,
    raw,
    round_even,
    softmax_scale,
    table_args,
    to_f32,
    to_steps,
    visible,
    width,
)
from .triton_sketch import rotate

QUERIES = 4  # queries that one program quantises
HEADS = 16  # query rows of a matrix product at most
CHUNK = 1024  # positions whose best score one program finds
BLOCKS = 8  # blocks of 16 tokens unpacked at a time
CANDIDATES = 64  # candidates unpacked at a time
JOIN = 1024  # positions that one program joins
BESTS = 128  # chunk results reduced at a time
BF16_KIND = tl.constexpr(2)


# --- queries --------------------------------------------------------------------------------------------------------


@triton.jit
def quantise_kernel(
    q, q_b, q_t, q_h, levels, factors, scale, T, H, rows,
    D: tl.constexpr, BD: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N rows of q [B,T,Hq,D]: rotated, as integers within +-31 (i8, padded to DP channels), and (step * scale) * 256."""
    row = (tl.program_id(0) * N + tl.arange(0, N))[:, None]
    b, t, h = row // (T * H), row // H % T, row % H
    j = tl.arange(0, BD)[None, :]
    place = b.to(tl.int64) * q_b + t.to(tl.int64) * q_t + h.to(tl.int64) * q_h
    x = to_f32(tl.load(q + place + j, mask=(row < rows) & (j < D), other=0), KIND)
    y = rotate(x, D, N, BD)
    largest = tl.max(tl.abs(y), axis=1)[:, None]
    nan = tl.max((y != y).to(tl.int32), axis=1)[:, None] != 0
    usable = (largest >= SMALLEST_QUERY) & (largest < float("inf")) & (nan == 0)
    divisor = tl.where(usable, largest, 1.0)
    number = tl.full((N, 1), LEVELS, tl.float32)
    level = round_even(tl.where(usable, y, 0.0) * tl.div_rn(number, divisor))
    step = tl.where(usable, tl.div_rn(divisor, number), 0.0)
    tl.store(factors + row, (step * scale) * STEPS, mask=row < rows)
    tl.store(levels + row.to(tl.int64) * DP + j, level.to(tl.int8), mask=(row < rows) & (j < DP))


def quantise(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """levels i8[B,T,Hq,DP], factors f32[B,T,Hq]; DP: head size padded for the matrix units."""
    B, T, H, D = q.shape
    DP = power(D, 32)
    levels = torch.empty(B, T, H, DP, dtype=torch.int8, device=q.device)
    factors = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    rows = B * T * H
    if rows:
        quantise_kernel[(cdiv(rows, QUERIES),)](
            raw(q), *q.stride()[:3], levels, factors, softmax_scale(scale, D), T, H, rows,
            D=D, BD=DP, DP=DP, KIND=kind(q), N=QUERIES, **EXACT,
        )  # fmt: skip
    return levels, factors


@device
def head_rows(tile, T, G, HEADS: tl.constexpr, ONE_T: tl.constexpr):
    """t, g of the query rows of a tile, [1, HEADS]: rows go over heads, and over query tokens unless ONE_T."""
    r = (tile * HEADS + tl.arange(0, HEADS))[None, :]
    if ONE_T:
        return r * 0, r, r < G
    else:
        return r // G, r % G, r < T * G


# --- scores of single heads -----------------------------------------------------------------------------------------


@device
def spread(x):
    """Bytes u8[...] -> their bits 0/1 u8[...,8], lowest first.

    Joined in pairs, all bits of a byte stay in one thread, side by side: it stores them 8 at a time for the matrix units.
    """
    even = tl.join(tl.join(x & 1, (x >> 4) & 1), tl.join((x >> 2) & 1, (x >> 6) & 1))
    odd = tl.join(tl.join((x >> 1) & 1, (x >> 5) & 1), tl.join((x >> 3) & 1, (x >> 7) & 1))
    return tl.join(even, odd)  # [..., bit 2, bit 1, bit 0 of the channel]


@device
def unpack(x, NB: tl.constexpr, BLOCKS: tl.constexpr):
    """Bytes u8[BLOCKS, NB, 16] of a plane -> 0/1 i8[tokens, 8 * NB]: channel 8j + c is bit c of byte j."""
    bits = tl.reshape(spread(x), (BLOCKS, NB, 16, 8)).to(tl.int8)
    return tl.reshape(tl.permute(bits, (0, 2, 1, 3)), (BLOCKS * 16, NB * 8))


@triton.jit
def score_kernel(
    levels, factors, bits, bits_page, bits_head, norm, norm_page, norm_head, norm_token, table, table_row, lens,
    scores, best, T, H, G, page, S, chunks, tiles,
    NB: tl.constexpr, NBP: tl.constexpr, DP: tl.constexpr, PAGED: tl.constexpr, ALIGNED: tl.constexpr,
    PLANES: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Plane-0 scores of up to HEADS query rows of one sequence and KV head, over one chunk of positions.

    ALIGNED: pages are whole blocks of 16 tokens, so a block has one page, and its bytes are read 16 at a time.
    """
    TOKENS: tl.constexpr = BLOCKS * 16
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b, h = row // H, row % H
    t, g, used = head_rows(tile, T, G, HEADS, False)
    head = ((b * T + t) * H + h).to(tl.int64) * G + g  # [1, HEADS]
    length = tl.load(lens + b)
    seen = visible(length, T, t, S)
    q = tl.load(levels + head * DP + tl.arange(0, DP)[:, None], mask=used, other=0)
    total = tl.sum(q.to(tl.int32), axis=0)[None, :]
    factor = tl.load(factors + head, mask=used, other=0.0)
    if PLANES == 2:
        factor = factor * GAIN
    top = tl.full((HEADS,), UNSEEN_SCORE, tl.int32)
    j = tl.arange(0, NBP)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    for first in range(tl.program_id(1) * CHUNK, tl.minimum(tl.program_id(1) * CHUNK + CHUNK, S), TOKENS):
        begin = (first + tl.arange(0, BLOCKS) * 16)[:, None, None]
        if ALIGNED:
            live = (begin < length) & (begin < S)
            where = page_at(table, table_row, b, begin // page, live, PAGED)
            within = where * bits_page + h.to(tl.int64) * bits_head + (begin % page).to(tl.int64) * NB
            within = tl.multiple_of(within, (16, 1, 1)) + j * 16 + i
            offset = begin % page + i
            beside = live & (begin + i < S)
        else:
            pos = begin + i
            beside = (pos < length) & (pos < S)
            where = page_at(table, table_row, b, pos // page, beside, PAGED)
            offset = pos % page
            within = where * bits_page + h.to(tl.int64) * bits_head + byte_at(offset, j, page, NB)
        packed = tl.load(bits + within, mask=beside & (j < NB), other=0)
        near = norm + where * norm_page + h.to(tl.int64) * norm_head + offset.to(tl.int64) * norm_token
        norms = tl.reshape(to_f32(tl.load(near, mask=beside, other=0), BF16_KIND), (TOKENS, 1))
        above = tl.dot(unpack(packed, NBP, BLOCKS), q, out_dtype=tl.int32)
        s = to_steps(((2 * above - total).to(tl.float32) * norms) * factor)
        position = first + tl.arange(0, TOKENS)[:, None]
        s = tl.where(position < seen, s, UNSEEN_SCORE)
        top = tl.maximum(top, tl.max(s, axis=0))
        tl.store(scores + head * S + position, s.to(tl.int16), mask=used & (position < S))
    rows = tl.reshape(head * chunks + tl.program_id(1), (HEADS,))
    tl.store(best + rows, top, mask=tl.reshape(used, (HEADS,)))


def head_scores(
    q: torch.Tensor, bits, norm, block_table, seq_lens, page: int, planes: int, scale, max_seq_len,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Every head's own scores i16[B*T*Hkv,G,S], and the best of each chunk of positions i32[B*T*Hkv,G,chunks]."""
    B, T, Hq, D = q.shape
    H = bits.shape[1]
    G, S, NB = Hq // H, width(block_table, page, max_seq_len), cdiv(D, 8)
    chunks = max(1, cdiv(S, CHUNK))
    scores = torch.empty(B * T * H, G, S, dtype=torch.int16, device=q.device)
    best = torch.empty(B * T * H, G, chunks, dtype=torch.int32, device=q.device)
    if scores.numel() == 0:
        return scores, best
    levels, factors = quantise(q, scale)
    table, table_row, paged = table_args(block_table)
    heads = power(min(T * G, HEADS), 8)
    tiles = cdiv(T * G, heads)
    aligned = page % 16 == 0 and bits.stride(0) % 16 == 0 and bits.stride(1) % 16 == 0
    score_kernel[(B * H * tiles, chunks)](
        levels, factors, bits, *bits.stride()[:2], raw(norm), *norm.stride(), table, table_row, seq_lens,
        scores, best, T, H, G, page, S, chunks, tiles,
        NB=NB, NBP=levels.shape[-1] // 8, DP=levels.shape[-1], PAGED=paged, ALIGNED=aligned, PLANES=planes,
        HEADS=heads, CHUNK=CHUNK, BLOCKS=BLOCKS, **EXACT,
    )  # fmt: skip
    return scores, best


@triton.jit
def refine_kernel(
    levels, factors, bits, bits_page, bits_head, plane, norm, norm_page, norm_head, norm_token, table, table_row,
    indices, counts, scores, best, T, H, G, page, K, chunks, tiles,
    NB: tl.constexpr, NBP: tl.constexpr, DP: tl.constexpr, PAGED: tl.constexpr, HEADS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Scores from both planes of N candidates of one row (b, t, h), for up to HEADS of its heads."""
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h = row // H // T, row % H
    _, g, used = head_rows(tile, T, G, HEADS, True)
    head = row * G + g
    slot = tl.program_id(1) * N + tl.arange(0, N)
    listed = slot < tl.load(counts + row)
    pos = tl.load(indices + row * K + slot, mask=listed & (slot < K), other=0)
    where = page_at(table, table_row, b, pos // page, listed, PAGED)
    offset = pos % page
    j = tl.arange(0, NBP)[None, :]
    plane0 = bits + (where * bits_page + h * bits_head)[:, None] + byte_at(offset[:, None], j, page, NB)
    mask = listed[:, None] & (j < NB)
    b0 = spread(tl.load(plane0, mask=mask, other=0))
    b1 = spread(tl.load(plane0 + plane, mask=mask, other=0))
    level = (b0 * 4 + b1 * 2).to(tl.int8) - 3
    q = tl.load(levels + head * DP + tl.arange(0, DP)[:, None], mask=used, other=0)
    dot = tl.dot(tl.reshape(level, (N, DP)), q, out_dtype=tl.int32)
    near = norm + where * norm_page + h * norm_head + offset.to(tl.int64) * norm_token
    norms = to_f32(tl.load(near, mask=listed, other=0), BF16_KIND)[:, None]
    s = to_steps((dot.to(tl.float32) * norms) * tl.load(factors + head, mask=used, other=0.0))
    s = tl.where(listed[:, None], s, UNSEEN_SCORE)
    tl.store(scores + head * K + slot[:, None], s.to(tl.int16), mask=used & (slot < K)[:, None])
    rows = tl.reshape(head * chunks + tl.program_id(1), (HEADS,))
    tl.store(best + rows, tl.max(s, axis=0), mask=tl.reshape(used, (HEADS,)))


def candidate_scores(
    q: torch.Tensor, bits, norm, block_table, page: int, indices: torch.Tensor, counts: torch.Tensor, scale,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Every head's scores from both planes i16[B*T*Hkv,G,K], and the best of each chunk i32[B*T*Hkv,G,chunks]."""
    B, T, Hq, D = q.shape
    H, K, NB = bits.shape[1], indices.shape[-1], cdiv(D, 8)
    G = Hq // H
    chunks = max(1, cdiv(K, CANDIDATES))
    scores = torch.empty(B * T * H, G, K, dtype=torch.int16, device=q.device)
    best = torch.empty(B * T * H, G, chunks, dtype=torch.int32, device=q.device)
    if scores.numel() == 0:
        return scores, best
    levels, factors = quantise(q, scale)
    table, table_row, paged = table_args(block_table)
    heads = power(min(G, HEADS), 8)
    tiles = cdiv(G, heads)
    refine_kernel[(B * T * H * tiles, chunks)](
        levels, factors, bits, *bits.stride()[:2], page * NB, raw(norm), *norm.stride(), table, table_row,
        indices.contiguous(), counts.contiguous(), scores, best, T, H, G, page, K, chunks, tiles,
        NB=NB, NBP=levels.shape[-1] // 8, DP=levels.shape[-1], PAGED=paged, HEADS=heads, N=CANDIDATES, **EXACT,
    )  # fmt: skip
    return scores, best


# --- joining the heads of a group -----------------------------------------------------------------------------------


@device
def best_of(best, row, chunks, BESTS: tl.constexpr):
    """The best score of one head: the maximum over its chunks."""
    top = tl.full((BESTS,), UNSEEN_SCORE, tl.int32)
    for first in range(0, chunks, BESTS):
        c = first + tl.arange(0, BESTS)
        top = tl.maximum(top, tl.load(best + row * chunks + c, mask=c < chunks, other=UNSEEN_SCORE))
    return tl.max(top)


@triton.jit
def weight_kernel(scores, best, sums, N, chunks, blocks, JOIN: tl.constexpr, BESTS: tl.constexpr):
    """Sum of the weights of one head's scores over one block of positions, an exact integer."""
    row = tl.program_id(0).to(tl.int64)
    top = best_of(best, row, chunks, BESTS)
    pos = tl.program_id(1) * JOIN + tl.arange(0, JOIN)
    s = tl.load(scores + row * N + pos, mask=pos < N, other=UNSEEN_SCORE).to(tl.int32)
    w = tl.where(s == UNSEEN_SCORE, 0, exp_weight(tl.maximum(top - s, 0), STEP_LOG2E))
    tl.store(sums + row * blocks + tl.program_id(1), tl.sum(w.to(tl.int64)))


@device
def total_of(sums, row, blocks, BESTS: tl.constexpr):
    """The sum of one head's weights over all blocks."""
    total = tl.zeros((BESTS,), tl.int64)
    for first in range(0, blocks, BESTS):
        c = first + tl.arange(0, BESTS)
        total += tl.load(sums + row * blocks + c, mask=c < blocks, other=0)
    return tl.sum(total)


@device
def biased(joined, bias, bias_row, b, pos, mask):
    """Scores plus the bias of their token in steps; what is unseen stays so."""
    nats = tl.load(bias + b.to(tl.int64) * bias_row + pos, mask=mask, other=0.0).to(tl.float32)
    steps = round_even(tl.minimum(tl.maximum(nats * STEPS, -1048576.0), 1048576.0)).to(tl.int32)
    moved = tl.minimum(tl.maximum(joined + steps, LOWEST_SCORE), -LOWEST_SCORE)
    return tl.where(joined == UNSEEN_SCORE, UNSEEN_SCORE, moved)


@triton.jit
def join_kernel(
    scores, best, sums, joined, positions, bias, bias_row, lens, window, T, H, G, N, S, chunks, blocks,
    SOFTMAX: tl.constexpr, WINDOWED: tl.constexpr, JOIN: tl.constexpr, BESTS: tl.constexpr,
):  # fmt: skip
    """One block of positions of one row (b, t, h): the group's joined score, plus bias, less what a window leaves out.

    With `positions` (candidates), results go to the positions of a row of S, else to the slots they came from.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * JOIN + tl.arange(0, JOIN)
    inside = slot < N
    share = tl.zeros((JOIN,), tl.float32)
    above = tl.full((JOIN,), -1 << 20, tl.int32)
    seen = inside
    for g in range(G):
        s = tl.load(scores + (row * G + g) * N + slot, mask=inside, other=UNSEEN_SCORE).to(tl.int32)
        seen = s != UNSEEN_SCORE
        below = tl.maximum(best_of(best, row * G + g, chunks, BESTS) - s, 0)
        if SOFTMAX:
            one = tl.full((JOIN,), 1.0, tl.float32)
            z = tl.maximum(total_of(sums, row * G + g, blocks, BESTS), 1).to(tl.float32)
            w = tl.where(seen, exp_weight(below, STEP_LOG2E), 0)
            share = share + w.to(tl.float32) * tl.div_rn(one, tl.zeros_like(one) + z)
        else:
            above = tl.maximum(above, -below)
    result = log_steps(share) if SOFTMAX else tl.maximum(above, LOWEST_SCORE)
    result = tl.where(seen, result, UNSEEN_SCORE)
    b, t = row // H // T, row // H % T
    pos = slot
    if positions is not None:
        pos = tl.load(positions + row * N + slot, mask=inside, other=-1)
        inside = inside & (pos >= 0) & seen
    if bias is not None:
        result = biased(result, bias, bias_row, b, pos, inside & seen)
    if WINDOWED:
        result = tl.where(pos < visible(tl.load(lens + b), T, t, S) - window, UNSEEN_SCORE, result)
    to = pos if positions is not None else slot
    tl.store(joined + row * (S if positions is not None else N) + to, result.to(tl.int16), mask=inside)


def join_heads(
    scores: torch.Tensor, best: torch.Tensor, joined: torch.Tensor, pool: int, T: int, H: int, *,
    positions: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    windowed: tuple[torch.Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Join scores i16[rows,G,N] of heads into joined i16[rows,N], or at `positions` i32[rows,N] of joined [rows,S].

    bias f32[B,>=S] is added in 1/256 nat; windowed = (seq_lens, window) leaves positions before the window unseen.
    """
    rows, G, N = scores.shape
    if rows * N == 0:
        return
    blocks = cdiv(N, JOIN)
    sums = None
    if pool == 1:
        sums = torch.empty(rows, G, blocks, dtype=torch.int64, device=scores.device)
        weight_kernel[(rows * G, blocks)](
            scores, best, sums, N, best.shape[-1], blocks, JOIN=JOIN, BESTS=BESTS, **EXACT
        )
    lens, window = windowed or (None, 0)
    join_kernel[(rows, blocks)](
        scores, best, sums, joined, positions, bias, 0 if bias is None else bias.stride(0), lens, window,
        T, H, G, N, joined.shape[-1], best.shape[-1], blocks,
        SOFTMAX=pool == 1, WINDOWED=windowed is not None, JOIN=JOIN, BESTS=BESTS, **EXACT,
    )  # fmt: skip


# --- the ops --------------------------------------------------------------------------------------------------------


def _into(joined: torch.Tensor, shape: tuple[int, ...], outs: tuple | None) -> tuple[torch.Tensor]:
    joined = joined.view(shape)
    if outs is not None:
        outs[0].copy_(joined)
        return (outs[0],)
    return (joined,)


def _destination(rows: int, n: int, outs: tuple | None, device_: torch.device) -> torch.Tensor:
    """Where joined scores go: the output itself if it is packed."""
    if outs is not None and outs[0].is_contiguous():
        return outs[0].view(rows, n)
    return torch.empty(rows, n, dtype=torch.int16, device=device_)


def score_tokens(
    q, bits, norm, block_table, seq_lens, page, planes, pool, scale, max_seq_len, *, outs=None
) -> tuple[torch.Tensor]:
    """i16[B,T,Hkv,S]: the heads' plane-0 scores joined over the group; -32768 where not visible."""
    (B, T), H = q.shape[:2], bits.shape[1]
    scores, best = head_scores(q, bits, norm, block_table, seq_lens, page, planes, scale, max_seq_len)
    joined = _destination(B * T * H, scores.shape[-1], outs, q.device)
    join_heads(scores, best, joined, pool, T, H)
    return _into(joined, (B, T, H, scores.shape[-1]), outs)


def refine_tokens(
    q, bits, norm, block_table, seq_lens, page, cand_indices, cand_counts, pool, scale, max_seq_len, *, outs=None
) -> tuple[torch.Tensor]:
    """i16[B,T,Hkv,K]: the score from both planes for the candidates; -32768 in the slots past their count."""
    (B, T), H = q.shape[:2], bits.shape[1]
    scores, best = candidate_scores(q, bits, norm, block_table, page, cand_indices, cand_counts, scale)
    joined = _destination(B * T * H, scores.shape[-1], outs, q.device)
    join_heads(scores, best, joined, pool, T, H)
    return _into(joined, (B, T, H, scores.shape[-1]), outs)
