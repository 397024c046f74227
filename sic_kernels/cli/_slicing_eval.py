"""Method of `eval slicing`.

The first context - scored tokens are prefilled dense, once. Each policy then runs the scored tokens on top,
teacher-forced, every query selecting for itself, and the cache is cropped back. Reported: perplexity against dense,
KL(dense || policy) of the next-token distributions, greedy agreement; intervals from a paired bootstrap over blocks of
16 consecutive tokens (neighbouring tokens are not independent). The oracle reads the tokens of largest true attention
mass, summed over the heads of a group, at the same budget.

The estimate of the omitted mass is held against the truth: means of both, mean absolute error, and how often the truth
is below the published bound (the estimate's log-odds plus `BOUND_SHIFT`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from .. import models, slicing
from ..integrations.transformers import PendingKV, SlicedCache
from . import _run

Tensor = torch.Tensor

BLOCK = 16  # tokens per bootstrap block
RESAMPLES = 2000
CHUNK = 128  # scored tokens per forward
BOUND_SHIFT = 1.3  # nats of log-odds from the estimated omitted mass to its 95 % bound, fitted on other texts
COMPARE_EVERY = 4  # chunks per check of the omitted-mass estimate, which needs all true logits
ANSWER_TOKENS = 6
ALL_SLICED = 1 << 30  # max_sliced_T: the scored tokens go many at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """One row of the table. kind: dense, sliced or oracle."""

    label: str
    kind: str
    policy: Any
    ratio: float


def plans(ratios: list[float]) -> list[Plan]:
    """Dense, then per ratio the oracle, the default policy and Quest's (also at 25 %)."""

    def policy(**options: Any) -> Any:
        return slicing.SlicePolicy(max_sliced_T=ALL_SLICED, **options)

    def quest(ratio: float) -> Plan:
        pages = policy(ratio=ratio, unit="page", beta=1.0, pool="softmax", min_len=0)
        return Plan(f"Quest pages {ratio:.0%}", "sliced", pages, ratio)

    rows = [Plan("dense", "dense", slicing.SlicePolicy(max_sliced_T=0), 1.0)]
    for ratio in ratios:
        rows.append(Plan(f"oracle {ratio:.0%}", "oracle", policy(ratio=ratio), ratio))
        rows.append(Plan(f"sketch {ratio:.0%}", "sliced", policy(ratio=ratio), ratio))
    return rows + [quest(max(ratios)), quest(0.25)]


class EvalCache(SlicedCache):
    """A `SlicedCache` that can answer dense or by the oracle, and that checks the omitted-mass estimate."""

    def __init__(self, config: Any, plan: Plan, **options: Any) -> None:
        super().__init__(config, plan.policy, **options)
        self.plan = plan
        self.estimate_sum = self.true_sum = self.error_sum = 0.0
        self.covered = self.compared = 0

    def _decode(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor:
        pages = self.pages
        assert pages is not None
        k, v, index, table, lens = pages.tensors(layer)
        if self.plan.kind == "sliced" and index is not None:
            result = slicing.attend(q, k, v, index, table, lens, policy=self.policy, layer=layer, **options)
            self._recorder.sliced(layer, result, pages, self.policy)
            self._compare_omitted(layer, result, q)
            return result.out
        selection = self._oracle(layer, q) if self.plan.kind == "oracle" else None
        return slicing.sliced_attention(q, k, v, table, lens, selection, **options)[0]

    def _compare_omitted(self, layer: int, result: Any, q: Tensor) -> None:
        """The estimate against the true mass not read, on one chunk in `COMPARE_EVERY`."""
        if self.plan.policy.unit != "token" or self._steps % COMPARE_EVERY:
            return
        lse = self._logits(layer, q).logsumexp(-1).permute(2, 0, 1).flatten(1)[None]  # [1,T,Hq]
        sliced = result.status == 0
        true = (1.0 - torch.exp(result.lse - lse))[sliced].clamp(0, 1)
        estimate = result.omitted_mass[sliced]
        self.true_sum += true.sum().item()
        self.estimate_sum += estimate.sum().item()
        self.error_sum += (estimate - true).abs().sum().item()
        odds = estimate / (1 - estimate).clamp_min(1e-6) * math.exp(BOUND_SHIFT)
        self.covered += int((odds / (1 + odds) >= true - 1e-6).sum())
        self.compared += true.numel()

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


def _with_pages_of(source: SlicedCache, config: Any, plan: Plan) -> EvalCache:
    """A cache with the same tokens, indexed as `plan` needs: the same pages, or for page summaries a copy."""
    cache = EvalCache(config, plan, page_size=source.page_size, params=source.params)
    if plan.policy.unit == source.policy.unit:
        cache.pages, cache._live = source.pages, source._live
        for mine, theirs in zip(cache.layers, source.layers):
            mine.seen = theirs.seen
        return cache
    for layer, mine in enumerate(cache.layers):
        k, v = source.pages.row(layer, 0)  # type: ignore[union-attr]
        mine.seen = k.shape[1]
        live = cache._begin(PendingKV(cache, layer, k[None], v[None]), None)
        cache.pages.append(layer, k[None], v[None], live)  # type: ignore[union-attr]
        cache._end(layer)
    return cache


# --- scored text ------------------------------------------------------------------------------------------------------


def evaluate_text(
    lm: Any, name: str, raw: str, context: int, scored: int, skip: int, plan_list: list[Plan], bar: Any
) -> list[dict[str, Any]]:
    ids = lm.tokens(raw, context, skip)
    base = SlicedCache(lm.model.config, plan_list[0].policy, capacity=context + 64)
    task = bar.add_task(f"{name}: prefill", total=context - scored)
    _run.prefill(lm.model, ids[:, : context - scored], base, lambda n: bar.advance(task, n))
    task = bar.add_task(f"{name}: {len(plan_list)} policies", total=scored * len(plan_list))
    tail = ids[:, context - scored :]
    rows: list[dict[str, Any]] = []
    dense: list[Tensor] = []
    oracles: dict[float, Tensor] = {}
    for plan in plan_list:
        cache = _with_pages_of(base, lm.model.config, plan)
        score = _score(lm.model, tail, cache, dense, lambda n: bar.advance(task, n))
        cache.crop(-scored)
        row = _row(name, plan, score, rows[0]["_nll"] if rows else None, oracles.get(plan.ratio), cache)
        if plan.kind == "oracle":
            oracles[plan.ratio] = score["kl"]
        rows.append(row)
    for row in rows:
        row.pop("_nll")
    return rows


def _score(model: Any, ids: Tensor, cache: Any, dense: list[Tensor], advance: Any) -> dict[str, Tensor]:
    """Per token: negative log-likelihood of the next, KL to dense, same greedy choice. The dense run fills `dense`."""
    first = not dense
    nll, kl, same = [], [], []
    at = 0
    for i, logp in enumerate(_run.teacher_forced(model, ids, cache, CHUNK, advance)):
        if first:
            dense.append(logp)
        base = dense[i]
        target = ids[0, at + 1 : at + 1 + len(logp)]
        nll.append(-logp[: len(target)].gather(1, target[:, None])[:, 0])
        kl.append((base.exp() * (base - logp)).sum(-1))
        same.append(logp.argmax(-1) == base.argmax(-1))
        at += len(logp)
    return {"nll": torch.cat(nll), "kl": torch.cat(kl), "same": torch.cat(same).float()}


def _row(
    name: str, plan: Plan, score: dict[str, Tensor], dense_nll: Tensor | None, oracle: Tensor | None, cache: EvalCache
) -> dict[str, Any]:
    nll = score["nll"]
    row: dict[str, Any] = {"text": name, "policy": plan.label, "_nll": nll, "perplexity": nll.mean().exp().item()}
    if dense_nll is None:
        return row
    change = nll - dense_nll
    low, high = _interval(_resampled(change))
    row.update(
        perplexity_change=math.expm1(change.mean().item()),
        perplexity_low=math.expm1(low),
        perplexity_high=math.expm1(high),
        kl=score["kl"].mean().item(),
        agreement=score["same"].mean().item(),
    )
    if oracle is not None:
        low, high = _interval(_resampled(score["kl"]) / _resampled(oracle))
        row.update(kl_ratio=(score["kl"].mean() / oracle.mean()).item(), kl_ratio_low=low, kl_ratio_high=high)
    stats = cache.stats()
    if stats.bytes_dense:
        row["read_ratio"] = stats.bytes_read / stats.bytes_dense
    if cache.compared:
        row.update(
            omitted_true=cache.true_sum / cache.compared, omitted_estimate=cache.estimate_sum / cache.compared,
            omitted_error=cache.error_sum / cache.compared, omitted_coverage=cache.covered / cache.compared,
        )  # fmt: skip
    return row


def _resampled(values: Tensor) -> Tensor:
    """Means of `RESAMPLES` bootstrap samples of blocks; the same blocks for every call, so that pairs stay pairs."""
    blocks = values[: len(values) // BLOCK * BLOCK].view(-1, BLOCK).mean(1)
    chosen = torch.randint(len(blocks), (RESAMPLES, len(blocks)), generator=torch.Generator().manual_seed(0))
    return blocks[chosen].mean(1)


def _interval(samples: Tensor) -> tuple[float, float]:
    ordered = samples.sort().values
    return ordered[int(0.025 * len(ordered))].item(), ordered[int(0.975 * len(ordered))].item()


# --- needles ----------------------------------------------------------------------------------------------------------


def evaluate_needles(
    lm: Any, name: str, raw: str, context: int, skip: int, count: int, plan_list: list[Plan], bar: Any
) -> list[dict[str, Any]]:
    """Facts spread over one context; each policy answers each question greedily, the question itself sliced too."""
    cases = models.needle_cases(count)
    ids = _context_with_facts(lm, raw, cases, context, skip)
    base = SlicedCache(
        lm.model.config, dataclasses.replace(plan_list[0].policy, max_sliced_T=0), capacity=context + 128
    )
    task = bar.add_task(f"{name}: prefill with needles", total=ids.shape[1])
    _run.prefill(lm.model, ids, base, lambda n: bar.advance(task, n))
    task = bar.add_task(f"{name}: {count} needle questions", total=count * len(plan_list))
    expected: list[str] = []
    rows = []
    for plan in plan_list:
        cache = _with_pages_of(base, lm.model.config, plan)
        answers = []
        for case in cases:
            answers.append(_answer(lm, cache, case.question))
            bar.advance(task)
        expected = expected or answers
        right = sum(case.answer.lower() == answer for case, answer in zip(cases, answers))
        as_dense = sum(a == b for a, b in zip(answers, expected))
        rows.append({"text": name, "policy": plan.label, "questions": count, "as_dense": as_dense, "right": right})
    return rows


def _context_with_facts(lm: Any, raw: str, cases: list[Any], context: int, skip: int) -> Tensor:
    facts = [lm.tokenizer(case.fact, return_tensors="pt").input_ids for case in cases]
    body = lm.tokens(raw, context - sum(f.shape[1] for f in facts), skip)
    parts, at = [], 0
    for case, fact in zip(cases, facts):
        stop = int(case.place * body.shape[1])
        parts += [body[:, at:stop], fact]
        at = stop
    return torch.cat([*parts, body[:, at:]], dim=1)


def _answer(lm: Any, cache: EvalCache, question: str) -> str:
    """First word of the greedy answer, articles aside; the cache is left as it was."""
    ids, produced = lm.tokenizer(question, return_tensors="pt").input_ids, []
    fed = 0
    with torch.inference_mode():
        for _ in range(ANSWER_TOKENS):
            logits = lm.model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1]
            fed += ids.shape[1]
            ids = logits.argmax().view(1, 1)
            produced.append(int(ids))
    cache.crop(-fed)
    words = [word.strip(".,;:!?\"'").lower() for word in lm.tokenizer.decode(produced).split()]
    return next((word for word in words if word not in ("a", "an", "the")), "")
