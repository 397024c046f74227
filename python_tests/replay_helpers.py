"""A small model in segments, and pools that remember as a mapped file does."""

import dataclasses

import torch

from sic_kernels import replay
from sic_kernels.replay import Rows, Segment, faults
from sic_kernels.testing import assert_same_bits

D, TOKENS, CHUNK, LAYERS = 8, 16, 4, 3
FINGERPRINT = replay.Fingerprint("tiny", "r1", "float32", "none", 512, "0123456789abcdef")


def buffers():
    x = {"tokens": torch.zeros(TOKENS, dtype=torch.int64), "logits": torch.zeros(TOKENS, D)}
    x |= {f"h{i}": torch.zeros(CHUNK, D) for i in (0, 1)}
    return x | {f"kv{i}": torch.zeros(2, TOKENS, D) for i in range(LAYERS)}


def weights():
    g = torch.Generator().manual_seed(7)
    return [torch.randn(D, D, generator=g) / 3 for _ in range(LAYERS + 2)]


def layer(i, w):
    """Boundary states h -> the other h, keys and values at their positions, causal attention over all of them."""

    def run(step):
        h, kv = step[f"h{i % 2}"][: step.count], step[f"kv{i}"]
        kv[0, step.position : step.end] = h @ w
        kv[1, step.position : step.end] = h.roll(1, 1)
        score = h @ kv[0, : step.end].T
        at = torch.arange(step.position, step.end)[:, None]
        score = score.masked_fill(torch.arange(step.end)[None] > at, float("-inf"))
        step[f"h{(i + 1) % 2}"][: step.count] = h + score.softmax(1) @ kv[1, : step.end]

    return Segment(f"layer {i}", run, reads=[f"h{i % 2}"], writes=[f"h{(i + 1) % 2}"], rows=[Rows(f"kv{i}", 1)])


def segments():
    w = weights()

    def embed(step):
        ids = step["tokens"][step.position : step.end]
        step["h0"][: step.count] = torch.sin(ids[:, None] * torch.arange(1, D + 1))

    def head(step):
        step["logits"][step.position : step.end] = step[f"h{LAYERS % 2}"][: step.count] @ w[-1]

    first = Segment("embed", embed, reads=["tokens"], writes=["h0"])
    last = Segment("head", head, reads=[f"h{LAYERS % 2}"], rows=[Rows("logits")])
    return [first, *(layer(i, w[i]) for i in range(LAYERS)), last]


def inputs():
    return {"tokens": torch.arange(3, 3 + TOKENS)}


def plan(**options):
    given = {"buffers": buffers(), "fingerprint": FINGERPRINT, "inputs": ["tokens"], **options}
    return replay.ReplayPlan.capture(given.pop("segments", None) or segments(), **given)


RUN = {"end": TOKENS, "chunk": CHUNK}
TOTAL = (TOKENS // CHUNK) * (LAYERS + 2)


def state(p):
    """All that a run leaves behind."""
    return {name: x.clone() for name, x in p.tensors.items()}


def assert_state(p, want):
    for name, x in state(p).items():
        assert_same_bits(x, want[name], name)


def nothing(step):
    pass


def failing(error, times):
    """The second segment raises on its second chunk, so often."""
    parts, left = segments(), [times]
    fn = parts[1].fn

    def fails(step):
        if step.position == CHUNK and left[0]:
            left[0] -= 1
            raise error
        fn(step)

    return [parts[0], dataclasses.replace(parts[1], fn=fails), *parts[2:]]


def interrupted(index=7, **options):
    p = plan(**options)
    with faults.stop_at(p, index):
        return p, p.run(inputs(), **RUN).cursor
