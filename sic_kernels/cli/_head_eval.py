"""Method of `eval head`: does the confidence of earlier tokens help attention?

The scored text is run token by token. The probability that the model gave to each token becomes, three tokens later, a
bias on that token's key (`ConfidenceRing.as_key_bias`), in dense and in sliced attention; scored as the other evaluations are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .. import head, slicing
from ..integrations.transformers import SlicedCache
from . import _run
from ._quality import EvalCache, Plan, compare, policy, quality_row

Tensor = torch.Tensor

STRENGTHS = (0.25, 1.0)
LAG = 3


class RingCache(EvalCache):
    """Adds the bias of a ring to the logits of every layer."""

    def __init__(self, config: Any, plan: Plan, strength: float, prompt: int, **options: Any) -> None:
        super().__init__(config, plan, **options)
        self.ring = head.ConfidenceRing(1, LAG, capacity=8192) if strength else None
        self.strength, self.prompt = strength, torch.tensor([prompt])
        self._bias: Tensor | None = None

    def _decode(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor:
        assert self.pages is not None
        if self.ring is not None and layer == 0:
            size = self.pages.tensors(layer)[3].shape[1] * self.page_size
            self._bias = self.ring.as_key_bias(self.prompt, size, strength=self.strength)
        return super()._decode(layer, q, {**options, "key_bias": self._bias})

    def following(self, run: Iterator[Tensor], ids: Tensor) -> Iterator[Tensor]:
        """`run` over `ids [1,N]`, a token each; the ring gets the probability of every token before it is fed."""
        self._push(1.0)  # of the first token nothing is known
        for i, logp in enumerate(run):
            yield logp
            if i + 1 < ids.shape[1]:
                self._push(logp[-1, ids[0, i + 1]].exp().item())

    def _push(self, confidence: float) -> None:
        if self.ring is not None:
            self.ring.push(torch.tensor([confidence]))


def plans(ratio: float) -> list[tuple[Plan, float]]:
    """Dense and sliced, without the ring and with it at each strength."""
    rows = []
    for label, kind, options in (("dense", "dense", {}), (f"sketch {ratio:.0%}", "sliced", {"ratio": ratio})):
        for strength in (0.0, *STRENGTHS):
            name = f"{label}, ring {strength:g}" if strength else label
            rows.append((Plan(name, kind, policy(**options), None), strength))
    return rows


def evaluate_ring(
    lm: Any, name: str, raw: str, context: int, scored: int, skip: int, ratio: float, bar: Any
) -> list[dict]:
    """A line per plan; every plan against dense without a ring."""
    ids = lm.tokens(raw, context, skip)
    base = SlicedCache(lm.model.config, slicing.SlicePolicy(max_sliced_T=0), capacity=context + 64)
    task = bar.add_task(f"{name}: prefill", total=context - scored)
    _run.prefill(lm.model, ids[:, : context - scored], base, lambda n: bar.advance(task, n))
    tail, todo = ids[:, context - scored :], plans(ratio)
    task = bar.add_task(f"{name}: {len(todo)} ways", total=scored * len(todo))
    dense: list[Tensor] = []
    scores: dict[str, dict[str, Tensor]] = {}
    rows = []
    for plan, strength in todo:
        cache = RingCache(
            lm.model.config, plan, strength, context - scored, page_size=base.page_size, params=base.params
        )
        cache.take_pages_of(base)
        run = _run.teacher_forced(lm.model, tail, cache, 1, lambda n: bar.advance(task, n))
        scores[plan.label] = compare(cache.following(run, tail), tail, dense)
        cache.crop(-scored)
        rows.append(quality_row(name, plan.label, None, scores))
    return rows
