"""Finding out whether a segment that is cut off and run again gives the bits of one that was not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .errors import PlanError
from .segments import Rows, Segment, Step

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

# What a buffer is filled with so that a result which depends on it shows. BITS: NaN, -1, true. SMALL: numbers near 0, odd
# integers, false. PLAIN: 200, or 100 in integers, true: what a maximum or a comparison with a NaN would hide.
BITS, SMALL, PLAIN = POISONS = range(3)


def hazards(
    segments: Sequence[Segment],
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    begin: int,
    end: int,
    seed: int,
    passed: Callable[[], None],
) -> list[PlanError]:
    """The hazards of each segment over tokens begin .. end, in their order; on copies, the tensors are not touched.

    passed: called whenever a segment has come to its end.
    """
    copies = {name: x.clone() for name, x in tensors.items()}
    for name, value in inputs.items():
        copies[name].copy_(value)
    found: list[PlanError] = []
    for layer, segment in enumerate(segments):
        step = Step(copies, 0, seed)
        step.layer, step.position, step.count = layer, begin, end - begin
        found += Trial(segment, copies, step, passed).hazards()
    return found


class Trial:
    """One segment on poisoned buffers; afterwards its results are in place and the rest is as it was."""

    def __init__(self, segment: Segment, tensors: Mapping[str, Tensor], step: Step, passed: Callable[[], None]) -> None:
        self.segment, self.tensors, self.step, self.passed = segment, tensors, step, passed
        self.base = {name: x.clone() for name, x in tensors.items()}
        self.rows = {r.name: r for r in segment.rows}
        self.beside: dict[tuple[str, str], None] = {}  # what runs changed besides their results, in the order found

    def hazards(self) -> list[PlanError]:
        return [PlanError(self.segment.name, hazard, detail) for hazard, detail in dict.fromkeys(self._found())]

    def _found(self) -> Iterator[tuple[str, str]]:
        try:
            plain = self._run(None, None)
        except Exception as error:
            self._restore()
            yield "raises", f"{error!r}"
            return
        try:
            yield from self._poisoned()
        except Exception as error:  # on what it reads without saying so
            yield "undeclared_read", f"fails where what it does not read by its declaration is poisoned: {error!r}"
        yield from self.beside
        self._restore(keep=self.segment.writes)
        for name, value in plain.items():
            self._target(name).copy_(value)

    def _poisoned(self) -> Iterator[tuple[str, str]]:
        states = _global_random()
        first = self._run(BITS, BITS)
        if _global_random() != states:
            yield "global_rng", "draws from a global generator: use Step.uniform"
        changed = _differences(first, self._run(BITS, BITS))
        if changed:
            yield "nondeterministic", f"two runs on the same buffers differ in {changed[0]!r}"
            return
        outputs: set[str] = set()
        for poison in (SMALL, PLAIN):
            for name in _differences(first, self._run(poison, BITS)):
                outputs.add(name)
                if is_filled(first[name], BITS) and is_filled(self._target(name), poison):
                    yield "not_written", f"writes nothing to {name!r}"
                else:
                    detail = (
                        f"{name!r} depends on what was in it: something is added to it, or part of it is not written"
                    )
                    yield "reads_output", detail
        for poison in (SMALL, PLAIN):
            for name in set(_differences(first, self._run(BITS, poison))) - outputs:
                yield (
                    "undeclared_read",
                    f"{name!r} depends on a buffer, or on rows, that it does not read by its declaration",
                )
        self._run(BITS, BITS)
        self._call()  # on its own results, as after a resume
        for name in _differences(first, self._results()):
            yield "not_idempotent", f"a second run over its own results changes {name!r}"

    def _run(self, outputs: int | None, others: int | None) -> Tensors:
        """The results after a run on buffers whose results and whose rest are poisoned so (None: as they were)."""
        self._restore()
        for name, x in self.tensors.items():
            if name in self.rows:
                axis = self.rows[name].axis
                fill(_rows(x, axis, self.step.position, self.step.end), outputs)
                fill(_rows(x, axis, self.step.end, x.shape[axis]), others)
            elif name not in self.segment.reads:
                fill(x, outputs if name in self.segment.writes else others)
        self._call()
        if others is not None:
            self.beside.update(dict.fromkeys(self._side_effects(others)))
        return self._results()

    def _call(self) -> None:
        self.step.epoch += 1  # results must not depend on the number of the run
        self.segment.fn(self.step)
        self.passed()

    def _side_effects(self, poison: int) -> Iterator[tuple[str, str]]:
        """What it changed besides its results: right after a run in which everything else was poisoned."""
        position, end = self.step.position, self.step.end
        for name, x in self.tensors.items():
            if name in self.segment.writes:
                continue
            if name in self.segment.reads:
                if not same_bits(x, self.base[name]):
                    yield "changes_input", f"writes {name!r}, which it reads"
            elif name in self.rows:
                axis = self.rows[name].axis
                if not same_bits(_rows(x, axis, 0, position), _rows(self.base[name], axis, 0, position)):
                    yield "outside_position", f"changes rows of {name!r} before token {position}"
                elif not is_filled(_rows(x, axis, end, x.shape[axis]), poison):
                    yield "outside_position", f"writes rows of {name!r} from token {end} on: appended by a counter?"
            elif not is_filled(x, poison):
                yield "undeclared_write", f"writes {name!r}, which it does not name"

    def _results(self) -> Tensors:
        return {name: self._target(name).clone() for name in (*self.segment.writes, *self.rows)}

    def _target(self, name: str) -> Tensor:
        row: Rows | None = self.rows.get(name)
        x = self.tensors[name]
        return x if row is None else _rows(x, row.axis, self.step.position, self.step.end)

    def _restore(self, keep: Sequence[str] = ()) -> None:
        for name, x in self.base.items():
            if name not in keep:
                self.tensors[name].copy_(x)


def _rows(x: Tensor, axis: int, begin: int, end: int) -> Tensor:
    return x.narrow(axis, begin, max(0, end - begin))


def fill(x: Tensor, poison: int | None) -> None:
    """Every element, by one of `POISONS`; None: nothing."""
    if poison is None:
        return
    if x.dtype == torch.bool:
        x.fill_(poison != SMALL)
    elif poison == PLAIN:
        x.fill_(200 if x.is_floating_point() else 100)
    else:
        pattern = torch.full((x.element_size(),), 0xFF if poison == BITS else 1, dtype=torch.uint8, device=x.device)
        x.copy_(pattern.view(x.dtype)[0].expand(x.shape))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def is_filled(x: Tensor, poison: int) -> bool:
    """Whether every element is what `fill` would make of it."""
    want = torch.empty_like(x, memory_format=torch.contiguous_format)
    fill(want, poison)
    return same_bits(x, want)


def _differences(a: Tensors, b: Tensors) -> list[str]:
    return [name for name in a if not same_bits(a[name], b[name])]


def _global_random() -> tuple[Any, ...]:
    """The state of the generators that a segment must not touch."""
    cuda: tuple[bytes, ...] = ()
    if torch.cuda.is_initialized():
        cuda = tuple(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
    state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state[1].tobytes(), state[2], cuda
