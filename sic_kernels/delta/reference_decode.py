"""Decoding, and attention over what is decoded; in float64, rounded once."""

from __future__ import annotations

import torch

from ..slicing.reference_attention import sliced_attention
from ..slicing.reference_layout import place, width
from .levels import LEVELS
from .reference_layout import from_little_endian, read_tags, unpack_codes
from .reference_rotation import apply_rope, rotate_keys, unrotate

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # by number


def decode_rows(
    codes: Tensor, ids: Tensor, scale: Tensor, centres: Tensor, bits: int, k_rotation: int | None
) -> Tensor:
    """Rows of codes u8[...,Hkv,bytes] -> f64[...,Hkv,D]: template + un-rotated residual. An id that is none is 0."""
    levels = torch.tensor(LEVELS[bits], dtype=torch.float64, device=codes.device)
    y = levels[unpack_codes(codes, centres.shape[2], bits).long()] * scale.double()[..., None]
    r = unrotate(y) if k_rotation is None else rotate_keys(y, k_rotation)
    known = torch.where(ids < centres.shape[1], ids, 0)
    return centres.double()[torch.arange(ids.shape[-1], device=ids.device), known] + r


def decode_slots(where: Tensor, offset: Tensor, pages: tuple, codec: tuple) -> tuple[Tensor, Tensor]:
    """Keys f64[...,Hkv,Dk] before RoPE and values f64[...,Hkv,Dv] of the slots `offset` of the pages `where`, both [...].

    A raw row whose entry is none is template 0.
    """
    k_bits, v_bits, k_rotation, k_templates, v_templates = codec[:5]
    k_codes, v_codes, tags, raw = pages[:4]
    k_rows, v_rows = k_codes[where, :, offset], v_codes[where, :, offset]
    k_scale, v_scale, k_id, v_id, is_raw = read_tags(tags[where, :, offset])
    k_scale, v_scale, k_id, v_id = (torch.where(is_raw, torch.zeros_like(x), x) for x in (k_scale, v_scale, k_id, v_id))
    k = decode_rows(k_rows, k_id, k_scale, k_templates[0], k_bits, k_rotation)
    v = decode_rows(v_rows, v_id, v_scale, v_templates[0], v_bits, None)
    entry = from_little_endian(k_rows[is_raw][:, :4])
    there = (entry >= 0) & (entry < raw.shape[0])
    kept = raw[entry[there]].double()
    known = is_raw.clone()
    known[is_raw] = there
    k[known], v[known] = kept[:, : k.shape[-1]], kept[:, k.shape[-1] :]
    return k, v


def decode(pages, codec, block_table, seq_lens, positions, S) -> tuple[Tensor, Tensor]:
    """f64 [B,S,Hkv,Dk], [B,S,Hkv,Dv]: keys at their positions; rows from seq_len on are 0."""
    k_codes, (k_centres, v_centres) = pages[0], (codec[3][0], codec[4][0])
    H, page = k_codes.shape[1:3]
    index, offset, live = place(block_table, seq_lens, page, S)
    k = torch.zeros(*live.shape, H, k_centres.shape[2], dtype=torch.float64, device=k_codes.device)
    v = torch.zeros(*live.shape, H, v_centres.shape[2], dtype=torch.float64, device=k_codes.device)
    rows_k, rows_v = decode_slots(index[live], offset.expand_as(index)[live], pages, codec)
    (lo, hi, _), interleaved = codec[5:]
    if lo is not None:
        at = torch.arange(S, device=k.device).expand_as(live) if positions is None else positions[:, :S]
        rows_k = apply_rope(rows_k, at[live], lo, hi, interleaved)
    k[live], v[live] = rows_k, rows_v
    return k, v


def delta_decode(seq_lens, block_table, pages, codec, positions, max_seq_len, dtype):
    """k [B,S,Hkv,Dk], v [B,S,Hkv,Dv] as numbers: keys rotated to `positions`; rows from seq_len on are 0.

    dtype: 0 float32, 1 float16, 2 bfloat16.
    """
    S = width(block_table, pages[0].shape[2], max_seq_len)
    k, v = decode(pages, codec, block_table, seq_lens, positions, S)
    return k.to(DTYPES[dtype]), v.to(DTYPES[dtype])


def delta_attention(
    q,
    pages,
    codec,
    block_table,
    seq_lens,
    indices,
    counts,
    unit,
    positions,
    tail_k,
    tail_v,
    tail_start,
    scale,
    key_bias,
    softcap,
    window,
    sinks,
    max_seq_len,
):
    """out [B,T,Hq,Dv] (q's dtype), lse f32[B,T,Hq]: sliced_attention over the decoded cache.

    Positions from tail_start[b] on are rows of the tail [B,Hkv,R,D], keys already rotated, at position - tail_start[b].
    """
    page = pages[0].shape[2]
    S = width(block_table, page, max_seq_len)
    coded = seq_lens.long() if tail_start is None else torch.minimum(seq_lens.long(), tail_start.long())
    k, v = (x.float().transpose(1, 2) for x in decode(pages, codec, block_table, coded, positions, S))
    if tail_start is not None:
        k, v = with_tail(k, tail_k, tail_start, seq_lens), with_tail(v, tail_v, tail_start, seq_lens)
    k_cache, v_cache, table = as_pages(k, page), as_pages(v, page), page_table(seq_lens, S, page)
    return sliced_attention(
        q, k_cache, v_cache, table, seq_lens, indices, counts, unit, scale, key_bias, softcap, window, sinks, None, None, S
    )  # fmt: skip


def with_tail(rows: Tensor, tail: Tensor, start: Tensor, seq_lens: Tensor) -> Tensor:
    """rows [B,Hkv,S,D] with those of the tail [B,Hkv,R,D] from start[b] to seq_len in their place."""
    pos = torch.arange(rows.shape[2], device=rows.device)
    first = start.long()[:, None]
    taken = (pos >= first) & (pos < seq_lens.long()[:, None])  # [B,S]
    b, s = taken.nonzero(as_tuple=True)
    rows = rows.clone()
    rows[b, :, s] = tail[b, :, s - start.long()[b]].to(rows.dtype)
    return rows


def as_pages(rows: Tensor, page: int) -> Tensor:
    """[B,Hkv,S,D] -> [B*M,Hkv,page,D], the last page of each sequence padded with zeros."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[2] % page))
    return padded.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)


def page_table(seq_lens: Tensor, S: int, page: int) -> Tensor:
    """int64[B,M]: the pages of `as_pages`."""
    M = -(-S // page)
    return torch.arange(seq_lens.shape[0] * M, device=seq_lens.device).reshape(-1, M)
