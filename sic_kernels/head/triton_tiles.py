"""Tiles of logits in Triton: what becomes of x, and what is kept of a tile.

A tile is [R,N]: R rows, N columns. Of each of its rows a partial result is kept (`Partials`); kernels of `triton_finish` make
a row's results of them. A tile's sums are integers in steps of 2^-50, exact in any order: a row's bits depend neither on how
the compiler lays a tile out, which goes by the alignment of what it loads, nor on the other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from ..runtime.triton_common import INF, INTERPRETED, cdiv, device, power, scale_args, scale_at

NAN_BIT, INF_BIT, EMPTY_BIT = (tl.constexpr(bit) for bit in (1, 2, 4))
STEPS = tl.constexpr(2.0**50)  # a sum of 2048 numbers of at most 1 fits into an int64
LEAST = tl.constexpr(-512.0)  # y of what adds nothing: its exponential is 0
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
HIGHEST_ID = tl.constexpr((1 << 31) - 1)


# --- launch arguments -----------------------------------------------------------------------------------------------


class Partials(NamedTuple):
    """Of each row and tile: m, sums of e^y, y e^y, y^2 e^y (in steps), faults, K keys of the greatest; z of ids asked for."""

    m: torch.Tensor  # f32 [B,tiles]
    sums: torch.Tensor  # i64 [B,3,tiles]
    faults: torch.Tensor  # u8 [B,tiles]
    keys: torch.Tensor  # i64 [B,K,tiles]
    watch: torch.Tensor  # f32 [B,W]
    target: torch.Tensor  # f32 [B]


class Wanted(NamedTuple):
    """What is asked of B rows of V columns, as the kernels take it: arguments of tiles, of results, and constants of both."""

    dims: tuple[int, int, int, int]  # B, k, W, targets
    columns: int  # those that can take part
    tiles: int
    partials: Partials
    asked: tuple  # watch_ids, its strides, W, target_ids, its stride, vocab_start
    temperature: tuple  # and its stride
    shaping: tuple  # bias, mask_bits, its row stride, softcap
    flags: dict[str, Any]  # K, WATCHED, TARGETED, TEMPERATURE
    capped: bool

    @property
    def tile_args(self) -> tuple:
        return (self.columns, self.tiles, *self.shaping, *self.asked, *self.temperature, *self.partials)


def wanted(
    B: int, V: int, tile: int, device_: torch.device, temperature, bias, softcap, valid_vocab, mask_bits, k, watch_ids,
    target_ids, vocab_start,
) -> Wanted:  # fmt: skip
    """Options of an op on logits, in the order of the native ops, for tiles of `tile` columns."""
    columns = V if valid_vocab is None else min(V, max(0, valid_vocab - vocab_start))
    tiles, K, W = max(1, cdiv(columns, tile)), power(k), 0 if watch_ids is None else watch_ids.shape[-1]

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device_)

    partials = Partials(
        scratch(B, tiles, dtype=torch.float32), scratch(B, 3, tiles, dtype=torch.int64),
        scratch(B, tiles, dtype=torch.uint8), scratch(B, K, tiles, dtype=torch.int64),
        scratch(B, W, dtype=torch.float32), scratch(B, dtype=torch.float32),
    )  # fmt: skip
    *value, mode = scale_args(temperature)
    row = watch_ids.stride(0) if W and watch_ids.ndim == 2 else 0
    watched = (watch_ids, row, watch_ids.stride(-1), W) if W else (None, 0, 0, 0)
    targeted = (None, 0) if target_ids is None else (target_ids, target_ids.stride(0))
    return Wanted(
        (B, k, W, 0 if target_ids is None else B), columns, tiles, partials, (*watched, *targeted, vocab_start), tuple(value),
        (bias, mask_bits, 0 if mask_bits is None else mask_bits.stride(0), float(softcap or 0.0)),
        {"K": K, "WATCHED": power(W) if W else 0, "TARGETED": target_ids is not None, "TEMPERATURE": mode},
        softcap is not None,
    )  # fmt: skip


# --- keys: a z and its column as one integer ------------------------------------------------------------------------


@device
def ordered(bits):
    """The bits of f32 numbers (not NaN) as integers in the order of the numbers; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@device
def keys_of(z, column):
    """int64: of a greater z greater, of equal ones that of the lower column."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)  # -0 equals 0
    return (ordered(bits).to(tl.int64) << 32) | (column ^ HIGHEST_ID).to(tl.int64)


@device
def z_of(keys):
    return ordered((keys >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@device
def column_of(keys):
    """int64"""
    return (keys & HIGHEST_ID) ^ HIGHEST_ID


if INTERPRETED:

    def greatest(keys, R, N, K):
        """The K greatest keys of each row [R,N], greatest first, as [R,K]. `tl.topk` takes the interpreter seconds."""
        slot = tl.arange(0, K)[None, :]
        best = tl.zeros((R, K), tl.int64)
        for i in range(int(K)):
            top = tl.max(keys, axis=1)[:, None]
            best = tl.where(slot == i, top, best)
            keys = tl.where(keys == top, -(1 << 63), keys)
        return best

else:

    @device
    def greatest(keys, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        """The K greatest keys of each row [R,N], greatest first, as [R,K]."""
        if K == 1:
            return tl.max(keys, axis=1)[:, None]
        else:
            return tl.topk(keys, K)


# --- from x to z ----------------------------------------------------------------------------------------------------


@device
def tanh(x):
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = size + size * square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    result = tl.where(size < 0.25, near, far)  # far from 0 the series may overflow, near it 1 - e loses digits
    return tl.where(x < 0, -result, result)


@device
def shaped(x, row, used, column, V, columns, bias, mask_bits, mask_row, cap, CAPPED: tl.constexpr):
    """z of x f32[R,N]: -inf where an id does not take part.  row i64[R,1], column i32[1,N].

    What there is is loaded up to V, which as a rule is a multiple of 16, so that loads are wide; `columns` need not be.
    """
    if CAPPED:
        x = cap * tanh(x / cap)
    if bias is not None:
        x += tl.load(bias + column, mask=column < V, other=0.0)
    inside = used & (column < columns)
    if mask_bits is not None:
        word = tl.load(mask_bits + row * mask_row + column // 32, mask=used & (column < V), other=0)
        inside = inside & (((word >> (column % 32)) & 1) != 0)
    return tl.where(inside, x, -INF)


# --- what is kept of a tile -----------------------------------------------------------------------------------------


@device
def inverse_temperature(temperature, step, row, MODE: tl.constexpr):
    """f64; 1 where the temperature is 0 (greedy) or not given."""
    t = (row * 0).to(tl.float64) + scale_at(temperature, step, row, MODE)
    return tl.where(t > 0, 1.0 / tl.where(t > 0, t, 1.0), 1.0)


@device
def exact_sum(x):
    """int64 sums of rows, in steps; the numbers are within -1 and 1."""
    return tl.sum((x * STEPS).to(tl.int64), axis=1)


@device
def store_asked(z, row, used, column, first, ids, ids_row, ids_step, W, into, start, N: tl.constexpr, WP: tl.constexpr):
    """Store z of those of W <= WP ids of each row that lie in the tile; ids are read again only if there is one."""
    w = tl.arange(0, WP)[None, :]
    near = tl.load(ids + row * ids_row + w * ids_step, mask=used & (w < W), other=-1).to(tl.int64) - start - first
    if tl.max(((near >= 0) & (near < N)).to(tl.int32)) != 0:
        for i in range(W):
            at = tl.load(ids + row * ids_row + i * ids_step, mask=used, other=-1).to(tl.int64) - start
            tl.store(into + row * W + i + column * 0, z, mask=used & (column == at))


@device
def store_tile(
    x, row, used, column, first, tile, V, columns, tiles, bias, mask_bits, mask_row, cap, watch_ids, watch_row, watch_step, W,
    target_ids, target_step, start, temperature, temperature_step, m, sums, faults, keys, watch, target,
    K: tl.constexpr, WATCHED: tl.constexpr, TARGETED: tl.constexpr, TEMPERATURE: tl.constexpr, CAPPED: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Keep of one tile of x f32[R,N] what `Partials` holds.  row i64[R,1], used bool[R,1], column i32[1,N] from `first` on."""
    z = shaped(x, row, used, column, V, columns, bias, mask_bits, mask_row, cap, CAPPED)
    if WATCHED > 0:
        store_asked(z, row, used, column, first, watch_ids, watch_row, watch_step, W, watch, start, N, WATCHED)
    if TARGETED:
        store_asked(z, row, used, column, first, target_ids, target_step, 0, 1, target, start, N, 1)
    at, rows = tl.reshape(row * tiles + tile, (R,)), tl.reshape(row, (R,))
    mask = tl.reshape(used, (R,))
    nan, inf = tl.max((z != z).to(tl.int32), axis=1), tl.max((z == INF).to(tl.int32), axis=1)
    tl.store(faults + at, (nan * NAN_BIT + inf * INF_BIT).to(tl.uint8), mask=mask)
    z = tl.where(z < INF, z, -INF)
    top = tl.max(z, axis=1)
    tl.store(m + at, top, mask=mask)
    inverse = inverse_temperature(temperature, temperature_step, rows, TEMPERATURE)
    inverse = tl.minimum(inverse, LARGEST).to(tl.float32)
    y = tl.maximum((z - tl.where(top > -INF, top, 0.0)[:, None]) * inverse[:, None], LEAST)
    e = tl.exp(y)
    at = rows * 3 * tiles + tile
    tl.store(sums + at, exact_sum(e), mask=mask)
    tl.store(sums + at + tiles, exact_sum(y * e), mask=mask)
    tl.store(sums + at + 2 * tiles, exact_sum(y * y * e), mask=mask)
    best = greatest(keys_of(z, column), R, N, K)
    tl.store(keys + (row * K + tl.arange(0, K)[None, :]) * tiles + tile, best, mask=used)
