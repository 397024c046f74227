"""Measuring: what the machine is and can read, and several functions timed in turn under the same conditions.

A time alone says little on a machine that others use too. So whatever is compared is called in turn, round by round
(`Interleaved`): medians of a run share its disturbances, and their ratio is what to trust. A plain read of memory takes
part in the turns; it measures the bandwidth of the moment, and leaves the processor's cache without the next inputs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from .native import module

READ_BYTES = (
    128 << 20
)  # of the read that takes part in the turns: above four times the last-level cache of most machines
# Something else was running if the middle half of the times is wider than this share of the median, ...
DISTURBED = 0.2
FAR = 1.5  # ... or the median is so many times the best.


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one function: median, best, 99th percentile, width of the middle half over the median, calls."""

    median: float
    best: float
    p99: float
    spread: float
    calls: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        s, n = sorted(seconds), len(seconds)
        median = s[n // 2] if n % 2 else (s[n // 2 - 1] + s[n // 2]) / 2
        middle = s[(3 * n) // 4] - s[n // 4] if n >= 4 else s[-1] - s[0]
        return Times(median, s[0], s[min(n - 1, int(n * 0.99))], middle / median, n)

    @property
    def disturbed(self) -> bool:
        return self.spread > DISTURBED or self.median > FAR * self.best

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


class Interleaved:
    """Peers that are called before each call of the function that is measured.

    Every callable takes the number of the set of inputs to use, 0 <= i < sets. Before round r, peer p runs on set
    r + p + 1 and the function then gets set r, so that nothing finds the inputs of the call before it.
    """

    def __init__(self, peers: dict[str, Callable[[int], Any]], sets: int) -> None:
        self.peers, self.sets = peers, sets
        self.seconds: dict[str, list[float]] = {name: [] for name in peers}
        self.round = 0

    def turn(self) -> int:
        """Time every peer once; returns the set for the function that is measured."""
        for p, (name, peer) in enumerate(self.peers.items()):
            i = (self.round + p + 1) % self.sets
            begin = time.perf_counter()
            peer(i)
            self.seconds[name].append(time.perf_counter() - begin)
        self.round += 1
        return (self.round - 1) % self.sets

    def times(self, skip: int = 0) -> dict[str, Times]:
        """Of each peer, without the first `skip` rounds."""
        return {name: Times.of(s[skip:]) for name, s in self.seconds.items()}


def time_in_turns(
    function: Callable[[int], Any], turns: Interleaved, rounds: int, advance: Callable[[], Any] = lambda: None
) -> Times:
    """Median and the rest of `function` over `rounds` turns, after one that does not count."""
    seconds = []
    for _ in range(rounds + 1):
        i = turns.turn()
        begin = time.perf_counter()
        function(i)
        seconds.append(time.perf_counter() - begin)
        advance()
    return Times.of(seconds[1:])


def rounds_for(
    function: Callable[[int], Any], turns: Interleaved, seconds: float, low: int = 7, high: int = 100
) -> int:
    """How many turns fit into `seconds`; runs two of them, which also warms everything up."""
    begin = time.perf_counter()
    for _ in range(2):
        function(turns.turn())
    for times in turns.seconds.values():
        times.clear()
    return max(low, min(high, int(2 * seconds / (time.perf_counter() - begin))))


def ask_for_huge_pages() -> None:
    """Make torch ask the system for huge pages, as `SlicedKVCache` does for its arrays: for all tensors, the peers' too.

    Torch reads the setting at its first allocation, so call this before. What the user has set stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# --- memory bandwidth ------------------------------------------------------------------------------------------------


class Memory:
    """Reads memory as fast as torch can (the faster of a sum and a dot product), or copies half of what it reads."""

    def __init__(self, nbytes: int = READ_BYTES) -> None:
        self.data = torch.ones(nbytes // 4)
        halves = self.data.view(2, -1)
        self._target = torch.empty_like(halves[0])
        self._source = halves[0]
        ways: list[Callable[[], Any]] = [lambda: torch.dot(halves[0], halves[1]), lambda: self.data.sum()]
        self._read = min(ways, key=lambda way: _median(way, 5))

    def read(self, _set: int = 0) -> None:
        self._read()

    def copy(self, _set: int = 0) -> None:
        self._target.copy_(self._source)

    def rate(self, seconds: float) -> float:
        """GB/s of a read or a copy, bytes read plus bytes written: the same number of bytes for both."""
        return self.data.nbytes / seconds / 1e9


def bandwidth(nbytes: int = 2 * READ_BYTES, calls: int = 15) -> dict[str, float]:
    """GB/s of this machine now: read and copy (bytes read plus bytes written) with torch's threads, and read with one."""
    memory, threads = Memory(nbytes), torch.get_num_threads()
    rates = {name: memory.rate(_median(way, calls)) for name, way in (("read", memory.read), ("copy", memory.copy))}
    try:
        torch.set_num_threads(1)
        rates["read_1_thread"] = memory.rate(_median(memory.read, max(3, calls // 2)))
    finally:
        torch.set_num_threads(threads)
    return rates


def _median(function: Callable[[], Any], calls: int) -> float:
    function()
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return Times.of(seconds).median


# --- the machine -----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a measurement depends on, JSON-ready: processor, cache, memory, threads, instruction set, versions."""
    native = module()
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "last_level_cache_bytes": last_level_cache(),
        "huge_pages": _huge_pages(),
        "torch_asks_for_huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
        "threads": native.num_threads(),
        "torch_threads": torch.get_num_threads(),
        "thread_pool": native.thread_pool(),
        "isa": native.isa(),
        "sic_kernels": __version__,
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core; 32 MiB where nobody says."""
    sizes = [32 << 20] if not _caches() else []
    for text in _caches():
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes)


def _caches() -> list[str]:
    texts = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.rstrip("KM").isdigit():
            texts.append(text)
    return texts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _huge_pages() -> str | None:
    """The policy in force for transparent huge pages, which decides what scattered reads cost."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else text.strip()


def peak_memory(reset: bool = False) -> int | None:
    """Highest resident bytes of this process since the last reset; None where the system does not tell or reset."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return None
