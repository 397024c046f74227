"""What the head benchmarks run: statistics of logits, and of an LM head, at the vocabularies of two models; peers in torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..runtime.bench_report import Bench, Family, Target
from ..runtime.clocks import Function
from ..runtime.roofline import Work
from ..testing import assert_close, generator, randn
from . import work
from .cases import BENCH_SHAPES, MODELS, HeadShape
from .stats import lm_head_stats, logits_stats
from .types import TokenStats

Tensor = torch.Tensor

K = 8
MAIN = HeadShape(8, *MODELS["SmolLM2-135M"])
QUICK_SHAPES = (MAIN, HeadShape(8, *MODELS["Llama-3-8B"]))
SETS = 3  # no set is used again before the next turn
SEVERAL = 256 << 20  # bytes up to which every set has weights of its own; larger ones leave nothing in a cache anyway
PEERS = {
    "torch": "log_softmax, entropy, max, topk, argmax (of an LM head: linear first)",
    "linear + stats": "torch's linear, then logits_stats",
}


class Inputs:
    """Sets of logits f32 [B,V], hidden states [B,D] and weights [V,D] with the spread of a language model's."""

    def __init__(self, shape: HeadShape, sets: int | None = None, device: str = "cpu") -> None:
        self.shape, self.device, gen = shape, torch.device(device), generator(0)
        self.sets = SETS if sets is None else sets
        self.hidden = [randn(gen, shape.B, shape.D).to(shape.dtype).to(self.device) for _ in range(self.sets)]
        own = self.sets if shape.V * shape.D * shape.dtype.itemsize <= SEVERAL else 1
        weights = [self._weight(gen) for _ in range(own)]
        self.weights = [weights[i % own] for i in range(self.sets)]
        self.logits = [(3 * randn(gen, shape.B, shape.V)).to(self.device) for _ in range(self.sets)]
        self.out = logits_stats(self.logits[0], k=K)[:9]

    def _weight(self, gen: torch.Generator) -> Tensor:
        """[V,D], made in parts: logits have a standard deviation of 3."""
        s = self.shape
        weight = torch.empty(s.V, s.D, dtype=s.dtype)
        for rows in weight.split(1 << 13):
            rows.copy_(randn(gen, *rows.shape) * (3 / s.D**0.5))
        return weight.to(self.device)


def torch_statistics(x: Tensor) -> tuple[Tensor, ...]:
    """The same with torch: lse, entropy, argmax, the greatest K and their log-probabilities."""
    log_p = torch.log_softmax(x, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    top = log_p.topk(K, -1)
    return x.max(-1).values, entropy, x.argmax(-1), top.indices, top.values


def _same(got: TokenStats, x: Tensor, atol: float, what: str) -> None:
    """Against torch in float64 on the whole logits."""
    truth = x.double()
    log_p = truth.log_softmax(-1)
    assert_close(got.lse.double(), truth.logsumexp(-1), atol=atol, what=f"{what}: lse")
    assert_close(got.entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=atol, what=f"{what}: entropy")
    listed = log_p.gather(1, got.topk_ids)
    assert_close(got.topk_logprobs.double(), listed, atol=atol, what=f"{what}: topk_logprobs")
    assert_close(listed, log_p.topk(K, -1).values, atol=atol, what=f"{what}: topk_ids")


def _logits(inputs: Inputs) -> Bench:
    s, out = inputs.shape, inputs.out

    def verify() -> None:
        _same(logits_stats(inputs.logits[0], k=K), inputs.logits[0], 1e-5, "logits_stats")

    peers: dict[str, Function] = {"torch": lambda i: torch_statistics(inputs.logits[i])}
    return Bench(
        "logits_stats", s, lambda i: logits_stats(inputs.logits[i], k=K, out=out), out, peers, verify,
        4 * s.B * s.V, "ns per logit", s.B * s.V, warm=True,
    )  # fmt: skip


def _lm_head(inputs: Inputs) -> Bench:
    s, out = inputs.shape, inputs.out

    def linear(i: int) -> Tensor:
        return torch.nn.functional.linear(inputs.hidden[i], inputs.weights[i])

    def verify() -> None:
        got = lm_head_stats(inputs.hidden[0][:2], inputs.weights[0], k=K)
        parts = [inputs.hidden[0][:2].double() @ rows.double().T for rows in inputs.weights[0].split(1 << 13)]
        _same(got, torch.cat(parts, 1), 1e-3, "lm_head_stats")

    peers: dict[str, Function] = {
        "torch": lambda i: torch_statistics(linear(i).float()),
        "linear + stats": lambda i: logits_stats(linear(i), k=K, out=out),
    }
    return Bench(
        "lm_head_stats", s, lambda i: lm_head_stats(inputs.hidden[i], inputs.weights[i], k=K, out=out), out, peers,
        verify, (s.V + s.B) * s.D * s.dtype.itemsize, "ns per logit", s.B * s.V, warm=True,
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[Inputs], Bench]] = {"logits_stats": _logits, "lm_head_stats": _lm_head}
NAMES = tuple(_BUILDERS)


def targets(name: str, shape: HeadShape) -> tuple[Target, ...]:
    """What the CPU must reach."""
    if name == "logits_stats":
        return (Target("speedup", 10.0, "torch"), *([Target("read", 0.7)] if shape.B in (8, 32) else []))
    at_one = (Target("speedup", 1.0, "torch"), Target("read", 0.75))
    at_eight = (Target("speedup", 1.3, "torch"),)
    return (*{1: at_one, 8: at_eight}.get(shape.B, ()), Target("speedup", 1.0, "linear + stats"))


def work_of(name: str, s: HeadShape) -> Work:
    """What a GPU has to do."""
    return work.work({"logits_stats": work.logits_stats, "lm_head_stats": work.lm_head_stats}[name](s))


def build(name: str, inputs: Inputs) -> Bench:
    """The benchmark of that name (`NAMES`) on some inputs, with its targets on the CPU."""
    bench = _BUILDERS[name](inputs)
    aimed = inputs.device.type == "cpu" and inputs.shape in BENCH_SHAPES
    return dataclasses.replace(bench, targets=targets(name, inputs.shape) if aimed else ())


FAMILY = Family(
    "head", NAMES, MAIN, BENCH_SHAPES, QUICK_SHAPES, lambda shape, device: Inputs(shape, device=device), build, work_of,
    peers=PEERS,
)  # fmt: skip
