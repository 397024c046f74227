"""score_pages in Triton: the estimate of each page from its summary, joined over the heads of a group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_common import (
    INF,
    cdiv,
    device,
    kind,
    larger,
    largest,
    operand,
    page_at,
    power,
    product,
    product_kind,
    raw,
    softmax_scale,
    table_args,
    visible,
    width,
)

HEADS = 16  # query rows of a matrix product
PAGES = 64  # pages that one program scores; fewer in f32, whose products lie in registers
JOIN = 256  # pages that one program joins
BESTS = 128  # partial results reduced at a time


@triton.jit
def page_score_kernel(
    q, q_b, q_t, q_h, summary, summary_page, summary_head, summary_row, table, table_row, lens,
    scores, best, beta, scale, T, H, G, page, S, M, chunks, tiles,
    D: tl.constexpr, BD: tl.constexpr, QKIND: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr,
    PAGED: tl.constexpr, HEADS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """(q.c + beta * sum |q| r) * scale of PAGES pages for up to HEADS query rows; best[...]: maximum of the chunk."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b, h = row // H, row % H
    r = (tile * HEADS + tl.arange(0, HEADS))[:, None]
    t, g, used = r // G, r % G, r < T * G
    j = tl.arange(0, BD)
    place = b.to(tl.int64) * q_b + t.to(tl.int64) * q_t + (h * G + g).to(tl.int64) * q_h
    x = operand(tl.load(q + place + j[None, :], mask=used & (j < D)[None, :], other=0), QKIND, DOT)
    m = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    length = tl.load(lens + b)
    live = (m * page < length) & (m < M)
    where = page_at(table, table_row, b, m, live, PAGED)
    at = summary + (where * summary_page + h.to(tl.int64) * summary_head)[None, :] + j[:, None]
    mask = live[None, :] & (j < D)[:, None]
    centre = operand(tl.load(at, mask=mask, other=0), KIND, DOT)
    radius = operand(tl.load(at + summary_row, mask=mask, other=0), KIND, DOT)
    s = product(x, centre) + beta * product(tl.abs(x), radius)
    seen = m[None, :] * page < visible(length, T, t, S)
    s = tl.where(seen, s * scale, float("-inf"))
    head = ((b * T + t) * H + h).to(tl.int64) * G + g
    tl.store(scores + head * M + m[None, :], s, mask=used & (m < M)[None, :])
    rows = tl.reshape(head * chunks + tl.program_id(1), (HEADS,))
    tl.store(best + rows, largest(s, 1), mask=tl.reshape(used, (HEADS,)))


@device
def best_page(best, row, chunks, BESTS: tl.constexpr):
    """The best score of one head over its chunks."""
    top = tl.full((BESTS,), float("-inf"), tl.float32)
    for first in range(0, chunks, BESTS):
        c = first + tl.arange(0, BESTS)
        top = larger(top, tl.load(best + row * chunks + c, mask=c < chunks, other=float("-inf")))
    return largest(top, 0)


@triton.jit
def page_sum_kernel(scores, best, sums, M, chunks, blocks, JOIN: tl.constexpr, BESTS: tl.constexpr):
    """Sum of exp(score - best) of one head over one block of pages."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * JOIN + tl.arange(0, JOIN)
    s = tl.load(scores + row * M + m, mask=m < M, other=float("-inf"))
    tl.store(sums + row * blocks + tl.program_id(1), tl.sum(tl.exp(s - best_page(best, row, chunks, BESTS))))


@device
def page_bias(bias, bias_row, b, m, page, seen, visible_tokens):
    """The largest bias among the visible tokens of each page."""
    most = tl.where(seen, float("-inf"), 0.0)
    for i in range(page):
        pos = m * page + i
        one = tl.load(bias + b.to(tl.int64) * bias_row + pos, mask=seen & (pos < visible_tokens), other=float("-inf"))
        most = larger(most, one.to(tl.float32))
    return most


@triton.jit
def page_join_kernel(
    scores, best, sums, joined, bias, bias_row, lens, window, T, H, G, page, S, M, chunks, blocks,
    SOFTMAX: tl.constexpr, WINDOWED: tl.constexpr, JOIN: tl.constexpr, BESTS: tl.constexpr,
):  # fmt: skip
    """One block of pages of one row (b, t, h): the maximum of (score - head's best), or log of the summed softmax."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * JOIN + tl.arange(0, JOIN)
    share = tl.zeros((JOIN,), tl.float32)
    above = tl.full((JOIN,), float("-inf"), tl.float32)
    for g in range(G):
        s = tl.load(scores + (row * G + g) * M + m, mask=m < M, other=float("-inf"))
        below = s - best_page(best, row * G + g, chunks, BESTS)
        if SOFTMAX:
            z = tl.zeros((BESTS,), tl.float32)
            for first in range(0, blocks, BESTS):
                c = first + tl.arange(0, BESTS)
                z += tl.load(sums + (row * G + g) * blocks + c, mask=c < blocks, other=0.0)
            # log of the sum of exp(below - log z), relative to the largest so far: no share underflows.
            below = below - tl.log(tl.sum(z))
            most = larger(above, below)
            safe = tl.where(most == -INF, 0.0, most)
            share = share * tl.exp(above - safe) + tl.exp(below - safe)
            above = most
        else:
            above = larger(above, below)
    b, t = row // H // T, row // H % T
    tokens = visible(tl.load(lens + b), T, t, S)
    seen = m * page < tokens
    result = tl.where(seen, above + tl.log(share), -INF) if SOFTMAX else tl.where(seen, above, -INF)
    if WINDOWED:
        result = tl.where(tl.minimum((m + 1) * page, tokens) <= tokens - window, -INF, result)
    if bias is not None:
        result = result + page_bias(bias, bias_row, b, m, page, seen, tokens)
    tl.store(joined + row * M + m, result, mask=m < M)


def joined_pages(
    q: torch.Tensor, summary, block_table, seq_lens, page: int, beta: float, pool: int, scale, max_seq_len,
    *, bias: torch.Tensor | None = None, window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """f32[B,T,Hkv,M]: joined scores of pages, plus the largest bias of a page; -inf where not visible or too old."""
    B, T, Hq, D = q.shape
    H = summary.shape[1]
    G, S = Hq // H, width(block_table, page, max_seq_len)
    M = cdiv(S, page)
    joined = torch.empty(B, T, H, M, dtype=torch.float32, device=q.device)
    if joined.numel() == 0:
        return joined
    dot = product_kind(q, summary)
    pages, warps = (PAGES, 4) if dot else (32 if D <= 128 else 16, 8)
    rows, chunks, blocks, tiles = B * T * H, cdiv(M, pages), cdiv(M, JOIN), cdiv(T * G, HEADS)
    scores = torch.empty(rows, G, M, dtype=torch.float32, device=q.device)
    best = torch.empty(rows, G, chunks, dtype=torch.float32, device=q.device)
    table, table_row, paged = table_args(block_table)
    page_score_kernel[(B * H * tiles, chunks)](
        raw(q), *q.stride()[:3], raw(summary), *summary.stride()[:3], table, table_row, seq_lens, scores, best,
        float(beta), softmax_scale(scale, D), T, H, G, page, S, M, chunks, tiles,
        D=D, BD=power(D, 16), QKIND=kind(q), KIND=kind(summary), DOT=dot, PAGED=paged,
        HEADS=HEADS, PAGES=pages, num_warps=warps,
    )  # fmt: skip
    sums = torch.empty(rows, G, blocks, dtype=torch.float32, device=q.device) if pool == 1 else None
    if pool == 1:
        page_sum_kernel[(rows * G, blocks)](scores, best, sums, M, chunks, blocks, JOIN=JOIN, BESTS=BESTS)
    page_join_kernel[(rows, blocks)](
        scores, best, sums, joined, bias, 0 if bias is None else bias.stride(0), seq_lens, window or 0,
        T, H, G, page, S, M, chunks, blocks,
        SOFTMAX=pool == 1, WINDOWED=window is not None, JOIN=JOIN, BESTS=BESTS,
    )  # fmt: skip
    return joined


def score_pages(
    q, summary, block_table, seq_lens, page, beta, pool, scale, max_seq_len, *, outs=None
) -> tuple[torch.Tensor]:
    """f32[B,T,Hkv,M]: (q.c + beta * sum |q_i| r_i) * scale of each page, joined over the group; -inf if not visible."""
    joined = joined_pages(q, summary, block_table, seq_lens, page, beta, pool, scale, max_seq_len)
    if outs is None:
        return (joined,)
    outs[0].copy_(joined)
    return (outs[0],)
