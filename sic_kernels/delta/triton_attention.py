"""delta_attention in Triton: the splits, the softmax and the merge of sliced_attention, on coded rows.

Keys are decoded tile by tile. Values are summed twice: levels, with their scales in the weights, in the rotated space, and
what is plain (templates, raw rows, the tail) beside them; a split's sum of levels is rotated back once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..slicing.triton_attention import (
    LONG,
    Splits,
    attention_outs,
    combine,
    entry_positions,
    most_entries,
    query_rows,
    split_entries,
    store_partial,
    weigh,
)
from ..slicing.triton_common import (
    F16,
    F32,
    device,
    kind,
    operand,
    page_at,
    power,
    product,
    product_kind,
    raw,
    softmax_scale,
    table_args,
    to_f32,
    visible,
    weight_operand,
    width,
)
from .reference_encode import LARGEST_SCALE
from .triton_common import BLOCK, C_ALIGNED, C_BD, C_D, load_entry, load_levels, unrotate_values
from .triton_rows import coded_args, key_rows, load_tags, plain_rows, rope_positions

LARGEST_HALF = tl.constexpr(LARGEST_SCALE)


@device
def with_tail(
    x, rows, rows_b, rows_h, rows_step, b, h, at, in_tail, some, D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr
):
    """x f32[N, BD] with the rows `at` of the tail in place of those that are `in_tail`, if there are some."""
    if some:
        j = tl.arange(0, BD)[None, :]
        place = rows + b.to(tl.int64) * rows_b + h * rows_h + at.to(tl.int64) * rows_step + j
        x = tl.where(in_tail, to_f32(tl.load(place, mask=in_tail & (j < D), other=0), KIND), x)
    return x


@device
def logits(x, keys, DOT: tl.constexpr):
    """Queries x, operands of kind DOT, times keys f32[N, BD]: 16-bit keys in two parts, which together are as good as f32."""
    if DOT == F32:
        return product(x, tl.trans(keys))
    else:
        near = weight_operand(tl.minimum(tl.maximum(keys, -LARGEST_HALF), LARGEST_HALF) if DOT == F16 else keys, DOT)
        rest = weight_operand(keys - near.to(tl.float32), DOT)
        return product(x, tl.trans(near)) + product(x, tl.trans(rest))


@triton.jit
def coded_attention_kernel(
    q, q_b, q_t, q_h,
    k_codes, k_page, k_head, k_token, v_codes, v_page, v_head, v_token, tags, t_page, t_head, t_token,
    raw, raw_row, raw_entries, k_centres, v_centres, lo, hi, positions, positions_row,
    tail_k, tail_k_b, tail_k_h, tail_k_row, tail_v, tail_v_b, tail_v_h, tail_v_row, tail_start,
    table, table_row, lens, indices, counts, bias, bias_row, top, total, partial, scale, cap, window,
    T, H, G, page, S, K, split, splits, tiles,
    K_CODE: tl.constexpr, V_CODE: tl.constexpr, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, K_COUNT: tl.constexpr,
    V_COUNT: tl.constexpr, RAW: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, QKIND: tl.constexpr, TAIL: tl.constexpr, PAGED: tl.constexpr, SELECTED: tl.constexpr,
    UNIT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """One split of one tile of query rows: maximum and sum of the weights, weighted sum of the values."""
    D: tl.constexpr = K_CODE[C_D]
    BD: tl.constexpr = K_CODE[C_BD]
    DV: tl.constexpr = V_CODE[C_D]
    BDV: tl.constexpr = V_CODE[C_BD]
    row, b, h, t, g, used = query_rows(tiles, T, H, G, ROWS, SELECTED)
    length = tl.load(lens + b)
    seen = visible(length, T, t, S)
    most = tl.max(tl.where(used, seen, 0))
    entries, begin, end = split_entries(counts, row, most, page, split, SELECTED, UNIT)
    if begin >= end:
        return
    j = tl.arange(0, BD)
    place = b.to(tl.int64) * q_b + t.to(tl.int64) * q_t + (h * G + g).to(tl.int64) * q_h
    x = tl.load(q + place[:, None] + j[None, :], mask=used[:, None] & (j < D)[None, :], other=0)
    x = operand(x, QKIND, DOT)
    wide = h.to(tl.int64)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc, rotated = tl.zeros((ROWS, BDV), tl.float32), tl.zeros((ROWS, BDV), tl.float32)
    for first in range(begin, end, N):
        entry = first + tl.arange(0, N)
        pos, live = entry_positions(indices, row.to(tl.int64), K, entries, entry, end, page, most, SELECTED, UNIT)
        at, coded = pos[:, None], live[:, None]
        if tail_start is not None:
            start = tl.load(tail_start + b).to(tl.int32)
            in_tail = coded & (at >= start)
            coded = coded & (at < start)
            some_tail = tl.max(in_tail.to(tl.int32)) != 0
        where = page_at(table, table_row, b, at // page, coded, PAGED)
        offset = (at % page).to(tl.int64)
        k_scale, v_scale, k_id, v_id, is_raw = load_tags(
            tags + where * t_page + wide * t_head + offset * t_token, coded, K_COUNT, V_COUNT
        )
        k_row = k_codes + where * k_page + wide * k_head + offset * k_token
        some_raw = tl.max(is_raw.to(tl.int32)) != 0
        raw_entry = load_entry(k_row, is_raw, raw_entries, K_CODE[C_ALIGNED])
        position = rope_positions(positions, positions_row, b, at, coded)
        hi_row = first // BLOCK if positions is None and not SELECTED else position // BLOCK
        plain = plain_rows(k_centres + wide * K_COUNT * D, k_id, coded, is_raw, raw_entry, some_raw, raw, raw_row, 0,
                           D, BD, RAW)  # fmt: skip
        keys = key_rows(k_row, k_scale, coded, plain, lo, hi, position, hi_row, N, K_CODE, K_WORDS, R, NORM, HALF,
                        INTERLEAVED)  # fmt: skip
        if tail_start is not None:
            keys = with_tail(keys, tail_k, tail_k_b, tail_k_h, tail_k_row, b, wide, at - start, in_tail, some_tail, D, BD,
                             TAIL)  # fmt: skip
        s = logits(x, keys, DOT) * scale
        p, keep, m, l = weigh(s, m, l, pos, live, seen, length, b, t, bias, bias_row, cap, window, T, CAPPED, WINDOWED)
        plain = plain_rows(v_centres + wide * V_COUNT * DV, v_id, coded, is_raw, raw_entry, some_raw, raw, raw_row, D,
                           DV, BDV, RAW)  # fmt: skip
        if tail_start is not None:
            plain = with_tail(plain, tail_v, tail_v_b, tail_v_h, tail_v_row, b, wide, at - start, in_tail, some_tail, DV,
                              BDV, TAIL)  # fmt: skip
        acc = acc * keep[:, None] + product(weight_operand(p, DOT), weight_operand(plain, DOT))
        v_row = v_codes + where * v_page + wide * v_head + offset * v_token
        levels = load_levels(v_row, coded, N, V_CODE, V_WORDS)
        p = weight_operand(p * tl.reshape(v_scale, (1, N)), DOT)
        rotated = rotated * keep[:, None] + product(p, weight_operand(levels, DOT))
    acc += unrotate_values(rotated, DV, ROWS, BDV)
    head = ((b * T + t) * H + h).to(tl.int64) * G + g  # place among B*T*Hq
    store_partial(top, total, partial, head * splits + tl.program_id(1), m, l, acc, used, DV, BDV)


def tile_shape(T: int, widest: int, exact: bool) -> tuple[int, int, int]:
    """Query rows and entries of a tile, and its warps: entries are decoded in registers, so tiles are small."""
    if exact or widest > 128:
        return 16, 16, 8
    return 16 if T <= LONG else 32, 32, 8


def tail_args(tail_k, tail_v, tail_start) -> tuple[tuple, int]:
    """The tail as kernels take it, and its kind."""
    if tail_start is None:
        return (None, 0, 0, 0) * 2 + (None,), 0
    rows = (y for x in (tail_k, tail_v) for y in (raw(x), *x.stride()[:3]))
    return (*rows, tail_start.contiguous()), kind(tail_k)


def delta_attention(
    q, pages, codec, block_table, seq_lens, indices, counts, unit, positions, tail_k, tail_v, tail_start, scale, key_bias,
    softcap, window, sinks, max_seq_len, *, outs: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [B,T,Hq,Dv], lse f32[B,T,Hq] over the listed and visible positions; indices None is dense."""
    B, T, Hq, D = q.shape
    H, page = pages[0].shape[1:3]
    centres = codec[4][0]
    out, lse = outs if outs is not None else attention_outs(q, centres[None])
    S, selected, DV = width(block_table, page, max_seq_len), indices is not None, centres.shape[2]
    if B * T * Hq == 0:
        return out, lse
    if selected:
        indices, counts = indices.contiguous(), counts.contiguous()
    most = most_entries(indices, unit, page, S)
    dot = product_kind(q)
    cut = Splits.of(q, H, DV, most, selected, tile_shape(T, power(max(D, DV)), dot == 0))
    args, flags = coded_args(pages, codec, positions)
    tail, tail_kind = tail_args(tail_k, tail_v, tail_start)
    table, table_row, paged = table_args(block_table)
    if most:
        coded_attention_kernel[(cut.programs, cut.splits)](
            raw(q), *q.stride()[:3], *args, *tail, table, table_row, seq_lens, indices, counts,
            key_bias, 0 if key_bias is None else key_bias.stride(0), cut.top, cut.total, cut.partial,
            softmax_scale(scale, D), float(softcap or 0.0), int(window or 0), T, H, Hq // H, page, S,
            indices.shape[-1] if selected else 0, cut.split, cut.splits, cut.tiles,
            **flags, QKIND=kind(q), TAIL=tail_kind, PAGED=paged, SELECTED=selected, UNIT=unit,
            CAPPED=softcap is not None, WINDOWED=window is not None, DOT=dot, ROWS=cut.rows, N=cut.entries,
            num_warps=cut.warps, num_stages=1,
        )  # fmt: skip
    combine(cut, H, page, S, most, seq_lens, counts, unit, sinks, None, out, lse)
    return out, lse
