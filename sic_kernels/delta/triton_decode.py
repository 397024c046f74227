"""delta_decode in Triton: coded rows to numbers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..slicing.triton_common import cdiv, from_f32, kind, page_at, power, raw, table_args, width
from .reference_decode import DTYPES
from .triton_common import BLOCK, C_ALIGNED, C_BD, C_D, load_entry, load_levels, unrotate_values
from .triton_rows import coded_args, key_rows, load_tags, plain_rows, rope_positions

NUMBERS = 2048  # of keys that one program decodes: they lie in registers


@triton.jit
def decode_kernel(
    k_codes, k_page, k_head, k_token, v_codes, v_page, v_head, v_token, tags, t_page, t_head, t_token,
    raw, raw_row, entries, k_centres, v_centres, lo, hi, positions, positions_row, table, table_row, lens,
    k, k_b, k_s, k_h, v, v_b, v_s, v_h, H, page, S,
    K_CODE: tl.constexpr, V_CODE: tl.constexpr, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, K_COUNT: tl.constexpr,
    V_COUNT: tl.constexpr, RAW: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, OUT: tl.constexpr, PAGED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N tokens of one sequence and head; zeros behind its end."""
    D: tl.constexpr = K_CODE[C_D]
    DV: tl.constexpr = V_CODE[C_D]
    b, h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    pos = (tl.program_id(1) * N + tl.arange(0, N))[:, None]
    inside = pos < S
    live = inside & (pos < tl.load(lens + b))
    where = page_at(table, table_row, b, pos // page, live, PAGED)
    offset = (pos % page).to(tl.int64)
    k_scale, v_scale, k_id, v_id, is_raw = load_tags(
        tags + where * t_page + h * t_head + offset * t_token, live, K_COUNT, V_COUNT
    )
    row = k_codes + where * k_page + h * k_head + offset * k_token
    some_raw = tl.max(is_raw.to(tl.int32)) != 0
    entry = load_entry(row, is_raw, entries, K_CODE[C_ALIGNED])
    position = rope_positions(positions, positions_row, b, pos, live)
    hi_row = tl.program_id(1) * N // BLOCK if positions is None else position // BLOCK
    plain = plain_rows(
        k_centres + h * K_COUNT * D, k_id, live, is_raw, entry, some_raw, raw, raw_row, 0, D, K_CODE[C_BD], RAW
    )
    x = key_rows(row, k_scale, live, plain, lo, hi, position, hi_row, N, K_CODE, K_WORDS, R, NORM, HALF, INTERLEAVED)
    j = tl.arange(0, K_CODE[C_BD])[None, :]
    at = k + b.to(tl.int64) * k_b + pos.to(tl.int64) * k_s + h * k_h
    tl.store(at + j, from_f32(tl.where(live, x, 0.0), OUT), mask=inside & (j < D))
    row = v_codes + where * v_page + h * v_head + offset * v_token
    plain = plain_rows(
        v_centres + h * V_COUNT * DV, v_id, live, is_raw, entry, some_raw, raw, raw_row, D, DV, V_CODE[C_BD], RAW
    )
    y = unrotate_values(load_levels(row, live, N, V_CODE, V_WORDS), DV, N, V_CODE[C_BD]) * v_scale + plain
    j = tl.arange(0, V_CODE[C_BD])[None, :]
    at = v + b.to(tl.int64) * v_b + pos.to(tl.int64) * v_s + h * v_h
    tl.store(at + j, from_f32(tl.where(live, y, 0.0), OUT), mask=inside & (j < DV))


def delta_decode(
    seq_lens: torch.Tensor, block_table: torch.Tensor | None, pages: tuple, codec: tuple, positions: Any,
    max_seq_len: Any, dtype: int, *, outs: tuple | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """k [B,S,Hkv,Dk], v [B,S,Hkv,Dv] as numbers: keys rotated to `positions`; rows from seq_len on are 0."""
    H, page = pages[0].shape[1:3]
    B, S = seq_lens.shape[0], width(block_table, page, max_seq_len)
    sizes = [templates[0].shape[2] for templates in codec[3:5]]
    if outs is None:
        k, v = (torch.empty(B, S, H, D, dtype=DTYPES[dtype], device=seq_lens.device) for D in sizes)
        outs = (k, v)
    if B * S * H == 0:
        return outs[0], outs[1]
    args, flags = coded_args(pages, codec, positions)
    table, table_row, paged = table_args(block_table)
    n = min(64, NUMBERS // power(max(sizes), 32))
    decode_kernel[(B * H, cdiv(S, n))](
        *args, table, table_row, seq_lens, raw(outs[0]), *outs[0].stride()[:3], raw(outs[1]), *outs[1].stride()[:3],
        H, page, S, **flags, OUT=kind(outs[0]), PAGED=paged, N=n,
    )  # fmt: skip
    return outs[0], outs[1]
