"""Encoding, bit for bit: the definition that every backend must reproduce exactly.

A key (turned back from its position) or value x becomes the id of the nearest template c, and the rotated residual
y = H(x - c) as integer levels times one f16 scale, fitted by least squares (Lloyd-Max levels after a random rotation: QuIP#,
Tseng et al. 2024; TurboQuant, Zandieh et al. 2025). All arithmetic is IEEE float32, every operation rounded by itself, in the
order written here. Rows that do not fit are kept raw in a side table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..slicing.reference_sketch import rotate, tree_sum, write_sketch
from .levels import LEVELS, MAX_LEVEL_8, REACH, UNITS, thresholds
from .reference_layout import RAW_SCALE, little_endian, make_tags, pack_codes
from .reference_rotation import rotate_keys, undo_rope

Tensor = torch.Tensor

SEARCH_LEVELS = 127  # rows become integers within +-127 to find their template
SMALLEST_ROW = 2.0**-120  # of the search and of a residual: 127 / it must be finite
LARGEST_SCALE = 65504.0  # of half precision


class Coded(NamedTuple):
    """Rows [N,Hkv] as they are stored: codes u8[..., D], template ids int64, scales f16; misfit: kept raw if there is room."""

    codes: Tensor
    ids: Tensor
    scale: Tensor
    misfit: Tensor


def divide(a: float, b: Tensor) -> Tensor:
    """a / b, one IEEE division; torch takes a reciprocal where a number meets a tensor."""
    return torch.full_like(b, a) / b


def root(x: Tensor) -> Tensor:
    """The IEEE square root: torch's own in float32 is off by a bit, its float64 rounded to float32 is not."""
    return torch.sqrt(x.double()).float()


def dot_templates(q: Tensor, search: Tensor) -> Tensor:
    """Rows of integers q f32[N,Hkv,D] times the search templates i8[Hkv, n/16, D/4, 16, 4], exactly: f32[N,Hkv,n]."""
    H, groups, quads = search.shape[:3]
    plain = search.permute(0, 1, 3, 2, 4).reshape(H, 16 * groups, 4 * quads).float()
    padded = torch.nn.functional.pad(q, (0, plain.shape[-1] - q.shape[-1]))
    return torch.einsum("nhd,hcd->nhc", padded, plain)  # at most 127 * 127 * 1024 < 2^24


def nearest(x: Tensor, templates: tuple) -> Tensor:
    """int64[N,Hkv]: the templates nearest to x f32[N,Hkv,D] by their integer distance; the lowest id of several."""
    _, search, half_norm, mean, step = templates[:5]
    moved = x - mean
    largest = moved.abs().amax(-1)
    usable = largest >= SMALLEST_ROW
    levels = torch.full_like(largest, SEARCH_LEVELS)
    inverse = levels / torch.where(usable, largest, 1.0)
    q = torch.where(usable[..., None], torch.round(moved * inverse[..., None]), 0.0)
    factor = (largest / levels) * step
    scores = dot_templates(q, search) * factor[..., None] - half_norm
    return scores.argmax(-1)


def quantise(u: Tensor, bits: int) -> Tensor:
    """int64 codes of residuals in level units."""
    size, half = u.abs(), 1 << bits - 1
    if bits == 8:
        level = torch.round(size).clamp(max=MAX_LEVEL_8).long()
        return torch.where(u < 0, -level, level) + half
    m = torch.bucketize(size, torch.tensor(thresholds(bits), device=u.device), right=True)
    return torch.where(u < 0, half - 1 - m, half + m)


def start(y: Tensor, energy: Tensor, bits: int) -> tuple[Tensor, float]:
    """The size of rows y [..., D] f32[...], and how many level units it is given to find the codes."""
    if bits in REACH:
        return y.abs().amax(-1), REACH[bits]
    return root(energy / torch.full_like(energy, y.shape[-1])), UNITS[bits]


def encode_rows(x: Tensor, templates: tuple, bits: int, k_rotation: int | None) -> Coded:
    """Rows x f32[N,Hkv,D] of finite values. k_rotation: of keys; None: values, rotated as a whole."""
    centres, bound = templates[0], templates[5]
    ids = nearest(x, templates)
    r = x - centres[torch.arange(x.shape[1], device=x.device), ids].float()
    y = rotate(r) if k_rotation is None else rotate_keys(r, k_rotation)
    energy = tree_sum(y * y)
    spread, units = start(y, energy, bits)
    usable = (spread >= SMALLEST_ROW) & (spread < torch.inf)
    unit = divide(units, torch.where(usable, spread, 1.0))
    codes = quantise(torch.where(usable[..., None], y * unit[..., None], 0.0), bits)
    level = torch.tensor(LEVELS[bits], dtype=torch.float32, device=x.device)[codes]
    along, square = tree_sum(y.abs() * level.abs()), (level * level).sum(-1)
    fitted = (along / torch.where(usable, square, 1.0)).to(torch.float16)
    scale = torch.where(usable, fitted, torch.zeros_like(fitted))
    s = scale.float()
    error = (energy - (s + s) * along) + (s * s) * square
    misfit = (scale.isinf() | ~energy.isfinite()) | (error > bound)
    return Coded(codes.to(torch.uint8), ids, scale.clamp(max=LARGEST_SCALE), misfit)


def last_writes(slots: Tensor) -> Tensor:
    """Indices of the rows that stay, in order: slot not -1, and no later row for the same slot."""
    last = {slot: n for n, slot in enumerate(slots.tolist()) if slot >= 0}
    return torch.tensor(sorted(last.values()), dtype=torch.int64, device=slots.device)


def place_raw(misfit: Tensor, slots: Tensor, raw_owner: Tensor, raw_state: Tensor) -> Tensor:
    """int64[N,Hkv]: the entry of every row that is kept raw, -1 of the others; brings owners and state up to date.

    Row by row, head by head: a slot keeps the entry that it owns, else takes the lowest free one; a row that fits frees the
    entry of its slot; a row that finds no room is counted and stays coded.
    """
    H = misfit.shape[1]
    owners = raw_owner.tolist()
    owned = {owner: e for e, owner in enumerate(owners) if owner >= 0}
    entries = torch.full(misfit.shape, -1, dtype=torch.int64, device=misfit.device)
    refused = 0
    for n, slot in enumerate(slots.tolist()):
        for h, raw in enumerate(misfit[n].tolist()):
            entry = owned.pop(slot * H + h, None)
            if not raw:
                if entry is not None:
                    owners[entry] = -1
                continue
            if entry is None:
                entry = owners.index(-1) if -1 in owners else None
            if entry is None:
                refused += 1
                continue
            owners[entry], entries[n, h] = slot * H + h, entry
    raw_owner.copy_(torch.tensor(owners, dtype=torch.int64))
    raw_state[0] = sum(owner >= 0 for owner in owners)
    raw_state[1] += refused
    return entries


def delta_encode(k, v, positions, slots, codec, sinks, pages, bits, norm, centre):
    """Write rows k [N,Hkv,Dk], v [N,Hkv,Dv] as differences from templates, in place; slot -1 is skipped.

    A sketch (bits, norm, centre as in append_kv) takes the keys as they are given.
    """
    k_bits, v_bits, k_rotation, k_templates, v_templates, (lo, _, undo), interleaved = codec
    k_codes, v_codes, tags, raw, raw_owner, raw_state = pages
    kept = last_writes(slots)
    slots, positions = slots[kept].long(), positions[kept].long()
    page = k_codes.shape[2]
    where, offset = slots // page, slots % page
    keys, values = k[kept].float(), v[kept].float()
    if bits is not None:
        write_sketch(keys, where, offset, bits, norm, centre)
    if lo is not None:
        keys = undo_rope(keys, positions, lo, undo, interleaved)

    finite = keys.isfinite().all(-1) & values.isfinite().all(-1)
    k_rows = encode_rows(torch.where(keys.isfinite(), keys, 0.0), k_templates, k_bits, k_rotation)
    v_rows = encode_rows(torch.where(values.isfinite(), values, 0.0), v_templates, v_bits, None)
    misfit = k_rows.misfit | v_rows.misfit | ~finite | (positions < sinks)[:, None]
    entries = place_raw(misfit, slots, raw_owner, raw_state)
    stored = entries >= 0

    k_packed, v_packed = pack_codes(k_rows.codes, k_bits), pack_codes(v_rows.codes, v_bits)
    tag = make_tags(k_rows.scale, v_rows.scale, k_rows.ids, v_rows.ids)
    link = torch.zeros_like(k_packed)
    link[..., :4] = little_endian(entries.clamp(min=0), 4)
    raw_tag = torch.nn.functional.pad(little_endian(torch.full_like(entries, RAW_SCALE), 2), (0, 4))
    k_codes[where, :, offset] = torch.where(stored[..., None], link, k_packed)
    v_codes[where, :, offset] = torch.where(stored[..., None], torch.zeros_like(v_packed), v_packed)
    tags[where, :, offset] = torch.where(stored[..., None], raw_tag, tag)
    raw[entries[stored]] = torch.cat((keys, values), -1)[stored].to(raw.dtype)
    return ()
