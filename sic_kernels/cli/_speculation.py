"""What prompt lookup saves, with and without a budget: run on a model, or replayed on answers that it gave."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..integrations import lookup
from ..runtime.errors import SicError
from ._answers import Answers, eos_ids, prompt_ids

COSTS = (0.02, 0.1, 0.3)  # of a verified token, in forwards of one


def plans(costs: tuple[float, ...] = COSTS) -> dict[str, dict[str, Any]]:
    """Options of `lookup.generate`: no proposals, all verified, a budget for each cost."""
    return {"plain": {"most": 0}, "all": {}, **{f"budget {cost:g}": {"cost": cost} for cost in costs}}


def replayed(answers: Answers) -> list[dict[str, Any]]:
    """Sums over the answers, without a model: which tokens are accepted follows from the answers."""
    rows = []
    for name, options in plans().items():
        row = _empty(name, options)
        for prompt in answers.prompt.unique().tolist():
            entropy = answers.entropy[answers.prompt == prompt][:-1].tolist()
            # the first token comes with the prompt's own forward, whose entropy is not kept: taken as sure
            _add(row, lookup.replay(answers.asked[prompt], answers.tokens(prompt), [0.0, *entropy], **options))
        rows.append(row)
    return rows


def measured(lm: Any, prompts: list[str], cap: int, bar: Any, costs: tuple[float, ...] = COSTS) -> list[dict[str, Any]]:
    """Sums over greedy answers, and seconds.  Raises if a way gives other tokens than plain decoding."""
    rows = [_empty(name, options) for name, options in plans(costs).items()]
    task = bar.add_task(f"{len(prompts)} answers, {len(rows)} ways", total=len(prompts) * len(rows))
    for prompt in prompts:
        ids, wanted = torch.tensor([prompt_ids(lm.tokenizer, prompt)]), None
        for options, row in zip(plans(costs).values(), rows):
            start = time.perf_counter()
            found = lookup.generate(lm.model, ids, cap, eos_ids=eos_ids(lm.model), **options)
            row["seconds"] = row.get("seconds", 0.0) + time.perf_counter() - start
            wanted = wanted or found.tokens
            if found.tokens != wanted:
                raise SicError(f"prompt lookup ({row['plan']}) gave other tokens than plain greedy decoding")
            _add(row, found)
            bar.advance(task)
    return rows


def _empty(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"plan": name, "cost": options.get("cost"), "tokens": 0, "forwards": 0, "verified": 0, "accepted": 0}


def _add(row: dict[str, Any], found: lookup.Generated) -> None:
    row["tokens"] += len(found.tokens)
    for name in ("forwards", "verified", "accepted"):
        row[name] += getattr(found, name)


def table(rows: list[dict[str, Any]]) -> Any:
    """Forwards and verified tokens per token, and what both cost together at each price of a verified token."""
    from rich.table import Table

    costs = [row["cost"] for row in rows if row["cost"] is not None]
    shown = Table(title=f"prompt lookup over {rows[0]['tokens']} tokens of greedy answers, per token")
    shown.add_column("verified is")
    for name in ("forwards", "verified", "accepted", *(f"forwards + {cost:g} verified" for cost in costs)):
        shown.add_column(name, justify="right")
    if "seconds" in rows[0]:
        shown.add_column("ms", justify="right")
    for row in rows:
        tokens = row["tokens"]
        per_token = [row[name] / tokens for name in ("forwards", "verified", "accepted")]
        cells = [f"{value:.3f}" for value in (*per_token, *(per_token[0] + cost * per_token[1] for cost in costs))]
        if "seconds" in row:
            cells.append(f"{1e3 * row['seconds'] / tokens:.1f}")
        shown.add_row(row["plan"], *cells)
    return shown
