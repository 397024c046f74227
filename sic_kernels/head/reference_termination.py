"""termination_step: what one step of a rule does to one row, and that for every row."""

from __future__ import annotations

import math
import struct

import torch

Tensor = torch.Tensor
EOS, STRING, SCORE, LENGTH, PLATEAU, SCORE_NAN, STATS_STATUS = (1 << i for i in range(7))
STOPS = EOS | STRING | SCORE | LENGTH | PLATEAU


def _f32(x: float) -> float:
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def threshold_at(input_len: int, threshold: float, slope_per_1k: float, max_threshold: float) -> float:
    """min(max_threshold, threshold + slope_per_1k / 1000 * input_len), in float64."""
    return min(max_threshold, threshold + slope_per_1k / 1000 * input_len)


def termination_step(
    tokens, score, entropy, status, matched, input_lens, generated, streak, recent, state_reason,
    threshold, slope_per_1k, max_threshold, hysteresis, patience, min_tokens, max_tokens, plateau_window, plateau_width, eos_ids,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """done bool [B], reason u8 [B]; generated, streak, recent and state_reason are updated in place."""
    for b in range(len(tokens)):
        said = int(state_reason[b])
        if said & STOPS:  # a row that is done stays as it is
            continue
        newest = int(generated[b]) % recent.shape[1]
        generated[b] += 1
        stops = 0
        if int(tokens[b]) in eos_ids:
            stops |= EOS
        if matched is not None and bool(matched[b]):
            stops |= STRING

        if score is not None:
            bar = threshold_at(int(input_lens[b]), threshold, slope_per_1k, max_threshold)
            s = float(score[b])
            kept = s >= _f32(bar - hysteresis) if streak[b] > 0 else s > _f32(bar)
            streak[b] = min(int(streak[b]) + 1, patience) if kept else 0
            said |= SCORE_NAN if math.isnan(s) else 0
        if streak[b] >= patience:
            stops |= SCORE

        recent[b, newest] = torch.nan if entropy is None else entropy[b]
        if status is not None and status[b] != 0:
            said |= STATS_STATUS
        if plateau_window > 0:
            window = [float(recent[b, (newest - i) % recent.shape[1]]) for i in range(plateau_window)]
            known = not any(math.isnan(h) for h in window)
            if known and max(window) - min(window) <= plateau_width:
                stops |= PLATEAU

        if generated[b] < min_tokens:
            stops = 0
        if generated[b] >= max_tokens:
            stops |= LENGTH
        state_reason[b] = said | stops
    return state_reason & STOPS != 0, state_reason.clone()
