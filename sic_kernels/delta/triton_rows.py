"""Coded rows to numbers in Triton: what delta_decode and delta_attention share.

A row is plain numbers plus a rotated residual, levels * scale. Plain are the template of a coded row, and all of a raw one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from ..slicing.triton_common import device, kind, raw, to_f32
from .triton_common import (
    BLOCK,
    C_BD,
    C_D,
    C_SIZES,
    RAW_TAG,
    apply_rope,
    as_scale,
    code_layout,
    load_levels,
    packed_sizes,
    rope_flags,
    rotate_keys,
    rotation_flags,
    tag_words,
)


def coded_args(pages: tuple, codec: tuple, positions: torch.Tensor | None) -> tuple[tuple, dict[str, Any]]:
    """Pages and codec as kernels take them: arguments in the order of their parameters, and constants by name."""
    k_bits, v_bits, k_rotation, k_templates, v_templates, rope, interleaved = codec
    k_codes, v_codes, tags, table = pages[:4]
    k_centres, v_centres = k_templates[0], v_templates[0]
    layouts = code_layout(k_codes, k_centres.shape[2], k_bits), code_layout(v_codes, v_centres.shape[2], v_bits)
    in_pages = (y for x in (k_codes, v_codes, tags) for y in (x, *x.stride()[:3]))
    args = (
        *in_pages, raw(table), table.stride(0), table.shape[0], k_centres, v_centres, rope[0], rope[1],
        positions, 0 if positions is None else positions.stride(0),
    )  # fmt: skip
    flags = {
        "K_CODE": layouts[0], "V_CODE": layouts[1], "K_WORDS": packed_sizes(layouts[0][C_SIZES]),
        "V_WORDS": packed_sizes(layouts[1][C_SIZES]), "K_COUNT": k_centres.shape[1], "V_COUNT": v_centres.shape[1],
        "RAW": kind(table), **rotation_flags(k_rotation), **rope_flags(rope, interleaved),
    }  # fmt: skip
    return args, flags


@device
def load_tags(tags, mask, K_COUNT: tl.constexpr, V_COUNT: tl.constexpr):
    """k_scale, v_scale f32, k_id, v_id int32 of tags, and which rows are raw (scales 0)."""
    at = tag_words(tags)
    k = tl.load(at, mask=mask, other=0)
    v = tl.load(at + 1, mask=mask, other=0)
    ids = tl.load(at + 2, mask=mask, other=0).to(tl.int32)
    is_raw = mask & (k == RAW_TAG)
    k_id, v_id = ids & 0xFF, ids >> 8
    k_id, v_id = (
        tl.where((k_id < K_COUNT) & (k != RAW_TAG), k_id, 0),
        tl.where((v_id < V_COUNT) & (k != RAW_TAG), v_id, 0),
    )
    return tl.where(is_raw, 0.0, as_scale(k)), tl.where(is_raw, 0.0, as_scale(v)), k_id, v_id, is_raw


@device
def plain_rows(
    centres, id, coded, is_raw, entry, some_raw, raw, raw_row, first, D: tl.constexpr, BD: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """f32[N, BD]: templates, and in place of those of raw rows their numbers, from column `first` of the raw table on.

    An entry of -1 is none: the row stays its template; some_raw: whether there is any raw row.
    """
    j = tl.arange(0, BD)[None, :]
    x = tl.load(centres + id * D + j, mask=coded & (j < D), other=0.0).to(tl.float32)
    if some_raw:
        place = raw + entry.to(tl.int64) * raw_row + first + j
        x = tl.where(is_raw & (entry >= 0), to_f32(tl.load(place, mask=(entry >= 0) & (j < D), other=0), RAW), x)
    return x


@device
def key_rows(
    row, scale, coded, plain, lo, hi, position, hi_row, N: tl.constexpr, CODE: tl.constexpr, WORDS: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Keys f32[N, BD] at their positions; hi_row: position / 64, [N,1] or the same for all."""
    levels = load_levels(row, coded, N, CODE, WORDS)
    x = rotate_keys(levels, CODE[C_D], R, NORM, N, CODE[C_BD], True) * scale + plain
    return apply_rope(x, lo, position % BLOCK, hi, hi_row, coded, N, CODE[C_BD], HALF, INTERLEAVED)


@device
def rope_positions(positions, positions_row, b, pos, mask):
    """Where keys are turned to: the position itself if none are given."""
    if positions is None:
        return pos
    else:
        return tl.load(positions + b.to(tl.int64) * positions_row + pos, mask=mask, other=0)
