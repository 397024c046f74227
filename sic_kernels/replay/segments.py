"""Segments: the parts of a step that are run, skipped and repeated as a whole, and the buffers that they name."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..runtime.arguments import described, flag, instance, integer, is_dense, text
from ..runtime.errors import ArgumentError
from .cursor import MAX_LAYERS
from .errors import StaleCursor
from .random import uniform

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Rows:
    """A buffer that is addressed by position along one axis (a KV cache): a segment reads the rows before the end of its chunk
    and writes those of its chunk."""

    name: str
    axis: int = 0

    def __post_init__(self) -> None:
        text("Rows", "name", self.name, "the name of a buffer")
        object.__setattr__(self, "axis", integer("Rows", "axis", self.axis, 0, "the number of a dimension"))


class Step:
    """What a segment is called with: `step[name]` is a buffer, `step.position` the first token, `step.count` how many.

    Everything a segment computes must follow from these: it is what makes a second run give the same bits. A captured segment is
    not called again: where it runs it reads from `positions`, `length` and `uniform` (docs/replay_cuda.md).
    """

    __slots__ = ("_tensors", "count", "epoch", "layer", "position", "seed")

    def __init__(self, tensors: Mapping[str, Tensor], epoch: int, seed: int) -> None:
        self._tensors, self.epoch, self.seed = tensors, epoch, seed
        self.layer = self.position = self.count = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def end(self) -> int:
        """The token after the chunk."""
        return self.position + self.count

    @property
    def positions(self) -> Tensor:
        """int64 [count]: of the chunk's tokens, where the buffers are; as slots of a cache, or for `index_copy_`."""
        return torch.arange(self.position, self.end, device=self._device)

    @property
    def length(self) -> Tensor:
        """int64 [1]: tokens that there are once the chunk has been appended, where the buffers are."""
        return torch.tensor([self.end], device=self._device)

    def uniform(self, out: Tensor) -> Tensor:
        """Fills `out` (float32) with random numbers from [0, 1) that follow from (seed, position, layer) alone."""
        return uniform((self.seed, self.position, self.layer), out=out)

    @property
    def _device(self) -> torch.device:
        return next((x.device for x in self._tensors.values()), torch.device("cpu"))


@dataclasses.dataclass(frozen=True)
class Segment:
    """A named callable of one `Step` that leaves its results in buffers.

    * reads: names of buffers that it reads and does not change.
    * writes: names of buffers that it overwrites wholly, without looking at what was there.
    * rows: buffers addressed by position.
    * rng: whether it draws random numbers, through `Step.uniform` only.
    """

    name: str
    fn: Callable[[Step], Any]
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    rows: Sequence[Rows] = ()
    rng: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentError.of("Segment", "name", repr(self.name), "a name")
        if not callable(self.fn):
            raise ArgumentError.of("Segment", "fn", type(self.fn).__name__, "a function of a Step")
        kinds = (("reads", str, "names of buffers"), ("writes", str, "names of buffers"), ("rows", Rows, "Rows"))
        for arg, kind, expected in kinds:
            given = getattr(self, arg)
            parts = () if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
            if isinstance(given, str) or not isinstance(given, Iterable) or not all(isinstance(x, kind) for x in parts):
                raise ArgumentError.of("Segment", arg, repr(given), f"a sequence of {expected}")
            object.__setattr__(self, arg, parts)
        object.__setattr__(self, "rng", flag("Segment", "rng", self.rng))

    @property
    def changes(self) -> tuple[str, ...]:
        """The buffers that it writes to, wholly or by rows."""
        return (*self.writes, *(r.name for r in self.rows))

    @property
    def names(self) -> tuple[str, ...]:
        """Every buffer that it names."""
        return (*self.reads, *self.changes)


class Buffer:
    """A buffer as it was when the plan was made: a block of a `MemoryPool`, or a tensor that lives as long as the process."""

    def __init__(self, name: str, source: Any) -> None:
        self.name, self.source = name, source
        self.block = hasattr(source, "generation")
        if not self.block:
            instance("ReplayPlan.capture", f"buffers[{name!r}]", source, torch.Tensor)
        self.tensor: Tensor = source.tensor if self.block else source
        x = self.tensor
        apart = is_dense(x) and all(n < 2 or stride > 0 for n, stride in zip(x.shape, x.stride()))
        if not apart or x.requires_grad:
            got = f"{described(x)}{' that requires grad' if x.requires_grad else ''}"
            raise ArgumentError.of(
                "ReplayPlan.capture", f"buffers[{name!r}]", got, "a dense tensor with memory for each element"
            )
        self.identity = self._identity()

    @property
    def survives(self) -> bool:
        """Whether it outlives the process."""
        return self.block and self.source.survives

    def _identity(self) -> tuple[Any, ...]:
        x = self.source
        what = x.identity if self.block else (x.data_ptr(), x.stride())
        return (*what, str(self.tensor.dtype), tuple(self.tensor.shape))

    def check(self) -> None:
        """`StaleCursor` if it is not what it was: freed, used again for something else, moved, of another shape."""
        if self.block:  # what is alive has not moved
            if not self.source.alive:
                raise StaleCursor(f"buffer {self.name!r}: its block was freed, or its pool was closed")
            return
        live = self._identity()
        if live != self.identity:
            raise StaleCursor(f"buffer {self.name!r}: is {live}, was {self.identity} when the plan was made")


def bound(segments: Sequence[Segment], buffers: Mapping[str, Any]) -> dict[str, Buffer]:
    """The buffers of a plan; `ArgumentError` for a name that nobody gives or two segments of one name."""
    if not isinstance(segments, Sequence) or not all(isinstance(s, Segment) for s in segments):
        raise ArgumentError.of("ReplayPlan.capture", "segments", type(segments).__name__, "a sequence of Segments")
    if not isinstance(buffers, Mapping) or not all(isinstance(name, str) for name in buffers):
        raise ArgumentError.of(
            "ReplayPlan.capture", "buffers", type(buffers).__name__, "a mapping from names to buffers"
        )
    names = [s.name for s in segments]
    if not names or len(names) >= MAX_LAYERS:
        raise ArgumentError.of("ReplayPlan.capture", "segments", len(names), f"1 to {MAX_LAYERS - 1} segments")
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError.of("ReplayPlan.capture", "segments", f"two of the name {name!r}", "names used once")
    for segment in segments:
        for name in segment.names:
            if name not in buffers:
                raise ArgumentError.of(
                    "ReplayPlan.capture", "buffers", f"none for {name!r} of {segment.name!r}", "one for each name"
                )
    found = {name: Buffer(name, source) for name, source in buffers.items()}
    for segment in segments:
        for rows in segment.rows:
            rank = found[rows.name].tensor.ndim
            if rows.axis >= rank:
                raise ArgumentError.of(
                    "ReplayPlan.capture", f"rows of {segment.name!r}", f"axis {rows.axis!r}", f"0 to {rank - 1}"
                )
    return found


def digest_of(segments: Sequence[Segment], buffers: Mapping[str, Buffer], backend: str) -> int:
    """32 bits over what a cursor of a plan relies on; blocks of a backed pool count with place and generation."""
    parts: list[Any] = [backend]
    parts += [(s.name, s.reads, s.writes, tuple((r.name, r.axis) for r in s.rows), s.rng) for s in segments]
    for name, buffer in sorted(buffers.items()):
        x = buffer.tensor
        parts.append((name, buffer.identity if buffer.survives else (str(x.dtype), tuple(x.shape))))
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")
