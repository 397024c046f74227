"""How calls are timed: on the host by the time they take, on a CUDA device by events around replays of captured graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Function = Callable[[int], Any]  # takes the number of a set of inputs


class Clock(Protocol):
    """A lap is one call of a function on a set of inputs, of whatever kind the clock likes until `seconds` is asked for."""

    refused: list[Function]  # functions that are not timed as they should be

    def ready(self, function: Function, sets: int) -> Function:
        """The function as it is to be timed."""
        ...

    def lap(self, function: Function, i: int) -> Any: ...

    def seconds(self, laps: Sequence[Any]) -> list[float]: ...

    def wait(self) -> None:
        """Until everything that was asked for is done."""
        ...


class HostClock:
    """Calls that have done their work when they return."""

    def __init__(self) -> None:
        self.refused: list[Function] = []

    def ready(self, function: Function, sets: int) -> Function:
        return function

    def lap(self, function: Function, i: int) -> float:
        begin = time.perf_counter()
        function(i)
        return time.perf_counter() - begin

    def seconds(self, laps: Sequence[float]) -> list[float]:
        return list(laps)

    def wait(self) -> None:
        pass


class CudaClock:
    """Calls that leave work on a CUDA stream.

    Nothing waits between laps, so the device always has work queued and what the host does between two launches is not
    measured. A function that can be captured is timed as a graph, as a runner replays it; one that cannot, as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.refused: list[Function] = []

    def ready(self, function: Function, sets: int) -> Function:
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            for i in range(sets):  # they never run at the same time, so they share their temporaries
                graphs.append(self.captured(function, i, graphs[0].pool() if graphs else None))
        except RuntimeError:
            self.wait()
            self.refused.append(function)
            return function
        return lambda i: graphs[i].replay()

    def captured(self, function: Function, i: int, pool: Any = None) -> torch.cuda.CUDAGraph:
        """The launches of one call. It runs once before: first calls load kernels, which a capture may not."""
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            function(i)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            function(i)
        return graph

    def lap(self, function: Function, i: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function(i)
        end.record()
        return begin, end

    def seconds(self, laps: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        self.wait()
        return [1e-3 * begin.elapsed_time(end) for begin, end in laps]

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def clock_of(device: str | torch.device) -> Clock:
    device = torch.device(device)
    return CudaClock(device) if device.type == "cuda" else HostClock()
