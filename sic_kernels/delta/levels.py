"""Quantisation tables: integer levels near the Lloyd-Max levels of a unit Gaussian (`tools/delta_levels.py` makes them).

A code is the index of its level in ascending order, and stands for level * scale. A row is first scaled to level units: with 2
and 3 bits so that its standard deviation is UNITS, with more so that its largest channel is REACH. The sign of a channel then
gives the half of the table, the number of positive thresholds (midway between positive levels) that are not above its
magnitude the level. With 8 bits the magnitude is rounded and code = level + 128.
"""

from __future__ import annotations

import itertools

BITS = (2, 3, 4, 5, 8)

LEVELS: dict[int, tuple[int, ...]] = {
    2: (-100, -30, 30, 100),
    3: (-88, -55, -31, -10, 10, 31, 55, 88),
    4: (-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104),
    5: (-97, -80, -69, -60, -53, -47, -41, -36, -31, -26, -22, -18, -14, -10, -6, -2,
        2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97),
    8: tuple(range(-128, 128)),  # code 0 is never written
}  # fmt: skip

MAX_LEVEL_8 = 127

# Level units per standard deviation of a row.
UNITS = {2: 66.21, 3: 40.91}

# Level units of the largest channel of a row: takes 15 % off the error of real rows with 4 bits, 57 % with 8, nothing with fewer.
REACH = {4: 104 / 0.95, 5: 97.0, 8: 127.0}

# Mean squared error of a unit Gaussian coded with the levels (those of more than 3 bits: scaled like those of fewer).
DISTORTION = {2: 0.117482, 3: 0.0345486, 4: 0.00950622, 5: 0.00251935, 8: 0.0000883236}


def thresholds(bits: int) -> tuple[float, ...]:
    """Values midway between neighbouring positive levels, exact in float32 (8 bits have none: they round)."""
    levels = LEVELS[bits][1 << bits - 1 :]
    return tuple((a + b) / 2 for a, b in itertools.pairwise(levels))
