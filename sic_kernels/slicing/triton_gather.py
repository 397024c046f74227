"""gather in Triton: the listed rows of a cache, packed, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .triton_common import cdiv, page_at, power, table_args, visible, width

ENTRIES = 32  # rows that one program copies
UNITS = 256  # listed units measured at a time
STARTS = 1024  # rows whose starts are added up at a time

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def size_kernel(
    indices, counts, lens, sizes, T, H, page, S, K, rows, UNIT: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """How many rows one (b, t, h) gathers: tokens of listed units that are visible."""
    row = tl.program_id(0).to(tl.int64)
    seen = visible(tl.load(lens + row // H // T), T, row // H % T, S)
    count = tl.load(counts + row)
    total = tl.zeros((UNITS,), tl.int64)
    size = page if UNIT == 1 else 1
    for first in range(0, count, UNITS):
        i = first + tl.arange(0, UNITS)
        unit = tl.load(indices + row * K + i, mask=(i < count) & (i < K), other=-1).to(tl.int64)
        inside = tl.minimum(tl.maximum(seen - unit * size, 0), size)
        total += tl.where(unit >= 0, inside, 0)
    tl.store(sizes + row, tl.sum(total))


@triton.jit
def start_kernel(sizes, indptr, rows, STARTS: tl.constexpr):
    """indptr from the sizes, in one program."""
    done = tl.zeros((), tl.int64)
    tl.store(indptr, done)
    for first in range(0, rows, STARTS):
        i = first + tl.arange(0, STARTS)
        size = tl.load(sizes + i, mask=i < rows, other=0)
        tl.store(indptr + 1 + i, done + tl.cumsum(size, 0), mask=i < rows)
        done += tl.sum(size)


@triton.jit
def gather_kernel(
    k, k_page, k_head, k_token, v, v_page, v_head, v_token, table, table_row, indices, indptr,
    out_k, out_k_row, out_v, out_v_row, T, H, page, K,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, PAGED: tl.constexpr, UNIT: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """N rows of one (b, t, h). Listed units ascend, so its visible rows are the first ones of its entries."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H // T, row % H
    begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    entry = tl.program_id(1) * N + tl.arange(0, N)
    live = entry < end - begin
    if UNIT == 1:
        pos = tl.load(indices + row * K + entry // page, mask=live, other=0) * page + entry % page
    else:
        pos = tl.load(indices + row * K + entry, mask=live, other=0)
    index = pos // page if PAGED else pos * 0
    offset = (pos % page if PAGED else pos).to(tl.int64)
    where = page_at(table, table_row, b, index, live, PAGED)
    j, jv = tl.arange(0, BD)[None, :], tl.arange(0, BDV)[None, :]
    to = (begin + entry)[:, None]
    mask = live[:, None] & (j < D)
    at = (where * k_page + h * k_head + offset * k_token)[:, None] + j
    tl.store(out_k + to * out_k_row + j, tl.load(k + at, mask=mask, other=0), mask=mask)
    mask = live[:, None] & (jv < DV)
    at = (where * v_page + h * v_head + offset * v_token)[:, None] + jv
    tl.store(out_v + to * out_v_row + jv, tl.load(v + at, mask=mask, other=0), mask=mask)


def gather(
    k_cache, v_cache, block_table, seq_lens, indices, counts, unit, *, outs: Any = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k [N,Dk], v [N,Dv], indptr i64[B*T*Hkv+1]: the selected visible rows, packed by (b, t, head).

    Without outs, N is read from the device: the one place where a launcher waits.
    """
    B, T, H, K = indices.shape
    page, D, DV = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]
    rows, S, size = B * T * H, width(block_table, page, None), page if unit == 1 else 1
    table, table_row, paged = table_args(block_table)
    indices = indices.contiguous()
    indptr = torch.empty(rows + 1, dtype=torch.int64, device=k_cache.device) if outs is None else outs[2]
    sizes = torch.empty(rows, dtype=torch.int64, device=k_cache.device)
    if rows:
        size_kernel[(rows,)](
            indices, counts.contiguous(), seq_lens, sizes, T, H, page, S, K, rows, UNIT=unit, UNITS=UNITS
        )
    start_kernel[(1,)](sizes, indptr, rows, STARTS=STARTS)
    if outs is None:
        total = int(indptr[-1])
        outs = (k_cache.new_empty(total, D), v_cache.new_empty(total, DV), indptr)
    if rows * K * size:
        bits_k, bits_v = _BITS[k_cache.element_size()], _BITS[v_cache.element_size()]
        out_k, out_v = outs[0].view(bits_k), outs[1].view(bits_v)
        gather_kernel[(rows, cdiv(K * size, ENTRIES))](
            k_cache.view(bits_k), *k_cache.stride()[:3], v_cache.view(bits_v), *v_cache.stride()[:3], table, table_row,
            indices, indptr, out_k, out_k.stride(0), out_v, out_v.stride(0), T, H, page, K,
            D=D, BD=power(D, 16), DV=DV, BDV=power(DV, 16), PAGED=paged, UNIT=unit, N=ENTRIES,
        )  # fmt: skip
    return outs[0], outs[1], indptr
