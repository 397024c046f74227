"""What a GPU would need at least: a roofline over the launches of an op. A prediction, never a measurement.

A family describes its ops as `Work`, launch by launch; devices and the formula are here. Each launch takes

    launch + max(nbytes / memory rate + again / cache rate, clocks / (busy multiprocessors * clock rate)) + exchanges

since the launches of an op depend on each other. A kernel of few blocks keeps few multiprocessors busy, and each can pull
so many bytes a clock only.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates in bytes a second. launch: seconds from the end of a kernel to the start of the next in a replayed graph.
    exchange: seconds for the blocks of a cluster to tell each other something."""

    name: str
    memory: float
    cache: float
    multiprocessors: int = 132
    clock: float = 1.75e9
    copy_share: float = 0.9
    bytes_a_clock: float = 32.0
    launch: float = 1.8e-6
    exchange: float = 1e-6

    def rate(self, peak: float, blocks: int) -> float:
        """What `blocks` blocks can pull."""
        return min(peak, self.busy(blocks) * self.bytes_a_clock * self.clock)

    def busy(self, blocks: int) -> int:
        return max(1, min(blocks, self.multiprocessors))


DEVICES = {
    "h100": Device("H100 SXM", 3.35e12, 5.5e12),
    "h200": Device("H200", 4.8e12, 5.5e12),
}


MEMSET = "memset"  # the name of a launch that sets memory


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel (or one setting of memory) of an op.

    nbytes: from or to memory, each byte once in the whole op.  again: what the op has touched before, so that it is in the
    cache.  blocks: of the grid.  clocks: of one multiprocessor for the arithmetic of all blocks.
    exchanges: within clusters, one after another; more than a block makes where not all clusters run at once.
    """

    kernel: str
    nbytes: int = 0
    again: int = 0
    blocks: int = 1
    clocks: float = 0.0
    exchanges: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """The launches of one call, in order."""

    launches: tuple[Launch, ...]

    @property
    def nbytes(self) -> int:
        """What the op must touch at least, once."""
        return sum(launch.nbytes for launch in self.launches)

    @property
    def kernels(self) -> int:
        """Launches that are kernels."""
        return sum(launch.kernel != MEMSET for launch in self.launches)

    @property
    def fills(self) -> int:
        """Launches that set memory."""
        return len(self.launches) - self.kernels


def seconds(device: Device, launch: Launch) -> float:
    """One launch, with the gap before it."""
    moving = launch.nbytes / device.rate(device.copy_share * device.memory, launch.blocks)
    moving += launch.again / device.rate(device.cache, launch.blocks)
    working = max(moving, launch.clocks / (device.busy(launch.blocks) * device.clock))
    return device.launch + working + launch.exchanges * device.exchange


def assumptions(device: Device) -> list[str]:
    """What the prediction rests on, in words."""
    narrow = device.bytes_a_clock * device.clock
    return [
        f"memory: {device.memory / 1e12:.2f} TB/s by the data sheet, {device.copy_share:.0%} of it for a kernel that only copies",
        f"cache: {device.cache / 1e12:.1f} TB/s for what an earlier launch of the op touched",
        f"{device.multiprocessors} multiprocessors at {device.clock / 1e9:.2f} GHz; each pulls at most "
        f"{device.bytes_a_clock:g} bytes a clock ({narrow / 1e9:.0f} GB/s), so a kernel of few blocks does not fill the memory",
        f"{1e6 * device.launch:.1f} us for each launch in a replayed graph; launches wait for each other",
        f"{1e6 * device.exchange:.1f} us each time that the blocks of a cluster tell each other something: a barrier, reads of "
        "the others' shared memory, and what one warp does with it; nothing overlaps with it",
        "inputs are not in the cache before; every byte is moved once; arithmetic hides behind memory but for the clocks named",
        "nothing for ramp-up, tails, bank conflicts, refresh: a kernel is expected to be slower than this, not faster",
    ]


def predict(device: Device, name: str, shape: Any, work: Work) -> dict[str, Any]:
    """One line of the prediction, JSON-ready."""
    parts = [(launch, seconds(device, launch)) for launch in work.launches]
    total = sum(s for _, s in parts)
    return {
        "name": name,
        "shape": shape.name,
        "length": shape.length,
        "B": shape.B,
        "bytes": work.nbytes,
        "predicted_seconds": total,
        "bytes_seconds": work.nbytes / (device.copy_share * device.memory),
        "launch_seconds": device.launch * len(parts),
        "launches": [dataclasses.asdict(launch) | {"predicted_seconds": s} for launch, s in parts],
    }
