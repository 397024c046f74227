"""Probes are trained and evaluated offline, on hidden states that were kept, with torch.

    parts = split_by_prompt(prompts, seed=0)
    probe = train_probe(hidden[parts.train], complete[parts.train])
    rows = evaluate_probe({"probe": probe_scores(probe, hidden), "P(EOS)": p_eos}, complete, parts.test)
    certified = certify(scores[part], complete[part], prompts[part])  # part = parts.calibration; see guarantee.py

Everything takes plain tensors, so any model and any text will do: hidden [N,D], targets [N], prompts int [N] (which
prompt a position belongs to; the positions of a prompt are in order).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..runtime.arguments import code_of, integer
from ..runtime.errors import ArgumentError
from ..runtime.extras import extra
from .reference_probe import probe as probe_reference
from .types import ACTIVATIONS, LINKS, Probe

Tensor = torch.Tensor

RANK = 16
KIND, VERSION = "sic_kernels.head.probes", "1"
PARTS = ("projection", "vector", "bias")


class Split(NamedTuple):
    """int64: the positions of each part. No prompt is in two of them."""

    train: Tensor
    calibration: Tensor
    test: Tensor


def split_by_prompt(prompts: Tensor, shares: tuple[float, float] = (0.4, 0.3), seed: int = 0) -> Split:
    """Whole prompts go to train, calibration and test: positions of one answer resemble each other, and would leak.

    prompts: int [N].  shares: of the prompts, for train and calibration; the others are test. Deterministic with the seed.
    """
    if len(shares) != 2 or min(shares) <= 0 or sum(shares) >= 1:
        raise ArgumentError.of("split_by_prompt", "shares", shares, "two shares above 0, in all less than 1")
    names = prompts.unique()
    if len(names) < 3:
        raise ArgumentError.of("split_by_prompt", "prompts", f"{len(names)} prompts", "3 or more")
    names = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
    first = max(1, round(shares[0] * len(names)))
    last = min(len(names) - 1, max(first + 1, round(sum(shares) * len(names))))
    return Split(
        *(torch.isin(prompts, part).nonzero()[:, 0] for part in (names[:first], names[first:last], names[last:]))
    )


def train_probe(
    hidden: Tensor,
    targets: Tensor,
    *,
    link: str = "sigmoid",
    activation: str = "none",
    rank: int = RANK,
    decay: float = 1e-3,
    iterations: int = 60,
    seed: int = 0,
) -> Probe:
    """A `Probe` f32 (projection [rank,D], vector [1,rank], bias [1]) for targets [N] of hidden states [N,D], by L-BFGS.

    link: "sigmoid" for targets that are 0 or 1 (cross-entropy), "identity" for numbers such as an entropy (squared error).
    activation: between projection and vector.  decay: weight of the squared norm of all weights, on channels of unit variance.
    The same seed, machine and number of threads give the same probe. What it is worth says `evaluate_probe` on other prompts.
    """
    op = "train_probe"
    _check(op, hidden, targets)
    code_of(op, "activation", activation, ACTIVATIONS)
    code_of(op, "link", link, LINKS)
    integer(op, "rank", rank, 1, "1 or more rows of the projection")
    if link == "sigmoid" and not bool(((targets >= 0) & (targets <= 1)).all()):
        span = f"{targets.min().item():g} to {targets.max().item():g}"
        raise ArgumentError.of(op, "targets", span, 'targets from 0 to 1, or link="identity" for other numbers')
    x, y = hidden.double(), targets.double()
    # the constant part goes into the bias, which only a probe without an activation can do
    mean = x.mean(0) if activation == "none" else torch.zeros(x.shape[1], dtype=x.dtype)
    std = x.std(0, correction=0).clamp(min=1e-6)
    x = ((x - mean) / std).float()
    projection, vector, bias = _fit(x, y.float(), link, activation, rank, decay, iterations, seed)
    projection = projection.double() / std
    bias = bias - (projection @ mean).double() @ vector.double()
    return Probe(projection.float(), vector[None].float(), bias.float()[None], activation, link)


def _fit(
    x: Tensor, y: Tensor, link: str, activation: str, rank: int, decay: float, iterations: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """projection [rank,D], vector [rank], bias [] for channels of unit variance."""
    gen = torch.Generator().manual_seed(seed)
    projection = (torch.randn(rank, x.shape[1], generator=gen) * x.shape[1] ** -0.5).requires_grad_()
    vector = (torch.randn(rank, generator=gen) * rank**-0.5).requires_grad_()
    bias = y.mean()
    bias = (bias if link == "identity" else bias.clamp(1e-4, 1 - 1e-4).logit()).clone().requires_grad_()
    loss_of = (
        torch.nn.functional.mse_loss if link == "identity" else torch.nn.functional.binary_cross_entropy_with_logits
    )
    weights = (projection, vector, bias)
    optimiser = torch.optim.LBFGS(weights, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        inner = x @ projection.T
        score = (inner.relu() if activation == "relu" else inner) @ vector + bias
        total = loss_of(score, y) + decay * (projection.square().sum() + vector.square().sum())
        total.backward()
        return total

    optimiser.step(loss)
    return tuple(w.detach() for w in weights)  # type: ignore[return-value]


def probe_scores(probe: Probe, hidden: Tensor) -> Tensor:
    """f32 [N] of a probe with one vector, in float64 inside; a runner calls `sic.head.probe`."""
    return probe_reference(hidden, *probe.inputs())[0][:, 0]


# --- files ------------------------------------------------------------------------------------------------------------


def save_probes(path: str | Path, probes: Mapping[str, Probe], meta: Mapping[str, Any]) -> None:
    """One safetensors file of probes by name. meta: JSON-able: the model's fingerprint, data, metrics, thresholds."""
    save_file = extra("safetensors.torch", "files of probes", "blobs").save_file
    tensors = {f"{name}.{part}": getattr(p, part).contiguous() for name, p in probes.items()
               for part in PARTS}  # fmt: skip
    shape = {name: [p.activation, p.link] for name, p in probes.items()}
    save_file(tensors, str(path), metadata={"kind": KIND, "version": VERSION, "probes": json.dumps(shape),
                                            "meta": json.dumps(dict(meta))})  # fmt: skip


def load_probes(path: str | Path) -> tuple[dict[str, Probe], dict[str, Any]]:
    """What `save_probes` wrote: probes and meta; `ArgumentError` if the file is something else."""
    safetensors = extra("safetensors", "files of probes", "blobs")
    try:
        with safetensors.safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            if (about.get("kind"), about.get("version")) != (KIND, VERSION):
                raise ArgumentError.of("load_probes", "path", str(path), "a file written by save_probes")
            shape = json.loads(about["probes"])
            probes = {}
            for name, (activation, link) in shape.items():
                projection, vector, bias = (file.get_tensor(f"{name}.{part}") for part in PARTS)
                probes[name] = Probe(projection, vector, bias, activation, link)
            return probes, json.loads(about["meta"])
    except (safetensors.SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError.of("load_probes", "path", f"{path} ({error})", "a file written by save_probes") from error


def _check(op: str, hidden: Tensor, targets: Tensor) -> None:
    if not isinstance(hidden, Tensor) or hidden.ndim != 2 or not hidden.is_floating_point() or not len(hidden):
        raise ArgumentError.of(op, "hidden", _described(hidden), "a float tensor [N,D] with a row at least")
    if not isinstance(targets, Tensor) or targets.shape != hidden.shape[:1]:
        raise ArgumentError.of(op, "targets", _described(targets), f"[{len(hidden)}]")
    if not bool(hidden.isfinite().all()) or not bool(targets.double().isfinite().all()):
        raise ArgumentError.of(op, "hidden or targets", "values that are not finite", "finite values")


def _described(x: object) -> str:
    return f"{x.dtype}{list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
