"""Attention in Triton over all tokens or a selection of them: split-KV with fixed boundaries, then a combining pass.

The query heads of a group are rows of one matrix product, so each K and V row is read once for up to 16 of them.  A row's
entries (tokens, or tokens of listed pages) are cut every SPLIT entries whatever the batch, and partial results are added
up in that order: a row's bits depend on its own length only, and a full selection equals the dense result.  Only calls
with more than LONG query tokens (prompts) use wider tiles and one split.
Method: online softmax (Milakov & Gimelshein 2018), split over KV as in FlashDecoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .triton_common import (
    INF,
    LOG2E,
    cdiv,
    device,
    from_f32,
    kind,
    larger,
    largest,
    operand,
    page_at,
    power,
    product,
    product_kind,
    raw,
    scale_args,
    scale_at,
    softmax_scale,
    table_args,
    to_f32,
    visible,
    weight_operand,
    width,
)

SPLIT = 256  # entries of a partial result
LONG = 16  # query tokens up to which the tiles of decoding are used
PARTS = 16  # partial results combined at a time


@device
def capped(x, cap):
    """cap * tanh(x / cap), without losing small x in a difference of exponentials of large ones."""
    e = tl.exp(-2.0 * tl.abs(x / cap))
    size = cap * ((1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -size, size)


@device
def entry_positions(indices, row, K, count, entry, end, page, seen, SELECTED: tl.constexpr, UNIT: tl.constexpr):
    """Position of each entry of a row, and whether it is one: within the split, listed and visible."""
    live = entry < end
    if SELECTED:
        if UNIT == 1:
            unit = tl.load(indices + row * K + entry // page, mask=live, other=-1)
            pos = unit * page + entry % page
        else:
            unit = tl.load(indices + row * K + entry, mask=live, other=-1)
            pos = unit
        return pos, live & (unit >= 0) & (pos < seen)
    else:
        return entry, live & (entry < seen)


@device
def query_rows(tiles, T, H, G, ROWS: tl.constexpr, SELECTED: tl.constexpr):
    """This program's row among B*[T*]Hkv, its b and h, and of each query row of the tile: t, g, whether it is one.

    A tile's rows are the heads of a group, in dense calls of all query tokens (row = t * G + g).
    """
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    r = tile * ROWS + tl.arange(0, ROWS)
    if SELECTED:
        return row, row // H // T, row % H, row // H % T + r * 0, r, r < G
    else:
        return row, row // H, row % H, r // G, r % G, r < T * G


@device
def split_entries(counts, row, most, page, split, SELECTED: tl.constexpr, UNIT: tl.constexpr):
    """Number of entries of a row, and the first and last + 1 of this program's split."""
    if SELECTED:
        entries = tl.load(counts + row) * (page if UNIT == 1 else 1)
    else:
        entries = most
    begin = tl.program_id(1) * split
    return entries, begin, tl.minimum(begin + split, entries)


@device
def weigh(
    s, m, l, pos, live, seen, length, b, t, bias, bias_row, cap, window, T,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: logits s -> weights, what is left of earlier sums, and m, l brought up to date."""
    if CAPPED:
        s = capped(s, cap)
    if bias is not None:
        more = tl.load(bias + b.to(tl.int64) * bias_row + pos, mask=live, other=0.0)
        s = s + more.to(tl.float32)[None, :]
    read = live[None, :] & (pos[None, :] < seen[:, None])
    if WINDOWED:
        read = read & (pos[None, :] > (length - T + t - window)[:, None])
    s = tl.where(read, s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, axis=1))
    base = tl.where(higher == -INF, 0.0, higher)
    p = tl.exp2((s - base[:, None]) * LOG2E)
    keep = tl.exp2((m - base) * LOG2E)
    return p, keep, higher, l * keep + tl.sum(p, axis=1)


@device
def store_partial(top, total, partial, part, m, l, acc, used, DV: tl.constexpr, BDV: tl.constexpr):
    """A tile's partial results to places `part`."""
    jv = tl.arange(0, BDV)
    tl.store(top + part, m, mask=used)
    tl.store(total + part, l, mask=used)
    tl.store(partial + part[:, None] * DV + jv[None, :], acc, mask=used[:, None] & (jv < DV)[None, :])


@triton.jit
def attention_kernel(
    q, q_b, q_t, q_h, k, k_page, k_head, k_token, v, v_page, v_head, v_token, table, table_row, lens,
    indices, counts, bias, bias_row, only, top, total, partial, scale, cap, window, k_scale, k_scale_head,
    T, H, G, page, S, K, split, splits, tiles,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, QKIND: tl.constexpr, KIND: tl.constexpr,
    DOT: tl.constexpr, PAGED: tl.constexpr, SELECTED: tl.constexpr, UNIT: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, K_SCALE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One split of one tile of query rows: maximum and sum of the weights, weighted sum of the values."""
    row, b, h, t, g, used = query_rows(tiles, T, H, G, ROWS, SELECTED)
    head = ((b * T + t) * H + h).to(tl.int64) * G + g  # place among B*T*Hq
    if only is not None:
        wanted = tl.load(only + head, mask=used, other=0) != 0
        if tl.max(wanted.to(tl.int32)) == 0:
            return
    length = tl.load(lens + b)
    seen = visible(length, T, t, S)
    most = tl.max(tl.where(used, seen, 0))
    entries, begin, end = split_entries(counts, row, most, page, split, SELECTED, UNIT)
    if begin >= end:
        return
    j, jv = tl.arange(0, BD), tl.arange(0, BDV)
    place = b.to(tl.int64) * q_b + t.to(tl.int64) * q_t + (h * G + g).to(tl.int64) * q_h
    x = tl.load(q + place[:, None] + j[None, :], mask=used[:, None] & (j < D)[None, :], other=0)
    x = operand(x, QKIND, DOT)
    factor = tl.zeros((), tl.float32) + scale
    if K_SCALE != 0:
        factor = factor * scale_at(k_scale, k_scale_head, h, K_SCALE)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BDV), tl.float32)
    for first in range(begin, end, N):
        entry = first + tl.arange(0, N)
        pos, live = entry_positions(indices, row.to(tl.int64), K, entries, entry, end, page, most, SELECTED, UNIT)
        index = pos // page if PAGED else pos * 0
        offset = pos % page if PAGED else pos
        where = page_at(table, table_row, b, index, live, PAGED)
        at = where * k_page + h.to(tl.int64) * k_head + offset.to(tl.int64) * k_token
        keys = tl.load(k + at[:, None] + j[None, :], mask=live[:, None] & (j < D)[None, :], other=0)
        s = product(x, tl.trans(operand(keys, KIND, DOT))) * factor
        p, keep, m, l = weigh(s, m, l, pos, live, seen, length, b, t, bias, bias_row, cap, window, T, CAPPED, WINDOWED)
        at = where * v_page + h.to(tl.int64) * v_head + offset.to(tl.int64) * v_token
        values = tl.load(v + at[:, None] + jv[None, :], mask=live[:, None] & (jv < DV)[None, :], other=0)
        acc = acc * keep[:, None] + product(weight_operand(p, DOT), operand(values, KIND, DOT))
    store_partial(top, total, partial, head * splits + tl.program_id(1), m, l, acc, used, DV, BDV)


@triton.jit
def combine_kernel(
    top, total, partial, lens, counts, only, sinks, v_scale, v_scale_head, out, o_b, o_t, o_h, lse, l_b, l_t, l_h,
    T, H, G, page, S, split, splits,
    DV: tl.constexpr, BDV: tl.constexpr, OUT: tl.constexpr, SELECTED: tl.constexpr, UNIT: tl.constexpr,
    V_SCALE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Out and LSE of one query head from its partial results, added in order, PARTS at a time."""
    head = tl.program_id(0).to(tl.int64)
    if only is not None:
        wanted = tl.load(only + head)
        if wanted == 0:
            return
    b, t, hq = head // (T * H * G), head // (H * G) % T, head % (H * G)
    if SELECTED:
        entries = tl.load(counts + head // G) * (page if UNIT == 1 else 1)
    else:
        entries = visible(tl.load(lens + b), T, t, S)
    parts = tl.minimum((entries + split - 1) // split, splits)
    i, jv = tl.arange(0, PARTS), tl.arange(0, BDV)
    m = tl.full((), float("-inf"), tl.float32)
    for first in range(0, parts, PARTS):
        c = first + i
        m = tl.maximum(m, tl.max(tl.load(top + head * splits + c, mask=c < parts, other=float("-inf"))))
    base = m
    if sinks is not None:
        sink = tl.load(sinks + hq).to(tl.float32)
        base = tl.maximum(base, sink)
    base = tl.where(base == -INF, 0.0, base)
    l = tl.zeros((), tl.float32)
    acc = tl.zeros((BDV,), tl.float32)
    for first in range(0, parts, PARTS):
        c = first + i
        weight = tl.load(top + head * splits + c, mask=c < parts, other=float("-inf"))
        weight = tl.exp2((weight - base) * LOG2E)
        l += tl.sum(weight * tl.load(total + head * splits + c, mask=c < parts, other=0.0))
        rows = tl.load(partial + (head * splits + c)[:, None] * DV + jv[None, :],
                       mask=(c < parts)[:, None] & (jv < DV)[None, :], other=0.0)  # fmt: skip
        acc += tl.sum(weight[:, None] * rows, axis=0)
    empty = l == 0.0
    if sinks is not None:
        l = l + tl.exp2((sink - base) * LOG2E)
    result = acc / tl.where(empty, 1.0, l)
    if V_SCALE != 0:
        result = result * scale_at(v_scale, v_scale_head, hq // G, V_SCALE)
    result = tl.where(empty, 0.0, result)
    tl.store(out + b * o_b + t * o_t + hq * o_h + jv, from_f32(result, OUT), mask=jv < DV)
    tl.store(lse + b * l_b + t * l_t + hq * l_h, tl.where(empty, -INF, base + tl.log(tl.where(empty, 1.0, l))))


def tile_shape(T: int, widest: int, exact: bool) -> tuple[int, int, int]:
    """Query rows and entries of a tile, and its warps: 16 rows while decoding, 64 for prompts.

    Very wide heads, and f32 (`exact`), whose products the matrix units do not make, take smaller tiles over more threads:
    they must lie in registers.
    """
    if exact or widest > 256:
        return 16, 32 if widest <= 128 else 16, 8
    return 16 if T <= LONG else 64, 64 if widest <= 128 else 32, 4


class Splits(NamedTuple):
    """How a call is cut, and its partial results: top, total f32[B,T,Hq,splits], partial f32[B,T,Hq,splits,Dv].

    rows, entries, warps: of a tile; tiles: of query rows, of one sequence (and query token, of a selection) and KV head, in
    all `programs`; split: entries of a partial result.
    """

    rows: int
    entries: int
    warps: int
    tiles: int
    programs: int
    split: int
    splits: int
    top: torch.Tensor
    total: torch.Tensor
    partial: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, H: int, DV: int, most: int, selected: bool, tile: tuple[int, int, int]) -> Splits:
        """most: entries of the longest row; tile: rows, entries, warps."""
        B, T, Hq = q.shape[:3]
        rows, n, warps = tile
        tiles = cdiv(Hq // H * (1 if selected else T), rows)
        split = SPLIT if T <= LONG or selected else max(1, most)
        shape = (B, T, Hq, max(1, cdiv(most, split)))
        top, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
        partial = torch.empty(*shape, DV, dtype=torch.float32, device=q.device)
        programs = B * H * (T if selected else 1) * tiles
        return cls(rows, n, warps, tiles, programs, split, shape[3], top, total, partial)


def most_entries(indices: torch.Tensor | None, unit: int, page: int, S: int) -> int:
    """Entries of the longest row that there may be."""
    return S if indices is None else indices.shape[-1] * (page if unit == 1 else 1)


def combine(
    splits: Splits, H: int, page: int, S: int, most: int, seq_lens, counts, unit: int, sinks, v_scale,
    out: torch.Tensor, lse: torch.Tensor, only: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out, lse from the partial results; of `most` = 0 entries there are none."""
    T, Hq, DV = out.shape[1:]
    value_scale = scale_args(v_scale)
    combine_kernel[(lse.numel(),)](
        splits.top, splits.total, splits.partial, seq_lens, counts, only, sinks, *value_scale[:2],
        raw(out), *out.stride()[:3], lse, *lse.stride(), T, H, Hq // H, page, S, splits.split,
        splits.splits if most else 0, DV=DV, BDV=power(DV, 16), OUT=kind(out), SELECTED=counts is not None, UNIT=unit,
        V_SCALE=value_scale[2], PARTS=PARTS,
    )  # fmt: skip


def attention_into(
    q, k_cache, v_cache, block_table, seq_lens, indices, counts, unit, scale, key_bias, softcap, window, sinks,
    k_scale, v_scale, max_seq_len, out: torch.Tensor, lse: torch.Tensor, only: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """sliced_attention into out, lse; `only` u8[B,T,Hq]: the query heads to compute, others stay as they are."""
    B, T, Hq, D = q.shape
    H, page, DV = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    S, selected = width(block_table, page, max_seq_len), indices is not None
    if B * T * Hq == 0:
        return
    if selected:
        indices, counts = indices.contiguous(), counts.contiguous()
    most = most_entries(indices, unit, page, S)
    dot = product_kind(q, k_cache, v_cache)
    cut = Splits.of(q, H, DV, most, selected, tile_shape(T, power(max(D, DV)), dot == 0))
    table, table_row, paged = table_args(block_table)
    key_scale = scale_args(k_scale)
    if most:
        attention_kernel[(cut.programs, cut.splits)](
            raw(q), *q.stride()[:3], raw(k_cache), *k_cache.stride()[:3], raw(v_cache), *v_cache.stride()[:3],
            table, table_row, seq_lens, indices, counts, key_bias, 0 if key_bias is None else key_bias.stride(0),
            only, cut.top, cut.total, cut.partial, softmax_scale(scale, D), float(softcap or 0.0), int(window or 0),
            *key_scale[:2], T, H, Hq // H, page, S, indices.shape[-1] if selected else 0, cut.split, cut.splits,
            cut.tiles, D=D, BD=power(D, 16), DV=DV, BDV=power(DV, 16), QKIND=kind(q), KIND=kind(k_cache),
            DOT=dot, PAGED=paged, SELECTED=selected, UNIT=unit,
            CAPPED=softcap is not None, WINDOWED=window is not None, K_SCALE=key_scale[2], ROWS=cut.rows,
            N=cut.entries, num_warps=cut.warps,
        )  # fmt: skip
    combine(cut, H, page, S, most, seq_lens, counts, unit, sinks, v_scale, out, lse, only)


def attention_outs(q: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New out [B,T,Hq,Dv] in q's type, lse f32[B,T,Hq]."""
    out = torch.empty(*q.shape[:3], v_cache.shape[3], dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def sliced_attention(
    q, k_cache, v_cache, block_table, seq_lens, indices, counts, unit, scale, key_bias, softcap, window, sinks,
    k_scale, v_scale, max_seq_len, *, outs: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [B,T,Hq,Dv], lse f32[B,T,Hq] over the listed and visible positions; indices None is dense."""
    out, lse = attention_outs(q, v_cache) if outs is None else outs
    attention_into(
        q, k_cache, v_cache, block_table, seq_lens, indices, counts, unit, scale, key_bias, softcap, window, sinks,
        k_scale, v_scale, max_seq_len, out, lse,
    )  # fmt: skip
    return out, lse


# --- merging --------------------------------------------------------------------------------------------------------


@triton.jit
def merge_kernel(
    outs, o_n, o_row, o_h, lses, l_n, l_row, l_h, out, r_row, r_h, lse, e_row, e_h, n, H,
    D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row and head: states weighted by exp(lse - largest); +inf, like -inf, marks an empty state."""
    row, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    i, j = tl.arange(0, PARTS), tl.arange(0, BD)
    top = tl.full((), float("-inf"), tl.float32)
    for first in range(0, n, PARTS):
        c = (first + i).to(tl.int64)
        x = tl.load(lses + c * l_n + row * l_row + h * l_h, mask=c < n, other=float("-inf"))
        top = larger(top, largest(tl.where(x == INF, -INF, x), 0))
    base = tl.where(top == -INF, 0.0, top)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    for first in range(0, n, PARTS):
        c = (first + i).to(tl.int64)
        x = tl.load(lses + c * l_n + row * l_row + h * l_h, mask=c < n, other=float("-inf"))
        weight = tl.exp2((tl.where(x == INF, -INF, x) - base) * LOG2E)
        total += tl.sum(weight)
        at = outs + c[:, None] * o_n + row * o_row + h * o_h + j[None, :]
        values = to_f32(tl.load(at, mask=(c < n)[:, None] & (j < D)[None, :], other=0), KIND)
        acc += tl.sum(tl.where(weight[:, None] == 0, 0.0, values * weight[:, None]), axis=0)
    empty = top == -INF
    result = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(out + row * r_row + h * r_h + j, from_f32(result, KIND), mask=j < D)
    tl.store(lse + row * e_row + h * e_h, tl.where(empty, -INF, base + tl.log(tl.where(empty, 1.0, total))))


def merge_many(outs_, lses, *, outs: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [n,...,H,D], lses f32[n,...,H] -> the attention over the union of n disjoint sets of keys: out, lse f32."""
    if outs is None:
        outs = (torch.empty_like(outs_[0], memory_format=torch.contiguous_format),
                torch.empty_like(lses[0], memory_format=torch.contiguous_format))  # fmt: skip
    n, H, D = outs_.shape[0], outs_.shape[-2], outs_.shape[-1]
    states, weights = outs_.reshape(n, -1, H, D), lses.reshape(n, -1, H)
    out, lse = outs[0].view(-1, H, D), outs[1].view(-1, H)
    rows = states.shape[1] * H
    if rows and D:
        merge_kernel[(rows,)](
            raw(states), *states.stride()[:3], weights, *weights.stride(), raw(out), *out.stride()[:2],
            lse, *lse.stride(), n, H, D=D, BD=power(D, 16), KIND=kind(states), PARTS=PARTS,
        )  # fmt: skip
    return outs[0], outs[1]


def merge_states(out_a, lse_a, out_b, lse_b, *, outs: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_many` of two states."""
    return merge_many(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)), outs=outs)
