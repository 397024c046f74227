"""Method of `train-probe`: what the probes are to predict, what they are held against, and the tables.

* complete: stopping here changes nothing (`_answers.complete`).  Against P(EOS), the confidence exp(-entropy), the share in the
  training prompts, and a rule that learns nothing: the sentence that ends here was said before.
* next_entropy: of the distribution one position later, in nats.  Against this position's entropy and the mean.
* accepted: where the text proposes a token for the place after next (prompt lookup), it is the greedy one.  Against
  exp(-entropy), the acceptance of proposals with the same length of match, and the mean.

Everything is measured on test prompts; training sees neither them nor the calibration prompts, which set the thresholds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import head
from ..integrations.lookup import Drafter
from ._answers import Answers, complete, sentences

Tensor = torch.Tensor

RISK, CONFIDENCE = 0.05, 0.95
TASKS = ("complete", "next_entropy", "accepted")
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
    everywhere = torch.arange(len(answers.prompt))
    sure, mean = (-answers.entropy).exp(), torch.zeros(len(everywhere))
    done, repeated = _completeness(answers, tokenizer)
    stop = Task("complete", everywhere, done, {
        "P(EOS)": answers.eos_logprob.exp(), "exp(-entropy)": sure, "repeated sentence": repeated.float(), "mean": mean})  # fmt: skip
    has_next = answers.prompt[:-1] == answers.prompt[1:]
    rows = has_next.nonzero()[:, 0]
    ahead = Task("next_entropy", rows, answers.entropy[rows + 1], {
        "entropy here": answers.entropy[rows], "mean": mean[rows]})  # fmt: skip
    matched, right = _lookups(answers)
    rows = (right != UNKNOWN).nonzero()[:, 0]
    accepted = Task("accepted", rows, right[rows] == 1, {
        "exp(-entropy)": sure[rows], "match length": matched[rows].float(), "mean": mean[rows]})  # fmt: skip
    return [_with_means(task, torch.isin(task.rows, train)) for task in (stop, ahead, accepted)]


def _with_means(task: Task, train: Tensor) -> Task:
    """Baselines that are means over training prompts get their values."""
    y = task.targets.double()
    baselines = dict(task.baselines, mean=torch.full_like(y, float(y[train].mean())))
    if "match length" in baselines:
        length = baselines["match length"].long()
        sums, counts = torch.zeros(2, int(length.max()) + 1, dtype=torch.float64)
        sums.index_add_(0, length[train], y[train])
        counts.index_add_(0, length[train], torch.ones_like(y[train]))
        baselines["match length"] = (sums / counts.clamp(min=1))[length]
    return dataclasses.replace(task, baselines=baselines)


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
    """int64 [N] twice: length of the match that proposes a token two places on, and whether it is right (`UNKNOWN`: no proposal)."""
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


def measure(answers: Answers, tokenizer: Any, seed: int, train: Callable[..., head.Probe]) -> tuple[dict[str, head.Probe], dict]:
    """The trained probes and everything that is said about them. train: `train_probe`, with its progress reported."""
    parts = head.split_by_prompt(answers.prompt, seed=seed)
    probes, rows, verdicts = {}, [], {}
    for task in tasks(answers, tokenizer, parts.train):
        use = torch.isin(task.rows, parts.train)
        probe = train(answers.hidden[task.rows[use]], task.targets[use], link=task.link, seed=seed)
        predictions = {"probe": head.probe_scores(probe, answers.hidden[task.rows]), **task.baselines}
        test = torch.isin(task.rows, parts.test)
        lines = head.evaluate_probe(predictions, task.targets, test.nonzero()[:, 0])
        rows += [{"task": task.name, **line} for line in lines]
        verdicts[task.name] = _verdict(task, predictions, lines, test, answers.prompt[task.rows])
        probes[task.name] = probe
        if task.name == "complete":
            stopping = [_stopping(name, predictions[name], task.targets, answers.prompt, parts) for name in predictions]
    counts = {name: len(answers.prompt[part].unique()) for name, part in parts._asdict().items()}
    return probes, {"prompts": counts, "positions": len(answers.prompt), "rows": rows, "against_best_baseline": verdicts,
                    "stopping": stopping}  # fmt: skip


def _verdict(
    task: Task, predictions: dict[str, Tensor], lines: list[dict], test: Tensor, prompts: Tensor
) -> dict[str, Any]:
    """The probe against the best of its baselines on the test prompts: AUROC, or R^2."""
    key, metric = ("auroc", head.auroc) if task.link == "sigmoid" else ("r2", _r2)
    best = max(lines[1:], key=lambda line: line[key])
    low, high = head.bootstrap_difference(
        metric, *(predictions[name][test] for name in ("probe", best["name"])), task.targets[test], prompts[test]
    )
    return {"metric": key, "baseline": best["name"], "difference": lines[0][key] - best[key], "low": low, "high": high,
            "beats": low > 0}  # fmt: skip


def _r2(predicted: Tensor, truth: Tensor) -> float:
    return head.number_scores(predicted.double(), truth)["r2"]


def _stopping(name: str, score: Tensor, done: Tensor, prompts: Tensor, parts: head.Split) -> dict[str, Any]:
    """The certified threshold of a score, from the calibration prompts, and what it does on the test prompts."""
    def pick(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return score[part], done[part], prompts[part]

    found = head.certify(*pick(parts.calibration), risk=RISK, confidence=CONFIDENCE)
    row = {"name": name, "threshold": found.threshold, "p_value": found.p_value, "risk": RISK, "confidence": CONFIDENCE}
    if found.threshold is None:
        return row
    stops = head.stops_at(*pick(parts.test), found.threshold)
    return {**row, "answers": stops.prompts, "stopped": stops.stopped, "premature": stops.premature,
            "saved": stops.saved, "tokens": stops.tokens}  # fmt: skip
