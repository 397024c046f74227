"""attend in Triton: the launch chain score, shortlist, refine, select, attend, estimate; nothing comes back to the host."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .reference_select import default_capacity
from .reference_sketch import UNREAD_SHRINK, UNSEEN, f32
from .triton_attention import attention_into, attention_outs, capped
from .triton_common import (
    EXACT,
    INF,
    LOG2E,
    STEPS,
    UNSEEN_SCORE,
    cdiv,
    device,
    exp_weight,
    kind,
    larger,
    largest,
    page_at,
    power,
    raw,
    softmax_scale,
    table_args,
    to_f32,
    visible,
    width,
)
from .triton_pages import joined_pages, page_bias
from .triton_scores import BESTS, best_of, candidate_scores, head_scores, join_heads
from .triton_select import choose

# Status codes, as in reference_attend.
SLICED, DENSE_LAYER, DENSE_SHORT, DENSE_PREFILL, FALLBACK_MASS = (tl.constexpr(i) for i in range(5))
LN2 = tl.constexpr(math.log(2.0))
SHRINK = tl.constexpr(f32(UNREAD_SHRINK))
SHRUNK_LOG2E = tl.constexpr(f32(UNREAD_SHRINK * f32(math.log2(math.e) / 256)))
MARK = 256  # listed units that one program marks as read
BLOCK = 1024  # tokens that one program of the estimate looks at
PAGES = 64  # pages


# --- the estimate of what was not read ------------------------------------------------------------------------------


@triton.jit
def mark_kernel(indices, counts, read, K, units, MARK: tl.constexpr):
    """Mark the listed units of one row in read u8[rows, units]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * MARK + tl.arange(0, MARK)
    listed = (i < tl.load(counts + row)) & (i < K)
    unit = tl.load(indices + row * K + i, mask=listed, other=-1)
    tl.store(read + row * units + unit, tl.full((MARK,), 1, tl.uint8), mask=listed & (unit >= 0))


@device
def centre_logit(q, q_b, q_t, q_h, b, t, hq, centre, h, scale, D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr):
    """scale * q.centre of one query head: the part of its logits that sketch scores leave out."""
    j = tl.arange(0, BD)
    place = b.to(tl.int64) * q_b + t.to(tl.int64) * q_t + hq.to(tl.int64) * q_h
    x = to_f32(tl.load(q + place + j, mask=j < D, other=0), KIND)
    c = tl.load(centre + h * D + j, mask=j < D, other=0.0).to(tl.float32)
    return tl.sum(x * c) * scale


@device
def store_part(tops, sums, at, x):
    """Store logits x [n] as (largest, sum of exp(x - largest)); -inf counts nothing, NaN stays."""
    top = largest(x, 0)
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(weight_below(x, top)).to(tl.float64))


@device
def weight_below(x, top):
    """exp(x - top): 1 where both are infinite, 0 for -inf."""
    return tl.where(x == -INF, 0.0, tl.where(x == top, 1.0, tl.exp2((x - top) * LOG2E)))


@triton.jit
def unread_kernel(
    q, q_b, q_t, q_h, scores, best, read, lens, centre, bias, bias_row, tops, sums, scale, cap, window,
    T, H, G, S, chunks, blocks,
    D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK: tl.constexpr, BESTS: tl.constexpr,
):  # fmt: skip
    """One block of one query head: (largest logit, sum of exp) of its visible, unread tokens, from their scores.

    PLAIN: logits are scores: an exact integer sum of weights relative to the head's best score.
    """
    head = tl.program_id(0).to(tl.int64)
    row = head // G
    b, t, h = row // H // T, row // H % T, row % H
    pos = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pos < S
    s = tl.load(scores + head * S + pos, mask=inside, other=UNSEEN_SCORE).to(tl.int32)
    counted = inside & (s != UNSEEN_SCORE) & (tl.load(read + row * S + pos, mask=inside, other=1) == 0)
    base = centre_logit(q, q_b, q_t, q_h, b, t, h * G + head % G, centre, h, scale, D, BD, KIND)
    at = head * blocks + tl.program_id(1)
    if PLAIN:
        top = best_of(best, head, chunks, BESTS)
        w = tl.where(counted, exp_weight(tl.maximum(top - s, 0), SHRUNK_LOG2E), 0)
        total = tl.sum(w.to(tl.int64))
        level = SHRINK * (top.to(tl.float32) / STEPS) + base
        tl.store(tops + at, tl.where(total > 0, level, float("-inf")))
        tl.store(sums + at, total.to(tl.float64) * 5.9604644775390625e-08)  # / 2^24
    else:
        x = SHRINK * (s.to(tl.float32) / STEPS) + base
        if CAPPED:
            x = capped(x, cap)
        if bias is not None:
            x = x + tl.load(bias + b * bias_row + pos, mask=counted, other=0.0).to(tl.float32)
        if WINDOWED:
            seen = visible(tl.load(lens + b), T, t, S)
            counted = counted & (pos + 1 > seen - window)
        store_part(tops, sums, at, tl.where(counted, x, float("-inf")))


@triton.jit
def unread_pages_kernel(
    q, q_b, q_t, q_h, summary, summary_page, summary_head, table, table_row, read, lens, bias, bias_row, tops, sums,
    scale, cap, window, T, H, G, page, S, M, blocks,
    D: tl.constexpr, BD: tl.constexpr, QKIND: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """The same for pages: every token of an unread page is taken to have the page's centre for its key."""
    head = tl.program_id(0).to(tl.int64)
    row = head // G
    b, t, h = row // H // T, row // H % T, row % H
    m = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    seen = visible(tl.load(lens + b), T, t, S)
    live = tl.minimum(tl.maximum(seen - m * page, 0), page)
    counted = (m < M) & (live > 0) & (tl.load(read + row * M + m, mask=m < M, other=1) == 0)
    if WINDOWED:
        counted = counted & (tl.minimum((m + 1) * page, seen) > seen - window)
    j = tl.arange(0, BD)
    x = to_f32(tl.load(q + b * q_b + t * q_t + (h * G + head % G) * q_h + j, mask=j < D, other=0), QKIND)
    where = page_at(table, table_row, b, m, counted, PAGED)
    at = summary + (where * summary_page + h * summary_head)[:, None] + j[None, :]
    centres = to_f32(tl.load(at, mask=counted[:, None] & (j < D)[None, :], other=0), KIND)
    logit = tl.sum(centres * x[None, :], axis=1) * scale
    if CAPPED:
        logit = capped(logit, cap)
    if bias is not None:
        logit = logit + page_bias(bias, bias_row, b, m, page, counted, seen)
    logit = tl.where(counted, logit + tl.log(tl.maximum(live, 1).to(tl.float32)), float("-inf"))
    store_part(tops, sums, head * blocks + tl.program_id(1), logit)


@device
def log_sum(tops, sums, head, blocks, BESTS: tl.constexpr):
    """log of the sum over all blocks of one head; -inf for nothing."""
    c = tl.arange(0, BESTS)
    top = tl.full((), float("-inf"), tl.float32)
    for first in range(0, blocks, BESTS):
        x = tl.load(tops + head * blocks + first + c, mask=first + c < blocks, other=float("-inf"))
        top = larger(top, largest(x, 0))
    total = tl.zeros((), tl.float64)
    for first in range(0, blocks, BESTS):
        inside = first + c < blocks
        x = tl.load(tops + head * blocks + first + c, mask=inside, other=float("-inf"))
        z = tl.load(sums + head * blocks + first + c, mask=inside, other=0.0)
        total += tl.sum(tl.where(z == 0, 0.0, weight_below(x, top).to(tl.float64) * z))
    return tl.where(total == 0, float("-inf"), top + tl.log(total.to(tl.float32)))


@triton.jit
def unread_log_kernel(tops, sums, out, o_b, o_t, o_h, T, H, G, blocks, BESTS: tl.constexpr):
    """One query head: the log of its unread sum."""
    head = tl.program_id(0).to(tl.int64)
    row = head // G
    b, t, hq = row // H // T, row // H % T, row % H * G + head % G
    tl.store(out + b * o_b + t * o_t + hq * o_h, log_sum(tops, sums, head, blocks, BESTS))


@triton.jit
def finish_kernel(
    tops, sums, lse, l_b, l_t, l_h, counts, lens, omitted, m_b, m_t, m_h, status, s_b, s_t, s_h, again, limit,
    T, H, G, page, S, blocks, LIMITED: tl.constexpr, BESTS: tl.constexpr,
):  # fmt: skip
    """One query head: omitted mass = sigmoid(log of the unread sum - LSE), status, and whether it runs again dense."""
    head = tl.program_id(0).to(tl.int64)
    row = head // G
    b, t, hq = row // H // T, row // H % T, row % H * G + head % G
    unread = log_sum(tops, sums, head, blocks, BESTS)
    own = tl.load(lse + b * l_b + t * l_t + hq * l_h)
    share = 1.0 / (1.0 + tl.exp(own - unread))
    share = tl.where(unread == -INF, 0.0, share)
    seen = visible(tl.load(lens + b), T, t, S)
    whole = tl.load(counts + row) == (seen + page - 1) // page
    code = tl.where(whole, DENSE_SHORT, SLICED)
    if LIMITED:
        dense = (share <= limit) == 0  # NaN too
        tl.store(again + (b * T + t) * H * G + hq, dense.to(tl.uint8))
        code = tl.where(dense, FALLBACK_MASS, code)
        share = tl.where(dense, 0.0, share)
    tl.store(omitted + b * m_b + t * m_t + hq * m_h, share)
    tl.store(status + b * s_b + t * s_t + hq * s_h, code.to(tl.uint8))


# --- the parts of the chain -----------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The inputs of attend, in order."""

    q: Any
    k_cache: Any
    v_cache: Any
    bits: Any
    norm: Any
    centre: Any
    planes: Any
    summary: Any
    block_table: Any
    seq_lens: Any
    ratio: Any
    candidates: Any
    top_p: Any
    sink: Any
    recent: Any
    beta: Any
    pool: Any
    max_omitted_mass: Any
    dense_layer: Any
    max_sliced_T: Any
    min_len: Any
    keep: Any
    scale: Any
    key_bias: Any
    softcap: Any
    window: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    max_seq_len: Any


class Chain:
    """One call of attend: its arguments, and the steps that a sketch and page summaries share."""

    def __init__(self, inputs: Inputs, outs: Any) -> None:
        self.a = inputs
        self.B, self.T, self.Hq, self.D = self.a.q.shape
        self.H, self.page = self.a.k_cache.shape[1:3]
        self.G = self.Hq // self.H
        self.S = width(self.a.block_table, self.page, self.a.max_seq_len)
        self.paged_unit = self.a.summary is not None
        self.size = self.page if self.paged_unit else 1
        self.units = cdiv(self.S, self.size)
        self.outs = self._new_outs() if outs is None else outs

    def _new_outs(self) -> tuple[torch.Tensor, ...]:
        dense = self.a.dense_layer or self.a.max_sliced_T < self.T
        rows, dev = (self.B, self.T, self.H), self.a.q.device
        return (
            *attention_outs(self.a.q, self.a.v_cache),
            torch.empty(*rows, 0 if dense else self._capacity(), dtype=torch.int32, device=dev),
            torch.empty(rows, dtype=torch.int32, device=dev),
            torch.empty(self.a.q.shape[:3], dtype=torch.float32, device=dev),
            torch.empty(self.a.q.shape[:3], dtype=torch.uint8, device=dev),
        )

    def _capacity(self) -> int:
        unit = 1 if self.paged_unit else 0
        K = default_capacity(self.units, unit, self.size, self.a.ratio, None, self.a.sink, self.a.recent, self.a.keep)
        return max(K, min(self.units, max(1, cdiv(self.a.min_len, self.size))))

    def attention(self, out, lse, indices=None, counts=None, only=None) -> None:
        attention_into(
            self.a.q, self.a.k_cache, self.a.v_cache, self.a.block_table, self.a.seq_lens, indices, counts,
            1 if self.paged_unit and indices is not None else 0, self.a.scale, self.a.key_bias, self.a.softcap, self.a.window,
            self.a.sinks, self.a.k_scale, self.a.v_scale, self.a.max_seq_len, out, lse, only,
        )  # fmt: skip

    def choose(self, scores: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, listed: bool = False) -> None:
        """Select by the policy: at least one unit; short sequences whole; of sketches only the shortlisted."""
        choose(
            scores, self.a.seq_lens, 1 if self.paged_unit else 0, self.size, self.a.ratio, None, self.a.top_p, self.a.sink,
            self.a.recent, self.a.keep, indices, counts, least=1, min_len=self.a.min_len, listed=listed,
        )  # fmt: skip

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.a.q.device)

    def ranked_tokens(self) -> tuple[torch.Tensor, bool, torch.Tensor, torch.Tensor]:
        """Final scores i16[B,T,Hkv,S], whether only listed tokens count, each head's plane-0 scores and their bests."""
        first, best = head_scores(
            self.a.q, self.a.bits, self.a.norm, self.a.block_table, self.a.seq_lens, self.page, self.a.planes, self.a.scale,
            self.a.max_seq_len,
        )  # fmt: skip
        rows, shape = self.B * self.T * self.H, (self.B, self.T, self.H)
        scores = self.empty(rows, self.S, dtype=torch.int16)
        windowed = None if self.a.window is None else (self.a.seq_lens, int(self.a.window))
        pool = self.a.pool if self.a.planes == 1 else 0
        join_heads(first, best, scores, pool, self.T, self.H, bias=self.a.key_bias, windowed=windowed)
        if self.a.planes == 1:
            return scores.view(*shape, self.S), False, first, best
        share = max(self.a.candidates, self.a.ratio)
        K = max(default_capacity(self.S, 0, self.page, share, None, 0, 0, None), min(self.S, 1))
        listed, count = self.empty(*shape, K, dtype=torch.int32), self.empty(*shape, dtype=torch.int32)
        wide = scores.view(*shape, self.S)
        choose(wide, self.a.seq_lens, 0, 1, share, None, None, 0, 0, None, listed, count, least=1)
        fine, fine_best = candidate_scores(
            self.a.q, self.a.bits, self.a.norm, self.a.block_table, self.page, listed, count, self.a.scale
        )
        ranked = torch.full((rows, self.S), UNSEEN, dtype=torch.int16, device=self.a.q.device)
        join_heads(fine, fine_best, ranked, self.a.pool, self.T, self.H, positions=listed, bias=self.a.key_bias)
        return ranked.view(*shape, self.S), True, first, best

    def marked(self, indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """u8[rows, units]: 1 for what was read."""
        rows, K = self.B * self.T * self.H, indices.shape[-1]
        read = torch.zeros(rows, self.units, dtype=torch.uint8, device=self.a.q.device)
        if K:
            mark_kernel[(rows, cdiv(K, MARK))](indices, counts, read, K, self.units, MARK=MARK)
        return read

    def place(self) -> dict[str, Any]:
        """Arguments that both estimates share."""
        return {
            "bias": self.a.key_bias, "bias_row": 0 if self.a.key_bias is None else self.a.key_bias.stride(0),
            "scale": softmax_scale(self.a.scale, self.D), "cap": float(self.a.softcap or 0.0),
            "window": int(self.a.window or 0), "T": self.T, "H": self.H, "G": self.G, "S": self.S, "D": self.D,
            "BD": power(self.D, 16), "CAPPED": self.a.softcap is not None, "WINDOWED": self.a.window is not None,
        }  # fmt: skip

    def unread_tokens(self, first, best, read) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest logit, sum) of each block of each head's unread tokens."""
        heads, blocks = self.B * self.T * self.Hq, max(1, cdiv(self.S, BLOCK))
        tops, sums = self.empty(heads, blocks, dtype=torch.float32), self.empty(heads, blocks, dtype=torch.float64)
        plain = self.a.key_bias is None and self.a.softcap is None and self.a.window is None
        unread_kernel[(heads, blocks)](
            raw(self.a.q), *self.a.q.stride()[:3], first, best, read, self.a.seq_lens, self.a.centre.contiguous(),
            tops=tops, sums=sums, chunks=best.shape[-1], blocks=blocks, KIND=kind(self.a.q), PLAIN=plain,
            BLOCK=BLOCK, BESTS=BESTS, **self.place(), **EXACT,
        )  # fmt: skip
        return tops, sums

    def unread_pages(self, read) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest logit, sum) of each block of each head's unread pages."""
        heads, blocks = self.B * self.T * self.Hq, max(1, cdiv(self.units, PAGES))
        tops, sums = self.empty(heads, blocks, dtype=torch.float32), self.empty(heads, blocks, dtype=torch.float64)
        table, table_row, paged = table_args(self.a.block_table)
        unread_pages_kernel[(heads, blocks)](
            raw(self.a.q), *self.a.q.stride()[:3], raw(self.a.summary), *self.a.summary.stride()[:2], table, table_row, read,
            self.a.seq_lens, tops=tops, sums=sums, page=self.page, M=self.units, blocks=blocks, QKIND=kind(self.a.q),
            KIND=kind(self.a.summary), PAGED=paged, PAGES=PAGES, **self.place(),
        )  # fmt: skip
        return tops, sums

    def finish(self, tops, sums, counts) -> torch.Tensor | None:
        """Omitted mass and status into the outputs; the heads to run again, if a limit is set."""
        _, lse, _, _, omitted, status = self.outs
        limited = self.a.max_omitted_mass is not None
        again = self.empty(self.B, self.T, self.Hq, dtype=torch.uint8) if limited else None
        finish_kernel[(self.B * self.T * self.Hq,)](
            tops, sums, lse, *lse.stride(), counts, self.a.seq_lens, omitted, *omitted.stride(), status,
            *status.stride(), again, float(self.a.max_omitted_mass or 0.0), self.T, self.H, self.G, self.size, self.S,
            tops.shape[-1], LIMITED=limited, BESTS=BESTS,
        )  # fmt: skip
        return again

    def run_dense(self, code: int) -> None:
        out, lse, indices, counts, omitted, status = self.outs
        self.attention(out, lse)
        indices.fill_(-1)
        counts.zero_()
        omitted.zero_()
        status.fill_(code)

    def select(self, indices: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The selection, and (largest logit, sum) of each block of what it leaves out."""
        first = best = None
        if self.paged_unit:
            scores = joined_pages(
                self.a.q, self.a.summary, self.a.block_table, self.a.seq_lens, self.page, self.a.beta, self.a.pool, self.a.scale,
                self.a.max_seq_len, bias=self.a.key_bias, window=self.a.window,
            )  # fmt: skip
            self.choose(scores, indices, counts)
        else:
            scores, listed, first, best = self.ranked_tokens()
            self.choose(scores, indices, counts, listed=listed)
        read = self.marked(indices, counts)
        return self.unread_pages(read) if self.paged_unit else self.unread_tokens(first, best, read)

    def run(self) -> None:
        out, lse, indices, counts, _, _ = self.outs
        packed = indices.contiguous(), counts.contiguous()
        tops, sums = self.select(*packed)
        self.attention(out, lse, *packed)
        again = self.finish(tops, sums, packed[1])
        if again is not None:
            self.attention(out, lse, only=again)
        copy_back(packed, (indices, counts))

    def run_selection(self) -> None:
        indices, counts, log_unread = self.outs
        packed = indices.contiguous(), counts.contiguous()
        tops, sums = self.select(*packed)
        unread_log_kernel[(self.B * self.T * self.Hq,)](
            tops, sums, log_unread, *log_unread.stride(), self.T, self.H, self.G, tops.shape[-1], BESTS=BESTS
        )
        copy_back(packed, (indices, counts))


def copy_back(packed: tuple[torch.Tensor, ...], outs: tuple[torch.Tensor, ...]) -> None:
    for own, result in zip(packed, outs):
        if own is not result:
            result.copy_(own)


def select_slice(
    q, bits, norm, centre, planes, summary, block_table, seq_lens, page, ratio, candidates, top_p, sink, recent, beta,
    pool, min_len, keep, scale, key_bias, softcap, window, max_seq_len, outs,
):  # fmt: skip
    """indices, counts, log_unread: the first half of `attend`."""
    index = norm if summary is None else summary
    chain = Chain(
        Inputs(
            q, _Shape((index.shape[0], index.shape[1], page, q.shape[3])), None, bits, norm, centre, planes, summary, block_table,
            seq_lens, ratio, candidates, top_p, sink, recent, beta, pool, None, False, q.shape[1], min_len, keep, scale, key_bias,
            softcap, window, None, None, None, max_seq_len,
        ),
        outs,
    )  # fmt: skip
    if q.numel():
        chain.run_selection()
    return chain.outs


class _Shape(NamedTuple):
    """A cache that is not read."""

    shape: tuple[int, ...]


def attend(*inputs: Any, outs: Any = None) -> tuple[torch.Tensor, ...]:
    """out, lse, indices, counts, omitted_mass, status: score all, refine the best, select, attend to what was selected.

    inputs: those of the native op, in order (`Inputs`).
    """
    chain = Chain(Inputs(*inputs), outs)
    if chain.a.q.numel() == 0:
        return chain.outs
    if chain.a.dense_layer:
        chain.run_dense(DENSE_LAYER.value)
    elif chain.a.max_sliced_T < chain.T:
        chain.run_dense(DENSE_PREFILL.value)
    else:
        chain.run()
    return chain.outs
