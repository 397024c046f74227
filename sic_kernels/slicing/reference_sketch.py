"""The rotated key sketch, bit for bit: the definition that every backend must reproduce exactly.

A key k of head h becomes z = H(signs * (k - centre)): random signs, then a Hadamard butterfly, so that every channel of
z looks Gaussian whatever the model does.  Plane 0 stores the sign of z, plane 1 says whether |z| is large, and one bf16
norm per token and head turns an integer dot product into an estimate of q.k (RaBitQ, Gao & Long 2024, with a second
bit).  All arithmetic is IEEE float32 without fused multiply-add, in the order written here.
"""

from __future__ import annotations

import math
import struct

import torch

from .reference_layout import (
    Tensor,
    head_scale,
    live_slots,
    per_position,
    scaled_keys,
    softmax_scale,
    visible,
    width,
)
from .reference_pages import summarise


def f32(x: float) -> float:
    """x rounded to float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


TOKENS_PER_BLOCK = 16  # tokens whose bytes lie together, so that one vector load takes 16 of them
QUERY_LEVELS = 31  # queries become integers within +-31
STEPS_PER_NAT = 256  # resolution of the integer scores
ONE_BIT_GAIN = 2.2166  # level per unit of sign, for scores that use plane 0 of a two-plane sketch
THRESHOLD = 1.25  # plane 1 is set above THRESHOLD * mean |z|
UNREAD_SHRINK = f32(0.8)  # of one-bit scores in the estimate of unread mass: unbiased on text
SMALLEST_QUERY = 2.0**-120  # queries below it score nothing
LOWEST = -32767  # lowest score of a visible token
UNSEEN = -32768  # score of a position that the query cannot see

# 2^f on [-1/2, 1/2], highest power first (Cephes).
EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
        6.931472028550421e-1, 1.0)  # fmt: skip

_MASK64 = (1 << 64) - 1


# --- rotation -------------------------------------------------------------------------------------------------------


def _mix(x: int) -> int:
    """splitmix64 finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def signs(D: int) -> Tensor:
    """f32[D] of +-1, the same for every head, layer and model."""
    return torch.tensor(
        [-1.0 if _mix(((d + 1) * 0x9E3779B97F4A7C15) & _MASK64) & 1 else 1.0 for d in range(D)],
        dtype=torch.float32,
    )


def blocks(D: int) -> list[int]:
    """D as descending powers of two (its binary digits): the sizes of the butterflies on consecutive channels."""
    return [1 << bit for bit in range(D.bit_length() - 1, -1, -1) if D >> bit & 1]


def butterfly(x: Tensor) -> Tensor:
    """Unnormalised Hadamard transform of the last dimension (a power of two), additions in a fixed order."""
    n, h = x.shape[-1], 1
    while h < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        h *= 2
    return x


def rotate(x: Tensor) -> Tensor:
    """f32[..., D] -> f32[..., D]: signs, butterfly per block, times f32(1/sqrt(block size))."""
    x = x * signs(x.shape[-1]).to(x.device)
    parts = []
    for part in x.split(blocks(x.shape[-1]), dim=-1):
        parts.append(butterfly(part) * torch.tensor(1.0 / math.sqrt(part.shape[-1]), dtype=torch.float32))
    return torch.cat(parts, dim=-1)


def tree_sum(v: Tensor) -> Tensor:
    """f32[..., D] -> f32[...]: sum in the fixed order (halving within each block, then blocks left to right)."""
    sums = []
    for part in v.split(blocks(v.shape[-1]), dim=-1):
        while part.shape[-1] > 1:
            h = part.shape[-1] // 2
            part = part[..., :h] + part[..., h:]
        sums.append(part[..., 0])
    total = sums[0]
    for block in sums[1:]:
        total = total + block
    return total


# --- keys -----------------------------------------------------------------------------------------------------------


def sketch_keys(keys: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """Centred keys f32[..., D] -> (planes bool[..., planes, D], norm bf16[...])."""
    D = keys.shape[-1]
    y = rotate(keys)
    size = y.abs()
    mean = tree_sum(size)
    energy = tree_sum(y * y)
    b0 = y >= 0
    if planes == 1:
        bits, divisor = b0[..., None, :], mean
    else:
        outer = size >= (mean * torch.tensor(THRESHOLD / D, dtype=torch.float32))[..., None]
        # Offset binary: 4*b0 + 2*b1 - 3 is the level -3, -1, 1 or 3.
        bits = torch.stack((b0, b0 == outer), dim=-2)
        divisor = tree_sum(size * torch.where(outer, 3.0, 1.0))
    norm = torch.where(divisor == 0, torch.zeros_like(energy), energy / divisor)
    return bits, norm.to(torch.bfloat16)


def byte_offsets(page: int, D: int, planes: int) -> Tensor:
    """int64[page, planes, ceil(D/8)]: where byte j of a token's plane lies among the bytes of a (page, head).

    A plane is cut into blocks of 16 tokens (the last may be narrower, w); a block is [ceil(D/8)][w] bytes.
    """
    nbytes = -(-D // 8)
    token = torch.arange(page)
    first = token // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    w = (page - first).clamp(max=TOKENS_PER_BLOCK)
    within = first[:, None] * nbytes + torch.arange(nbytes) * w[:, None] + (token - first)[:, None]
    return torch.arange(planes)[None, :, None] * (page * nbytes) + within[:, None, :]


def pack_bits(planes: Tensor) -> Tensor:
    """bool[..., D] -> u8[..., ceil(D/8)]: channel 8j + c is bit c of byte j; surplus bits are 0."""
    D = planes.shape[-1]
    padded = torch.nn.functional.pad(planes.to(torch.uint8), (0, -D % 8))
    weights = torch.tensor([1 << c for c in range(8)], dtype=torch.uint8, device=planes.device)
    return (padded.unflatten(-1, (-(-D // 8), 8)) * weights).sum(-1).to(torch.uint8)


def unpack_bits(packed: Tensor, D: int) -> Tensor:
    """u8[..., ceil(D/8)] -> f32[..., D] of +-1."""
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(-2)[..., :D].float() * 2 - 1


def key_sketch(k_cache, block_table, seq_lens, centre, k_scale, planes, start):
    """bits u8[P,Hkv,planes*page*ceil(D/8)], norm bf16[P,Hkv,page] of the live keys; 0 where no live key is."""
    P, H, page, D = k_cache.shape
    live = live_slots(block_table, seq_lens, start, P, page)
    planes_of, norm = sketch_keys(_centred(scaled_keys(k_cache, k_scale), centre), planes)
    norm = norm.masked_fill(~live[:, None], 0)
    packed = pack_bits(planes_of).masked_fill(~live[:, None, :, None, None], 0)
    bits = torch.zeros(P, H, planes * page * -(-D // 8), dtype=torch.uint8, device=k_cache.device)
    bits[:, :, byte_offsets(page, D, planes).to(bits.device)] = packed
    return bits, norm


def append_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale, bits, norm, centre, summary):
    """Write rows k [N,Hkv,Dk], v [N,Hkv,Dv] and their index entries in place; slot -1 is skipped.

    The sketch is that of the key as stored.  The summary of a page covers its tokens up to the last one written here.
    """
    H, page = k_cache.shape[1:3]
    kept = slots >= 0
    where, offset = slots[kept].long() // page, slots[kept].long() % page
    stored = _store(k[kept], k_cache, where, offset, k_scale)
    _store(v[kept], v_cache, where, offset, v_scale)
    if bits is not None:
        scale = head_scale(k_scale, H)
        keys = stored.float() if scale is None else stored.float() * scale[:, None]
        write_sketch(keys, where, offset, bits, norm, centre)
    if summary is not None:
        for p in where.unique().tolist():
            live = int(offset[where == p].max()) + 1
            summary[p] = summarise(scaled_keys(k_cache[p : p + 1, :, :live], k_scale), summary.dtype)[0]
    return ()


def write_sketch(keys, where, offset, bits, norm, centre):
    """The sketch of keys f32[N,H,D] into the slots `offset` of the pages `where`, both [N]."""
    _, H, D = keys.shape
    page = norm.shape[2]
    planes = bits.shape[-1] // (page * -(-D // 8))
    planes_of, norms = sketch_keys(_centred(keys[:, :, None], centre)[:, :, 0], planes)
    target = byte_offsets(page, D, planes)[offset]  # [N, planes, bytes]
    bits[where[:, None, None, None], torch.arange(H)[:, None, None], target[:, None]] = pack_bits(planes_of)
    norm[where, :, offset] = norms


def _store(rows, cache, where, offset, scale):
    """Write rows [N,H,D] to their slots, and return them as stored.  f8 caches hold row / scale, saturated."""
    if cache.dtype == torch.float8_e4m3fn:
        per_head = head_scale(scale, cache.shape[1])
        rows = rows.float() if per_head is None else rows.float() / per_head[:, None]
        rows = rows.clamp(-448.0, 448.0)
    stored = rows.to(cache.dtype)
    if stored.numel():
        cache[where, :, offset] = stored
    return stored


def _centred(keys: Tensor, centre: Tensor | None) -> Tensor:
    """keys f32[P,Hkv,page,D] minus centre f32[Hkv,D]."""
    return keys if centre is None else keys - centre.float()[:, None]


# --- queries and scores ---------------------------------------------------------------------------------------------


def quantise_query(q: Tensor) -> tuple[Tensor, Tensor]:
    """q [..., D] -> (integers within +-31 as f32[..., D], step f32[...]), in the rotated space of the sketch."""
    y = rotate(q.float())
    largest = y.abs().amax(-1)
    usable = torch.isfinite(largest) & (largest >= SMALLEST_QUERY)
    most = torch.full_like(largest, QUERY_LEVELS)  # number / tensor would be a product with the reciprocal in torch
    inverse = most / torch.where(usable, largest, torch.ones_like(largest))
    levels = torch.round(y * inverse[..., None])
    levels = torch.where(usable[..., None], levels, torch.zeros_like(levels))
    return levels, torch.where(usable, largest / most, torch.zeros_like(largest))


def _to_steps(dot: Tensor, norm: Tensor, factor: Tensor) -> Tensor:
    """Integer scores int64 = rint((dot * norm) * factor) within +-32767; NaN is the lowest."""
    s = torch.round((dot * norm) * factor)
    return torch.where(s.isnan(), torch.full_like(s, LOWEST), s).clamp(LOWEST, -LOWEST).long()


def _query_terms(q: Tensor, heads: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """q [B,T,Hq,D] -> (integers f32[B,T,Hkv,G,D], factor f32[B,T,Hkv,G] = (step * scale) * 256)."""
    B, T, Hq, D = q.shape
    levels, step = quantise_query(q)
    factor = (step * torch.tensor(softmax_scale(scale, D), dtype=torch.float32)) * float(STEPS_PER_NAT)
    return levels.reshape(B, T, heads, Hq // heads, D), factor.reshape(B, T, heads, Hq // heads)


def head_scores(q, bits, norm, block_table, seq_lens, page, planes, scale, max_seq_len) -> Tensor:
    """int64[B,T,Hkv,G,S]: each head's plane-0 estimate of scale * q.(k - centre) in 1/256 nat."""
    H, D = bits.shape[1], q.shape[-1]
    S = width(block_table, page, max_seq_len)
    levels, factor = _query_terms(q, H, scale)
    if planes == 2:
        factor = factor * torch.tensor(ONE_BIT_GAIN, dtype=torch.float32)
    plane0 = bits[:, :, byte_offsets(page, D, 1)[:, 0].to(bits.device)]  # [P,H,page,bytes]
    key = unpack_bits(per_position(plane0, block_table, seq_lens, page, S), D)  # [B,H,S,D]
    norms = per_position(norm.float(), block_table, seq_lens, page, S)
    # Exact: |dot| <= 31 * D fits the 24 bits of a float32.
    dot = torch.einsum("bthgd,bhsd->bthgs", levels, key)
    return _to_steps(dot, norms[:, None, :, None], factor[..., None])


def score_tokens(q, bits, norm, block_table, seq_lens, page, planes, pool, scale, max_seq_len):
    """i16[B,T,Hkv,S]: the heads' scores joined over the group; -32768 where not visible."""
    s = head_scores(q, bits, norm, block_table, seq_lens, page, planes, scale, max_seq_len)
    seen = torch.arange(s.shape[-1], device=q.device) < visible(seq_lens, q.shape[1], s.shape[-1])[:, :, None, None]
    return (_join_heads(s, seen, pool),)


def refine_tokens(q, bits, norm, block_table, seq_lens, page, cand_indices, cand_counts, pool, scale, max_seq_len):
    """i16[B,T,Hkv,K]: the score from both planes for the candidates; -32768 in the slots past their count."""
    H, D = bits.shape[1], q.shape[-1]
    S = width(block_table, page, max_seq_len)
    levels, factor = _query_terms(q, H, scale)
    both = bits[:, :, byte_offsets(page, D, 2).to(bits.device)]  # [P,H,page,2,bytes]
    sign = unpack_bits(per_position(both, block_table, seq_lens, page, S), D)  # [B,H,S,2,D]
    level = 2 * sign[..., 0, :] + sign[..., 1, :]
    norms = per_position(norm.float(), block_table, seq_lens, page, S)
    dot = torch.einsum("bthgd,bhsd->bthgs", levels, level)
    s = _to_steps(dot, norms[:, None, :, None], factor[..., None])
    listed = torch.arange(cand_indices.shape[-1], device=q.device) < cand_counts[..., None]
    at = torch.where(listed, cand_indices.long(), 0)[..., None, :].expand(*s.shape[:-1], -1)
    return (_join_heads(s.gather(-1, at), listed, pool),)


# --- joining the query heads of a group -----------------------------------------------------------------------------


def weights(distance: Tensor, shrink: float = 1.0) -> Tensor:
    """int64 W = 2^24 exp(-shrink * d/256), truncated, of distances d >= 0 (int64).

    A fixed polynomial in f32, every product and sum rounded by itself: the same integer on every backend.
    """
    x = -distance.clamp(max=1 << 20).float() * f32(shrink * f32(math.log2(math.e) / STEPS_PER_NAT))
    n = torch.round(x)
    f = x - n
    p = torch.full_like(f, EXP2[0])
    for c in EXP2[1:]:
        p = p * f + c
    return torch.where(x >= -24.0, torch.ldexp(p, n + 24).long(), 0)


def log_steps(p: Tensor) -> Tensor:
    """int64 log of f32 p in 1/256 nat: the exponent and a parabola through the mantissa (monotonic, within 0.01 nat)."""
    raw = p.view(torch.int32)
    e = ((raw >> 23) - 127).float()
    m = (raw & 0x7FFFFF).float() * 2.0**-23
    steps = torch.round((e + (m + 0.34375 * (m * (1.0 - m)))) * f32(STEPS_PER_NAT * math.log(2.0))).long()
    return torch.where(p > 0, steps.clamp(min=LOWEST), LOWEST)


def _join_heads(s: Tensor, seen: Tensor, pool: int) -> Tensor:
    """Scores int64[B,T,Hkv,G,n] of each head -> i16[B,T,Hkv,n] of the group; seen bool[B,T,Hkv or 1,n]."""
    lowest = torch.iinfo(torch.int64).min // 2
    seen_heads = seen[..., None, :]
    if s.shape[-1] == 0:
        return torch.empty(*s.shape[:3], 0, dtype=torch.int16, device=s.device)
    best = s.masked_fill(~seen_heads, lowest).amax(-1, keepdim=True)
    below = (best - s).clamp(min=0)
    joined = (-below.amin(-2)).clamp(min=LOWEST) if pool == 0 else _join_softmax(below, seen_heads)
    return joined.masked_fill(~seen.expand_as(joined), UNSEEN).to(torch.int16)


def _join_softmax(below: Tensor, seen: Tensor) -> Tensor:
    """Log of the sum over the group of each head's softmax, added in head order in f32."""
    w = weights(below).masked_fill(~seen, 0)
    inverse = 1.0 / w.sum(-1, keepdim=True).clamp(min=1).float()
    share = w.float() * inverse
    total = share[..., 0, :]
    for head in range(1, share.shape[-2]):
        total = total + share[..., head, :]
    return log_steps(total)
