"""termination_step in Triton: one program for a block of rows."""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl

from .reference_termination import EOS, LENGTH, PLATEAU, SCORE, SCORE_NAN, STATS_STATUS, STOPS, STRING

ROWS = 128

_EOS, _STRING, _SCORE, _LENGTH, _PLATEAU, _SCORE_NAN, _STATS_STATUS, _STOPS = (
    tl.constexpr(bit) for bit in (EOS, STRING, SCORE, LENGTH, PLATEAU, SCORE_NAN, STATS_STATUS, STOPS)
)


@triton.jit
def as_f64(bits):
    """The float64 of these bits: a number given to a kernel would be rounded to f32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def step_kernel(
    tokens, score, entropy, status, matched, input_lens, generated, streak, recent, recent_row, capacity, state_reason,
    done, reason, B, threshold, slope, most, hysteresis, width, patience, min_tokens, max_tokens,
    EOS_IDS: tl.constexpr, WINDOW: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_STATS: tl.constexpr,
    HAS_MATCHED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of one block.  threshold, slope, most, hysteresis and width are the bits of float64."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    said = tl.load(state_reason + b, mask=b < B, other=_STOPS).to(tl.int32)
    live = (b < B) & ((said & _STOPS) == 0)
    token = tl.load(tokens + b, mask=live, other=-1)
    before = tl.load(generated + b, mask=live, other=0)
    count = before + 1
    tl.store(generated + b, count, mask=live)
    stops = tl.zeros((ROWS,), tl.int32)
    for i in tl.static_range(len(EOS_IDS)):
        stops = tl.where(token == EOS_IDS[i], stops | _EOS, stops)
    if HAS_MATCHED:
        stops = tl.where(tl.load(matched + b, mask=live, other=0) != 0, stops | _STRING, stops)

    run = tl.load(streak + b, mask=live, other=0)
    if HAS_SCORE:
        x = tl.load(score + b, mask=live, other=0.0)
        tokens_in = tl.load(input_lens + b, mask=live, other=0).to(tl.float64)
        risen = as_f64(threshold) + as_f64(slope) * tokens_in
        limit = as_f64(most)
        bar = tl.where(risen < limit, risen, limit)
        low = (bar - as_f64(hysteresis)).to(tl.float32)
        kept = tl.where(run > 0, x >= low, x > bar.to(tl.float32))
        run = tl.where(kept, tl.minimum(run + 1, patience), 0)
        tl.store(streak + b, run, mask=live)
        said = tl.where(x != x, said | _SCORE_NAN, said)
    stops = tl.where(run >= patience, stops | _SCORE, stops)

    row = recent + b.to(tl.int64) * recent_row
    newest = (before & 0x7FFFFFFF) % capacity  # inside, whatever the caller's state says
    h = tl.full((ROWS,), float("nan"), tl.float32)
    if HAS_STATS:
        h = tl.load(entropy + b, mask=live, other=0.0)
        said = tl.where(tl.load(status + b, mask=live, other=0) != 0, said | _STATS_STATUS, said)
    tl.store(row + newest, h, mask=live)
    if WINDOW > 0:
        least, greatest, known = h, h, h == h
        for i in range(1, WINDOW):
            at = tl.where(newest >= i, newest - i, newest - i + capacity)
            h = tl.load(row + at, mask=live, other=0.0)
            known = known & (h == h)
            least, greatest = tl.where(h < least, h, least), tl.where(h > greatest, h, greatest)
        spread = greatest.to(tl.float64) - least.to(tl.float64)
        stops = tl.where(known & (spread <= as_f64(width)), stops | _PLATEAU, stops)

    stops = tl.where(count < min_tokens, 0, stops)
    stops = tl.where(count >= max_tokens, stops | _LENGTH, stops)
    said = tl.where(live, said | stops, said)
    tl.store(state_reason + b, said.to(tl.uint8), mask=live)
    tl.store(done + b, ((said & _STOPS) != 0).to(tl.uint8), mask=b < B)
    tl.store(reason + b, said.to(tl.uint8), mask=b < B)


def termination_step(
    tokens, score, entropy, status, matched, input_lens, generated, streak, recent, state_reason,
    threshold, slope_per_1k, max_threshold, hysteresis, patience, min_tokens, max_tokens, plateau_window, plateau_width, eos_ids,
    *, outs: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """done bool [B], reason u8 [B]; the state is updated in place."""
    B = len(tokens)
    if outs is None:
        outs = (torch.empty(B, dtype=torch.bool, device=tokens.device), torch.empty_like(state_reason))
    done, reason = outs
    given = (None if matched is None else matched.view(torch.uint8), input_lens, generated, streak, recent)
    numbers = (_bits(x) for x in (threshold, slope_per_1k / 1000, max_threshold, hysteresis, plateau_width))
    if B:
        step_kernel[(-(-B // ROWS),)](
            tokens, score, entropy, status, *given, recent.stride(0), recent.shape[1], state_reason,
            done.view(torch.uint8), reason, B, *numbers, patience, min_tokens, max_tokens, tuple(eos_ids), plateau_window,
            score is not None, entropy is not None, matched is not None, ROWS, enable_fp_fusion=False,
        )  # fmt: skip
    return done, reason


def _bits(x: float) -> int:
    """A float64 as the integer of the same bits."""
    return struct.unpack("q", struct.pack("d", x))[0]
