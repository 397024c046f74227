"""append_kv and page_summary in Triton: rows into a paged cache with their index entries, and what encloses a page."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .triton_common import (
    EXACT,
    F8,
    F16,
    F32,
    INF,
    cdiv,
    device,
    from_f32,
    kind,
    larger,
    largest,
    page_at,
    power,
    raw,
    scale_args,
    scale_at,
    scaled,
    table_args,
    to_f32,
)
from .triton_sketch import centred, store_sketch

ROWS = 4  # rows that one program of append_kv writes
SCAN = 256  # slots compared at a time, to find a later row of the same slot or page
TOKENS = 16  # keys of a page that are reduced at a time


# --- summaries ------------------------------------------------------------------------------------------------------


@device
def difference_up(a, b):
    """a - b rounded towards +inf: the rounding error is exact (TwoSum), so one step up if something was lost."""
    d = a - b
    part = d - a
    lost = ((a - (d - part)) + (-b - part)) > 0
    u = d.to(tl.int32, bitcast=True)
    up = tl.where(d > 0, u + 1, tl.where(d == 0, 1, u - 1)).to(tl.float32, bitcast=True)
    return tl.where(lost & (d != INF), up, d)


@device
def store_up(pointer, x, mask, KIND: tl.constexpr):
    """Store x >= 0 rounded towards +inf: of a positive number in any format the next one is the next integer."""
    near = from_f32(x, KIND)
    if KIND == F32:
        tl.store(pointer, near, mask=mask)
    elif KIND == F16:
        code = near.to(tl.int16, bitcast=True) + (near.to(tl.float32) < x).to(tl.int16)
        tl.store(pointer, code.to(tl.float16, bitcast=True), mask=mask)
    else:
        tl.store(pointer, near + (to_f32(near, KIND) < x).to(tl.int16), mask=mask)


@device
def summarise(
    keys, k_token, live, summary, summary_row, scale, scale_head, h, D: tl.constexpr, BD: tl.constexpr,
    KIND: tl.constexpr, OUT: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Centre and radius of the first `live` keys of one page and head."""
    j = tl.arange(0, BD)
    low = tl.full((BD,), float("inf"), tl.float32)
    high = tl.full((BD,), float("-inf"), tl.float32)
    for first in range(0, live, TOKENS):
        token = (first + tl.arange(0, TOKENS))[:, None]
        mask = (token < live) & (j < D)[None, :]
        x = tl.load(keys + token.to(tl.int64) * k_token + j[None, :], mask=mask, other=0)
        x = scaled(x, scale, scale_head, h, KIND, SCALE)
        low = -larger(-low, largest(tl.where(mask, -x, float("-inf")), 0))
        high = larger(high, largest(tl.where(mask, x, float("-inf")), 0))
    stored = from_f32(low * 0.5 + high * 0.5, OUT)
    centre = to_f32(stored, OUT)
    tl.store(summary + j, stored, mask=j < D)
    radius = larger(difference_up(high, centre), difference_up(centre, low))
    store_up(summary + summary_row + j, radius, j < D, OUT)


@triton.jit
def page_summary_kernel(
    k, k_page, k_head, k_token, table, table_row, lens, start, scale, scale_head,
    summary, summary_page, summary_head, summary_row, H, page,
    D: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, OUT: tl.constexpr, PAGED: tl.constexpr,
    SCALE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One page of one sequence and head; pages before `start`'s, or without a live key, are left alone."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    index = tl.program_id(1)
    length = tl.load(lens + b)
    first = index * page
    if start is not None:
        first_page = tl.load(start + b) // page
        if index < first_page:
            return
    if first >= length:
        return
    where = page_at(table, table_row, b, index, True, PAGED)
    live = tl.minimum(length - first, page).to(tl.int32)
    in_page = where * summary_page + h.to(tl.int64) * summary_head
    summarise(k + where * k_page + h.to(tl.int64) * k_head, k_token, live, summary + in_page, summary_row,
              scale, scale_head, h, D, BD, KIND, OUT, SCALE, TOKENS)  # fmt: skip


def summary_dtype(cache: torch.dtype) -> torch.dtype:
    """Summaries are in the cache's type; of f8 caches in f32."""
    return torch.float32 if cache == torch.float8_e4m3fn else cache


def page_summary(
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor,
    k_scale: Any,
    start: torch.Tensor | None,
    *,
    outs: tuple | None = None,
) -> tuple[torch.Tensor]:
    """summary [P,Hkv,2,D]: centre and radius of each page's live keys; other pages stay as they are (new: 0)."""
    P, H, page, D = k_cache.shape
    B = seq_lens.shape[0]
    if outs is None:
        outs = (torch.zeros(P, H, 2, D, dtype=summary_dtype(k_cache.dtype), device=k_cache.device),)
    (summary,) = outs
    table, table_row, paged = table_args(block_table)
    M = 1 if block_table is None else block_table.shape[1]
    if B * H * M == 0 or page == 0:
        return (summary,)
    scale, scale_head, mode = scale_args(k_scale)
    page_summary_kernel[(B * H, M)](
        raw(k_cache), *k_cache.stride()[:3], table, table_row, seq_lens, start, scale, scale_head,
        raw(summary), *summary.stride()[:3], H, page,
        D=D, BD=power(D, 16), KIND=kind(k_cache), OUT=kind(summary), PAGED=paged, SCALE=mode, TOKENS=TOKENS, **EXACT,
    )  # fmt: skip
    return (summary,)


# --- appending ------------------------------------------------------------------------------------------------------


@device
def stored_rows(x, scale, scale_head, h, KIND: tl.constexpr, CACHE: tl.constexpr, SCALE: tl.constexpr):
    """Rows as the cache stores them: as they are; in an f8 cache divided by its scale and rounded."""
    if CACHE == F8:
        numbers = to_f32(x, KIND)
        if SCALE != 0:
            numbers = tl.div_rn(numbers, tl.zeros_like(numbers) + scale_at(scale, scale_head, h, SCALE))
        return from_f32(numbers, F8)
    else:
        return x


@device
def stays(slot, n, slots, slots_step, begin, N, SCAN: tl.constexpr):
    """Whether rows n [ROWS,1], from `begin` on, are written: they have a slot, and no later row has the same."""
    mine = slot >= 0
    for first in range(begin, N, SCAN):
        m = (first + tl.arange(0, SCAN))[None, :]
        other = tl.load(slots + m * slots_step, mask=m < N, other=-1).to(tl.int64)
        mine = mine & (tl.max(((other == slot) & (m > n)).to(tl.int32), axis=1)[:, None] == 0)
    return mine


@triton.jit
def append_kernel(
    k, k_row, k_row_head, v, v_row, v_row_head, k_cache, k_page, k_head, k_token, v_cache, v_page, v_head, v_token,
    slots, slots_step, k_scale, k_scale_head, v_scale, v_scale_head,
    bits, bits_page, bits_head, plane, norm, norm_page, norm_head, norm_token, centre, centre_head, N, page,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr, CACHE: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, PLANES: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head: K, V and, with PLANES, the sketch of K as stored.  Of two rows of a slot the later wins."""
    h = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    slot = tl.load(slots + n * slots_step, mask=n < N, other=-1).to(tl.int64)
    mine = stays(slot, n, slots, slots_step, tl.program_id(0) * ROWS, N, SCAN)
    where, offset = slot // page, slot % page
    j = tl.arange(0, BD)[None, :]
    row = tl.load(k + n.to(tl.int64) * k_row + h * k_row_head + j, mask=mine & (j < D), other=0)
    key = stored_rows(row, k_scale, k_scale_head, h, KIND, CACHE, K_SCALE)
    tl.store(k_cache + where * k_page + h * k_head + offset * k_token + j, key, mask=mine & (j < D))
    jv = tl.arange(0, BDV)[None, :]
    row = tl.load(v + n.to(tl.int64) * v_row + h * v_row_head + jv, mask=mine & (jv < DV), other=0)
    value = stored_rows(row, v_scale, v_scale_head, h, KIND, CACHE, V_SCALE)
    tl.store(v_cache + where * v_page + h * v_head + offset * v_token + jv, value, mask=mine & (jv < DV))
    if PLANES != 0:
        x = centred(scaled(key, k_scale, k_scale_head, h, CACHE, K_SCALE), centre, centre_head, h, D, BD, CENTRED)
        x = tl.where(j < D, x, 0.0)
        in_bits, in_norm = bits + where * bits_page + h * bits_head, norm + where * norm_page + h * norm_head
        store_sketch(x, in_bits, plane, in_norm, norm_token, offset, page, mine, D, ROWS, BD, PLANES)


@triton.jit
def append_summary_kernel(
    slots, slots_step, k_cache, k_page, k_head, k_token, k_scale, k_scale_head,
    summary, summary_page, summary_head, summary_row, N, page,
    D: tl.constexpr, BD: tl.constexpr, CACHE: tl.constexpr, OUT: tl.constexpr, K_SCALE: tl.constexpr,
    SCAN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The summary of one written row's page, over its keys up to the last one written; other rows of the page pass."""
    n, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + n * slots_step).to(tl.int64)
    if slot < 0:
        return
    where = slot // page
    later = 0
    for first in range(0, N, SCAN):
        m = first + tl.arange(0, SCAN)
        other = tl.load(slots + m * slots_step, mask=m < N, other=-1).to(tl.int64)
        beyond = (other >= 0) & (other // page == where) & ((other > slot) | ((other == slot) & (m > n)))
        later += tl.sum(beyond.to(tl.int32))
    if later == 0:
        live = (slot % page + 1).to(tl.int32)
        summarise(k_cache + where * k_page + h * k_head, k_token, live,
                  summary + where * summary_page + h * summary_head, summary_row, k_scale, k_scale_head, h,
                  D, BD, CACHE, OUT, K_SCALE, TOKENS)  # fmt: skip


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: Any,
    v_scale: Any,
    bits: torch.Tensor | None,
    norm: torch.Tensor | None,
    centre: torch.Tensor | None,
    summary: torch.Tensor | None,
    *,
    outs: tuple | None = None,
) -> tuple[()]:
    """Write rows k [N,Hkv,Dk], v [N,Hkv,Dv] and their index entries in place; slot -1 is skipped."""
    N, H, D = k.shape
    page = k_cache.shape[2]
    if N * H == 0:
        return ()
    planes = 0 if bits is None else bits.shape[-1] // (page * cdiv(D, 8))
    key_scale, value_scale = scale_args(k_scale), scale_args(v_scale)
    sketch: tuple = (None, 0, 0, 0, None, 0, 0, 0)
    if bits is not None and norm is not None:
        sketch = (bits, *bits.stride()[:2], page * cdiv(D, 8), raw(norm), *norm.stride())
    append_kernel[(cdiv(N, ROWS), H)](
        raw(k), *k.stride()[:2], raw(v), *v.stride()[:2], raw(k_cache), *k_cache.stride()[:3],
        raw(v_cache), *v_cache.stride()[:3], slots, slots.stride(0), *key_scale[:2], *value_scale[:2],
        *sketch, centre, 0 if centre is None else centre.stride(0), N, page,
        D=D, BD=power(D, 16), DV=v.shape[2], BDV=power(v.shape[2], 16), KIND=kind(k), CACHE=kind(k_cache),
        K_SCALE=key_scale[2], V_SCALE=value_scale[2], PLANES=planes, CENTRED=centre is not None, ROWS=ROWS, SCAN=SCAN,
        **EXACT,
    )  # fmt: skip
    if summary is not None:
        append_summary_kernel[(N, H)](
            slots, slots.stride(0), raw(k_cache), *k_cache.stride()[:3], *key_scale[:2],
            raw(summary), *summary.stride()[:3], N, page,
            D=D, BD=power(D, 16), CACHE=kind(k_cache), OUT=kind(summary), K_SCALE=key_scale[2], SCAN=SCAN,
            TOKENS=TOKENS, **EXACT,
        )  # fmt: skip
    return ()
