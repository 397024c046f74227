"""Measuring: what the machine is and can read, and several functions timed in turn under the same conditions.

A time alone says little on a machine that others use too. So whatever is compared is called in turn, round by round
(`Interleaved`): medians of a run share its disturbances, and their ratio is what to trust. A plain read of memory takes
part in the turns; it measures the bandwidth of the moment, and leaves the cache without the next inputs.

All of it runs on a CUDA device as on the CPU: a `Clock` (clocks.py) says how a call is timed there.
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
from .clocks import Clock, Function, HostClock, clock_of
from .native import module

# Of the read that takes part in the turns: above four times the last-level cache. On CUDA it also takes longer than the
# host needs to queue a turn.
READ_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
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

    warm: the function that is measured, if it and its peers are to run on the next set just before they are timed: their code is
    then in the cache, as in a loop over tokens, and the inputs are not. (Fetching code takes 0.1 ms after the copy and the read.)
    """

    def __init__(
        self, peers: dict[str, Function], sets: int, clock: Clock | None = None, warm: Function | None = None
    ) -> None:
        self.clock: Clock = clock or HostClock()
        self.peers, self.sets, self.warm = peers, sets, warm
        self.laps: dict[str, list[Any]] = {name: [] for name in peers}
        self.round = 0

    def turn(self) -> int:
        """Time every peer once; returns the set for the function that is measured."""
        for p, (name, peer) in enumerate(self.peers.items()):
            if self.warm:
                peer((self.round + p + 2) % self.sets)
            self.laps[name].append(self.clock.lap(peer, (self.round + p + 1) % self.sets))
        if self.warm:
            self.warm((self.round + 1) % self.sets)
        self.round += 1
        return (self.round - 1) % self.sets

    def times(self, skip: int = 0) -> dict[str, Times]:
        """Of each peer, without the first `skip` rounds."""
        return {name: Times.of(self.clock.seconds(laps[skip:])) for name, laps in self.laps.items()}


def time_in_turns(function: Function, turns: Interleaved, rounds: int) -> Times:
    """Median and the rest of `function` over `rounds` turns, after one that does not count."""
    laps = [turns.clock.lap(function, turns.turn()) for _ in range(rounds + 1)]
    return Times.of(turns.clock.seconds(laps[1:]))


def rounds_for(function: Function, turns: Interleaved, seconds: float, low: int = 7, high: int = 100) -> int:
    """How many turns fit into `seconds`; runs two of them, which also warms everything up."""
    begin = time.perf_counter()
    for _ in range(2):
        function(turns.turn())
    turns.clock.wait()
    for laps in turns.laps.values():
        laps.clear()
    return max(low, min(high, int(2 * seconds / (time.perf_counter() - begin))))


def ask_for_huge_pages() -> None:
    """Make torch ask the system for huge pages, as `SlicedKVCache` does for its arrays: for all tensors, the peers' too.

    Torch reads the setting at its first allocation, so call this before. What the user has set stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# --- memory bandwidth ------------------------------------------------------------------------------------------------


class Memory:
    """Reads memory as fast as torch can (the faster of a sum and a dot product), or copies half of what it reads."""

    def __init__(self, nbytes: int | None = None, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.clock = clock_of(self.device)
        nbytes = READ_BYTES[self.device.type] if nbytes is None else nbytes
        self.data = torch.ones(nbytes // 4, device=self.device)
        halves = self.data.view(2, -1)
        self._target = torch.empty_like(halves[0])
        self._source = halves[0]
        ways: list[Callable[[], Any]] = [lambda: torch.dot(halves[0], halves[1]), lambda: self.data.sum()]
        self._read = min(ways, key=lambda way: self.median(lambda _: way(), 5))

    def read(self, _set: int = 0) -> None:
        self._read()

    def copy(self, _set: int = 0) -> None:
        self._target.copy_(self._source)

    def rate(self, seconds: float) -> float:
        """GB/s of a read or a copy, bytes read plus bytes written: the same number of bytes for both."""
        return self.data.nbytes / seconds / 1e9

    def median(self, function: Function, calls: int) -> float:
        """Seconds of one call, after one that does not count."""
        laps = [self.clock.lap(function, 0) for _ in range(calls + 1)]
        return Times.of(self.clock.seconds(laps[1:])).median


def bandwidth(nbytes: int | None = None, calls: int = 15, device: str | torch.device = "cpu") -> dict[str, float]:
    """GB/s of this device now: read and copy (bytes read plus bytes written); on the CPU also a read by one thread."""
    kind = torch.device(device).type
    memory = Memory(2 * READ_BYTES[kind] if nbytes is None else nbytes, device)
    rates = {
        name: memory.rate(memory.median(way, calls)) for name, way in (("read", memory.read), ("copy", memory.copy))
    }
    if kind == "cpu":
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            rates["read_1_thread"] = memory.rate(memory.median(memory.read, max(3, calls // 2)))
        finally:
            torch.set_num_threads(threads)
    return rates


# --- the machine -----------------------------------------------------------------------------------------------------


def machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What a measurement depends on, JSON-ready: processor, cache, memory, threads, instruction set, versions, CUDA device."""
    native = module()
    facts: dict[str, Any] = {
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
    if torch.device(device).type == "cuda":
        facts["device"] = _cuda_device(device)
    return facts


def _cuda_device(device: str | torch.device) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "cache_bytes": facts.L2_cache_size,
        "cuda": torch.version.cuda,
    }


def last_level_cache(device: str | torch.device = "cpu") -> int:
    """Bytes of the largest cache of a CUDA device or of the first core; 32 MiB where nobody says."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
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
