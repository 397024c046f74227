"""Method of `train-probe`: what the probes are to predict, what they are held against, and the tables.

* complete: stopping here changes nothing (`_answers.complete`).  Against P(EOS), the confidence exp(-entropy), the share in the
  training prompts, and a rule that learns nothing: the sentence that ends here was said before.
* next_entropy: of the distribution one position later, in nats.  Against this position's entropy, a
  line through it, and the mean.
* accepted: where the text proposes a token for the place after next (prompt lookup), it is the greedy one.  Against
  exp(-entropy), the acceptance of proposals with the same length of match, and the mean.

Everything is measured on test prompts; training, and the choice of activation and decay, see
neither them nor the calibration prompts, which set the thresholds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import head
from ..integrations.lookup import Drafter
from ._answers import Answers, complete, sentences

Tensor = torch.Tensor

RISKS, CONFIDENCE = (0.05, 0.1), 0.95
TASKS = ("complete", "next_entropy", "accepted")
CHOICES = [{"activation": activation, "decay": decay} for activation in ("none", "relu") for decay in (0.01, 0.05, 0.2)]
UNKNOWN = -1


@dataclasses.dataclass(frozen=True)
class Task:
    """rows: int64 [n], the positions that have a target.  targets: bool or f32 [n].  baselines: predictions f32 [n]."""

    name: str
    rows: Tensor
    targets: Tensor
    baselines: dict[str, Tensor]

    @property
    def link(self) -> str:
        return "sigmoid" if self.targets.dtype == torch.bool else "identity"


def tasks(answers: Answers, tokenizer: Any, train: Tensor) -> list[Task]:
    """The three tasks. train: the positions of the training prompts, which the baselines learn from as well."""
    sure, everywhere = (-answers.entropy).exp(), torch.arange(len(answers.prompt))
    done, repeated = _completeness(answers, tokenizer)
    p_eos = answers.eos_logprob.exp()
    stop = {"P(EOS)": p_eos, "exp(-entropy)": sure, "repeated sentence": repeated.float()}
    with_next = (answers.prompt[:-1] == answers.prompt[1:]).nonzero()[:, 0]
    matched, right = _lookups(answers)
    proposed = (right != UNKNOWN).nonzero()[:, 0]
    found = [
        Task("complete", everywhere, done, stop),
        Task("next_entropy", with_next, answers.entropy[with_next + 1], {"entropy here": answers.entropy[with_next]}),
        Task("accepted", proposed, right[proposed] == 1, {"exp(-entropy)": sure[proposed]}),
    ]
    learnt = [torch.isin(task.rows, train) for task in found]
    found[1].baselines["line through entropy here"] = _line(answers.entropy[with_next], found[1].targets, learnt[1])
    found[2].baselines["match length"] = _class_means(found[2].targets, matched[proposed], learnt[2])
    for task, use in zip(found, learnt):
        task.baselines["mean"] = _class_means(task.targets, torch.zeros_like(task.rows), use)
    return found


def _line(x: Tensor, y: Tensor, train: Tensor) -> Tensor:
    """f64 [n]: y from x by least squares over the training positions."""
    a, b = x.double(), y.double()
    mean, level = a[train].mean(), b[train].mean()
    slope = ((a[train] - mean) * (b[train] - level)).sum() / (a[train] - mean).square().sum().clamp(min=1e-12)
    return level + slope * (a - mean)


def _class_means(targets: Tensor, label: Tensor, train: Tensor) -> Tensor:
    """f64 [n]: the mean target of the training positions with the same label (int64 [n], small)."""
    sums, counts = torch.zeros(2, int(label.max()) + 1 if len(label) else 1, dtype=torch.float64)
    sums.index_add_(0, label[train], targets[train].double())
    counts.index_add_(0, label[train], torch.ones(int(train.sum()), dtype=torch.float64))
    return (sums / counts.clamp(min=1))[label]


def _completeness(answers: Answers, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """bool [N] twice: complete here; the last sentence ends here and was said before."""
    done: list[bool] = []
    repeated: list[bool] = []
    for prompt in answers.prompt.unique().tolist():
        tokens = answers.tokens(prompt)
        prefixes = [tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))]
        done += complete(prefixes, bool(answers.finished[prompt]))
        for prefix in prefixes:
            *earlier, last = sentences(prefix) or [""]
            repeated.append(last in earlier)
    return torch.tensor(done), torch.tensor(repeated)


def _lookups(answers: Answers) -> tuple[Tensor, Tensor]:
    """int64 [N] twice: length of the match that proposes a token two places on; is it right (`UNKNOWN`: no proposal)."""
    matched, right = (torch.full((len(answers.prompt),), UNKNOWN) for _ in range(2))
    for prompt in answers.prompt.unique().tolist():
        at = int((answers.prompt == prompt).nonzero()[0, 0])
        tokens, drafter = answers.tokens(prompt), Drafter(most=1)
        drafter.extend([*answers.asked[prompt], *tokens[:1]])
        for i in range(len(tokens) - 2):
            drafter.extend(tokens[i + 1 : i + 2])
            proposed = drafter.propose(0.0, 1)
            if proposed:
                matched[at + i] = drafter.matched
                right[at + i] = proposed[0] == tokens[i + 2]
    return matched, right


def measure(
    answers: Answers, tokenizer: Any, seed: int, advance: Callable[[int], None]
) -> tuple[dict[str, head.Probe], dict]:
    """The trained probes and everything that is said about them. advance(n) is called as probes are trained."""
    parts = head.split_by_prompt(answers.prompt, seed=seed)
    probes, rows, verdicts, stopping = {}, [], {}, []
    for task in tasks(answers, tokenizer, parts.train):
        hidden, prompts = answers.hidden[task.rows], answers.prompt[task.rows]
        use, test = (torch.isin(task.rows, part) for part in (parts.train, parts.test))
        chosen = _choose(hidden[use], task, task.targets[use], prompts[use], seed)
        probe = head.train_probe(hidden[use], task.targets[use], link=task.link, seed=seed, **chosen)
        predictions = {"probe": head.probe_scores(probe, hidden), **task.baselines}
        lines = head.evaluate_probe(predictions, task.targets, test.nonzero()[:, 0])
        rows += [{"task": task.name, **line} for line in lines]
        verdicts[task.name] = {**_verdict(task, predictions, lines, test, prompts), **chosen}
        probes[task.name] = probe
        if task.name == "complete":
            stopping = [
                _stopping(name, risk, score, task.targets, prompts, parts)
                for risk in RISKS for name, score in predictions.items()
            ]  # fmt: skip
        advance(1)
    counts = {name: len(answers.prompt[part].unique()) for name, part in parts._asdict().items()}
    return probes, _without_nan({
        "prompts": counts, "positions": len(answers.prompt), "rows": rows, "against_best_baseline": verdicts,
        "stopping": stopping, "saves_more_than_p_eos": _saves_more(stopping),
    })  # fmt: skip


def _saves_more(stopping: list[dict[str, Any]]) -> bool:
    """Whether the probe saves more tokens than P(EOS) under every one of the guarantees: else there is no use for it."""
    saved = {(row["name"], row["risk"]): row.get("saved", 0) for row in stopping}
    return all(saved["probe", risk] > saved["P(EOS)", risk] for risk in RISKS)


def _choose(hidden: Tensor, task: Task, targets: Tensor, prompts: Tensor, seed: int) -> dict[str, Any]:
    """Activation and decay that do best on a part of the training prompts, trained on the others."""
    parts = head.split_by_prompt(prompts, seed=seed)
    learn, held = torch.cat((parts.train, parts.calibration)), parts.test

    def worth(choice: dict[str, Any]) -> float:
        probe = head.train_probe(hidden[learn], targets[learn], link=task.link, seed=seed, **choice)
        predicted = head.probe_scores(probe, hidden[held]).double()
        return -(predicted - targets[held].double()).square().mean().item()

    return max(CHOICES, key=worth)


def _without_nan(x: Any) -> Any:
    """What has no value is null in JSON."""
    if isinstance(x, dict):
        return {key: _without_nan(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_without_nan(value) for value in x]
    return None if isinstance(x, float) and math.isnan(x) else x


def _verdict(
    task: Task, predictions: dict[str, Tensor], lines: list[dict], test: Tensor, prompts: Tensor
) -> dict[str, Any]:
    """The probe against the best of its baselines on the test prompts: AUROC, or R^2."""
    key, metric = ("auroc", head.auroc) if task.link == "sigmoid" else ("r2", _r2)
    best = max(lines[1:], key=lambda line: -1.0 if math.isnan(line[key]) else line[key])
    mine, other = (predictions[name][test] for name in ("probe", best["name"]))
    low, high = head.bootstrap_difference(metric, mine, other, task.targets[test], prompts[test])
    return {"metric": key, "baseline": best["name"], "difference": lines[0][key] - best[key], "low": low, "high": high,
            "beats": low > 0}  # fmt: skip


def _r2(predicted: Tensor, truth: Tensor) -> float:
    return head.number_scores(predicted.double(), truth)["r2"]


def _stopping(
    name: str, risk: float, score: Tensor, done: Tensor, prompts: Tensor, parts: head.Split
) -> dict[str, Any]:
    """The certified threshold of a score, from the calibration prompts, and what it does on the test prompts."""
    calibration, test = ((score[part], done[part], prompts[part]) for part in (parts.calibration, parts.test))
    found = head.certify(*calibration, risk=risk, confidence=CONFIDENCE)
    row = {"name": name, "risk": risk, "confidence": CONFIDENCE, "threshold": found.threshold, "p_value": found.p_value}
    if found.threshold is None:
        return row
    stops = head.stops_at(*test, found.threshold)
    return {**row, "answers": stops.prompts, "stopped": stops.stopped, "premature": stops.premature,
            "saved": stops.saved, "tokens": stops.tokens}  # fmt: skip
