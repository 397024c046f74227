"""The delta ops once more, as loops over Python numbers and NumPy scalars: a second opinion on the reference.

Written from the documented definitions, sharing no code with `sic_kernels`; rotations are those of `slicing_naive`.
"""

import math

import numpy as np
from slicing_naive import block_ranges, rotate, sign_of, tree_sum

F = np.float32
LEVELS = {
    2: [30, 100],
    3: [10, 31, 55, 88],
    4: [5, 15, 25, 36, 48, 62, 79, 104],
    5: [2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97],
}
UNITS = {2: 66.21, 3: 40.91}
REACH = {4: 104 / 0.95, 5: 97, 8: 127}


# --- RoPE -----------------------------------------------------------------------------------------------------------


def pairs(dim, interleaved):
    return [(2 * d, 2 * d + 1) if interleaved else (d, d + dim // 2) for d in range(dim // 2)]


def undo_rope(x, position, lo, hi_undo, interleaved):
    """x, a list of f32, turned back by two tables [n][2][dim/2]: first the blocks', then the one within a block."""
    y = list(x)
    for table in (hi_undo[position // 64], lo[position % 64]):
        for d, (a, b) in enumerate(pairs(2 * len(table[0]), interleaved)):
            c, s = F(table[0][d]), F(table[1][d])
            y[a], y[b] = y[a] * c + y[b] * s, y[b] * c - y[a] * s
    return y


def apply_rope(x, position, inv_freq, factor, interleaved):
    """x turned by position * inv_freq, in float64."""
    y = [float(v) for v in x]
    for d, (a, b) in enumerate(pairs(2 * len(inv_freq), interleaved)):
        angle = position * float(inv_freq[d])
        z = complex(y[a], y[b]) * complex(math.cos(angle), math.sin(angle)) * factor
        y[a], y[b] = z.real, z.imag
    return y


# --- rotation -------------------------------------------------------------------------------------------------------


def rotate_keys(x, R):
    """Hadamard over the R channels D/R apart, times 1/sqrt R; the type of x's numbers."""
    y, D = list(x), len(x)
    h = D // R
    while h < D:
        for i in range(0, D, 2 * h):
            for j in range(i, i + h):
                y[j], y[j + h] = y[j] + y[j + h], y[j] - y[j + h]
        h *= 2
    return y if R == 1 else [v * type(v)(F(1.0 / math.sqrt(R))) for v in y]


def unrotate(y):
    """The inverse of the sketch's rotation, in float64: signs after the butterflies."""
    x = [float(v) for v in y]
    for first, n in block_ranges(len(x)):
        h = 1
        while h < n:
            for i in range(first, first + n, 2 * h):
                for j in range(i, i + h):
                    x[j], x[j + h] = x[j] + x[j + h], x[j] - x[j + h]
            h *= 2
        for j in range(first, first + n):
            x[j] *= float(F(1.0 / math.sqrt(n)))
    return [v * float(sign_of(d)) for d, v in enumerate(x)]


def rotate_strided(y, R, number=F):
    """A Hadamard transform of the R channels that lie D/R apart, its own inverse."""
    x, stride = [number(v) for v in y], len(y) // R
    for h in (stride << i for i in range(R.bit_length() - 1)):
        for i in range(0, len(x), 2 * h):
            for j in range(i, i + h):
                x[j], x[j + h] = x[j] + x[j + h], x[j] - x[j + h]
    return [v * number(F(1.0 / math.sqrt(R))) for v in x]


# --- codes ----------------------------------------------------------------------------------------------------------


def level_of(code, bits):
    if bits == 8:
        return code - 128
    half = 1 << (bits - 1)
    return LEVELS[bits][code - half] if code >= half else -LEVELS[bits][half - 1 - code]


def code_of(u, bits):
    half, size = 1 << (bits - 1), abs(float(u))
    if bits == 8:
        m = int(min(np.rint(F(size)), 127))
        return half - m if u < 0 else half + m
    m = sum((a + b) / 2 <= size for a, b in zip(LEVELS[bits], LEVELS[bits][1:]))
    return half - 1 - m if u < 0 else half + m


def nearest(x, centres):
    """Index of the nearest of the centres [n][D] of half precision, by the integer search."""
    n, D = len(centres), len(x)
    mean = [F(sum(float(c[d]) for c in centres) / n) for d in range(D)]
    moved = [[F(c[d]) - mean[d] for d in range(D)] for c in centres]
    step = max(abs(v) for c in moved for v in c) / F(127)
    search = [[int(np.rint(v / step)) if step > 0 else 0 for v in c] for c in moved]
    half = [F(sum(float(v) ** 2 for v in c) / 2) for c in moved]
    xm = [x[d] - mean[d] for d in range(D)]
    largest = max(abs(v) for v in xm)
    q = [0] * D
    if largest >= F(2.0**-120):
        inverse = F(127) / largest
        q = [int(np.rint(v * inverse)) for v in xm]
    factor = (largest / F(127)) * step
    scores = [F(sum(a * b for a, b in zip(q, s))) * factor - h for s, h in zip(search, half)]
    return max(range(n), key=lambda j: (scores[j], -j))


def encode_row(x, centres, bits, R=None):
    """codes, id, f16 scale, squared error of a row of finite f32 values; R None: a value."""
    D = len(x)
    best = nearest(x, centres)
    r = [x[d] - F(centres[best][d]) for d in range(D)]
    y = rotate(r) if R is None else rotate_keys(r, R)
    energy = tree_sum([v * v for v in y])
    size = max(abs(v) for v in y) if bits in REACH else np.sqrt(energy / F(D))
    if not 2.0**-120 <= size < np.inf:
        return [1 << (bits - 1)] * D, best, np.float16(0), energy
    unit = F({**UNITS, **REACH}[bits]) / size
    codes = [code_of(v * unit, bits) for v in y]
    levels = [level_of(c, bits) for c in codes]
    along = tree_sum([abs(v) * F(abs(m)) for v, m in zip(y, levels)])
    square = F(sum(m * m for m in levels))
    with np.errstate(over="ignore"):
        scale = np.float16(along / square)
    s = F(scale)
    return codes, best, scale, (energy - (s + s) * along) + (s * s) * square


def pack(codes, bits):
    """The bytes of a row of codes."""
    data = []
    shift = 0
    for width in {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 8: (8,)}[bits]:
        values = [c >> shift & ((1 << width) - 1) for c in codes]
        shift += width
        data += pack_field(values, width)
    return data + [0] * (-len(data) % 4)


def pack_field(values, width):
    if width == 8:
        return values
    if width == 1:
        bits = values + [0] * (-len(values) % 8)
        return [sum(bits[i + c] << c for c in range(8)) for i in range(0, len(bits), 8)]
    left, first, data = -(-len(values) // 16), 0, []
    while left:
        groups = 1
        while groups * 2 <= left and groups * 2 * width <= 32:
            groups *= 2
        for lane in range(16):
            word = 0
            for i in range(groups):
                d = 16 * (first + i) + lane
                word |= (values[d] if d < len(values) else 0) << (width * i)
            data += word.to_bytes(-(-groups * width // 8), "little")
        first, left = first + groups, left - groups
    return data


def decode_row(codes, best, scale, centres, bits, R=None):
    """A row in float64, before RoPE."""
    y = [level_of(c, bits) * float(scale) for c in codes]
    r = unrotate(y) if R is None else rotate_keys(y, R)
    return [float(c) + v for c, v in zip(centres[best], r)]
