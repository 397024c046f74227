"""What the Triton kernels of this family share: constants, rounding to scores, places in a paged cache, launch arguments.

The general part, and the rules that hold in all kernels, are in `runtime.triton_common`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl

from ..runtime.triton_common import (
    BF16,
    EXACT,
    F8,
    F16,
    F32,
    I16,
    INF,
    LOG2E,
    cdiv,
    device,
    f64_bits,
    from_f32,
    kind,
    larger,
    largest,
    operand,
    power,
    product,
    product_kind,
    raw,
    round_bf16,
    round_even,
    scale_args,
    scale_at,
    to_f32,
    weight_operand,
)
from .reference_layout import softmax_scale, width
from .reference_sketch import EXP2, LOWEST, ONE_BIT_GAIN, QUERY_LEVELS, STEPS_PER_NAT, THRESHOLD, UNSEEN, f32

__all__ = [
    "BF16",
    "EXACT",
    "F8",
    "F16",
    "F32",
    "I16",
    "INF",
    "LOG2E",
    "cdiv",
    "device",
    "f64_bits",
    "from_f32",
    "kind",
    "larger",
    "largest",
    "operand",
    "power",
    "product",
    "product_kind",
    "raw",
    "round_bf16",
    "round_even",
    "scale_args",
    "scale_at",
    "softmax_scale",
    "to_f32",
    "weight_operand",
    "width",
]

LOWEST_SCORE = tl.constexpr(LOWEST)
UNSEEN_SCORE = tl.constexpr(UNSEEN)
LEVELS = tl.constexpr(float(QUERY_LEVELS))
STEPS = tl.constexpr(float(STEPS_PER_NAT))
GAIN = tl.constexpr(f32(ONE_BIT_GAIN))
OUTER = tl.constexpr(THRESHOLD)
LOG_STEPS = tl.constexpr(f32(STEPS_PER_NAT * math.log(2.0)))
STEP_LOG2E = tl.constexpr(f32(math.log2(math.e) / STEPS_PER_NAT))
E0, E1, E2, E3, E4, E5, E6 = (tl.constexpr(c) for c in EXP2)
SQRT_HALF = tl.constexpr(f32(math.sqrt(0.5)))
SMALLEST_QUERY = tl.constexpr(2.0**-120)


# --- launch arguments -----------------------------------------------------------------------------------------------


def table_args(block_table: torch.Tensor | None) -> tuple[Any, int, bool]:
    """A block table as (tensor or None, stride of a row, whether there is one)."""
    return (None, 0, False) if block_table is None else (block_table, block_table.stride(0), True)


# --- numbers --------------------------------------------------------------------------------------------------------


@device
def to_steps(x):
    """Integer score of f32 x: rounded, within +-32767, NaN is the lowest."""
    x = tl.where(x == x, x, -32767.0)
    return round_even(tl.minimum(tl.maximum(x, -32767.0), 32767.0)).to(tl.int32)


@device
def exp_weight(distance, SHRINK: tl.constexpr):
    """int32 W = 2^24 exp(-d/256) truncated, of distances d >= 0: the fixed polynomial of the definition.

    SHRINK replaces the factor log2(e)/256 by another; launch with EXACT.
    """
    x = -tl.minimum(distance, 1 << 20).to(tl.float32) * SHRINK
    inside = tl.maximum(x, -25.0)
    n = round_even(inside)
    f = inside - n
    p = f * E0 + E1
    p = p * f + E2
    p = p * f + E3
    p = p * f + E4
    p = p * f + E5
    p = p * f + E6
    power_of_2 = ((n.to(tl.int32) + (24 + 127)) << 23).to(tl.float32, bitcast=True)
    return tl.where(x >= -24.0, (p * power_of_2).to(tl.int32), 0)


@device
def log_steps(p):
    """int32 log of f32 p in 1/256 nat: exponent and a parabola through the mantissa; launch with EXACT."""
    u = p.to(tl.int32, bitcast=True)
    e = ((u >> 23) - 127).to(tl.float32)
    m = (u & 0x7FFFFF).to(tl.float32) * 1.1920928955078125e-07
    steps = round_even((e + (m + 0.34375 * (m * (1.0 - m)))) * LOG_STEPS).to(tl.int32)
    return tl.where(p > 0, tl.maximum(steps, LOWEST_SCORE), LOWEST_SCORE)


# --- places ---------------------------------------------------------------------------------------------------------


@device
def visible(seq_len, T, t, S):
    """int32: how many positions query t of T sees of a sequence of seq_len tokens (causal among the T new ones)."""
    return tl.minimum(tl.maximum(seq_len.to(tl.int64) - T + t + 1, 0), S).to(tl.int32)


@device
def page_at(table, table_row, b, index, live, PAGED: tl.constexpr):
    """int64 page of the cache that holds page `index` of sequence b; entries that are not live are not read."""
    if PAGED:
        return tl.load(table + b.to(tl.int64) * table_row + index, mask=live, other=0).to(tl.int64)
    else:
        return b.to(tl.int64) + index.to(tl.int64) * 0


@device
def scaled(x, scale, scale_head, h, KIND: tl.constexpr, MODE: tl.constexpr):
    """Stored keys as f32 numbers: times the cache's scale, one f32 product."""
    if MODE == 0:
        return to_f32(x, KIND)
    else:
        return to_f32(x, KIND) * scale_at(scale, scale_head, h, MODE)


@device
def byte_at(offset, j, page, NB: tl.constexpr):
    """Where byte j of a token's plane lies: blocks of 16 tokens (the last of a page may be narrower), [NB][width]."""
    first = offset // 16 * 16
    return first.to(tl.int64) * NB + j * tl.minimum(page - first, 16) + (offset - first)
