"""Print the quantisation tables of sic_kernels/delta/levels.py: python tools/delta_levels.py

Lloyd-Max levels of the unit Gaussian, then the integers within +-127 and the unit (levels per standard deviation, in
hundredths) that lose least by the rounding. Only `math`: error functions in closed form, no integration.
"""

from __future__ import annotations

import itertools
import math

LARGEST = 127  # a level is a signed byte
STEPS = 100  # units are multiples of 1/100


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def below(x: float) -> float:
    """Probability of a value below x."""
    return math.erfc(-x / math.sqrt(2)) / 2


def cells(levels: list[float]) -> list[tuple[float, float]]:
    """The interval of values nearest to each of the ascending levels."""
    cuts = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    return list(itertools.pairwise(cuts))


def distortion(levels: list[float]) -> float:
    """Mean squared error of a unit Gaussian rounded to the nearest level."""
    total = 0.0
    for (low, high), level in zip(cells(levels), levels):
        mass, first = below(high) - below(low), density(low) - density(high)
        second = mass
        second += low * density(low) if math.isfinite(low) else 0.0
        second -= high * density(high) if math.isfinite(high) else 0.0
        total += second - 2 * level * first + level * level * mass
    return total


def lloyd_max(count: int) -> list[float]:
    """The `count` levels of least distortion: each the mean of its cell (symmetric, so the upper half is iterated)."""
    upper = [2.8 * (i + 0.5) / (count // 2) for i in range(count // 2)]
    for _ in range(100_000):
        cuts = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(upper)), math.inf]
        new = [(density(a) - density(b)) / (below(-a) - below(-b)) for a, b in itertools.pairwise(cuts)]
        change = max(abs(a - b) for a, b in zip(new, upper))
        upper = new
        if change < 1e-13:
            break
    return [-x for x in reversed(upper)] + upper


def integers(levels: list[float]) -> tuple[float, list[int], float]:
    """unit, integer levels, their distortion: the best integers within +-LARGEST."""
    best = (math.inf, 0.0, levels)
    for step in range(STEPS, int(STEPS * LARGEST / levels[-1]) + STEPS):
        unit = step / STEPS
        rounded = [round(x * unit) for x in levels]
        if rounded[-1] <= LARGEST and len(set(rounded)) == len(levels):
            best = min(best, (distortion([i / unit for i in rounded]), unit, rounded))
    return best[1], best[2], best[0]


def uniform() -> tuple[float, float]:
    """unit (in halves), distortion of the 255 levels -127 .. 127."""
    levels = range(-LARGEST, LARGEST + 1)
    error, unit = min((distortion([2 * i / s for i in levels]), s / 2) for s in range(2 * 24, 2 * 40))
    return unit, error


def tables() -> dict[int, tuple[float, tuple[int, ...], float]]:
    """bits -> unit, levels (8 bits: none, the level is code - 128), distortion."""
    table = {}
    for bits in (2, 3, 4, 5):
        unit, levels, error = integers(lloyd_max(1 << bits))
        table[bits] = (unit, tuple(int(x) for x in levels), error)
    unit, error = uniform()
    return {**table, 8: (unit, (), error)}


if __name__ == "__main__":
    for bits, (unit, levels, error) in tables().items():
        print(f"{bits}: unit {unit!r}, distortion {error:.6g}, levels {levels}")
