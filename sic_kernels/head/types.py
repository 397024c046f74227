"""The values that head ops take and return."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, NamedTuple

from ..runtime.arguments import code_of, real
from ..runtime.errors import ArgumentError

Array = Any  # torch, NumPy, CuPy or JAX

ACTIVATIONS: dict[str, int] = {"none": 0, "relu": 1}
LINKS: dict[str, int] = {"sigmoid": 0, "identity": 1}


class Status(enum.IntFlag):
    """Bits of `TokenStats.status`; 0 is good.  A row with a status has id 0, NaN for all else, and lists that are empty."""

    NAN = 1  # a NaN among the logits
    INF = 2  # a +inf among them
    EMPTY = 4  # all of them -inf, masked, or behind the valid vocabulary


class TokenStats(NamedTuple):
    """What the logits of B rows say.  Logarithms are natural; everything is of the distribution at the row's temperature.

    lse, entropy, varentropy: f32[B]: log sum exp, -sum p log p, variance of -log p.  argmax: i64[B].
    topk_ids, topk_logprobs: i64, f32 [B,k], greatest first, of equals the lowest id; (-1, -inf) where fewer ids take part.
    watch_logprobs: f32[B,W].  target_logprob: f32[B], NaN where the target is -1 ([0] without targets).
    status: u8[B], bits of `Status`.  score: f32[B,n] of a probe (None without one).
    """

    lse: Array
    entropy: Array
    varentropy: Array
    argmax: Array
    topk_ids: Array
    topk_logprobs: Array
    watch_logprobs: Array
    target_logprob: Array
    status: Array
    score: Array | None = None


class StatsPart(NamedTuple):
    """The statistics of one shard of the vocabulary, to be merged with those of the others.

    z: the logits after softcap and bias; y = (z - m) / temperature.  m: f32[B], the greatest z; s, t, u: f64[B], the sums of
    e^y, y e^y, y^2 e^y (-inf and zeros where no id takes part).  top_ids, top: i64, f32 [B,k], ids and z.
    watch, target: f32 [B,W], [B] or [0]: z of those ids, -inf if they are in another shard.  status: u8[B].
    temperature: as it was given; vocab_start: the shard's first id.
    """

    m: Array
    s: Array
    t: Array
    u: Array
    top_ids: Array
    top: Array
    watch: Array
    target: Array
    status: Array
    temperature: Array | float | None = None
    vocab_start: int = 0


@dataclasses.dataclass(frozen=True)
class Probe:
    """score[B,n] = link(vector . activation(projection . hidden) + bias).

    projection: f32|f16|bf16 [R,D], R <= 64.  vector: f32 [n,R], n <= 16.  bias: f32 [n].
    activation: "none" or "relu".  link: "sigmoid" (a probability) or "identity" (a predicted entropy).
    """

    projection: Array
    vector: Array
    bias: Array
    activation: str = "none"
    link: str = "sigmoid"

    def __post_init__(self) -> None:
        for name in ("projection", "vector", "bias"):
            if getattr(self, name) is None:
                raise ArgumentError.of("Probe", name, None, "an array")
        code_of("Probe", "activation", self.activation, ACTIVATIONS)
        code_of("Probe", "link", self.link, LINKS)

    def inputs(self) -> tuple:
        """In the order of the native ops."""
        return self.projection, self.vector, self.bias, ACTIVATIONS[self.activation], LINKS[self.link]


NO_PROBE = (None, None, None, 0, 0)


def softcap_of(op: str, softcap: Any) -> float | None:
    """A soft cap is a number above 0, or None."""
    if softcap is None:
        return None
    return real(op, "softcap", softcap, lambda x: 0 < x < math.inf, "a finite number above 0, or None")
