"""What the head ops are tested and measured on: one description of a case feeds tests, benches and docs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from .. import testing
from ..testing import EXACT, SHORT_NAME, Build, Tolerance, assert_close, assert_same_bits, compare, generator, randn
from . import reference
from .termination import TerminationRule, TerminationState
from .types import NO_PROBE, StatsPart, TokenStats

Tensor = torch.Tensor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# atol of log-probabilities, rtol of them, atol of lse; entropies get ENTROPY.
EXACT_LOGITS = Tolerance(1e-5, 1e-6, 1e-5)
LM_HEAD = Tolerance(1e-3, 2e-4, 1e-3)
ENTROPY = {EXACT_LOGITS: (1e-5, 1e-6), LM_HEAD: (5e-3, 5e-4)}


class Case(testing.Case):
    """One call of one head op; termination_step's results are followed by the state that it writes to."""

    def written(self, inputs: tuple) -> tuple[Tensor, ...]:
        return inputs[STATE] if self.op == "termination_step" else ()

    def compare(self, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        """Integers equal; numbers within the tolerance, NaN where the definition has NaN."""
        if self.op in ("probe", "termination_step"):
            return compare(got, want, self.tolerance, str(self))
        names = (StatsPart if self.op.endswith("_part") else TokenStats)._fields
        for name, g, w in zip(names, got, want):
            what = f"{self}: {name}"
            if w.dtype.is_floating_point:
                atol, rtol = self._limits(name)
                assert_close(*same_nan(g, w, what), atol=atol, rtol=rtol, what=what)
            else:
                assert_same_bits(g, w, what)
        return None

    def _limits(self, name: str) -> tuple[float, float]:
        """atol, rtol of a result."""
        t = self.tolerance
        if name in ("s", "t", "u"):
            return t.atol, max(t.rtol, 1e-5)
        if name in ("entropy", "varentropy"):
            atol, rtol = ENTROPY[t]
            # The variance is a difference of two terms, each of the size of the entropy squared.
            return (atol if name == "entropy" else 10 * atol), rtol
        return (t.lse if name == "lse" else t.atol), max(t.rtol, 2e-6)


def same_nan(got: Tensor, want: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Both without their NaN, which must be at the same places."""
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN at other places"
    return got.masked_fill(got.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0)


def _case(op: str, build: Build, tolerance: Tolerance, bytes_moved: int = 0, **shape: Any) -> Case:
    words = [f"{k}{SHORT_NAME.get(v, v)}" for k, v in shape.items() if v is not None]
    return Case(op, "-".join(words), MappingProxyType(shape), build, tolerance, bytes_moved, family="head")


# --- inputs, in the order of the native ops -------------------------------------------------------------------------


def options(**given: Any) -> tuple:
    """What follows the logits: names and defaults of the public functions."""
    return (
        given.get("temperature"), given.get("bias"), given.get("softcap"), given.get("valid_vocab"), given.get("mask_bits"),
        given.get("k", 0), given.get("watch_ids"), given.get("target_ids"), given.get("vocab_start", 0),
    )  # fmt: skip


def logits_inputs(logits: Tensor, **given: Any) -> tuple:
    """Inputs of logits_stats and logits_part."""
    return logits, *options(**given)


def lm_head_inputs(hidden: Tensor, weight: Tensor, of_probe: tuple = NO_PROBE, **given: Any) -> tuple:
    """Inputs of lm_head_stats; of lm_head_part without the last."""
    return hidden, weight, *options(**given), of_probe


def random_mask(gen: torch.Generator, B: int, V: int, share: float = 0.5) -> Tensor:
    """i32 [B,ceil(V/32)]; the bits behind V are set: nobody may look at them."""
    live = torch.rand(B, -(-V // 32) * 32, generator=gen) < share
    live[:, V:] = True
    words = (live.view(B, -1, 32).long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


STATE = slice(5, 10)  # of termination_step's inputs: what it updates


def termination_inputs(
    rule: TerminationRule, state: TerminationState, tokens, score=None, stats=None, matched=None
) -> tuple:
    """Inputs of termination_step."""
    seen = (None, None) if stats is None else (stats.entropy, stats.status)
    return (tokens, score, *seen, matched, *vars(state).values(), *rule.inputs())


def all_extras(gen: torch.Generator, B: int, V: int, k: int = 5) -> dict[str, Any]:
    """Every option at once."""
    target = torch.randint(0, V, (B,), generator=gen)
    target[::3] = -1
    return {
        "temperature": (0.3 + torch.rand(B, generator=gen)) * (torch.arange(B) % 4 != 1),
        "bias": randn(gen, V), "softcap": 20.0, "valid_vocab": max(1, V - 3), "mask_bits": random_mask(gen, B, V), "k": k,
        "watch_ids": torch.randint(0, V, (3,), generator=gen, dtype=torch.int32), "target_ids": target,
    }  # fmt: skip


# --- acceptance grids -----------------------------------------------------------------------------------------------


def logits_grid() -> Iterator[Case]:
    """Grid 2 (many rows in the smaller vocabularies only: it is the same kernel), and every option on odd shapes."""
    temperatures, dtypes = (1.0, 0.5, 0.1), (F32, F16, BF16)
    for rows, temperature, dtype in itertools.product((1, 99), temperatures, dtypes):
        yield holes_case(rows, 111, temperature, dtype)
    for V, (temperature, dtype) in itertools.product((32000, 128256), zip(temperatures, dtypes)):
        yield holes_case(1, V, temperature, dtype)
    yield holes_case(99, 32000, 0.5, F32)
    yield holes_case(989, 111, 0.5, F32)
    for n, V in enumerate((1, 2, 15, 16, 17, 31, 33, 64, 257, 2048, 2049, 5003)):
        yield extras_case(1 + n % 5, V, (F32, F16, BF16)[n % 3], k=(1, 5, 64)[n % 3])


def holes_case(rows: int, V: int, temperature: float, dtype: torch.dtype) -> Case:
    """Random -inf among normal logits."""

    def build(gen: torch.Generator) -> tuple:
        x = randn(gen, rows, V) * 3
        x[torch.rand(rows, V, generator=gen) < 0.2] = -torch.inf
        x[:, V // 2] = 1.0
        return logits_inputs(x.to(dtype), temperature=torch.full((rows,), temperature), k=8)

    return _case("logits_stats", build, EXACT_LOGITS, rows * V * dtype.itemsize, B=rows, V=V, T=temperature, dt=dtype)


def extras_case(rows: int, V: int, dtype: torch.dtype, k: int) -> Case:
    def build(gen: torch.Generator) -> tuple:
        x = (randn(gen, rows, V + 5) * 4).to(dtype)[:, :V]
        return logits_inputs(x, **all_extras(gen, rows, V, k))

    return _case("logits_stats", build, EXACT_LOGITS, B=rows, V=V, k=k, dt=dtype, extras="all")


def lm_head_grid() -> Iterator[Case]:
    """Grid 1: the odd shapes whole, the large ones by some of their rows (a row does not depend on the others)."""
    yield lm_head_case(3, 3584, 4003, BF16)
    yield lm_head_case(5, 896, 3001, F16)
    yield lm_head_case(9, 576, 2049, BF16)
    for n, dtype in enumerate((F32, F16, BF16)):
        yield lm_head_case(33 + n, 512, 128, dtype, softcap=20.0)
        yield lm_head_case(17 + n, 507, 123, dtype, temperature=1.5)
        yield lm_head_case(13 + n, 70, 517, dtype, bias=True)
    for n, V in enumerate((1, 15, 17, 63, 65, 130)):
        yield lm_head_case(1 + n, 33 + n, V, (F32, F16, BF16)[n % 3], extras=True)


def lm_head_case(B: int, D: int, V: int, dtype: torch.dtype, **extra: Any) -> Case:
    def build(gen: torch.Generator) -> tuple:
        hidden, weight = randn(gen, B, D, dtype=dtype), (randn(gen, V, D) * (3 / D**0.5)).to(dtype)
        given = all_extras(gen, B, V) if extra.get("extras") else {"k": 4, **extra}
        if given.get("bias") is True:
            given["bias"] = randn(gen, V)
        of_probe: tuple = NO_PROBE
        if extra.get("extras"):
            of_probe = (randn(gen, 16, D, dtype=dtype) / D**0.5, randn(gen, 3, 16), randn(gen, 3), 1, 0)
        return lm_head_inputs(hidden, weight, of_probe, **given)

    return _case("lm_head_stats", build, LM_HEAD, (B + V) * D * dtype.itemsize, B=B, D=D, V=V, dt=dtype, **extra)


def part_grid() -> Iterator[Case]:
    """Shards: of logits, of an LM head, some without a valid id."""
    for n, (V, start, valid) in enumerate(((257, 0, 200), (300, 257, 400), (64, 557, 500), (1000, 5, None))):

        def build(gen: torch.Generator, V=V, start=start, valid=valid, n=n) -> tuple:
            x = randn(gen, 4, V) * 3
            x[n % 4] = -torch.inf
            given = {**all_extras(gen, 4, V), "vocab_start": start, "valid_vocab": valid}
            given["watch_ids"] = torch.tensor([[start, start + V - 1, 0, start + V]] * 4)
            return logits_inputs(x, **given)

        yield _case("logits_part", build, EXACT_LOGITS, V=V, start=start)
    for V, start in ((130, 40), (33, 0)):

        def build_head(gen: torch.Generator, V=V, start=start) -> tuple:
            given = {**all_extras(gen, 3, V), "vocab_start": start, "valid_vocab": start + V - 1}
            return lm_head_inputs(randn(gen, 3, 70, dtype=BF16), randn(gen, V, 70, dtype=BF16), **given)[:-1]

        yield _case("lm_head_part", build_head, LM_HEAD, V=V, start=start, D=70)


def merge_grid() -> Iterator[Case]:
    """Parts by the definition: one, several, some without a valid id."""
    for V, cuts in ((300, []), (257, [64, 64, 224]), (5003, [2048, 2080])):

        def build(gen: torch.Generator, V=V, cuts=cuts) -> tuple:
            x = randn(gen, 5, V) * 3
            x[1, cuts[0] if cuts else 7 :] = -torch.inf
            x[2] = -torch.inf
            inputs = logits_inputs(x, **all_extras(gen, 5, V))
            parts = [reference.logits_part(*part) for part in split(inputs, cuts)]
            return (*(torch.stack(results) for results in zip(*parts)), inputs[1])

        yield _case("merge_stats", build, EXACT_LOGITS, V=V, parts=len(cuts) + 1)


def probe_grid() -> Iterator[Case]:
    for B, D, R, n, dtype, activation, link in (
        (1, 576, 16, 1, BF16, 0, 0), (3, 70, 16, 3, F32, 1, 0), (9, 4096, 64, 16, F16, 1, 1), (33, 1, 1, 2, F32, 0, 1),
    ):  # fmt: skip

        def build(gen: torch.Generator, B=B, D=D, R=R, n=n, dtype=dtype, a=activation, link=link) -> tuple:
            scale = 1 / max(1, D) ** 0.5
            projection = (randn(gen, R, D) * scale).to(dtype)
            return randn(gen, B, D, dtype=dtype), projection, randn(gen, n, R), randn(gen, n), a, link

        yield _case("probe", build, Tolerance(1e-5, 1e-5, 0), B=B, D=D, R=R, n=n, dt=dtype)


def termination_grid() -> Iterator[Case]:
    """Rows in every state, some done, some about to be."""
    for B, window in ((1, 1), (3, 5), (129, 4), (300, 7)):

        def build(gen: torch.Generator, B=B, window=window) -> tuple:
            rule = random_rule(gen, window)
            return termination_inputs(rule, random_state(gen, B, rule, window), *random_step(gen, B, rule))

        yield _case("termination_step", build, EXACT, B=B, window=window)


def random_rule(gen: torch.Generator, window: int) -> TerminationRule:
    """Its plateau is at most `window` steps."""
    chance = lambda: torch.rand((), generator=gen).item()
    return TerminationRule(
        threshold=0.3 + 0.4 * chance(), slope_per_1k=0.2 * chance(), max_threshold=0.9, hysteresis=0.3 * chance(),
        patience=1 + int(3 * chance()), min_tokens=int(4 * chance()), max_tokens=None if chance() < 0.5 else 9,
        plateau_window=int((window + 1) * chance()), plateau_width=0.2 * chance(), eos_ids=range(int(4 * chance())),
    )  # fmt: skip


def random_state(gen: torch.Generator, B: int, rule: TerminationRule, window: int) -> TerminationState:
    """After up to a dozen tokens; every eighth row is done."""
    upto = lambda n: torch.randint(n, (B,), generator=gen, dtype=torch.int32)
    recent = torch.rand(B, window, generator=gen).mul(8).round().div(20)
    done = (upto(8) == 0).to(torch.uint8)
    return TerminationState(upto(5000), upto(12), upto(rule.patience + 1), recent, done)


def random_step(gen: torch.Generator, B: int, rule: TerminationRule) -> tuple:
    """tokens, score, stats, matched in the neighbourhood of every decision; of stats only what the rule reads."""
    some = lambda p: torch.rand(B, generator=gen) < p
    score = torch.rand(B, generator=gen).mul(20).round().div(20).masked_fill(some(0.05), torch.nan)
    entropy = torch.rand(B, generator=gen).mul(8).round().div(20).masked_fill(some(0.05), torch.nan)
    status = (some(0.1) * 2).to(torch.uint8)
    stats = TokenStats(None, entropy, None, None, None, None, None, None, status)
    absent = torch.rand(3, generator=gen) < 0.3
    return (
        torch.randint(0, 60, (B,), generator=gen, dtype=torch.int64 if absent[0] else torch.int32),
        None if absent[0] else score,
        None if absent[1] and not rule.plateau_window else stats,
        None if absent[2] else some(0.05),
    )


def split(inputs: tuple, at: list[int]) -> list[tuple]:
    """Inputs of logits_stats cut into those of logits_part at the given columns (multiples of 32 where there is a mask)."""
    x, temperature, bias, softcap, valid, mask, k, watch, target, start = inputs
    edges = [0, *at, x.shape[1]]
    return [
        (
            x[:, a:b], temperature, None if bias is None else bias[a:b], softcap, valid,
            None if mask is None else mask[:, a // 32 : -(-b // 32)].contiguous(), max(k, 1), watch, target, start + a,
        )
        for a, b in itertools.pairwise(edges)
    ]  # fmt: skip


_GRIDS: dict[str, Callable[[], Iterator[Case]]] = {
    "logits": logits_grid, "lm_head": lm_head_grid, "part": part_grid, "merge": merge_grid, "probe": probe_grid,
    "termination": termination_grid,
}  # fmt: skip


def grid(name: str) -> list[Case]:
    """The cases of one list of the acceptance grid, by name (`grids()`)."""
    return list(_GRIDS[name]())


def grids() -> list[str]:
    return list(_GRIDS)


# --- shapes of the published table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadShape:
    """A vocabulary, rows, and the hidden size of the model that has it."""

    B: int
    V: int
    D: int
    dtype: torch.dtype = BF16

    @property
    def length(self) -> int:
        return self.V

    @property
    def name(self) -> str:
        return f"B{self.B}-V{self.V}-D{self.D}-{SHORT_NAME[self.dtype]}"


MODELS = {"SmolLM2-135M": (49152, 576), "Llama-3-8B": (128256, 4096)}
BENCH_SHAPES = tuple(HeadShape(B, V, D) for V, D in MODELS.values() for B in (1, 8, 32))


def bench_logits(shape: HeadShape, seed: int = 0) -> Tensor:
    """f32 [B,V] with the spread of a language model's."""
    return randn(generator(seed), shape.B, shape.V) * 3
