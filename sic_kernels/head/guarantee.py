"""A threshold on a score that carries a guarantee: stopping above it changes at most a given share of the answers.

Learn then Test (Angelopoulos, Bates, Candes, Jordan and Lei 2021) by fixed-sequence testing: thresholds are tried from the
strictest on, on prompts that nothing was fitted on; each is a hypothesis "more than `risk` of the answers would change", and
the first that cannot be rejected ends the search.  The last rejected threshold keeps the risk with the confidence that was
asked for, whatever the score is worth: a poor score gives no threshold, or one that saves nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ..runtime.errors import ArgumentError

Tensor = torch.Tensor

# Fixed before any data: from 99.99 % to 2 %, in even steps of the log-odds.
THRESHOLDS = tuple(1 / (1 + math.exp(-x / 4)) for x in range(36, -17, -1))


@dataclasses.dataclass(frozen=True)
class Stops:
    """What stopping at the first position with score >= threshold does to n answers.

    stopped: answers that end early.  premature: those of them that are not complete where they stop.
    saved, tokens: tokens that are not generated, of all.  at: int64 [n], tokens kept of each answer.
    """

    prompts: int
    stopped: int
    premature: int
    saved: int
    tokens: int
    at: Tensor

    @property
    def risk(self) -> float:
        """The share of the answers that change."""
        return self.premature / self.prompts

    @property
    def saved_share(self) -> float:
        return self.saved / self.tokens


@dataclasses.dataclass(frozen=True)
class Certificate:
    """threshold: the lowest that was accepted, None if none was.  p_value: of its test.  stops: on the calibration prompts."""

    threshold: float | None
    risk: float
    confidence: float
    prompts: int
    p_value: float
    stops: Stops | None


def stops_at(score: Tensor, complete: Tensor, prompts: Tensor, threshold: float) -> Stops:
    """Stop each answer at its first position with score >= threshold; without one it goes on to its own end.

    score f32 [N], complete bool [N] (stopping there changes nothing), prompts int [N], the positions of a prompt in order.
    The last position of an answer is no stop: it ends there by itself.
    """
    for name, x in (("complete", complete), ("prompts", prompts)):
        if x.shape != score.shape:
            raise ArgumentError.of("stops_at", name, list(x.shape), list(score.shape))
    _, answer, length = prompts.unique(return_inverse=True, return_counts=True)
    order = answer.argsort(stable=True)
    begins = length.cumsum(0) - length
    place = torch.empty_like(answer)
    place[order] = torch.arange(len(answer)) - begins.repeat_interleave(length)
    last = length - 1
    stop = torch.where((score >= threshold) & (place < last[answer]), place, last[answer])
    at = torch.full_like(length, len(answer)).scatter_reduce_(0, answer, stop, "amin")
    early = at < last
    right = complete[order][begins + at]
    return Stops(
        prompts=len(length), stopped=int(early.sum()), premature=int((early & ~right).sum()),
        saved=int((last - at).sum()), tokens=int(length.sum()), at=at + 1,
    )  # fmt: skip


def certify(
    score: Tensor,
    complete: Tensor,
    prompts: Tensor,
    *,
    risk: float = 0.05,
    confidence: float = 0.95,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Certificate:
    """The lowest threshold with P(share of changed answers <= risk) >= confidence, over the draw of the calibration prompts.

    score, complete, prompts: as in `stops_at`, of prompts that were not used for training. thresholds: from the strictest on,
    chosen without looking at these prompts.  The guarantee is for prompts of the same distribution.
    """
    for name, value in (("risk", risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ArgumentError.of("certify", name, value, "above 0 and below 1")
    if list(thresholds) != sorted(thresholds, reverse=True):
        raise ArgumentError.of("certify", "thresholds", "another order", "from the strictest (largest) on")
    found = Certificate(None, risk, confidence, len(prompts.unique()), 1.0, None)
    for threshold in thresholds:
        stops = stops_at(score, complete, prompts, threshold)
        p_value = binomial_p_value(stops.premature, stops.prompts, risk)
        if p_value > 1 - confidence:
            break
        found = Certificate(threshold, risk, confidence, stops.prompts, p_value, stops)
    return found


def binomial_p_value(losses: int, count: int, risk: float) -> float:
    """P(at most `losses` of `count`) where each is a loss with probability `risk`: the exact test of a larger risk."""
    if not 0 <= losses <= count or not 0 < risk < 1:
        raise ArgumentError.of(
            "binomial_p_value", "losses", f"{losses} of {count} at {risk}", "0 to count, risk in (0, 1)"
        )

    def log_chance(k: int) -> float:
        ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        return ways + k * math.log(risk) + (count - k) * math.log1p(-risk)

    return min(1.0, math.fsum(math.exp(log_chance(k)) for k in range(losses + 1)))
