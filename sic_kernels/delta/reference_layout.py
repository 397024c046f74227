"""Where the bits of a coded row lie: code fields, tags, escape entries.

A code of b bits is split into fields, low bits first: 2 = [2], 3 = [2, 1], 4 = [4], 5 = [4, 1], 8 = [8].

* A field of w = 2 or 4 bits: channels lie in 16 lanes, d = 16 n + lane. The n of a row are taken in parts, each the largest
  power of two p that is left and has p * w <= 32. A part is 16 words, lane 0 to 15, of ceil(p * w / 8) bytes, little-endian;
  its i-th channel group is at bit w * i.
* A field of 8 bits: a byte a channel. A field of 1 bit: channel d is bit d % 8 of byte d / 8.

Fields follow each other; a row is padded to a multiple of 4 bytes. Whatever belongs to no channel is 0.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

LANES = 16
WORD_BITS = 32  # of a lane in a part, at most
TAG_BYTES = 6  # f16 k_scale, f16 v_scale, u8 k_id, u8 v_id
RAW_SCALE = 0x7E00  # bits of a k_scale that say: the row is raw, and its K code row begins with the entry, u32

FIELDS: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 8: (8,)}


def parts(D: int, width: int) -> list[int]:
    """Channel groups (of 16) in each part of a field of 2 or 4 bits."""
    left, sizes = -(-D // LANES), []
    while left:
        size = 1
        while 2 * size <= left and 2 * size * width <= WORD_BITS:
            size *= 2
        sizes.append(size)
        left -= size
    return sizes


def word_bytes(groups: int, width: int) -> int:
    """Bytes of a lane's word that holds so many channels."""
    return -(-groups * width // 8)


def field_bytes(D: int, width: int) -> int:
    """Bytes of one field of a row."""
    if width == 1:
        return -(-D // 8)
    return D if width == 8 else sum(LANES * word_bytes(p, width) for p in parts(D, width))


def code_bytes(D: int, bits: int) -> int:
    """Bytes of a row of codes: its fields, rounded up to a multiple of 4."""
    return -(-sum(field_bytes(D, width) for width in FIELDS[bits]) // 4) * 4


def _pack_field(values: Tensor, width: int) -> Tensor:
    """int64[..., D] below 2^width -> u8[..., bytes]."""
    D = values.shape[-1]
    if width == 8:
        return values.to(torch.uint8)
    if width == 1:
        padded = torch.nn.functional.pad(values, (0, -D % 8)).unflatten(-1, (-1, 8))
        return (padded << torch.arange(8, device=values.device)).sum(-1).to(torch.uint8)
    groups = torch.nn.functional.pad(values, (0, -D % LANES)).unflatten(-1, (-1, LANES))
    packed = []
    for part in groups.split(parts(D, width), dim=-2):
        shift = width * torch.arange(part.shape[-2], device=values.device)
        words = (part << shift[:, None]).sum(-2)  # [..., 16]
        byte = 8 * torch.arange(word_bytes(part.shape[-2], width), device=values.device)
        packed.append((words[..., None] >> byte & 0xFF).flatten(-2).to(torch.uint8))
    return torch.cat(packed, -1)


def _unpack_field(packed: Tensor, D: int, width: int) -> Tensor:
    """u8[..., bytes] -> int64[..., D]."""
    row = packed.long()
    if width == 8:
        return row
    if width == 1:
        return (row[..., None] >> torch.arange(8, device=row.device) & 1).flatten(-2)[..., :D]
    groups, first = [], 0
    for size in parts(D, width):
        nbytes = word_bytes(size, width)
        lanes = row[..., first : first + LANES * nbytes].unflatten(-1, (LANES, nbytes))
        words = (lanes << 8 * torch.arange(nbytes, device=row.device)).sum(-1)
        shift = width * torch.arange(size, device=row.device)
        groups.append(words[..., None, :] >> shift[:, None] & (1 << width) - 1)
        first += LANES * nbytes
    return torch.cat(groups, -2).flatten(-2)[..., :D]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes, integers [..., D] below 2^bits, -> rows u8[..., code_bytes(D, bits)]."""
    rest, D = codes.long(), codes.shape[-1]
    fields = []
    for width in FIELDS[bits]:
        fields.append(_pack_field(rest & (1 << width) - 1, width))
        rest = rest >> width
    row = torch.cat(fields, -1)
    return torch.nn.functional.pad(row, (0, code_bytes(D, bits) - row.shape[-1]))


def unpack_codes(rows: Tensor, D: int, bits: int) -> Tensor:
    """Rows u8[..., code_bytes(D, bits)] -> codes u8[..., D]."""
    codes = torch.zeros(*rows.shape[:-1], D, dtype=torch.int64, device=rows.device)
    first = low = 0
    for width in FIELDS[bits]:
        nbytes = field_bytes(D, width)
        codes = codes + (_unpack_field(rows[..., first : first + nbytes], D, width) << low)
        first, low = first + nbytes, low + width
    return codes.to(torch.uint8)


def little_endian(values: Tensor, nbytes: int) -> Tensor:
    """Integers [...] of 0 or more -> u8[..., nbytes]."""
    return (values.long()[..., None] >> 8 * torch.arange(nbytes, device=values.device) & 0xFF).to(torch.uint8)


def from_little_endian(data: Tensor) -> Tensor:
    """u8[..., n] -> int64[...]."""
    return (data.long() << 8 * torch.arange(data.shape[-1], device=data.device)).sum(-1)


def make_tags(k_scale: Tensor, v_scale: Tensor, k_id: Tensor, v_id: Tensor) -> Tensor:
    """Scales f16[...] and template ids [...] -> u8[..., 6]."""
    scales = [little_endian(s.view(torch.int16).long() & 0xFFFF, 2) for s in (k_scale, v_scale)]
    return torch.cat((*scales, k_id[..., None].to(torch.uint8), v_id[..., None].to(torch.uint8)), -1)


def read_tags(tags: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tags u8[..., 6] -> k_scale f16[...], v_scale f16[...], k_id int64[...], v_id int64[...], raw bool[...]."""
    k_bits, v_bits = from_little_endian(tags[..., 0:2]), from_little_endian(tags[..., 2:4])
    k_scale, v_scale = (bits.to(torch.int16).view(torch.float16) for bits in (k_bits, v_bits))
    return k_scale, v_scale, tags[..., 4].long(), tags[..., 5].long(), k_bits == RAW_SCALE
