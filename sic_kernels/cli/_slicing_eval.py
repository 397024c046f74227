"""Method of `eval slicing`; see `_quality` for how runs are scored.

Every query selects for itself. The estimate of the omitted mass is held against the truth: means of both, mean absolute
error, and how often the truth is below the published bound (the estimate's log-odds plus `BOUND_SHIFT`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from .. import models, slicing
from ..integrations.transformers import SlicedCache
from . import _run
from ._quality import EvalCache, Plan, policy, quality_row, score

Tensor = torch.Tensor

CHUNK = 128  # scored tokens per forward
BOUND_SHIFT = 1.3  # nats of log-odds from the estimated omitted mass to its 95 % bound, fitted on other texts
COMPARE_EVERY = 4  # chunks per check of the omitted-mass estimate, which needs all true logits
ANSWER_TOKENS = 6


def plans(ratios: list[float]) -> list[Plan]:
    """Dense, then per ratio the oracle, the default policy and Quest's (also at 25 %)."""

    def quest(ratio: float) -> Plan:
        pages = policy(ratio=ratio, unit="page", beta=1.0, pool="softmax", min_len=0)
        return Plan(f"Quest pages {ratio:.0%}", "sliced", pages, f"oracle {ratio:.0%}")

    rows = [Plan("dense", "dense", slicing.SlicePolicy(max_sliced_T=0))]
    for ratio in ratios:
        oracle = f"oracle {ratio:.0%}"
        rows.append(Plan(oracle, "oracle", policy(ratio=ratio)))
        rows.append(Plan(f"sketch {ratio:.0%}", "sliced", policy(ratio=ratio), oracle))
    return rows + [quest(max(ratios)), quest(0.25)]


class SlicedEvalCache(EvalCache):
    """Checks the estimate of the omitted mass as well."""

    def __init__(self, config: Any, plan: Plan, **options: Any) -> None:
        super().__init__(config, plan, **options)
        self.estimate_sum = self.true_sum = self.error_sum = 0.0
        self.covered = self.compared = 0

    def _answered(self, layer: int, result: Any, q: Tensor) -> None:
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


def _with_pages_of(source: SlicedCache, config: Any, plan: Plan) -> SlicedEvalCache:
    cache = SlicedEvalCache(config, plan, page_size=source.page_size, params=source.params)
    cache.take_pages_of(source)
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
    scores: dict[str, dict[str, Tensor]] = {}
    for plan in plan_list:
        cache = _with_pages_of(base, lm.model.config, plan)
        scores[plan.label] = score(lm.model, tail, cache, dense, CHUNK, lambda n: bar.advance(task, n))
        cache.crop(-scored)
        rows.append({**quality_row(name, plan.label, plan.against, scores), **_what_was_read(cache)})
    return rows


def _what_was_read(cache: SlicedEvalCache) -> dict[str, float]:
    row: dict[str, float] = {}
    stats = cache.stats()
    if stats.bytes_dense:
        row["read_ratio"] = stats.bytes_read / stats.bytes_dense
    if cache.compared:
        row.update(
            omitted_true=cache.true_sum / cache.compared, omitted_estimate=cache.estimate_sum / cache.compared,
            omitted_error=cache.error_sum / cache.compared, omitted_coverage=cache.covered / cache.compared,
        )  # fmt: skip
    return row


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


def _answer(lm: Any, cache: SlicedEvalCache, question: str) -> str:
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
