"""Slicing: every op against torch, at the lengths of the published table; how cost grows; what a call and a step cost."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest
import torch
from conftest import inputs_of

from sic_kernels import slicing
from sic_kernels.runtime import measure, native
from sic_kernels.slicing import benches
from sic_kernels.slicing.cases import BENCH_RATIOS, BenchShape
from sic_kernels.testing import assert_close, generator, randn

FAMILY = benches.FAMILY
CALL_US, IMPORT_S = 3.0, 0.3  # targets


@pytest.mark.parametrize("name", benches.NAMES)
def bench_op(name, shape, inputs, run):
    run(benches.build(name, inputs), inputs.sets)


@pytest.mark.parametrize("ratio", BENCH_RATIOS)
@pytest.mark.parametrize("op", ["sliced", "attend"])
def bench_ratio(op, ratio, run):
    """Cost over the share of the tokens read: a straight line."""
    inputs = inputs_of(FAMILY, benches.MAIN)
    run(benches.at_ratio(op, ratio, inputs), inputs.sets, linear=op, ratio=ratio)


# --- overhead -----------------------------------------------------------------------------------------------------------


def _states():
    gen = generator(0)
    states = [(randn(gen, 1, 1, 16), randn(gen, 1, 1)) for _ in range(3)]
    return tuple(t for state in states for t in state)  # out_a, lse_a, out_b, lse_b, out, lse


@pytest.mark.parametrize("way", ["public", "native"])
def bench_call(way, benchmark, microseconds):
    """Six tiny tensors through the checks and back: merge_states with out=."""
    *given, out, lse = _states()
    if way == "public":

        def call():
            slicing.merge_states(*given, out=(out, lse))
    else:
        merge = native.module().merge_states

        def call():
            merge(*given, out, lse, None, native.CPU)

    call()
    assert_close(out, slicing.merge_states(*given, backend="ref")[0], atol=1e-6)
    benchmark.pedantic(call, rounds=50, iterations=500, warmup_rounds=2)
    microseconds(f"call from Python, six tensors, {way} function", CALL_US)


IMPORT = """
import time, torch
begin = time.perf_counter()
import sic_kernels as sic
sic.slicing.attend, sic.backends()
print(time.perf_counter() - begin)
"""


def bench_import(benchmark, quick, fact):
    """Importing everything slicing needs, native module included, after torch."""
    seconds = []

    def once():
        seconds.append(
            float(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)
        )

    benchmark.pedantic(once, rounds=2 if quick else 5)
    s = statistics.median(seconds)
    fact(
        "import sic_kernels beyond torch",
        f"{s:.3f} s",
        target=f"<= {IMPORT_S:g} s",
        reached=s <= IMPORT_S,
        import_seconds=s,
    )


# --- a decode step ------------------------------------------------------------------------------------------------------


class Step:
    """A decode step of a runner: for each of `layers` layers append one token to the cache and attend, into given outputs."""

    def __init__(self, layers: int, shape: BenchShape, steps: int) -> None:
        self.layers, self.shape, gen = layers, shape, generator(0)
        start = shape.length
        full = BenchShape(
            start + steps, heads=shape.heads, group=shape.group, D=shape.D, page=shape.page, dtype=shape.dtype
        )
        self.inputs = benches.Inputs(full, sets=layers)
        self.inputs.rows.clear()
        self.q = randn(gen, 1, 1, shape.heads * shape.group, shape.D, dtype=shape.dtype)
        self.new = [randn(gen, 1, shape.heads, shape.D, dtype=shape.dtype) for _ in range(2)]
        self.slots = torch.empty(1, dtype=torch.int64)
        self.length = torch.tensor([start], dtype=torch.int32)
        self.max_seq_len = self.inputs.M * shape.page
        first = self.attend(0, None)
        self.out = (
            first.out,
            first.lse,
            first.selection.indices,
            first.selection.counts,
            first.omitted_mass,
            first.status,
        )

    def attend(self, layer, out):
        x = self.inputs
        return slicing.attend(
            self.q, x.k_cache, x.v_cache, x.sketch, x.tables[layer], self.length, max_seq_len=self.max_seq_len, out=out
        )

    def __call__(self) -> None:
        x, page = self.inputs, self.shape.page
        position = int(self.length)
        self.length += 1
        for layer in range(self.layers):
            self.slots[0] = int(x.tables[layer, 0, position // page]) * page + position % page
            slicing.append_kv(*self.new, x.k_cache, x.v_cache, self.slots, index=x.sketch)
            self.attend(layer, self.out)


def bench_decode_step(benchmark, quick, fact):
    """Latency and peak memory of 200 steps: they should not vary."""
    steps, layers = (60 if quick else 200), 16
    step = Step(layers, BenchShape(4096), steps + 8)
    for _ in range(5):
        step()
    peaks = []

    def before():
        peaks.append(measure.peak_memory())
        measure.peak_memory(reset=True)

    benchmark.pedantic(step, setup=before, rounds=steps)
    if benchmark.stats is None:
        return
    times = measure.Times.of(benchmark.stats.stats.data)
    words = f"P50 {1e3 * times.median:.2f} ms, P99 {1e3 * times.p99:.2f} ms, P99/P50 {times.p99 / times.median:.2f}"
    fact(f"decode step of {layers} layers at 4K, {steps} steps", words, seconds=times.as_dict())
    known = [p for p in peaks[1:] if p is not None]
    spread = max(known) - min(known) if known else None
    shown = "not told by this system" if spread is None else f"{spread / 1024:.0f} KiB"
    fact(f"its peak memory, spread over {steps} steps", shown, spread_bytes=spread, peak_bytes=max(known, default=None))
