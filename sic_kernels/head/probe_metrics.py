"""What a prediction is worth beside its baselines: ranking, calibration, error, and whether a difference is more than chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..runtime.errors import ArgumentError

Tensor = torch.Tensor

BINS = 10  # of the calibration error
RESAMPLES = 500


def evaluate_probe(
    predictions: Mapping[str, Tensor], targets: Tensor, rows: Tensor | None = None
) -> list[dict[str, Any]]:
    """A line for each prediction f32 [N] of the same targets [N], the probe's beside those of its baselines.

    rows: int [M], the positions to evaluate on (None: all), those of test prompts.
    Targets that are bool: AUROC; Brier score and expected calibration error (10 equal bins) of the prediction as a probability;
    precision and recall at 0.5.  Numbers: mean absolute error, root mean squared error, R^2 (0: no better than their mean).
    """
    if rows is None:
        rows = torch.arange(len(targets))
    truth = targets[rows]
    measure = binary_scores if targets.dtype == torch.bool else number_scores
    lines = []
    for name, predicted in predictions.items():
        if predicted.shape != targets.shape:
            raise ArgumentError.of(
                "evaluate_probe", f"predictions[{name!r}]", list(predicted.shape), list(targets.shape)
            )
        lines.append({"name": name, **measure(predicted[rows].double(), truth)})
    return lines


def binary_scores(p: Tensor, truth: Tensor) -> dict[str, float]:
    """How well p in 0 to 1 [N] tells where `truth` bool [N] holds; NaN where there is nothing to divide by."""
    called = p >= 0.5
    right = int((called & truth).sum())
    return {
        "positions": len(p), "share": truth.double().mean().item(), "auroc": auroc(p, truth),
        "brier": (p - truth.double()).square().mean().item(), "ece": calibration_error(p, truth),
        "precision": right / int(called.sum()) if called.any() else float("nan"),
        "recall": right / int(truth.sum()) if truth.any() else float("nan"),
    }  # fmt: skip


def auroc(p: Tensor, truth: Tensor) -> float:
    """The chance that a position where `truth` holds has a higher p than one where it does not; ties count half."""
    positive = int(truth.sum())
    negative = len(truth) - positive
    if not positive or not negative:
        return float("nan")
    _, place, count = p.unique(return_inverse=True, return_counts=True)
    rank = count.cumsum(0) - (count - 1) / 2  # the mean rank of equals, from 1
    wins = rank[place][truth].sum().item() - positive * (positive + 1) / 2
    return wins / (positive * negative)


def calibration_error(p: Tensor, truth: Tensor) -> float:
    """Expected calibration error: |mean p - share that is true| over bins of equal width, weighted by their sizes."""
    place = (p * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, p - truth.double())
    return (gap.abs().sum() / len(p)).item()


def number_scores(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    truth = truth.double()
    error = predicted - truth
    spread = (truth - truth.mean()).square().mean()
    return {
        "positions": len(truth), "mean": truth.mean().item(), "mae": error.abs().mean().item(),
        "rmse": error.square().mean().sqrt().item(), "r2": (1 - error.square().mean() / spread).item(),
    }  # fmt: skip


# --- differences ------------------------------------------------------------------------------------------------------


def bootstrap_difference(
    metric: Callable[[Tensor, Tensor], float], a: Tensor, b: Tensor, truth: Tensor, prompts: Tensor, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of metric(a, truth) - metric(b, truth), all [N], over samples of whole prompts (paired bootstrap)."""
    gen = torch.Generator().manual_seed(seed)
    groups = [(prompts == name).nonzero()[:, 0] for name in prompts.unique()]
    found = []
    for _ in range(RESAMPLES):
        chosen = torch.randint(len(groups), (len(groups),), generator=gen).tolist()
        rows = torch.cat([groups[i] for i in chosen])
        found.append(metric(a[rows], truth[rows]) - metric(b[rows], truth[rows]))
    ordered = sorted(x for x in found if x == x)
    if not ordered:
        return float("nan"), float("nan")
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]
