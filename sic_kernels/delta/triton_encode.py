"""delta_encode in Triton: rows are coded in parallel, then one program hands out the entries of the raw table in order.

Four steps: which rows stay and which entry they have; keys and values to codes; entries; raw rows into them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..slicing.triton_append import SCAN, stays
from ..slicing.triton_common import (
    EXACT,
    F16,
    SMALLEST_QUERY,
    cdiv,
    device,
    from_f32,
    kind,
    power,
    raw,
    round_even,
    to_f32,
)
from ..slicing.triton_sketch import centred, rotate, store_sketch, tree_sum
from .levels import MAX_LEVEL_8, REACH, UNITS
from .reference_encode import LARGEST_SCALE, SEARCH_LEVELS
from .triton_common import (
    C_ALIGNED,
    C_BD,
    C_BITS,
    C_BYTES,
    C_D,
    C_MASK,
    C_PARTS,
    C_SIZES,
    C_WIDTH,
    LARGEST,
    RAW_TAG,
    code_layout,
    load_entry,
    load_key,
    rope_flags,
    rotate_keys,
    rotation_flags,
    store_word,
    tag_words,
)

ROWS = 16  # rows that one program codes: of a matrix product
SKETCHED = 4  # keys that one program takes to the sketch
CHANNELS = 16  # of a program's rows for each warp: they lie in registers
TEMPLATES = 64  # templates of a matrix product
ITEMS = 1024  # rows whose entries are handed out at a time
NO_ROPE = (None, None, None)
SEARCH = tl.constexpr(float(SEARCH_LEVELS))
LARGEST_LEVEL = tl.constexpr(float(MAX_LEVEL_8))
TOP_SCALE = tl.constexpr(LARGEST_SCALE)
INF = tl.constexpr(float("inf"))


# --- which rows stay ------------------------------------------------------------------------------------------------


@triton.jit
def fate_kernel(
    slots, slots_step, k_codes, k_page, k_head, k_token, tags, t_page, t_head, t_token, owner, owner_step,
    kept, entries, N, H, page, E, HEADS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """kept i64[N]: the slots of the rows that stay, -1 of the others; entries i32[N,H]: the raw entry that each has."""
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    slot = tl.load(slots + n * slots_step, mask=n < N, other=-1).to(tl.int64)
    mine = stays(slot, n, slots, slots_step, tl.program_id(0) * ROWS, N, SCAN)
    slot = tl.where(mine, slot, -1)
    tl.store(kept + n, slot, mask=n < N)
    h = tl.arange(0, HEADS)[None, :].to(tl.int64)
    live = mine & (h < H)
    tag = tl.load(tag_words(tags + slot // page * t_page + h * t_head + slot % page * t_token), mask=live, other=0)
    row = k_codes + slot // page * k_page + h * k_head + slot % page * k_token
    entry = load_entry(row, live & (tag == RAW_TAG), E, ALIGNED)
    owned = tl.load(owner + entry.to(tl.int64) * owner_step, mask=entry >= 0, other=-1) == slot * H + h
    tl.store(entries + n.to(tl.int64) * H + h, tl.where(owned, entry, -1), mask=(n < N) & (h < H))


# --- codes ----------------------------------------------------------------------------------------------------------


@device
def nearest(
    x, search, half_norm, mean, step, groups, ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """int32[ROWS,1]: the templates nearest to x by integer dot products, the lowest of several."""
    j = tl.arange(0, BD)[None, :]
    moved = tl.where(j < D, x - tl.load(mean + j, mask=j < D, other=0.0), 0.0)
    largest = tl.max(tl.abs(moved), axis=1)[:, None]
    usable = (largest >= SMALLEST_QUERY) & (largest < INF)
    divisor, number = tl.where(usable, largest, 1.0), tl.full((ROWS, 1), SEARCH, tl.float32)
    q = round_even(tl.where(usable, moved, 0.0) * tl.div_rn(number, divisor))
    q = tl.minimum(tl.maximum(q, -SEARCH), SEARCH).to(tl.int8)
    factor = tl.where(usable, tl.div_rn(divisor, number), 0.0) * tl.load(step)
    best = tl.full((ROWS, 1), float("-inf"), tl.float32)
    id = tl.zeros((ROWS, 1), tl.int32)
    QUADS: tl.constexpr = (D + 3) // 4
    c = tl.arange(0, BD)[:, None]
    for first in range(0, groups * 16, TILE):
        i = first + tl.arange(0, TILE)[None, :]
        inside = i < groups * 16
        at = search + i // 16 * (64 * QUADS) + c // 4 * 64 + i % 16 * 4 + c % 4
        template = tl.load(at, mask=inside & (c < 4 * QUADS), other=0)
        dots = tl.dot(q, template, out_dtype=tl.int32)
        score = dots.to(tl.float32) * factor - tl.load(half_norm + i, mask=inside, other=INF)
        score = tl.where(score == score, score, -INF)
        top = tl.max(score, axis=1)[:, None]
        lowest = tl.min(tl.where(score == top, i, 1 << 30), axis=1)[:, None]
        id = tl.where(top > best, lowest, id)
        best = tl.maximum(best, top)
    return id


@device
def quantise(u, SIZES: tl.constexpr):
    """Codes int32 of residuals in level units, and the sizes of their levels f32; SIZES of 8 bits is ()."""
    size = tl.abs(u)
    sign = (u + 0.0).to(tl.int32, bitcast=True) >> 31  # all ones below 0; -0 is not
    if len(SIZES) == 0:
        level = round_even(tl.minimum(size, LARGEST_LEVEL))
        return 128 + ((level.to(tl.int32) ^ sign) - sign), level
    else:
        both = tl.zeros_like(sign) + SIZES[0] * 32  # the size, and how many thresholds are reached
        for i in tl.static_range(len(SIZES) - 1):
            above = size >= (SIZES[i] + SIZES[i + 1]) * 0.5
            both += tl.where(above, (SIZES[i + 1] - SIZES[i]) * 32 + 1, 0)
        return len(SIZES) + ((both & 31) ^ sign), (both >> 5).to(tl.float32)


@device
def store_part(codes, row, mask, groups_at, PART: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """One part of the first field of codes int32[N, groups, 16]."""
    inside = (groups_at >= PART[0]) & (groups_at < PART[0] + PART[1])
    shift = ((groups_at - PART[0]) * WIDTH) & 31
    field = tl.where(inside, (codes & ((1 << WIDTH) - 1)) << shift, 0)
    word = tl.sum(field, axis=1).to(tl.uint32, bitcast=True)
    lane = tl.arange(0, 16)[None, :]
    store_word(row + PART[3] + lane * PART[2], word, mask, PART[2], ALIGNED)


@device
def store_codes(codes, row, mask, N: tl.constexpr, CODE: tl.constexpr):
    """Codes int32[N, BD], 0 behind the head size, to the rows that begin at row [N,1]."""
    BD: tl.constexpr = CODE[C_BD]
    j = tl.arange(0, BD)[None, :]
    if CODE[C_BITS] == 8:
        tl.store(row + j, codes.to(tl.uint8), mask=mask & (j < CODE[C_BYTES]))
    else:
        grouped = tl.reshape(codes, (N, BD // 16, 16))
        groups_at = tl.arange(0, BD // 16)[None, :, None]
        for p in tl.static_range(len(CODE[C_PARTS])):
            store_part(grouped, row, mask, groups_at, CODE[C_PARTS][p], CODE[C_WIDTH], CODE[C_ALIGNED])
        if CODE[C_BITS] > CODE[C_WIDTH]:
            group = tl.arange(0, BD // 16)[None, :]
            word = tl.sum((grouped >> CODE[C_WIDTH]) << tl.arange(0, 16)[None, None, :], axis=2)
            inside = mask & (group * 2 < CODE[C_BYTES] - CODE[C_MASK])
            store_word(row + CODE[C_MASK] + group * 2, word.to(tl.uint32, bitcast=True), inside, 2, CODE[C_ALIGNED])


@device
def fit_scale(y, size, square, bound, used, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """The scale f16[N,1] by least squares, and whether it represents the row well enough."""
    along = tree_sum(tl.abs(y) * size, D, N, BD)
    levels = size.to(tl.int32)
    total = tl.sum(levels * levels, axis=1)[:, None].to(tl.float32)
    fitted = tl.where(used & (along > 0), tl.div_rn(along, tl.where(used, total, 1.0)), 0.0)
    half = from_f32(fitted, F16)
    s = half.to(tl.float32)
    error = (square - (s + s) * along) + (s * s) * total
    fits = (s <= TOP_SCALE) & (square <= LARGEST) & ((error > bound) == 0)
    return tl.where(s <= TOP_SCALE, s, TOP_SCALE).to(tl.float16), fits


@triton.jit
def encode_kernel(
    x, x_row, x_head, kept, positions, positions_step, codes, c_page, c_head, c_token, tags, t_page, t_head, t_token,
    centres, search, half_norm, mean, step, bound, lo, undo, misfits,
    N, H, page, count, groups, sinks, start,
    KIND: tl.constexpr, KEYS: tl.constexpr, CODE: tl.constexpr, AT_LARGEST: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS keys or values of one head to codes and tags; misfits u8[N,H]: whether they are to be kept raw."""
    D: tl.constexpr = CODE[C_D]
    BD: tl.constexpr = CODE[C_BD]
    h = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    slot = tl.load(kept + n, mask=n < N, other=-1)
    live = slot >= 0
    if tl.max(live.to(tl.int32)) == 0:
        return
    where, offset = slot // page, slot % page
    j = tl.arange(0, BD)[None, :]
    row = x + n.to(tl.int64) * x_row + h * x_head
    position = tl.load(positions + n * positions_step, mask=live, other=0)
    values = load_key(row, live, position, lo, undo, KIND, D, BD, HALF, INTERLEAVED)
    odd = (tl.abs(values) <= LARGEST) == 0
    finite = tl.max(odd.to(tl.int32), axis=1)[:, None] == 0
    values = tl.where(odd, 0.0, values)
    id = nearest(values, search + h * groups * (16 * 4 * ((D + 3) // 4)), half_norm + h * groups * 16, mean + h * D,
                 step + h, groups, ROWS, TILE, D, BD)  # fmt: skip
    template = tl.load(centres + (h * count + id) * D + j, mask=j < D, other=0.0).to(tl.float32)
    y = tl.where(j < D, values - template, 0.0)
    y = rotate_keys(y, D, R, NORM, ROWS, BD, False) if KEYS else rotate(y, D, ROWS, BD)
    square = tree_sum(y * y, D, ROWS, BD)
    if AT_LARGEST:
        top = tl.max(tl.where(y == y, tl.abs(y), INF), axis=1)[:, None]
    else:
        top = tl.sqrt_rn(tl.div_rn(square, tl.full((ROWS, 1), D, tl.float32)))
    used = (top >= SMALLEST_QUERY) & (top < INF)
    y = tl.where(used, y, 0.0)
    unit = tl.where(used, tl.div_rn(tl.zeros_like(top) + start, tl.where(used, top, 1.0)), 0.0)
    code, size = quantise(y * unit, CODE[C_SIZES])
    code, size = tl.where(j < D, code, 0), tl.where(j < D, size, 0.0)
    store_codes(code, codes + where * c_page + h * c_head + offset * c_token, live, ROWS, CODE)
    scale, fits = fit_scale(y, size, square, tl.load(bound + h), used, D, ROWS, BD)
    tag = tags + where * t_page + h * t_head + offset * t_token
    word = scale.to(tl.int16, bitcast=True).to(tl.uint16, bitcast=True)
    tl.store(tag_words(tag) + (0 if KEYS else 1), word, mask=live)
    tl.store(tag + (4 if KEYS else 5), id.to(tl.uint8), mask=live)
    misfit = live & ((finite & fits) == 0)
    if KEYS:
        misfit = misfit | (live & (position < sinks))
    tl.store(misfits + n.to(tl.int64) * H + h, misfit.to(tl.uint8), mask=live)


# --- the sketch -----------------------------------------------------------------------------------------------------


@triton.jit
def sketch_kernel(
    k, k_row, k_head, kept, bits, bits_page, bits_head, plane, norm, norm_page, norm_head, norm_token,
    centre, centre_head, N, page,
    KIND: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS keys of one head, as they are given, to the sketch."""
    h = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    slot = tl.load(kept + n, mask=n < N, other=-1)
    live = slot >= 0
    j = tl.arange(0, BD)[None, :]
    key = to_f32(tl.load(k + n.to(tl.int64) * k_row + h * k_head + j, mask=live & (j < D), other=0), KIND)
    key = tl.where(j < D, centred(key, centre, centre_head, h, D, BD, True), 0.0)
    where, offset = slot // page, slot % page
    in_bits, in_norm = bits + where * bits_page + h * bits_head, norm + where * norm_page + h * norm_head
    store_sketch(key, in_bits, plane, in_norm, norm_token, offset, page, live, D, ROWS, BD, PLANES)


# --- entries --------------------------------------------------------------------------------------------------------


@triton.jit
def settle_kernel(
    kept, entries, k_misfits, v_misfits, owner, owner_step, state, state_step, free, N, H, E, ITEMS: tl.constexpr
):
    """Entries, in the order of rows and heads: a row in need takes the lowest that is free, one that fits frees its own.

    One program. Between two rows that free something the k-th row in need takes the k-th free entry, found together.
    entries i32[N,H]: the entry that a row has -> the one that it is to be kept in, or -1.  free: scratch i32[ITEMS].
    """
    i = tl.arange(0, ITEMS)
    cursor, used, refused = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, N * H, ITEMS):
        item = first + i
        inside = item < N * H
        slot = tl.load(kept + item // H, mask=inside, other=-1)
        entry = tl.load(entries + item, mask=inside, other=-1)
        misfit = tl.load(k_misfits + item, mask=slot >= 0, other=0) | tl.load(v_misfits + item, mask=slot >= 0, other=0)
        raw = misfit != 0
        takes, frees = raw & (entry < 0), (slot >= 0) & (misfit == 0) & (entry >= 0)
        tl.store(entries + item, tl.where(raw, entry, -1), mask=inside)
        done = tl.zeros((), tl.int32)
        while done < ITEMS:
            until = tl.min(tl.where(frees & (i >= done), i, ITEMS))
            now = takes & (i >= done) & (i < until)
            wanted, found = tl.sum(now.to(tl.int32)), tl.zeros((), tl.int32)
            while (found < wanted) & (cursor < E):
                e = cursor + i
                is_free = tl.load(owner + e.to(tl.int64) * owner_step, mask=e < E, other=0) < 0
                rank = found + tl.cumsum(is_free.to(tl.int32), axis=0) - 1
                tl.store(free + rank, e, mask=is_free & (rank < wanted))
                last = tl.max(tl.where(is_free & (rank == wanted - 1), e, -1))
                found = tl.minimum(found + tl.sum(is_free.to(tl.int32)), wanted)
                cursor = tl.where(last >= 0, last + 1, cursor + ITEMS)
            tl.debug_barrier()
            rank = tl.cumsum(now.to(tl.int32), axis=0) - 1
            got = now & (rank < found)
            e = tl.load(free + rank, mask=got, other=0)
            tl.store(owner + e.to(tl.int64) * owner_step, slot * H + item % H, mask=got)
            tl.store(entries + item, e, mask=got)
            used, refused = used + found, refused + (wanted - found)
            if until < ITEMS:
                freed = tl.max(tl.where(i == until, entry, -1))
                tl.store(owner + freed.to(tl.int64) * owner_step, tl.full((), -1, tl.int64))
                cursor, used = tl.minimum(cursor, freed), used - 1
            tl.debug_barrier()
            done = until + 1
    tl.store(state, tl.load(state) + used)
    tl.store(state + state_step, tl.load(state + state_step) + refused)


@triton.jit
def raw_kernel(
    k, k_row, k_row_head, v, v_row, v_row_head, kept, positions, positions_step, entries, lo, undo,
    k_codes, k_page, k_head, k_token, v_codes, v_page, v_head, v_token, tags, t_page, t_head, t_token, table, table_row,
    H, page,
    KIND: tl.constexpr, RAW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One row that is kept raw: its numbers to its entry, and the stored row that leads there."""
    item = tl.program_id(0)
    entry = tl.load(entries + item)
    if entry < 0:
        return
    n, h = (item // H).to(tl.int64), (item % H).to(tl.int64)
    slot = tl.load(kept + n)
    where, offset = slot // page, slot % page
    j, jv = tl.arange(0, BD)[None, :], tl.arange(0, BDV)[None, :]
    position = tl.load(positions + n * positions_step) + tl.zeros((1, 1), tl.int32)
    every = position >= 0
    key = load_key(k + n * k_row + h * k_row_head, every, position, lo, undo, KIND, D, BD, HALF, INTERLEAVED)
    value = to_f32(tl.load(v + n * v_row + h * v_row_head + jv, mask=jv < DV, other=0), KIND)
    into = table + entry.to(tl.int64) * table_row
    tl.store(into + j, from_f32(key, RAW), mask=j < D)
    tl.store(into + D + jv, from_f32(value, RAW), mask=jv < DV)
    number = tl.where(j < 4, entry >> (8 * tl.minimum(j, 3)), 0) & 0xFF
    tl.store(k_codes + where * k_page + h * k_head + offset * k_token + j, number.to(tl.uint8), mask=j < K_BYTES)
    tl.store(v_codes + where * v_page + h * v_head + offset * v_token + jv, (jv * 0).to(tl.uint8), mask=jv < V_BYTES)
    i = tl.arange(0, 4)
    word = tag_words(tags + where * t_page + h * t_head + offset * t_token) + i
    tl.store(word, tl.where(i == 0, RAW_TAG, 0).to(tl.uint16), mask=i < 3)


# --- launching ------------------------------------------------------------------------------------------------------


def code_rows(
    x, kept, positions, codes, tags, templates, bits: int, misfits, sinks: int, k_rotation: int, rope: tuple,
    interleaved: bool, keys: bool,
) -> None:  # fmt: skip
    """Keys or values to codes and tags."""
    N, H, D = x.shape
    centres, search, half_norm, mean, step, bound = templates[:6]
    encode_kernel[(cdiv(N, ROWS), H)](
        raw(x), *x.stride()[:2], kept, positions, positions.stride(0), codes, *codes.stride()[:3],
        tags, *tags.stride()[:3], centres, search, half_norm, mean, step, bound, rope[0], rope[2], misfits,
        N, H, codes.shape[2], centres.shape[1], search.shape[1], sinks, (REACH | UNITS)[bits],
        KIND=kind(x), KEYS=keys, CODE=code_layout(codes, D, bits), AT_LARGEST=bits in REACH,
        TILE=min(TEMPLATES, power(16 * search.shape[1])), ROWS=ROWS, num_warps=min(16, max(4, power(D) // CHANNELS)),
        **rotation_flags(k_rotation), **rope_flags(rope, interleaved), **EXACT,
    )  # fmt: skip


def sketch_rows(k, kept, bits, norm, centre) -> None:
    """Keys as they are given to the sketch."""
    N, H, D = k.shape
    page = norm.shape[2]
    plane = page * cdiv(D, 8)
    sketch_kernel[(cdiv(N, SKETCHED), H)](
        raw(k), *k.stride()[:2], kept, bits, *bits.stride()[:2], plane, raw(norm), *norm.stride(),
        centre, centre.stride(0), N, page, KIND=kind(k), D=D, BD=power(D, 16), PLANES=bits.shape[-1] // plane,
        ROWS=SKETCHED, **EXACT,
    )  # fmt: skip


def delta_encode(
    k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, codec: tuple, sinks: int,
    pages: tuple, bits: Any, norm: Any, centre: Any, *, outs: tuple | None = None,
) -> tuple[()]:  # fmt: skip
    """Write rows k [N,Hkv,Dk], v [N,Hkv,Dv] as differences from templates, in place; slot -1 is skipped."""
    k_bits, v_bits, k_rotation, k_templates, v_templates, rope, interleaved = codec
    k_codes, v_codes, tags, table, owner, state = pages
    (N, H, D), DV, page, E = k.shape, v.shape[2], k_codes.shape[2], table.shape[0]
    if N * H == 0:
        return ()
    kept = torch.empty(N, dtype=torch.int64, device=k.device)
    entries = torch.empty(N, H, dtype=torch.int32, device=k.device)
    misfits = torch.empty(2, N, H, dtype=torch.uint8, device=k.device)
    in_keys, in_values, in_tags = ((x, *x.stride()[:3]) for x in (k_codes, v_codes, tags))
    fate_kernel[(cdiv(N, ROWS),)](
        slots, slots.stride(0), *in_keys, *in_tags, owner, owner.stride(0), kept, entries, N, H, page, E,
        HEADS=power(H), ALIGNED=code_layout(k_codes, D, k_bits)[C_ALIGNED], ROWS=ROWS, SCAN=SCAN,
    )  # fmt: skip
    if bits is not None:
        sketch_rows(k, kept, bits, norm, centre)
    code_rows(k, kept, positions, k_codes, tags, k_templates, k_bits, misfits[0], sinks, k_rotation, rope, interleaved,
              True)  # fmt: skip
    code_rows(v, kept, positions, v_codes, tags, v_templates, v_bits, misfits[1], sinks, 1, NO_ROPE, False, False)
    free = torch.empty(ITEMS, dtype=torch.int32, device=k.device)
    settle_kernel[(1,)](
        kept, entries, *misfits, owner, owner.stride(0), state, state.stride(0), free, N, H, E, ITEMS=ITEMS,
        num_warps=8,
    )  # fmt: skip
    if E == 0:
        return ()
    raw_kernel[(N * H,)](
        raw(k), *k.stride()[:2], raw(v), *v.stride()[:2], kept, positions, positions.stride(0), entries,
        rope[0], rope[2], *in_keys, *in_values, *in_tags, raw(table), table.stride(0), H, page,
        KIND=kind(k), RAW=kind(table), D=D, BD=power(D, 32), DV=DV, BDV=power(DV, 32), K_BYTES=k_codes.shape[3],
        V_BYTES=v_codes.shape[3], **rope_flags(rope, interleaved), **EXACT,
    )  # fmt: skip
    return ()
