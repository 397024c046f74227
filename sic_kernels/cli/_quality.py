"""What the evaluations share: runs of scored text, and how they are compared.

The first context - scored tokens are prefilled dense, once. Each plan then runs the scored tokens on top, teacher-forced,
and the cache is cropped back. Reported: perplexity against dense, KL(dense || plan) of the next-token distributions, greedy
agreement; intervals from a paired bootstrap over blocks of 16 consecutive tokens (neighbouring tokens are not independent).
The oracle reads the tokens of largest true attention mass, summed over the heads of a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from .. import slicing
from ..integrations.transformers import SlicedCache
from . import _run

Tensor = torch.Tensor

BLOCK = 16  # tokens per bootstrap block
RESAMPLES = 2000
ALL_SLICED = 1 << 30  # max_sliced_T: the scored tokens go many at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """One row of a table. kind: dense, sliced or oracle.  against: label of the row whose KL it is held against, if any."""

    label: str
    kind: str
    policy: Any
    against: str | None = None


def policy(**options: Any) -> Any:
    return slicing.SlicePolicy(max_sliced_T=ALL_SLICED, **options)


class EvalCache(SlicedCache):
    """A `SlicedCache` that can answer dense or by the oracle as well, whatever the number of tokens."""

    def __init__(self, config: Any, plan: Plan, **options: Any) -> None:
        super().__init__(config, plan.policy, **options)
        self.plan = plan

    def _decode(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor:
        pages = self.pages
        assert pages is not None
        k, v, index, table, lens = pages.tensors(layer)
        if self.plan.kind == "sliced" and index is not None:
            result = slicing.attend(q, k, v, index, table, lens, policy=self.policy, layer=layer, **options)
            self._recorder.sliced(layer, result, pages, self.policy)
            self._answered(layer, result, q)
            return result.out
        selection = self._oracle(layer, q) if self.plan.kind == "oracle" else None
        return slicing.sliced_attention(q, k, v, table, lens, selection, **options)[0]

    def _answered(self, layer: int, result: Any, q: Tensor) -> None:
        """After each sliced answer."""

    def _logits(self, layer: int, q: Tensor) -> Tensor:
        """True logits `[Hkv,G,T,n]` of the one row, -inf where a token is not visible."""
        _, T, Hq, D = q.shape
        keys, _ = self.pages.row(layer, 0)  # type: ignore[union-attr]
        heads, n = keys.shape[:2]
        grouped = q[0].view(T, heads, Hq // heads, D).permute(1, 2, 0, 3)
        logits = torch.matmul(grouped, keys.to(q.dtype).transpose(1, 2)[:, None]).mul_(D**-0.5)
        hidden = torch.ones(T, n, dtype=torch.bool).triu_(n - T + 1)
        return logits.masked_fill_(hidden, -math.inf)

    def _oracle(self, layer: int, q: Tensor) -> Any:
        """The tokens of largest summed attention mass, chosen by `select` from the true probabilities."""
        mass = torch.softmax(self._logits(layer, q), dim=-1).sum(1)
        return slicing.select(
            mass.transpose(0, 1)[None].contiguous(), self.pages.seq_lens, unit="token",  # type: ignore[union-attr]
            page_size=self.page_size, ratio=self.policy.ratio, sink=self.policy.sink, recent=self.policy.recent,
        )  # fmt: skip

    def take_pages_of(self, source: SlicedCache) -> None:
        """Hold the same tokens, indexed as the plan needs: the same pages, or for page summaries a copy."""
        if self.policy.unit == source.policy.unit:
            self.pages, self._live = source.pages, source._live
            for mine, theirs in zip(self.layers, source.layers):
                mine.seen = theirs.seen
            return
        pages: Any = source.pages
        _run.fill(self, (pages.row(layer, 0) for layer in range(pages.layers)))


def score(model: Any, ids: Tensor, cache: Any, dense: list[Tensor], chunk: int, advance: Any) -> dict[str, Tensor]:
    """`compare` for a run of the model on top of `cache`."""
    return compare(_run.teacher_forced(model, ids, cache, chunk, advance), ids, dense)


def compare(run: Iterable[Tensor], ids: Tensor, dense: list[Tensor]) -> dict[str, Tensor]:
    """Per token: negative log-likelihood of the next, KL to dense, same greedy choice. The dense run fills `dense`.

    run: log-probabilities `[n,V]` of one chunk of `ids [1,N]` after the other.
    """
    first = not dense
    nll, kl, same = [], [], []
    at = 0
    for i, logp in enumerate(run):
        if first:
            dense.append(logp)
        base = dense[i]
        target = ids[0, at + 1 : at + 1 + len(logp)]
        nll.append(-logp[: len(target)].gather(1, target[:, None])[:, 0])
        kl.append((base.exp() * (base - logp)).sum(-1))
        same.append(logp.argmax(-1) == base.argmax(-1))
        at += len(logp)
    return {"nll": torch.cat(nll), "kl": torch.cat(kl), "same": torch.cat(same).float()}


def quality_row(
    text: str, label: str, against: str | None, scores: dict[str, dict[str, Tensor]], base: str = "dense"
) -> dict[str, Any]:
    """A line of the table from the scores of all rows so far, by label.

    against: label of the row whose KL this one's is held against; base: of the dense run it is compared with.
    """
    mine, dense = scores[label], scores[base]
    row: dict[str, Any] = {"text": text, "policy": label, "perplexity": mine["nll"].mean().exp().item()}
    if mine is dense:
        return row
    change = mine["nll"] - dense["nll"]
    low, high = _interval(_resampled(change))
    kl_low, kl_high = _interval(_resampled(mine["kl"]))
    row.update(
        perplexity_change=math.expm1(change.mean().item()), perplexity_low=math.expm1(low),
        perplexity_high=math.expm1(high), kl=mine["kl"].mean().item(), kl_low=kl_low, kl_high=kl_high,
        agreement=mine["same"].mean().item(),
    )  # fmt: skip
    if against in scores:
        other = scores[against]["kl"]
        low, high = _interval(_resampled(mine["kl"]) / _resampled(other))
        ratio = (mine["kl"].mean() / other.mean()).item()
        row.update(against=against, kl_ratio=ratio, kl_ratio_low=low, kl_ratio_high=high)
    return row


def _resampled(values: Tensor) -> Tensor:
    """Means of `RESAMPLES` bootstrap samples of blocks; the same blocks for every call, so that pairs stay pairs."""
    blocks = values[: len(values) // BLOCK * BLOCK].view(-1, BLOCK).mean(1)
    chosen = torch.randint(len(blocks), (RESAMPLES, len(blocks)), generator=torch.Generator().manual_seed(0))
    return blocks[chosen].mean(1)


def _interval(samples: Tensor) -> tuple[float, float]:
    ordered = samples.sort().values
    return ordered[int(0.025 * len(ordered))].item(), ordered[int(0.975 * len(ordered))].item()
