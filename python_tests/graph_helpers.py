"""A small model of the library's own ops whose segments can be captured, and what is asked of a plan of it, on the emulator."""

import functools
import gc

import pytest
import torch
from replay_helpers import FINGERPRINT, state

from sic_kernels import replay, slicing
from sic_kernels.replay import Rows, Segment
from sic_kernels.testing import assert_same_bits

CHUNK, TOKENS, HEADS, D = 4, 16, 2, 32  # the caches have one page
RUN = {"end": TOKENS, "chunk": CHUNK, "seed": 5}
by_strategy = pytest.mark.parametrize("strategy", ["segments", "mask"])


def buffers():
    rows, cache = (CHUNK, HEADS, D), (1, HEADS, TOKENS, D)
    x = {"table": torch.zeros(1, 1, dtype=torch.int32), "bias": torch.zeros(1, TOKENS)}
    x |= {name: torch.zeros(rows) for name in ("u", "v", "o")} | {"lse": torch.zeros(CHUNK, HEADS)}
    return x | {name: torch.zeros(cache) for name in ("keys", "values", "out", "drawn")}


def draw(name):
    return Segment(f"draw {name}", lambda step: step.uniform(step[name][: step.count]), writes=[name], rng=True)


def append(step):
    u, v = (step[name][: step.count] for name in ("u", "v"))
    slicing.append_kv(u, v, step["keys"], step["values"], step.positions, backend="simt")


def attend(step):
    n = step.count
    out = step["o"][None, :n], step["lse"][None, :n]
    cache = step["keys"], step["values"], step["table"], step.length
    slicing.sliced_attention(step["u"][None, :n], *cache, key_bias=step["bias"], out=out, backend="simt")


def keep(step):
    o = step["o"][: step.count]
    slicing.append_kv(o, step["u"][: step.count], step["out"], step["drawn"], step.positions, backend="simt")


def segments():
    return [
        draw("u"),
        draw("v"),
        Segment("append", append, reads=["u", "v"], rows=[Rows("keys", 2), Rows("values", 2)]),
        Segment("attend", attend, reads=["u", "keys", "values", "table", "bias"], writes=["o", "lse"]),
        Segment("keep", keep, reads=["o", "u", "lse"], rows=[Rows("out", 2), Rows("drawn", 2)]),
    ]


LAYERS = len(segments())
TOTAL = LAYERS * TOKENS // CHUNK


def plan(backend="simt", **options):
    given = {"buffers": buffers(), "fingerprint": FINGERPRINT, "inputs": ["bias"], "backend": backend, **options}
    return replay.ReplayPlan.capture(given.pop("segments", None) or segments(), **given)


def results(p):
    return {name: x for name, x in state(p).items() if name not in p.inputs}


def assert_equal(got, want, what=""):
    for name in want:
        assert_same_bits(got[name], want[name], f"{what} {name}")


@functools.cache
def uninterrupted(**run):
    """The results of a run whose segments are only called, each once a chunk."""
    p = plan("cpu")
    assert p.run(**{**RUN, **run}).done
    return results(p)


def after(n):
    """A function that asks for a stop once n segments have begun."""
    left = iter(range(n))
    return lambda: next(left, None) is None


def launches(simt, function):
    """Kernels and graphs that a call of it launched."""
    before = simt.counters()
    function()
    now = simt.counters()
    return now["launches"] - before["launches"], now["graph_launches"] - before["graph_launches"]


def live(simt):
    """Bytes and graphs of the device that nobody has given back, without what only waits to be collected."""
    gc.collect()
    return [simt.counters()[key] for key in ("live_bytes", "live_graphs")]


def warm(p):
    """A run that calls and captures everything."""
    assert p.run(**RUN).done
    return p
