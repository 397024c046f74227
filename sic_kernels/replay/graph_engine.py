"""`GraphEngine`: segments as CUDA graphs, each followed by a mark that the device makes; on the emulator too ("simt").

A graph is made for chunks of one size. The first time that a segment runs at a size it is called: that is its run, and what
libraries load or compile at a first call, which no capture allows, is then loaded. Right after it is called once more and
captured, and from then on replayed. Under the strategy "mask" all segments become one graph once each has run; a resume
switches off those before the cursor.
"""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..runtime import backends, metrics, native
from ..runtime.errors import ArgumentError, BackendError
from ..runtime.log import get_logger
from .cursor_word import CursorWord, RunRecord
from .engine import segments_done
from .errors import ContextPoisoned, PlanError, StaleCursor
from .random import uniform
from .segments import Segment, Step

Tensor = torch.Tensor

_log = get_logger("replay")

AHEAD = 2  # launches that may be under way: the device never waits for the host, and a stop not for many segments
KEPT = 8  # sizes of chunks whose graphs are kept, the most recently used


class StepMemory:
    """Where graphs find what changes from one replay to the next; `csrc/replay/replay.h` has what each tensor holds."""

    def __init__(self, layers: int, count: int, device: torch.device) -> None:
        self.place, self.keys, self.words, self.positions = (
            torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((2,), (layers, 3), (layers,), (count,))
        )


class GraphStep(Step):
    """A `Step` whose place is on the device: what the host knew of it would be the same in every replay."""

    __slots__ = ("_backend", "_memory", "_name")

    def __init__(
        self, tensors: Mapping[str, Tensor], memory: StepMemory, layer: int, count: int, name: str, backend: str
    ) -> None:
        self._tensors, self._memory, self._name, self._backend = tensors, memory, name, backend
        self.layer, self.count = layer, count

    def _of_the_host(self, what: str, instead: str) -> int:
        detail = f"Step.{what} would be the same in every replay of the captured segment: use {instead}"
        raise PlanError(self._name, "host_value", detail)

    @property
    def position(self) -> int:  # type: ignore[override]
        return self._of_the_host("position", "Step.positions")

    @property
    def end(self) -> int:
        return self._of_the_host("end", "Step.length")

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._of_the_host("epoch", "nothing: results must not depend on it")

    @property
    def seed(self) -> int:  # type: ignore[override]
        return self._of_the_host("seed", "Step.uniform")

    @property
    def positions(self) -> Tensor:
        return self._memory.positions

    @property
    def length(self) -> Tensor:
        return self._memory.place[1:]

    def uniform(self, out: Tensor) -> Tensor:
        return uniform(self._memory.keys[self.layer], out=out, backend=self._backend)


class Device:
    """What graphs of all sizes share: the native module, the stream of the run, memory for what segments allocate."""

    def __init__(self, backend: str, tensors: Mapping[str, Tensor], word: CursorWord) -> None:
        op = "ReplayPlan.capture"
        reason = backends.why_not(backend)
        if reason is not None:
            raise BackendError(f"{op}: backend {backend!r} cannot be used: {reason}")
        places = {x.device for x in tensors.values()}
        self.backend, self.place = backend, next(iter(places), torch.device("cpu"))
        if len(places) != 1 or self.place.type != ("cpu" if backend == "simt" else "cuda"):
            expected = "all on the CPU, which plays the device" if backend == "simt" else "all on one CUDA device"
            raise ArgumentError.of(op, "buffers", "tensors on " + ", ".join(sorted(map(str, places))), expected)
        self.native: Any = native.simt_module() if backend == "simt" else native.module()
        self.progress = self.native.DeviceProgress(word.address, self.place.index or 0, word)
        self.stream = 0
        self.replays = self.captures = (
            0  # graphs launched, and segments called to be captured, that were not published yet
        )
        if backend == "cuda":
            self._side, self._pool = torch.cuda.Stream(self.place), torch.cuda.MemPool()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the device the current one, for what segments call."""
        return torch.cuda.device(self.place) if self.backend == "cuda" else contextlib.nullcontext()

    def begin(self) -> None:
        """The run belongs to the stream that is torch's current one now. What an earlier call left under way is done first."""
        # CUDA keeps the error of a launch until somebody asks, and the first segment that asks would be blamed.
        left = self.native.forget_errors()
        if left:
            _log.warning("a CUDA call before this run had failed, and nobody had asked: %s", left)
        self.progress.wait(0)
        if self.backend == "cuda":
            self.stream = torch.cuda.current_stream(self.place).cuda_stream

    def publish(self) -> None:
        """The launches since the last time into the metric."""
        replays, launches = self.replays, self.replays + self.captures
        self.replays = self.captures = 0
        metrics.get("sic_graph_replay_ratio").add(replays, launches)

    def captured(self, functions: Sequence[Any]) -> Any:
        """A graph with a segment for each function. What they allocate comes from a pool that lives as long as the plan."""
        with self.current(), _without_collector():
            if self.backend == "simt":
                graph = self.native.Graph(functions)
            else:
                with torch.cuda.stream(self._side), torch.cuda.use_mem_pool(self._pool, self.place):
                    graph = self.native.Graph(functions, self._side.cuda_stream)
        self.captures += len(functions)
        return graph


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """What it frees may be memory, events or graphs of the device, which would make a capture void."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Graphs:
    """The segments for chunks of one size, each a graph of its own."""

    def __init__(self, segments: Sequence[Segment], tensors: Mapping[str, Tensor], device: Device, count: int) -> None:
        self.segments, self.device = segments, device
        self.memory = memory = StepMemory(len(segments), count, device.place)
        self.steps = [GraphStep(tensors, memory, i, count, s.name, device.backend) for i, s in enumerate(segments)]
        self.graphs: dict[int, Any] = {}

    def set(self, record: RunRecord, position: int) -> None:
        """What is launched from now on runs at this position."""
        m = self.memory
        self.device.progress.set(m.place, m.keys, m.words, m.positions, record.epoch, record.seed, position)

    def run(self, layer: int, alone: bool) -> int:
        """Launches segment `layer` with its mark, and maybe later ones unless `alone`; returns the first it did not launch."""
        if layer in self.graphs:
            self.graphs[layer].replay(self.device.stream)
            self.device.replays += 1
        else:
            self._call(layer)
            self.graphs[layer] = self.device.captured([lambda: self._captured(layer)])
            self._mark(layer)  # last: a segment that could not be captured is not done
        return layer + 1

    def _call(self, layer: int) -> None:
        try:
            with self.device.current():
                self.segments[layer].fn(self.steps[layer])
        except Exception:
            self.device.progress.check_alive(self.device.stream)  # was it the device?
            raise

    def _mark(self, layer: int) -> None:
        self.device.progress.mark(self.memory.words, layer)

    def _captured(self, layer: int) -> None:
        self.segments[layer].fn(self.steps[layer])
        self._mark(layer)


class MaskedGraph(Graphs):
    """The segments for chunks of one size in one graph, launched without those that are done."""

    def __init__(self, segments: Sequence[Segment], tensors: Mapping[str, Tensor], device: Device, count: int) -> None:
        super().__init__(segments, tensors, device, count)
        self._called: set[int] = set()

    def run(self, layer: int, alone: bool) -> int:
        if not alone and not self.graphs and len(self._called) == len(self.segments):
            functions = [lambda i=i: self._captured(i) for i in range(len(self.segments))]
            self.graphs[0] = self.device.captured(functions)
        if not alone and self.graphs:
            self.graphs[0].replay(self.device.stream, layer)
            self.device.replays += 1
            return len(self.segments)
        self._call(layer)
        self._called.add(layer)
        self._mark(layer)
        return layer + 1


class GraphEngine:
    """Runs segments as CUDA graphs; an `Engine`. Not thread-safe, as the plan runs one call at a time.

    strategy: "segments", a graph each, so that a stop acts after at most `AHEAD` more of them; "mask", one graph of all, so that
    a chunk is one launch, and a stop acts after at most `AHEAD` chunks.
    Raises BackendError where the backend cannot be used, ArgumentError for buffers that are not on one device.
    """

    def __init__(
        self, segments: Sequence[Segment], tensors: Mapping[str, Tensor], word: CursorWord, backend: str, strategy: str
    ) -> None:
        self.segments, self.tensors, self.word = segments, tensors, word
        self._device = Device(backend, tensors, word)
        self._make = MaskedGraph if strategy == "mask" else Graphs
        self._sizes: collections.OrderedDict[int, Graphs] = collections.OrderedDict()
        self._lost: ContextPoisoned | None = None

    def begin(self, record: RunRecord) -> None:
        self._watched(self._device.begin)
        self.record = record
        self._set: tuple[int, int] | None = None  # size and position that the device has been told
        self._covered = 0  # segments, counted over the run, that a graph of several has taken
        self._launched = 0

    def run(self, layer: int, position: int, alone: bool = False) -> None:
        first = self.record.index(0, position, len(self.segments))
        if first + layer < self._covered:
            return
        until = self._watched(self._launch, layer, position, alone)
        self._launched = first + until
        self._covered = self._launched if until > layer + 1 else 0

    def _launch(self, layer: int, position: int, alone: bool) -> int:
        progress, count = self._device.progress, min(self.record.chunk, self.record.end - position)
        progress.wait(AHEAD - 1)
        graphs = self._graphs(count)
        if self._set != (count, position):
            graphs.set(self.record, position)
            self._set = count, position
        until = graphs.run(layer, alone)
        progress.launched(self._device.stream, self.word.clock())
        return until

    def settle(self, at: int) -> int:
        self._device.publish()
        self._watched(self._device.progress.wait, 0)
        done = segments_done(self.record, self.word, len(self.segments))
        launched = max(at, self._launched)
        if not at <= done <= launched:
            raise StaleCursor(f"progress word: {done} segments done, but {launched} of the run were launched")
        return done

    def _graphs(self, count: int) -> Graphs:
        if count not in self._sizes:
            if len(self._sizes) == KEPT:
                self._device.progress.wait(0)
                self._sizes.popitem(last=False)
            self._sizes[count] = self._make(self.segments, self.tensors, self._device, count)
        self._sizes.move_to_end(count)
        return self._sizes[count]

    def _watched(self, call: Callable[..., Any], *args: Any) -> Any:
        """What a call of it returns. Names the segment that was running when the context was lost; refuses all after that."""
        if self._lost:
            raise self._lost
        try:
            return call(*args)
        except ContextPoisoned as lost:
            self._lost = ContextPoisoned(str(lost))
            place = self._device.progress.read()
            if place is not None:
                self._lost = ContextPoisoned(f"at token {place[2]}: {lost}")
                self._lost.segment = self.segments[place[1]].name
            raise self._lost from lost
