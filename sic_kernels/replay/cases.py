"""What the ops of the replay family are tested on."""

from __future__ import annotations

import itertools
from types import MappingProxyType

import torch

from ..testing import Case

# Keys at the ends of their ranges, as the signed integers that a tensor holds.
KEYS = ((0, 0, 0), (-1, -1, -1), (1, 2, 3), (-(2**63), 2**40 + 5, 31), (2**63 - 1, 2**28 - 1, 4095))
# Numbers of one block and less, of several, past what a block of threads, a program and a task of the CPU make.
COUNTS = (0, 1, 3, 4, 5, 127, 1024, 1025, 4099, 16_384 + 7)


def uniform_case(key: tuple[int, int, int], count: int) -> Case:
    return Case(
        "uniform",
        f"{'_'.join(map(str, key))}-n{count}",
        MappingProxyType({"key": key, "count": count}),
        lambda gen: (torch.tensor(key, dtype=torch.int64), count),
        bytes_moved=4 * count,
        family="replay",
    )


def grids() -> tuple[str, ...]:
    return ("uniform",)


def grid(name: str = "uniform") -> list[Case]:
    """The cases of a list: every count, with the keys in turn, and every key."""
    pairs = [(key, count) for count, key in zip(COUNTS, itertools.cycle(KEYS))]
    pairs += [(key, 9) for key in KEYS]
    return {"uniform": [uniform_case(key, count) for key, count in dict.fromkeys(pairs)]}[name]
