"""select in Triton: the best units of each row, exactly, by counting digits.

Scores become unsigned keys in the definition's order (16 bits, f32: 32).  A row is cut into chunks.  For each digit of
8 bits, from the top, every chunk counts its keys that agree with the digits known so far; the next launch adds the
chunks' counts and so knows one digit more of the key at the border.  From the same counts the last launch knows where in
the output each chunk begins, and how many of the keys at the border are its own: indices come out ascending, ties lowest
index first, without atomics, sorting or a host that waits.  Forced units are counted by themselves and always taken.

`top_p` first narrows the count of each row: one program a row bisects for the border at which the weight is reached.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .reference_select import default_capacity
from .triton_common import (
    BF16,
    EXACT,
    F16,
    F32,
    I16,
    STEP_LOG2E,
    STEPS,
    cdiv,
    device,
    exp_weight,
    f64_bits,
    kind,
    power,
    raw,
    round_even,
    to_f32,
    visible,
)

DIGIT = 256  # values of a digit
CHUNKS = 64  # chunks of a row at most
BLOCK = 1024  # scores that a program looks at in one step
SPANS = tl.constexpr(4)  # kept spans compared at a time


# --- keys and rows --------------------------------------------------------------------------------------------------


@device
def sort_key(s, KIND: tl.constexpr):
    """Stored scores as uint32 in the order of selection: -0 equals +0, NaN is below everything (0)."""
    if KIND == I16:
        return (s.to(tl.int32) + 32768).to(tl.uint32)
    else:
        x = to_f32(s, KIND) + 0.0
        u = x.to(tl.uint32, bitcast=True)
        if KIND == F16:
            half = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
            ordered = tl.where(half >= 0x8000, 0xFFFF - half, half + 0x8000)
        elif KIND == BF16:
            half = u >> 16
            ordered = tl.where(half >= 0x8000, 0xFFFF - half, half + 0x8000)
        else:
            ordered = tl.where(u >= 0x80000000, 0xFFFFFFFF - u, u + 0x80000000)
        return tl.where(x == x, ordered, 0)


@device
def row_limits(
    lens, row, budget, budget_row, ratio_bits, T, H, S, size, least, min_len, BUDGET: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Of one row: sequence, visible tokens, visible units, how many units may be chosen.

    BUDGET: 0 a ratio of the visible tokens (its float64 bits), 1 a number of tokens, 2 a tensor of them.
    """
    b, t, h = row // H // T, row // H % T, row % H
    tokens = visible(tl.load(lens + b), T, t, S)
    seen = (tokens + size - 1) // size
    if BUDGET == 0:
        ratio = ratio_bits.to(tl.int64).to(tl.float64, bitcast=True)
        allowed = (tokens.to(tl.float64) * ratio).to(tl.int64)
    elif BUDGET == 1:
        allowed = tokens.to(tl.int64) * 0 + budget
    else:
        allowed = tl.load(budget + b * budget_row + h).to(tl.int64)
    if PAGES:
        allowed = tl.where(allowed >= tokens, seen.to(tl.int64), tl.maximum(allowed // size, 1))
    allowed = tl.maximum(allowed, least)
    allowed = tl.where(tokens <= min_len, seen.to(tl.int64), allowed)
    return b, tokens, seen, allowed


@device
def forced_units(i, b, tokens, seen, size, sink, recent, keep, keep_row, spans):
    """Whether units i are forced: a visible sink token, recent token or kept span touches them."""
    forced = (i < (tl.minimum(tokens, sink) + size - 1) // size) | (
        (recent > 0) & (i >= tl.maximum(tokens - recent, 0) // size)
    )
    if keep is not None:
        for first in range(0, spans, SPANS):
            n = (first + tl.arange(0, SPANS))[None, :]
            at = keep + b.to(tl.int64) * keep_row + n * 2
            low = tl.maximum(tl.load(at, mask=n < spans, other=0).to(tl.int64), 0)
            high = tl.minimum(tl.load(at + 1, mask=n < spans, other=0).to(tl.int64), tokens)
            touched = (high > low) & (i[:, None] >= low // size) & (i[:, None] < (high + size - 1) // size)
            forced = forced | (tl.max(touched.to(tl.int32), axis=1) != 0)
    return forced & (i < seen)


@device
def allowed_units(i, s, seen, limit, whole, LISTED: tl.constexpr):
    """Whether units i may be chosen; LISTED: only candidates (scores above -32768), unless everything fits."""
    if LISTED:
        return (i < seen) & ((s.to(tl.int32) != -32768) | (limit >= whole))
    else:
        return i < seen


# --- counting -------------------------------------------------------------------------------------------------------


@device
def border(counts, row, chunks, need, p, passes, CHUNKS: tl.constexpr, DIGIT: tl.constexpr):
    """One digit of the border key, from the counts of pass p: the digit; how many are still needed there; of each
    chunk, how many keys lie above the digit and how many at it."""
    c = tl.arange(0, CHUNKS)[:, None]
    d = tl.arange(0, DIGIT)
    at = counts + ((row * passes + p) * chunks + c) * DIGIT + d[None, :]
    table = tl.load(at, mask=c < chunks, other=0)
    total = tl.sum(table, axis=0)
    from_here = tl.sum(total) - tl.cumsum(total, 0) + total  # keys of this digit and above
    digit = tl.sum((from_here >= need).to(tl.int32)) - 1
    above = tl.sum(tl.where(d[None, :] > digit, table, 0), axis=1)
    equal = tl.sum(tl.where(d[None, :] == digit, table, 0), axis=1)
    return digit, need - tl.sum(above), above, equal


@device
def row_need(counts, forced_counts, row, chunks, limit, narrowed, passes, CHUNKS: tl.constexpr, DIGIT: tl.constexpr):
    """How many units a row takes in all, and how many of them unforced; forced units of each chunk."""
    c = tl.arange(0, CHUNKS)[:, None]
    d = tl.arange(0, DIGIT)[None, :]
    at = counts + (row * passes * chunks + c) * DIGIT + d
    unforced = tl.sum(tl.sum(tl.load(at, mask=c < chunks, other=0), axis=1))
    chunk = tl.arange(0, CHUNKS)
    forced_of = tl.load(forced_counts + row * chunks + chunk, mask=chunk < chunks, other=0)
    forced = tl.sum(forced_of)
    count = tl.minimum(tl.maximum(limit, forced), (unforced + forced).to(tl.int64)).to(tl.int32)
    if narrowed is not None:
        count = tl.minimum(count, tl.maximum(tl.load(narrowed + row), forced))
    return count, count - forced, forced_of


@triton.jit(do_not_specialize=["ratio_bits"])
def count_kernel(
    scores, s_b, s_t, s_h, lens, budget, budget_row, ratio_bits, keep, keep_row, spans, narrowed,
    counts, forced_counts, T, H, S, size, least, min_len, sink, recent, chunks, chunk,
    KIND: tl.constexpr, BUDGET: tl.constexpr, PAGES: tl.constexpr, LISTED: tl.constexpr, PASSES: tl.constexpr,
    P: tl.constexpr, CHUNKS: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass P: of one chunk, how many unforced keys that agree with the border's P digits have each next digit."""
    row = tl.program_id(0).to(tl.int64)
    b, tokens, seen, limit = row_limits(lens, row, budget, budget_row, ratio_bits, T, H, S, size, least, min_len,
                                        BUDGET, PAGES)  # fmt: skip
    prefix = tl.zeros((), tl.uint32)
    if P > 0:
        _, need, _ = row_need(counts, forced_counts, row, chunks, limit, narrowed, PASSES, CHUNKS, DIGIT)
        for q in tl.static_range(0, P):
            digit, need, _, _ = border(counts, row, chunks, need, q, PASSES, CHUNKS, DIGIT)
            prefix = (prefix << 8) | digit.to(tl.uint32)
    base = scores + b.to(tl.int64) * s_b + (row // H % T) * s_t + (row % H) * s_h
    number = tl.zeros((DIGIT,), tl.int32)
    forced = tl.zeros((BLOCK,), tl.int32)
    begin = tl.program_id(1) * chunk
    for first in range(begin, tl.minimum(begin + chunk, seen), BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < tl.minimum(begin + chunk, seen)
        s = tl.load(base + i, mask=inside, other=0)
        key = sort_key(s, KIND)
        taken = inside & forced_units(i, b, tokens, seen, size, sink, recent, keep, keep_row, spans)
        counted = inside & (taken == 0) & allowed_units(i, s, seen, limit, tokens, LISTED)
        if P > 0:
            counted = counted & ((key >> (8 * (PASSES - P))) == prefix)
        digits = ((key >> (8 * (PASSES - 1 - P))) & 255).to(tl.int32)
        number += tl.histogram(digits, DIGIT, mask=counted)
        forced += taken.to(tl.int32)
    at = (row * PASSES + P) * chunks + tl.program_id(1)
    tl.store(counts + at * DIGIT + tl.arange(0, DIGIT), number)
    if P == 0:
        tl.store(forced_counts + row * chunks + tl.program_id(1), tl.sum(forced))


@triton.jit(do_not_specialize=["ratio_bits"])
def write_kernel(
    scores, s_b, s_t, s_h, lens, budget, budget_row, ratio_bits, keep, keep_row, spans, narrowed,
    counts, forced_counts, indices, i_b, i_t, i_h, numbers, T, H, S, size, least, min_len, sink, recent,
    chunks, chunk, K,
    KIND: tl.constexpr, BUDGET: tl.constexpr, PAGES: tl.constexpr, LISTED: tl.constexpr, PASSES: tl.constexpr,
    CHUNKS: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the chosen units of one chunk to their places, and a share of the padding; chunk 0 writes the count."""
    row = tl.program_id(0).to(tl.int64)
    b, tokens, seen, limit = row_limits(lens, row, budget, budget_row, ratio_bits, T, H, S, size, least, min_len,
                                        BUDGET, PAGES)  # fmt: skip
    count, need, before = row_need(counts, forced_counts, row, chunks, limit, narrowed, PASSES, CHUNKS, DIGIT)
    key_at = tl.zeros((), tl.uint32)
    equal = before
    for q in tl.static_range(0, PASSES):
        digit, need, above, equal = border(counts, row, chunks, need, q, PASSES, CHUNKS, DIGIT)
        key_at = (key_at << 8) | digit.to(tl.uint32)
        before = before + above
    # `before`: what each chunk takes for certain; `equal`: its keys at the border, of which the row takes `need`.
    earlier = tl.arange(0, CHUNKS) < tl.program_id(1)
    ties = tl.sum(tl.where(earlier, equal, 0))
    place = tl.sum(tl.where(earlier, before, 0)) + tl.minimum(ties, need)
    base = scores + b.to(tl.int64) * s_b + (row // H % T) * s_t + (row % H) * s_h
    out = indices + b.to(tl.int64) * i_b + (row // H % T) * i_t + (row % H) * i_h
    begin = tl.program_id(1) * chunk
    for first in range(begin, tl.minimum(begin + chunk, seen), BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < tl.minimum(begin + chunk, seen)
        s = tl.load(base + i, mask=inside, other=0)
        key = sort_key(s, KIND)
        taken = inside & forced_units(i, b, tokens, seen, size, sink, recent, keep, keep_row, spans)
        free = inside & (taken == 0) & allowed_units(i, s, seen, limit, tokens, LISTED)
        tie = (free & (key == key_at)).to(tl.int32)
        rank = ties + tl.cumsum(tie, 0) - tie
        chosen = (taken | (free & (key > key_at)) | ((tie != 0) & (rank < need))).to(tl.int32)
        slot = place + tl.cumsum(chosen, 0) - chosen
        tl.store(out + slot, i, mask=(chosen != 0) & (slot < K))
        ties += tl.sum(tie)
        place += tl.sum(chosen)
    for first in range(count + tl.program_id(1) * BLOCK, K, chunks * BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(out + slot, tl.full((BLOCK,), -1, tl.int32), mask=slot < K)
    if tl.program_id(1) == 0:
        tl.store(numbers + row, tl.minimum(count, K))


# --- top-p ----------------------------------------------------------------------------------------------------------


@device
def unit_weights(s, key, top_key, top, seen, KIND: tl.constexpr):
    """int64 weights of scores relative to the best visible one, 2^24 for what ties with it."""
    if KIND == I16:
        distance = (top_key - key).to(tl.int32)
    else:
        steps = (top - to_f32(s, KIND)) * STEPS
        steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, 0.0), 1e6), 1e6)
        distance = tl.where(key == top_key, 0, round_even(steps).to(tl.int32))
    return tl.where(seen, exp_weight(tl.maximum(distance, 0), STEP_LOG2E), 0).to(tl.int64)


@device
def key_score(key, KIND: tl.constexpr):
    """The f32 score of a key: `sort_key` backwards."""
    if KIND == I16:
        return key.to(tl.float32)
    elif KIND == F32:
        u = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key)
        return tl.where(key == 0, float("nan"), u.to(tl.float32, bitcast=True))
    else:
        half = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key).to(tl.uint16).to(tl.int16, bitcast=True)
        half = half.to(tl.float16, bitcast=True) if KIND == F16 else half
        return tl.where(key == 0, float("nan"), to_f32(half, KIND))


@triton.jit(do_not_specialize=["ratio_bits", "top_p_bits"])
def top_p_kernel(
    scores, s_b, s_t, s_h, lens, budget, budget_row, ratio_bits, keep, keep_row, spans, narrowed, top_p_bits,
    T, H, S, size, least, min_len, sink, recent,
    KIND: tl.constexpr, BUDGET: tl.constexpr, PAGES: tl.constexpr, LISTED: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """How many units of one row hold the share p of its weight: forced ones, then the best others. A huge number where
    the share is never reached, and for rows that are taken whole."""
    row = tl.program_id(0).to(tl.int64)
    b, tokens, seen, limit = row_limits(lens, row, budget, budget_row, ratio_bits, T, H, S, size, least, min_len,
                                        BUDGET, PAGES)  # fmt: skip
    base = scores + b.to(tl.int64) * s_b + (row // H % T) * s_t + (row % H) * s_h
    top_key = tl.zeros((), tl.uint32)
    for first in range(0, seen, BLOCK):
        i = first + tl.arange(0, BLOCK)
        s = tl.load(base + i, mask=i < seen, other=0)
        top_key = tl.maximum(top_key, tl.max(tl.where(i < seen, sort_key(s, KIND), 0).to(tl.int64)).to(tl.uint32))
    top = key_score(top_key, KIND)
    low = tl.zeros((), tl.int64)  # the largest key at which enough weight is known to lie, if any
    high = tl.full((), 1, tl.int64) << BITS
    held, number, share, target = low, low, low, low
    forced_weight = low
    for step in range(BITS + 2):
        # Step 0 weighs everything, the last one what lies above the border and at it; between them, bisection.
        middle = tl.where(step > BITS, low + 1, tl.where(step == 0, high, (low + high) // 2))
        held, number, share, total = low * 0, low * 0, low * 0, low * 0
        above = held
        for first in range(0, seen, BLOCK):
            i = first + tl.arange(0, BLOCK)
            inside = i < seen
            s = tl.load(base + i, mask=inside, other=0)
            key = sort_key(s, KIND)
            w = unit_weights(s, key, top_key, top, inside, KIND)
            forced = inside & forced_units(i, b, tokens, seen, size, sink, recent, keep, keep_row, spans)
            free = inside & (forced == 0) & allowed_units(i, s, seen, limit, tokens, LISTED)
            better = free & (key.to(tl.int64) >= middle)
            total += tl.sum(w)
            held += tl.sum(tl.where(forced, w, 0))
            above += tl.sum(tl.where(better, w, 0))
            number += tl.sum((better | forced).to(tl.int64))
            share = tl.maximum(share, tl.max(tl.where(free & (key.to(tl.int64) == low), w, 0)))
        if step == 0:
            wanted = top_p_bits.to(tl.int64).to(tl.float64, bitcast=True) * total.to(tl.float64)
            target = wanted.to(tl.int64)
            target += (target.to(tl.float64) < wanted).to(tl.int64)
            forced_weight = held
        elif step <= BITS:
            reached = held + above >= target
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle)
        held = held + above
    missing = tl.maximum(target - held, 0)
    enough = number + (missing + tl.maximum(share, 1) - 1) // tl.maximum(share, 1)
    never = (missing > 0) & (share == 0)
    enough = tl.where(forced_weight >= target, 0, tl.where(never, 1 << 30, enough))
    enough = tl.where(tokens <= min_len, 1 << 30, enough)
    tl.store(narrowed + row, tl.minimum(enough, 1 << 30).to(tl.int32))


# --- launching ------------------------------------------------------------------------------------------------------


def choose(
    scores: torch.Tensor, seq_lens: torch.Tensor, unit: int, size: int, ratio: float, budget: Any, top_p: float | None,
    sink: int, recent: int, keep: torch.Tensor | None, indices: torch.Tensor, numbers: torch.Tensor, *,
    least: int = 0, min_len: int = -1, listed: bool = False,
) -> None:  # fmt: skip
    """Write the chosen units of scores [B,T,Hkv,units] to indices i32[B,T,Hkv,K] and numbers i32[B,T,Hkv].

    least: units that may be chosen at least; sequences of up to min_len tokens are taken whole; listed: scores of
    -32768 mark what may not be chosen unless everything fits.
    """
    B, T, H, units = scores.shape
    K, rows = indices.shape[-1], B * T * H
    if rows == 0:
        return
    given = 2 if isinstance(budget, torch.Tensor) else 0 if budget is None else 1
    budget_row = budget.stride(0) if given == 2 else 0
    keep = None if keep is None else keep.contiguous()
    spans = 0 if keep is None else keep.shape[1]
    limits = (seq_lens, budget if given == 2 else int(budget or 0), budget_row, f64_bits(float(ratio or 0.0)))
    # A sink or budget beyond all units is all of them: the kernels count in 32 bits.
    S = units * size
    ends = (min(sink, S), min(recent, S))
    shared = (raw(scores), *scores.stride()[:3], *limits, keep, spans * 2, spans)
    flags = {"KIND": kind(scores), "BUDGET": given, "PAGES": unit == 1, "LISTED": listed, **EXACT}
    narrowed = None
    if top_p is not None and top_p < 1:
        narrowed = torch.empty(rows, dtype=torch.int32, device=scores.device)
        top_p_kernel[(rows,)](
            *shared, narrowed, f64_bits(float(top_p)), T, H, S, size, least, min_len, *ends,
            BITS=32 if scores.dtype == torch.float32 else 16, BLOCK=BLOCK, **flags,
        )  # fmt: skip
    passes = 4 if scores.dtype == torch.float32 else 2
    chunk = max(BLOCK, power(cdiv(units, CHUNKS)))
    chunks = max(1, cdiv(units, chunk))
    counts = torch.empty(rows, passes, chunks, DIGIT, dtype=torch.int32, device=scores.device)
    forced = torch.empty(rows, chunks, dtype=torch.int32, device=scores.device)
    flags |= {"PASSES": passes, "CHUNKS": power(chunks, 2), "DIGIT": DIGIT, "BLOCK": BLOCK}
    tail = (T, H, S, size, least, min_len, *ends, chunks, chunk)
    for p in range(passes):
        count_kernel[(rows, chunks)](*shared, narrowed, counts, forced, *tail, P=p, **flags)
    write_kernel[(rows, chunks)](
        *shared, narrowed, counts, forced, indices, *indices.stride()[:3], numbers, *tail, K, **flags
    )


def select(
    scores, seq_lens, unit, page_size, ratio, budget, top_p, sink, recent, keep, capacity, *, outs=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [B,T,Hkv,units] -> indices i32[B,T,Hkv,K] (ascending, padded with -1), counts i32[B,T,Hkv]."""
    B, T, H, units = scores.shape
    size = 1 if unit == 0 else page_size
    if outs is None:
        K = default_capacity(units, unit, size, ratio, budget, sink, recent, keep) if capacity is None else capacity
        indices = torch.empty(B, T, H, int(K), dtype=torch.int32, device=scores.device)
        outs = (indices, torch.empty(B, T, H, dtype=torch.int32, device=scores.device))
    indices, numbers = outs
    packed = numbers if numbers.is_contiguous() else torch.empty_like(numbers, memory_format=torch.contiguous_format)
    choose(scores, seq_lens, unit, size, ratio, budget, top_p, sink, recent, keep, indices, packed)
    if packed is not numbers:
        numbers.copy_(packed)
    return indices, numbers
