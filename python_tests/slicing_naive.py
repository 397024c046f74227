"""The slicing ops once more, as loops over Python numbers and NumPy scalars: a second opinion on the reference.

Written from the documented definitions, sharing no code with `sic_kernels`.
"""

import math

import numpy as np

F = np.float32


def visible(seq_len, T, t, S):
    return max(0, min(S, seq_len - T + t + 1))


# --- sketch ---------------------------------------------------------------------------------------------------------


def sign_of(d):
    z = ((d + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z ^= z >> 31
    return F(-1.0) if z & 1 else F(1.0)


def block_ranges(D):
    """(first channel, size) of each power of two in D, largest first."""
    ranges, first = [], 0
    for bit in reversed(range(D.bit_length())):
        if D & (1 << bit):
            ranges.append((first, 1 << bit))
            first += 1 << bit
    return ranges


def rotate(x):
    y = [F(v) * sign_of(d) for d, v in enumerate(x)]
    for first, n in block_ranges(len(x)):
        h = 1
        while h < n:
            for i in range(0, n, 2 * h):
                for j in range(first + i, first + i + h):
                    y[j], y[j + h] = y[j] + y[j + h], y[j] - y[j + h]
            h *= 2
        for j in range(first, first + n):
            y[j] = y[j] * F(1.0 / math.sqrt(n))
    return y


def tree_sum(v):
    total = None
    for first, n in block_ranges(len(v)):
        part = list(v[first : first + n])
        h = n // 2
        while h:
            for i in range(h):
                part[i] = part[i] + part[i + h]
            h //= 2
        total = part[0] if total is None else total + part[0]
    return total


def to_bf16(x):
    """f32 value of the nearest bfloat16, ties to even."""
    raw = int(np.array(x, F).view(np.uint32))
    raw = (raw + 0x7FFF + (raw >> 16 & 1)) & 0xFFFF0000
    return np.array(raw, np.uint32).view(F)[()]


def sketch_key(key, centre, planes):
    """levels (one list per plane of 0/1), norm as f32 of a bf16."""
    D = len(key)
    y = rotate([F(k) - F(c) for k, c in zip(key, centre)])
    size = [abs(v) for v in y]
    total = tree_sum(size)
    energy = tree_sum([v * v for v in y])
    b0 = [int(v >= 0) for v in y]
    if planes == 1:
        divisor = total
        bits = [b0]
    else:
        threshold = total * F(1.25 / D)
        outer = [int(a >= threshold) for a in size]
        divisor = tree_sum([a * F(3.0 if o else 1.0) for a, o in zip(size, outer)])
        bits = [b0, [int(a == o) for a, o in zip(b0, outer)]]
    return bits, F(0.0) if divisor == 0 else to_bf16(energy / divisor)


def byte_of(plane, token, channel, page, D):
    """(byte index, bit) of a channel's bit among the bytes of a (page, head)."""
    nbytes = (D + 7) // 8
    block = token // 16
    w = min(16, page - 16 * block)
    j, bit = divmod(channel, 8)
    return plane * page * nbytes + 16 * block * nbytes + j * w + token % 16, bit


def quantise(q):
    y = rotate(q)
    largest = max(abs(v) for v in y)
    if largest == 0:
        return [0] * len(q), F(0.0)
    inverse = F(31.0) / largest
    return [int(np.rint(v * inverse)) for v in y], largest / F(31.0)


def score(q, bits, norm, scale, two_planes_stored, refine):
    """Integer score of one query head and one token."""
    levels, step = quantise(q)
    factor = (step * F(scale)) * F(256.0)
    if refine:
        dot = sum(z * (4 * a + 2 * b - 3) for z, a, b in zip(levels, bits[0], bits[1]))
    else:
        dot = sum(z * (2 * a - 1) for z, a in zip(levels, bits[0]))
        if two_planes_stored:
            factor = factor * F(2.2166)
    return int(max(-32767, min(32767, np.rint((F(dot) * norm) * factor))))


COEFFICIENTS = (
    1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0
)  # fmt: skip


def weight(distance):
    """About 2^24 exp(-distance / 256), an integer: 2^x by a polynomial, each product and sum rounded to f32."""
    x = F(-distance) * F(math.log2(math.e) / 256)
    if x < -24:
        return 0
    n = np.rint(x)
    f = x - n
    p = F(1.535336188319500e-4)
    for c in COEFFICIENTS:
        p = p * f + F(c)
    return int(float(p) * 2.0 ** (int(n) + 24))


def log_steps(p):
    """log p in 1/256 nat, from the exponent and a parabola through the mantissa."""
    if p == 0:
        return -32767
    mantissa, exponent = math.frexp(float(p))
    m = F(2 * mantissa - 1)
    log2 = F(exponent - 1) + (m + F(0.34375) * (m * (F(1) - m)))
    return max(-32767, int(np.rint(log2 * F(256 * math.log(2)))))


def join(scores, pool):
    """scores[g][s] of the visible tokens -> joined[s]."""
    best = [max(row) for row in scores]
    n = len(scores[0])
    if pool == 0:
        return [max(-32767, max(row[s] - b for row, b in zip(scores, best))) for s in range(n)]
    inverse = [F(1) / F(sum(weight(b - s) for s in row)) for row, b in zip(scores, best)]
    joined = []
    for s in range(n):
        p = F(0)
        for row, b, i in zip(scores, best, inverse):
            p = p + F(weight(b - row[s])) * i
        joined.append(log_steps(p))
    return joined


# --- selection ------------------------------------------------------------------------------------------------------


def _badness(score):
    """Sort key: NaN last, then by descending score."""
    return (1, 0.0) if math.isnan(score) else (0, -score)


def _weight_below(best, score, log_unit):
    distance = F(best) - F(score)
    return weight(int(np.rint(distance * F(log_unit)))) if np.isfinite(distance) else 0


def select_row(scores, vis, size, limit, top_p, sink, recent, spans, log_unit):
    """Chosen units of one row, ascending.  limit in units; log_unit: steps of 1/256 nat per unit of score."""
    n = -(-vis // size)
    forced = set()
    for lo, hi in [(0, sink), (vis - recent, vis), *spans]:
        for position in range(max(0, lo), min(vis, hi)):
            forced.add(position // size)
    order = sorted((i for i in range(n) if i not in forced), key=lambda i: (*_badness(scores[i]), i))
    room = max(0, limit - len(forced))
    if top_p is not None and top_p < 1 and n:
        best = max(s for s in scores[:n] if not math.isnan(s))
        w = [_weight_below(best, s, log_unit) for s in scores[:n]]
        got, needed = sum(w[i] for i in forced), top_p * sum(w)
        prefix = 0
        while got < needed and prefix < len(order):
            got += w[order[prefix]]
            prefix += 1
        room = min(room, prefix)
    return sorted(forced | set(order[:room]))


# --- attention ------------------------------------------------------------------------------------------------------


def attention_row(q, keys, values, positions, scale, bias=None, softcap=None, sink=None):
    """out[Dv], lse of one query head in float64; keys[s], values[s] by position."""
    if not positions:
        return [0.0] * len(values[0]), -math.inf
    logits = []
    for s in positions:
        x = scale * math.fsum(float(a) * float(b) for a, b in zip(q, keys[s]))
        if softcap is not None:
            x = softcap * math.tanh(x / softcap)
        logits.append(x + (0.0 if bias is None else float(bias[s])))
    top = max(logits + ([] if sink is None else [float(sink)]))
    total = math.fsum([math.exp(x - top) for x in logits] + ([] if sink is None else [math.exp(float(sink) - top)]))
    out = [
        math.fsum(math.exp(x - top) / total * float(values[s][c]) for x, s in zip(logits, positions))
        for c in range(len(values[0]))
    ]
    return out, top + math.log(total)
