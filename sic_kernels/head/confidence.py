"""Confidence of tokens, used later: for the step that comes some tokens after, as a bias on keys, as a verification budget."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..runtime.arguments import FLOATS, INTS, integer, output, real, tensor, torch_device
from ..runtime.errors import ArgumentError
from .rows import chosen_rows, row_numbers
from .types import Array

Tensor = torch.Tensor
F32 = torch.finfo(torch.float32)


class ConfidenceRing:
    """The confidences (0 to 1) of the last `capacity` tokens of B rows, read `lag` tokens later.

    A predictor that runs beside the model is late: what it says of token n - lag is known when step n begins.  So a step is
    conditioned on what was known then, and nothing is rolled back.

    Everything is a tensor on `device`, the place of the next token included: `push`, `read` and `as_key_bias` neither wait nor
    depend on a number of the host, and can be captured together in a graph that is replayed every step.
    lag: 1 to capacity, in tokens.  capacity: how far back a bias can reach; memory is 4 * B * capacity bytes.
    """

    def __init__(self, batch: int, lag: int = 3, *, capacity: int = 1024, device: torch.device | str = "cpu") -> None:
        B = integer("ConfidenceRing", "batch", batch, 1, "1 or more rows")
        self.capacity = integer("ConfidenceRing", "capacity", capacity, 1, "1 or more tokens")
        self.lag = integer("ConfidenceRing", "lag", lag, 1, "1 or more tokens")
        if self.lag > self.capacity:
            raise ArgumentError.of("ConfidenceRing", "lag", self.lag, f"at most the capacity ({self.capacity})")
        device = torch_device("ConfidenceRing", device)
        self.confidence = torch.ones(B, self.capacity, device=device)  # that of token n at n % capacity
        self.count = torch.zeros(B, dtype=torch.int64, device=device)  # tokens pushed

    def push(self, confidence: Array) -> None:
        """confidence f32[B] of the token just generated. A NaN is a 1: nothing is known against the token."""
        B, device = len(self.count), self.count.device
        new = tensor("ConfidenceRing.push", "confidence", confidence, FLOATS, (B,), device)
        known = new.float().nan_to_num(nan=1.0).clamp(0, 1)
        self.confidence.scatter_(1, (self.count % self.capacity)[:, None], known[:, None])
        self.count += 1

    def read(self) -> Tensor:
        """f32[B]: the confidence of token n - lag, when n - 1 tokens have been pushed; 1 while there is none."""
        wanted = self.count - self.lag
        found = self.confidence.gather(1, (wanted % self.capacity)[:, None])[:, 0]
        return torch.where(wanted >= 0, found, 1.0)

    def as_key_bias(
        self, prompt_lens: Array, size: int, *, strength: float = 1.0, floor: float = 0.05, out: Array | None = None
    ) -> Tensor:
        """f32[B,size]: what `key_bias` of sliced attention adds to the logits of each key.

            bias[p] = strength * ln(max(c, floor))      of the key at p, whose token was generated with confidence c

        so at strength 1 a key has its attention weight (before the normalisation) multiplied by the confidence of its token,
        and by `floor` at least. 0 for the prompt, for tokens younger than `lag` (their confidence is not yet known) and for those
        that the ring no longer holds.
        prompt_lens: i32|i64[B]: the key of the first token pushed lies at prompt_lens[b].  size: S of the attention.
        strength: 0 or more.  floor: above 0, at most 1.  A frozen model was not trained with such a bias: measure what it does.
        """
        op = "ConfidenceRing.as_key_bias"
        size = integer(op, "size", size, 0, "the number of key positions")
        strength = real(op, "strength", strength, lambda x: 0 <= x <= F32.max, "a finite float32, 0 or more")
        floor = real(op, "floor", floor, lambda x: F32.tiny <= x <= 1, "above 0 (a normal float32), at most 1")
        B, device = len(self.count), self.count.device
        lens = tensor(op, "prompt_lens", prompt_lens, INTS, (B,), device)
        into = None if out is None else output(op, out, torch.float32, (B, size), device)
        token = torch.arange(size, device=device) - lens[:, None]
        newest = (self.count - self.lag)[:, None]
        known = (token >= 0) & (token <= newest) & (token >= self.count[:, None] - self.capacity)
        bias = strength * self.confidence.clamp(min=floor).log().gather(1, token % self.capacity)
        bias = torch.where(known, bias, 0.0)
        return bias if into is None else into.copy_(bias)

    def reset(self, rows: Any = None) -> None:
        """These rows (None: all; else indices or a bool mask) begin a new text."""
        self.count[chosen_rows("ConfidenceRing.reset", rows, len(self.count), self.count.device)] = 0

    def reorder(self, rows: Any) -> None:
        """Row i becomes a copy of row rows[i] (beams); the batch keeps its size, the tensors their place."""
        batch = len(self.count)
        rows = row_numbers("ConfidenceRing.reorder", rows, batch, self.count.device)
        if len(rows) != batch:
            raise ArgumentError.of(
                "ConfidenceRing.reorder", "rows", f"{len(rows)} rows", f"{batch}, as many as there are"
            )
        self.confidence.copy_(self.confidence[rows])
        self.count.copy_(self.count[rows])


def verify_budget(
    confidence: Array, cost: float | tuple[float, float] = 0.1, *, bonus: float = 1.0, out: Array | None = None
) -> Tensor:
    """How many of the drafted tokens are worth verifying: i64[B], from 0 to K.

    confidence: f32[B,K], the chance that drafted token j is accepted if all before it were, clipped to 0 to 1; NaN counts as 0.
    cost: of a verification of k tokens, fixed + per_token * k; a number is per_token, with fixed = 1.  Any unit.
    bonus: tokens that a step yields beside the accepted ones: the target model's own after the last accepted one (1 in
    speculative decoding; with 0 only accepted tokens count).

        accepted(k) = c_1 + c_1 c_2 + ... + c_1 ... c_k
        lengths[b] = argmax_k (bonus + accepted(k)) / (fixed + per_token * k)

    the fewest of equally good k. Which positions are verified is all that this decides, so it is lossless: what is not verified
    is not output. Runs on the device of `confidence`, does not wait for it, and can be captured. Bitwise deterministic,
    a row by itself. Source: the expected number of accepted tokens of Leviathan et al. 2023, with a probability for each
    position in place of one for all.
    """
    op = "verify_budget"
    fixed, per_token = cost if isinstance(cost, (tuple, list)) and len(cost) == 2 else (1.0, cost)
    fixed = real(op, "cost", fixed, lambda x: 0 < x < math.inf, "per_token, or (fixed, per_token): fixed above 0")
    per_token = real(op, "cost", per_token, lambda x: 0 <= x < math.inf, "per_token, or (fixed, per_token): 0 or more")
    bonus = real(op, "bonus", bonus, lambda x: 0 <= x < math.inf, "a finite number, 0 or more")
    c = tensor(op, "confidence", confidence, FLOATS, (-1, -1))
    into = None if out is None else output(op, out, torch.int64, (len(c),), c.device)
    accepted = c.double().nan_to_num(nan=0.0).clamp(0, 1).cumprod(1).cumsum(1)
    accepted = torch.nn.functional.pad(accepted, (1, 0))  # k = 0
    steps = torch.arange(accepted.shape[1], dtype=torch.float64, device=c.device)
    lengths = ((bonus + accepted) / (fixed + per_token * steps)).argmax(1)
    return lengths if into is None else into.copy_(lengths)
