"""What repeated runs of a function cost: peak memory, and the spread of their times."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of `runs` runs after one that warmed up.

    peak_bytes: (least, most) over the runs of what the allocator held at most beyond what it held before; equal in a
    deterministic function. The CUDA caching allocator where CUDA is in use, else torch's CPU allocator: outputs and all
    temporaries that torch makes. Scratch that the native core keeps from call to call is in `resident_growth` only: by
    how much the high-water mark of the process's memory moved over all these runs (0 once everything has its place).
    seconds: of each run, ascending.
    """

    runs: int
    peak_bytes: tuple[int, int]
    resident_growth: int
    seconds: tuple[float, ...] = dataclasses.field(repr=False)

    @property
    def memory_equal(self) -> bool:
        return self.peak_bytes[0] == self.peak_bytes[1]

    def percentile(self, share: float) -> float:
        """Nearest rank: of fewer than 100 runs the 99th percentile is the slowest."""
        return self.seconds[max(0, math.ceil(share * len(self.seconds)) - 1)]

    @property
    def spread(self) -> float:
        """P99 over P50 of the seconds."""
        return self.percentile(0.99) / max(self.percentile(0.5), 1e-12)

    def as_dict(self) -> dict[str, Any]:
        return {
            "runs": self.runs, "peak_bytes": list(self.peak_bytes), "memory_equal": self.memory_equal,
            "resident_growth": self.resident_growth, "p50": self.percentile(0.5), "p99": self.percentile(0.99),
            "spread": self.spread,
        }  # fmt: skip


def measure(fn: Callable[[], Any], runs: int) -> Costs:
    """Run `fn` once, then `runs` times for memory and `runs` times for time; results are dropped at once.

    Other threads that allocate or compute meanwhile are in the figures of CUDA, and disturb the times of all.
    """
    fn()
    before = _high_water()
    peaks = [_peak(fn) for _ in range(runs)]
    grown = _high_water() - before
    return Costs(runs, (min(peaks), max(peaks)), grown, tuple(sorted(_seconds(fn) for _ in range(runs))))


def _seconds(fn: Callable[[], Any]) -> float:
    _wait()
    begin = time.perf_counter()
    result = fn()
    _wait()
    seconds = time.perf_counter() - begin
    del result  # freeing is not part of the run
    return seconds


def _cuda_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _wait() -> None:
    if _cuda_in_use():
        sys.modules["torch"].cuda.synchronize()


def _peak(fn: Callable[[], Any]) -> int:
    return _cuda_peak(fn) if _cuda_in_use() else _cpu_peak(fn)


def _cuda_peak(fn: Callable[[], Any]) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(fn: Callable[[], Any]) -> int:
    """From the record of every allocation and release, in the order of their times over all threads that the record has: this
    one, and those of torch that work for it. The profiler that keeps it is silent; torch.profiler, its successor, hands out
    sums for each op, from which no peak follows, and writes to stderr."""
    from torch.autograd import profiler_legacy

    profiler_legacy._enable_profiler_legacy(profiler_legacy.profile(profile_memory=True).config())
    try:
        result = fn()
    finally:
        threads = profiler_legacy._disable_profiler_legacy()
    del result
    moves: list[Any] = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    total = peak = 0
    for event in sorted(
        moves, key=lambda event: event.start_us()
    ):  # stable: equal times stay in the order of their thread
        total += event.cpu_memory_usage()
        peak = max(peak, total)
    return peak


def _high_water() -> int:
    """Bytes of memory that the process had resident at most, so far."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
