"""What the Triton kernels of this family share: code rows, levels, tags, rotations of keys, RoPE, launch arguments.

The three rules of slicing's kernels hold here too. A kernel takes what it must know of code rows as one tuple, CODE (see
`code_layout`); rows are [N, BD] in channel order, channels behind the head size are 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl

from ..slicing.reference_sketch import f32
from ..slicing.triton_common import device, power, to_f32
from ..slicing.triton_sketch import butterflies, negative_sign, normalised, partner
from .levels import LEVELS
from .reference_layout import FIELDS, LANES, RAW_SCALE, field_bytes, parts, word_bytes
from .reference_rotation import ROPE_BLOCK

RAW_TAG = tl.constexpr(RAW_SCALE)
BLOCK = tl.constexpr(ROPE_BLOCK)
# Places in CODE.
C_BITS, C_D, C_BD, C_WIDTH, C_PARTS, C_MASK, C_SIZES, C_ALIGNED, C_BYTES = (tl.constexpr(i) for i in range(9))
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


# --- launch arguments -----------------------------------------------------------------------------------------------


def code_layout(codes: torch.Tensor, D: int, bits: int) -> tuple:
    """CODE of rows of codes u8[P,Hkv,page,bytes]: bits, D, BD, width of the first field, its parts, first byte of the mask,
    sizes of the positive levels, whether words lie at multiples of 4 bytes, bytes.

    A part is (its first channel group, its groups, bytes of a word, its first byte).
    """
    low = FIELDS[bits][0]
    first = at = 0
    found = []
    for groups in parts(D, low) if low < 8 else ():
        found.append((first, groups, word_bytes(groups, low), at))
        first, at = first + groups, at + LANES * word_bytes(groups, low)
    sizes = tuple(LEVELS[bits][1 << bits - 1 :]) if bits < 8 else ()
    steps = [step for n, step in zip(codes.shape, codes.stride()[:3]) if n > 1]
    aligned = all(x % 4 == 0 for x in (codes.data_ptr(), *steps))
    return bits, D, power(D, 32), low, tuple(found), field_bytes(D, low), sizes, aligned, codes.shape[3]


def packed_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of levels as bytes of 32-bit words."""
    return tuple(sum(size << 8 * i for i, size in enumerate(sizes[at : at + 4])) for at in range(0, len(sizes), 4))


def rope_flags(rope: tuple, interleaved: bool) -> dict[str, Any]:
    """HALF: pairs of channels that are turned, 0 without RoPE."""
    return {"HALF": 0 if rope[0] is None else rope[0].shape[2], "INTERLEAVED": bool(interleaved)}


def rotation_flags(k_rotation: int) -> dict[str, Any]:
    """R: channels of a key that are rotated together; NORM: what they are multiplied by."""
    return {"R": k_rotation, "NORM": f32(1 / math.sqrt(k_rotation))}


# --- codes ----------------------------------------------------------------------------------------------------------


@device
def load_word(at, mask, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Little-endian words of 1, 2 or 4 bytes, as uint32; ALIGNED: they lie at multiples of their size."""
    if BYTES == 1:
        return tl.load(at, mask=mask, other=0).to(tl.uint32)
    elif ALIGNED:
        if BYTES == 2:
            return tl.load(at.to(tl.pointer_type(tl.uint16), bitcast=True), mask=mask, other=0).to(tl.uint32)
        else:
            return tl.load(at.to(tl.pointer_type(tl.uint32), bitcast=True), mask=mask, other=0)
    else:
        word = tl.load(at, mask=mask, other=0).to(tl.uint32)
        for i in tl.static_range(1, BYTES):
            word = word | (tl.load(at + i, mask=mask, other=0).to(tl.uint32) << (8 * i))
        return word


@device
def store_word(at, word, mask, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Store words uint32 as `load_word` reads them."""
    if BYTES == 1:
        tl.store(at, word.to(tl.uint8), mask=mask)
    elif ALIGNED:
        if BYTES == 2:
            tl.store(at.to(tl.pointer_type(tl.uint16), bitcast=True), word.to(tl.uint16), mask=mask)
        else:
            tl.store(at.to(tl.pointer_type(tl.uint32), bitcast=True), word, mask=mask)
    else:
        for i in tl.static_range(0, BYTES):
            tl.store(at + i, ((word >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


@device
def with_part(
    codes, row, mask, groups_at, PART: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr
):
    """Codes uint32[N, groups, 16] with those of one part in their place."""
    lane = tl.arange(0, 16)[None, :]
    word = load_word(row + PART[3] + lane * PART[2], mask, PART[2], ALIGNED)
    shift = ((groups_at - PART[0]) * WIDTH) & 31
    field = (word[:, None, :] >> shift.to(tl.uint32)) & ((1 << WIDTH) - 1)
    if PART[1] == GROUPS:
        return field
    return tl.where((groups_at >= PART[0]) & (groups_at < PART[0] + PART[1]), field, codes)


@device
def load_codes(row, mask, N: tl.constexpr, CODE: tl.constexpr):
    """Codes uint32[N, BD] of the rows that begin at row [N,1]; 0 where mask [N,1] is not set."""
    BD: tl.constexpr = CODE[C_BD]
    j = tl.arange(0, BD)[None, :]
    if CODE[C_BITS] == 8:
        return tl.load(row + j, mask=mask & (j < CODE[C_D]), other=0).to(tl.uint32)
    else:
        groups_at = tl.arange(0, BD // 16)[None, :, None]
        codes = tl.zeros((N, BD // 16, 16), tl.uint32)
        for p in tl.static_range(len(CODE[C_PARTS])):
            codes = with_part(codes, row, mask, groups_at, CODE[C_PARTS][p], CODE[C_WIDTH], CODE[C_ALIGNED], BD // 16)
        if CODE[C_BITS] > CODE[C_WIDTH]:
            group = tl.arange(0, BD // 16)[None, :]
            inside = mask & (group * 2 < CODE[C_BYTES] - CODE[C_MASK])
            bit = load_word(row + CODE[C_MASK] + group * 2, inside, 2, CODE[C_ALIGNED])
            bit = (bit[:, :, None] >> tl.arange(0, 16)[None, None, :].to(tl.uint32)) & 1
            codes = codes | (bit << CODE[C_WIDTH])
        return tl.reshape(codes, (N, BD))


@device
def level_of(code, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Levels f32 of codes uint32; WORDS: `packed_sizes`."""
    if BITS == 8:
        return code.to(tl.float32) - 128.0
    else:
        negative = (code >> (BITS - 1)) - 1  # all ones, or 0
        m = (code ^ negative) & ((1 << (BITS - 1)) - 1)
        word = tl.zeros_like(m) + WORDS[0]
        for i in tl.static_range(1, len(WORDS)):
            word = tl.where((m >> 2) == i, WORDS[i], word)
        # The integer in the mantissa of 2^23: less work than a conversion.
        size = (((word >> ((m * 8) & 31)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        return (size.to(tl.uint32, bitcast=True) | (negative & 0x80000000)).to(tl.float32, bitcast=True)


@device
def load_levels(row, mask, N: tl.constexpr, CODE: tl.constexpr, WORDS: tl.constexpr):
    """Levels f32[N, BD] of code rows; 0 behind the head size and where mask is not set."""
    level = level_of(load_codes(row, mask, N, CODE), CODE[C_BITS], WORDS)
    return tl.where(mask & (tl.arange(0, CODE[C_BD])[None, :] < CODE[C_D]), level, 0.0)


@device
def load_entry(row, mask, entries, ALIGNED: tl.constexpr):
    """int32: the entry that raw rows name at the beginning of their key's codes; -1: none."""
    entry = load_word(row, mask, 4, ALIGNED).to(tl.int32, bitcast=True)
    return tl.where(mask & (entry >= 0) & (entry < entries), entry, -1)


@device
def tag_words(tags):
    """Tags lie at even addresses: k_scale, v_scale, both ids."""
    return tags.to(tl.pointer_type(tl.uint16), bitcast=True)


@device
def as_scale(word):
    """A tag's scale as f32."""
    return word.to(tl.int16, bitcast=True).to(tl.float16, bitcast=True).to(tl.float32)


# --- rotations ------------------------------------------------------------------------------------------------------


@device
def exchanged(x, H: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """Each channel's partner: they lie H apart, in blocks of 2 H."""
    if (H & (H - 1)) == 0:
        return partner(x, H, N, BD)
    else:
        j = tl.arange(0, BD)[None, :]
        other = tl.where(j % (2 * H) < H, j + H, j - H)
        return tl.gather(x, tl.where(other < BD, other, j) + tl.zeros((N, 1), tl.int32), axis=1)


@device
def mixed(x):
    """Sum and difference of the two halves of the last dimension."""
    low, high = tl.split(x)
    return low + high, low - high


@device
def mix_last(x):
    a, b = mixed(x)
    return tl.join(a, b)


@device
def butterfly_of_8(x, S: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """Three steps of a butterfly, distances S, 2 S, 4 S (a power of two), within a thread: one exchange instead of three."""
    y = tl.permute(tl.reshape(x, (N, BD // (8 * S), 2, 2, 2, S)), (0, 1, 5, 2, 3, 4))
    a, b = mixed(y)
    aa, ab = mixed(a)
    ba, bb = mixed(b)
    y = tl.join(tl.join(mix_last(aa), mix_last(ab)), tl.join(mix_last(ba), mix_last(bb)))
    return tl.reshape(tl.permute(y, (0, 1, 3, 4, 5, 2)), (N, BD))


@device
def butterfly(x, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, EIGHTS: tl.constexpr):
    """f32[N, BD]: a butterfly over the R channels that lie S apart, of blocks of R * S channels.

    EIGHTS: three steps at a time where they can be, for kernels that have the registers.
    """
    j = tl.arange(0, BD)[None, :]
    for step in tl.static_range(0, 10):
        if (1 << step) < R:
            if EIGHTS and S & (S - 1) == 0 and (8 << (step // 3 * 3)) <= R:
                if step % 3 == 0:
                    x = butterfly_of_8(x, S << step, N, BD)
            else:
                other = exchanged(x, S << step, N, BD)
                x = tl.where(j // (S << step) % 2 == 1, other - x, x + other)
    return x


@device
def rotate_keys(
    x, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, EIGHTS: tl.constexpr
):
    """f32[N, BD]: channels d, d + D/R, d + 2 D/R, .. together; its own inverse."""
    if R == 1:
        return x
    else:
        return tl.where(tl.arange(0, BD)[None, :] < D, butterfly(x, D // R, R, N, BD, EIGHTS) * NORM, 0.0)


@device
def unrotate_values(x, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """f32[N, BD]: the inverse of the rotation of values."""
    if D & (D - 1) == 0:
        x = normalised(butterfly(x, 1, D, N, BD, True), D, BD)
    else:
        x = butterflies(x, D, N, BD)
    return tl.where(negative_sign(tl.arange(0, BD)[None, :]), -x, x)


# --- RoPE -----------------------------------------------------------------------------------------------------------


@device
def pairs(BD: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of every channel [1, BD]: its pair, whether it is the first of it, the other one, and whether it turns at all."""
    j = tl.arange(0, BD)[None, :]
    if INTERLEAVED:
        return j // 2, j % 2 == 0, j ^ 1, j < 2 * HALF
    else:
        return j % HALF, j < HALF, tl.where(j < HALF, j + HALF, j - HALF), j < 2 * HALF


@device
def turned(
    own, other, table, row, mask, BACK: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Channels and their partners times the complex numbers table[row], row [N,1], or their conjugates (BACK)."""
    pair, first, _, inside = pairs(BD, HALF, INTERLEAVED)
    at = table + row * (2 * HALF) + pair
    c = tl.load(at, mask=mask & inside, other=1.0)
    s = tl.load(at + HALF, mask=mask & inside, other=0.0)
    s = tl.where(first == BACK, s, -s)
    return own * c + other * s, other * c - own * s


@device
def load_key(
    row, mask, position, lo, undo, KIND: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Given keys f32[N, BD], turned back from their positions; launch with EXACT."""
    j = tl.arange(0, BD)[None, :]
    x = to_f32(tl.load(row + j, mask=mask & (j < D), other=0), KIND)
    if HALF != 0:
        _, _, partners, inside = pairs(BD, HALF, INTERLEAVED)
        other = to_f32(tl.load(row + partners, mask=mask & inside, other=0), KIND)
        own, other = turned(x, other, undo, position // BLOCK, mask, True, BD, HALF, INTERLEAVED)
        own, other = turned(own, other, lo, position % BLOCK, mask, True, BD, HALF, INTERLEAVED)
        x = tl.where(inside, own, x)
    return x


@device
def apply_rope(
    x, lo, lo_row, hi, hi_row, mask, N: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Keys f32[N, BD] at their positions, given as rows of the two tables."""
    if HALF == 0:
        return x
    else:
        other = exchanged(x, 1 if INTERLEAVED else HALF, N, BD)
        own, other = turned(x, other, lo, lo_row, mask, False, BD, HALF, INTERLEAVED)
        own, other = turned(own, other, hi, hi_row, mask, False, BD, HALF, INTERLEAVED)
        return tl.where(tl.arange(0, BD)[None, :] < 2 * HALF, own, x)
