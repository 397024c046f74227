"""Finding out whether a segment that is cut off and run again gives the bits of one that was not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .errors import PlanError
from .segments import Rows, Segment, Step

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

# Bytes that poison a buffer. 0xff makes NaNs and -1; 0x01 small, wrong numbers: a sum that swallows a NaN shows there.
POISONS = (0xFF, 0x01)


def hazards(
    segments: Sequence[Segment],
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    begin: int,
    end: int,
    seed: int,
) -> list[PlanError]:
    """The hazards of each segment over tokens begin .. end, in their order; the tensors are afterwards as they were."""
    before = {name: x.clone() for name, x in tensors.items()}
    found: list[PlanError] = []
    try:
        for name, value in inputs.items():
            tensors[name].copy_(value)
        for layer, segment in enumerate(segments):
            step = Step(tensors, 0, seed)
            step.layer, step.position, step.count = layer, begin, end - begin
            found += Trial(segment, tensors, step).hazards()
    finally:
        for name, x in before.items():
            tensors[name].copy_(x)
    return found


class Trial:
    """One segment on poisoned buffers; afterwards its results are in place and the rest is as it was."""

    def __init__(self, segment: Segment, tensors: Mapping[str, Tensor], step: Step) -> None:
        self.segment, self.tensors, self.step = segment, tensors, step
        self.base = {name: x.clone() for name, x in tensors.items()}
        self.rows = {r.name: r for r in segment.rows}

    def hazards(self) -> list[PlanError]:
        return [PlanError(self.segment.name, hazard, detail) for hazard, detail in self._found()]

    def _found(self) -> Iterator[tuple[str, str]]:
        states = _global_random()
        try:
            first = self._run(POISONS[0], poison_outputs=True)
        except Exception as error:  # whatever it is, the segment fails on what it should not have looked at, or always
            self._restore()
            yield from self._raised(error)
            return
        if _global_random() != states:
            yield "global_rng", "draws from a global generator: use Step.uniform"
        yield from self._side_effects(first, POISONS[0])
        again = self._run(POISONS[0], poison_outputs=True)
        changed = _differences(first, again)
        if changed:
            yield "nondeterministic", f"two runs on the same buffers differ in {changed[0]!r}"
        else:
            yield from self._dependence(first)
        self._run(None, poison_outputs=False)  # on its own results, as after a resume
        if not changed and (touched := _differences(first, self._results())):
            yield "not_idempotent", f"a second run over its own results changes {touched[0]!r}"
        self._restore(keep=self.segment.writes)
        for name, value in first.items():
            self._target(name).copy_(value)

    def _dependence(self, first: Tensors) -> Iterator[tuple[str, str]]:
        """Whether results follow what was in outputs, or in buffers that it does not name."""
        outputs = _differences(first, self._run(POISONS[1], poison_outputs=True, poison_others=POISONS[0]))
        for name in outputs:
            target, other = self._target(name), POISONS[1]
            if _is_poison(target, other):
                yield "not_written", f"writes nothing to {name!r}"
            else:
                yield (
                    "reads_output",
                    f"{name!r} depends on what was in it: something is added to it, or part of it is not written",
                )
        others = _differences(first, self._run(POISONS[0], poison_outputs=True, poison_others=POISONS[1]))
        for name in others:
            if name not in outputs:
                yield (
                    "undeclared_read",
                    f"{name!r} depends on a buffer, or on rows, that it does not read by its declaration",
                )

    def _raised(self, error: Exception) -> Iterator[tuple[str, str]]:
        try:
            self.segment.fn(self.step)
        except Exception as plain:
            yield "raises", f"{plain!r}"
        else:
            yield "undeclared_read", f"fails where what it does not read by its declaration is poisoned: {error!r}"

    def _side_effects(self, results: Tensors, poison: int) -> Iterator[tuple[str, str]]:
        """What it changed besides its results: right after a run in which everything else was poisoned."""
        for name, x in self.tensors.items():
            if name in self.segment.writes:
                continue
            if name in self.segment.reads:
                if not same_bits(x, self.base[name]):
                    yield "changes_input", f"writes {name!r}, which it reads"
            elif name in self.rows:
                axis = self.rows[name].axis
                if not same_bits(
                    _rows(x, axis, 0, self.step.position), _rows(self.base[name], axis, 0, self.step.position)
                ):
                    yield "outside_position", f"changes rows of {name!r} before token {self.step.position}"
                elif not _is_poison(_rows(x, axis, self.step.end, x.shape[axis]), poison):
                    yield (
                        "outside_position",
                        f"writes rows of {name!r} from token {self.step.end} on: appended by a counter?",
                    )
            elif not _is_poison(x, poison):
                yield "undeclared_write", f"writes {name!r}, which it does not name"

    def _run(self, poison: int | None, *, poison_outputs: bool, poison_others: int | None = None) -> Tensors:
        """The results after one run; None: on the buffers as they are."""
        if poison is not None:
            others = poison if poison_others is None else poison_others
            self._restore()
            for name, x in self.tensors.items():
                if name in self.rows:
                    fill_bytes(_rows(x, self.rows[name].axis, self.step.position, self.step.end), poison)
                    fill_bytes(_rows(x, self.rows[name].axis, self.step.end, x.shape[self.rows[name].axis]), others)
                elif name in self.segment.writes:
                    fill_bytes(x, poison)
                elif name not in self.segment.reads:
                    fill_bytes(x, others)
        self.segment.fn(self.step)
        return self._results()

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


def fill_bytes(x: Tensor, byte: int) -> None:
    """Every byte of the elements."""
    pattern = torch.full((x.element_size(),), byte, dtype=torch.uint8, device=x.device)
    x.copy_(pattern.view(x.dtype).expand(x.shape)) if x.dtype != torch.bool else x.fill_(bool(byte & 1))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.ndim else x.reshape(1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _is_poison(x: Tensor, byte: int) -> bool:
    if x.dtype == torch.bool:
        return bool((x == bool(byte & 1)).all())
    return bool((_bits(x) == byte).all())


def _differences(a: Tensors, b: Tensors) -> list[str]:
    return [name for name in a if not same_bits(a[name], b[name])]


def _global_random() -> tuple[Any, ...]:
    """The state of the generators that a segment must not touch."""
    cuda = (
        tuple(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
        if torch.cuda.is_initialized()
        else ()
    )
    state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state[1].tobytes(), state[2], cuda
