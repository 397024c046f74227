"""The rotated key sketch in Triton: signs, Hadamard butterfly, planes and norms of rows of keys, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .triton_common import (
    EXACT,
    OUTER,
    SQRT_HALF,
    byte_at,
    cdiv,
    device,
    kind,
    page_at,
    power,
    raw,
    round_bf16,
    scale_args,
    scaled,
    table_args,
)

ROWS = 16  # keys that one program of key_sketch takes


# --- rotation of rows [N, BD], channels past D zero -----------------------------------------------------------------


@device
def block_log2(j, D: tl.constexpr):
    """log2 of the size of channel j's butterfly: D is cut into descending powers of two, so the highest bit in which
    j and D differ is the size.  Only for j < D."""
    return ((j ^ D).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@device
def partner(x, H: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """x[:, j ^ H]"""
    pairs = tl.permute(tl.reshape(x, (N, BD // (2 * H), 2, H)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(high, low), (0, 1, 3, 2)), (N, BD))


@device
def negative_sign(j):
    """Whether the random sign of channel j is -1: the lowest bit of the splitmix64 finaliser."""
    z = (j + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) & 1) == 1


@device
def normalised(x, D: tl.constexpr, BD: tl.constexpr):
    """f32[N, BD] times f32(1/sqrt(block size)), channels past D zero."""
    j = tl.arange(0, BD)[None, :]
    log2 = block_log2(j, D)
    half = ((127 - log2 // 2) << 23).to(tl.float32, bitcast=True)
    return tl.where(j < D, x * tl.where(log2 % 2 == 1, half * SQRT_HALF, half), 0.0)


@device
def butterflies(x, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """f32[N, BD]: a butterfly per block (additions in the fixed order), times f32(1/sqrt(block size))."""
    j = tl.arange(0, BD)[None, :]
    log2 = block_log2(j, D)
    for step in tl.static_range(0, 16):
        if (1 << step) < D:
            other = partner(x, 1 << step, N, BD)
            mixed = tl.where(((j >> step) & 1) == 1, other - x, x + other)
            x = tl.where((log2 > step) & (j < D), mixed, x)
    return normalised(x, D, BD)


@device
def rotate(x, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """f32[N, BD]: random signs, then the butterflies."""
    return butterflies(tl.where(negative_sign(tl.arange(0, BD)[None, :]), -x, x), D, N, BD)


@device
def tree_sum(v, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """f32[N, 1] of v >= 0: halving within each block, then the blocks from left to right.

    Every channel of a block ends with the block's sum, since both partners add the same two numbers.
    """
    j = tl.arange(0, BD)[None, :]
    log2 = block_log2(j, D)
    for down in tl.static_range(0, 16):
        if (1 << (15 - down)) < D:
            both = v + partner(v, 1 << (15 - down), N, BD)
            v = tl.where((log2 > 15 - down) & (j < D), both, v)
    total = tl.zeros((N, 1), tl.float32)
    for down in tl.static_range(0, 16):
        if (D >> (15 - down)) & 1:  # one channel of the block: a sum with zeros, exact in any order
            first = (D >> (16 - down)) << (16 - down)
            total += tl.sum(tl.where(j == first, v, 0.0), axis=1)[:, None]
    return total


# --- keys -----------------------------------------------------------------------------------------------------------


@device
def sketch_rows(x, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, PLANES: tl.constexpr):
    """Centred keys f32[N, BD] -> both planes as 0/1 int32[N, BD], norm bf16 as int16[N, 1]."""
    j = tl.arange(0, BD)[None, :]
    y = rotate(x, D, N, BD)
    size = tl.abs(y)
    mean = tree_sum(size, D, N, BD)
    energy = tree_sum(y * y, D, N, BD)
    above = y >= 0
    outer = size >= mean * (OUTER / D)
    if PLANES == 2:
        divisor = tree_sum(tl.where(outer, size * 3.0, size), D, N, BD)
    else:
        divisor = mean
    none = divisor == 0
    norm = tl.where(none, 0.0, tl.div_rn(energy, tl.where(none, 1.0, divisor)))
    first = ((j < D) & above).to(tl.int32)
    second = ((j < D) & (above == outer)).to(tl.int32)
    return first, second, round_bf16(norm)


@device
def store_plane(place, bits, offset, page, mask, N: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr):
    """Pack 0/1 int32[N, BD] and store the bytes of each token; place: where the plane of its page begins, [N, 1]."""
    j = tl.arange(0, BD // 8)[None, :]
    packed = tl.sum(tl.reshape(bits, (N, BD // 8, 8)) << tl.arange(0, 8)[None, None, :], axis=2)
    tl.store(place + byte_at(offset, j, page, NB), packed.to(tl.uint8), mask=mask & (j < NB))


@device
def store_sketch(
    x, bits, plane, norm, norm_token, offset, page, mask, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """Sketch centred keys f32[N, BD] and store planes and norms.

    bits, norm: of each token's page and head, [N, 1]; plane: bytes of a plane; offset: of each token in its page.
    """
    NB: tl.constexpr = (D + 7) // 8
    first, second, norms = sketch_rows(x, D, N, BD, PLANES)
    store_plane(bits, first, offset, page, mask, N, BD, NB)
    if PLANES == 2:
        store_plane(bits + plane, second, offset, page, mask, N, BD, NB)
    tl.store(norm + offset * norm_token, norms, mask=mask)


@device
def centred(x, centre, centre_head, h, D: tl.constexpr, BD: tl.constexpr, CENTRED: tl.constexpr):
    """Keys f32[N, BD] minus the head's centre f32[D]."""
    if CENTRED:
        j = tl.arange(0, BD)
        return x - tl.load(centre + h * centre_head + j, mask=j < D, other=0.0).to(tl.float32)[None, :]
    else:
        return x


@triton.jit
def key_sketch_kernel(
    k, k_page, k_head, k_token, table, table_row, lens, start, centre, centre_head, scale, scale_head,
    bits, bits_page, bits_head, plane, norm, norm_page, norm_head, norm_token, H, page, S,
    D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr, PLANES: tl.constexpr,
    SCALE: tl.constexpr, CENTRED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N tokens of one sequence and head; tokens before `start`'s page, or not live, are left alone."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    pos = (tl.program_id(1) * N + tl.arange(0, N))[:, None]
    live = (pos < tl.load(lens + b)) & (pos < S)
    if start is not None:
        live = live & (pos >= tl.load(start + b) // page * page)
    if tl.max(live.to(tl.int32)) == 0:
        return
    offset = pos % page
    j = tl.arange(0, BD)[None, :]
    where = page_at(table, table_row, b, pos // page, live, PAGED)
    x = tl.load(k + where * k_page + h.to(tl.int64) * k_head + offset.to(tl.int64) * k_token + j,
                mask=live & (j < D), other=0)  # fmt: skip
    x = centred(scaled(x, scale, scale_head, h, KIND, SCALE), centre, centre_head, h, D, BD, CENTRED)
    x = tl.where(j < D, x, 0.0)
    in_bits = bits + where * bits_page + h.to(tl.int64) * bits_head
    in_norm = norm + where * norm_page + h.to(tl.int64) * norm_head
    store_sketch(x, in_bits, plane, in_norm, norm_token, offset, page, live, D, N, BD, PLANES)


def key_sketch(
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor,
    centre: torch.Tensor | None,
    k_scale: Any,
    planes: int,
    start: torch.Tensor | None,
    *,
    outs: tuple | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """bits u8[P,Hkv,bytes], norm bf16[P,Hkv,page] of the live keys; entries of other slots stay as they are (new: 0)."""
    P, H, page, D = k_cache.shape
    B = seq_lens.shape[0]
    if outs is None:
        bits = torch.zeros(P, H, planes * page * cdiv(D, 8), dtype=torch.uint8, device=k_cache.device)
        outs = (bits, torch.zeros(P, H, page, dtype=torch.bfloat16, device=k_cache.device))
    bits, norm = outs
    table, table_row, paged = table_args(block_table)
    S = page if block_table is None else block_table.shape[1] * page
    if B * H * S == 0:
        return bits, norm
    scale, scale_head, mode = scale_args(k_scale)
    key_sketch_kernel[(B * H, cdiv(S, ROWS))](
        raw(k_cache), *k_cache.stride()[:3], table, table_row, seq_lens, start,
        centre, 0 if centre is None else centre.stride(0), scale, scale_head,
        bits, *bits.stride()[:2], page * cdiv(D, 8), raw(norm), *norm.stride(), H, page, S,
        D=D, BD=power(D, 16), KIND=kind(k_cache), PAGED=paged, PLANES=planes, SCALE=mode, CENTRED=centre is not None,
        N=ROWS, **EXACT,
    )  # fmt: skip
    return bits, norm
