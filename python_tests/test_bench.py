"""The benchmarks work: every one verifies at a small size, and what they print follows from the times."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from sic_kernels.runtime import bench_report, clocks, measure
from sic_kernels.slicing import bench_peers, benches
from sic_kernels.slicing.cases import BenchShape
from sic_kernels.testing import assert_close

ROOT = Path(__file__).parents[1]
SMALL = BenchShape(1000, B=2, heads=2, D=64)


@pytest.fixture(scope="module")
def inputs():
    return benches.Inputs(SMALL, sets=3)


@pytest.fixture(scope="module")
def memory():
    return measure.Memory(1 << 20)


@pytest.mark.parametrize("name", benches.NAMES)
def test_every_bench_verifies_and_makes_a_row(name, inputs, memory):
    bench = benches.build(name, inputs)
    assert bench.name == name
    bench.verify()
    turns = bench.turns(memory, inputs.sets)
    times = measure.time_in_turns(bench.function, turns, 3)
    line = bench_report.row(bench, times, turns.times(skip=1), memory)
    assert json.loads(json.dumps(line)) == line
    assert line["bytes"] > 0
    assert set(line["speedup"]) == set(bench.peers)
    assert line["targets"] == []  # only the main shape has targets
    assert len(bench_report.cells(line)) == len(bench_report.COLUMNS)


@pytest.mark.parametrize("op", ["sliced", "attend"])
def test_any_share(op, inputs):
    bench = benches.at_ratio(op, 0.25, inputs)
    bench.verify()
    bench.function(1)
    assert bench.peers == {}


def test_a_wrong_result_is_not_timed(inputs, monkeypatch):
    monkeypatch.setattr(
        benches, "sliced_attention", lambda *a, **k: (torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16), None)
    )
    with pytest.raises(AssertionError, match="dense: out"):
        benches.build("dense", inputs).verify()


def test_sets_are_disjoint_and_rows_are_the_pages_in_order(inputs):
    assert inputs.tables.flatten().unique().numel() == inputs.tables.numel()
    k, _ = inputs.in_order(1)
    page, slot = int(inputs.tables[1, 1, 5]), 7
    assert torch.equal(k[1, :, 5 * 16 + slot], inputs.k_cache[page, :, slot])


def test_every_target_has_its_bench():
    assert set(benches.SPEED) <= set(benches.NAMES)


def test_targets():
    row = {"speedup": {"P1": 12.0}, "read_share": 0.85, "ns": 0.7}
    faster, read, ns = (
        bench_report.Target("speedup", 13, "P1"),
        bench_report.Target("read", 0.8),
        bench_report.Target("ns", 0.5),
    )
    assert [t.measure(row) for t in (faster, read, ns)] == [12.0, 0.85, 0.7]
    assert [t.reached(t.measure(row)) for t in (faster, read, ns)] == [False, True, False]
    assert [t.words() for t in (faster, read, ns)] == [">= 13x P1", ">= 80% of read", "<= 0.5 ns"]
    assert [t.words(t.measure(row)) for t in (faster, read, ns)] == ["12.0x P1", "85% of read", "0.70 ns"]
    assert bench_report.Target("speedup", 1.8, "P2").words(1.78) == "1.78x P2"
    assert bench_report.Target("speedup", 2, "P2").measure(row) is None
    copy = bench_report.Target("copy", 0.7)
    assert (copy.measure({"copy_share": 0.75}), copy.reached(0.75), copy.reached(0.65)) == (0.75, True, False)
    assert (copy.words(), copy.words(0.75)) == (">= 70% of copy", "75% of copy")


def test_times():
    times = measure.Times.of([4.0, 1.0, 2.0, 3.0])
    assert (times.median, times.best, times.p99, times.calls) == (2.5, 1.0, 4.0, 4)
    assert times.disturbed
    assert not measure.Times.of([1.0, 1.01, 1.02, 1.03]).disturbed


def test_turns_rotate():
    seen = []
    turns = measure.Interleaved({"a": lambda i: seen.append(("a", i)), "b": lambda i: seen.append(("b", i))}, sets=3)
    measure.time_in_turns(lambda i: seen.append(("own", i)), turns, 2)
    assert seen == [("a", 1), ("b", 2), ("own", 0), ("a", 2), ("b", 0), ("own", 1), ("a", 0), ("b", 1), ("own", 2)]
    assert {name: t.calls for name, t in turns.times(skip=1).items()} == {"a": 2, "b": 2}


class Laps:
    """A clock that knows its seconds only in the end, like a GPU's."""

    def __init__(self):
        self.refused, self.waited = [], 0

    def ready(self, function, sets):
        return function

    def lap(self, function, i):
        return [function(i), None]

    def seconds(self, laps):
        return [1.0 + value for value, _ in laps]

    def wait(self):
        self.waited += 1


def test_a_clock_that_answers_late():
    clock = Laps()
    turns = measure.Interleaved({"a": lambda i: i}, sets=4, clock=clock)
    assert measure.rounds_for(lambda i: i, turns, 1e-9) == 7
    assert clock.waited == 1
    assert measure.time_in_turns(lambda i: 10 * i, turns, 2).as_dict()["best"] == 1.0  # sets 3 and 0, after set 2
    assert turns.times(skip=1)["a"].best == 1.0


class FakeCuda:
    """The part of torch.cuda that a clock uses; a graph replays what was called while it was captured."""

    def __init__(self, monkeypatch):
        self.said, self.time, self.graphs = [], 0.0, []
        cuda = self

        class Graph:
            def replay(self):
                for i in self.calls:
                    cuda.work(i)

            def pool(self):
                return "pool"

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = cuda.time

            def elapsed_time(self, end):
                return 1e3 * (end.at - self.at)

        @contextlib.contextmanager
        def graph(graph, pool):
            before, cuda.said = cuda.said, []
            yield
            graph.calls, cuda.said = cuda.said, before
            cuda.graphs.append(pool)

        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        for name, fake in {
            "CUDAGraph": Graph, "Event": Event, "graph": graph, "Stream": lambda device: stream,
            "current_stream": lambda device: stream, "stream": contextlib.nullcontext, "synchronize": lambda device: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)

    def work(self, i):
        self.said.append(i)
        self.time += 0.5 + i


def test_the_clock_of_a_gpu_replays_graphs(monkeypatch):
    cuda, clock = FakeCuda(monkeypatch), clocks.clock_of("cuda")
    function = clock.ready(cuda.work, 3)
    assert cuda.said == [0, 1, 2]  # once each before its capture
    assert cuda.graphs == [None, "pool", "pool"]
    turns = measure.Interleaved({}, sets=3, clock=clock)
    times = measure.time_in_turns(function, turns, 2)
    assert cuda.said[3:] == [0, 1, 2]
    assert (times.best, times.calls) == (1.5, 2)
    assert clock.refused == []


def test_what_cannot_be_captured_is_timed_as_it_is_and_said(monkeypatch, inputs):
    FakeCuda(monkeypatch)
    clock = clocks.clock_of("cuda")

    def reads_back(i):
        raise RuntimeError("operation not permitted when stream is capturing")

    assert clock.ready(reads_back, 2) is reads_back
    memory = measure.Memory(1 << 20)
    memory.clock = clock
    bench = bench_report.Bench("x", SMALL, reads_back, (), {}, None, 1)
    one = measure.Times.of([1.0])
    line = bench_report.row(bench, one, {"read": one, "copy": one}, memory)
    assert line["not_captured"] == ["x"]
    machine = measure.machine() | {"bandwidth": {"read": 1.0}}
    assert "cannot be captured in a graph: x" in bench_report.text_table([line], machine)


class FakeFlashInfer:
    """FlashInfer's decode, as far as it is used: planned pages, then attention over them."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace, layout, use_tensor_cores):
            assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "HND", True)

        def plan(self, indptr, indices, last, q_heads, kv_heads, D, page, q_data_type, kv_data_type):
            self.lens = ((indptr.diff() - 1) * page + last).tolist()
            self.pages = [indices[a:b].long() for a, b in zip(indptr.tolist(), indptr[1:].tolist())]
            assert (q_heads, kv_heads, D, page, q_data_type, kv_data_type) == (
                8,
                2,
                64,
                16,
                torch.bfloat16,
                torch.bfloat16,
            )

        def run(self, q, cache):
            rows = [[c[p].transpose(0, 1).flatten(1, 2)[:, :n] for c in cache] for p, n in zip(self.pages, self.lens)]
            k, v = (torch.stack(part) for part in zip(*rows))
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q.unflatten(1, (2, 4)), k, v).flatten(1, 2)


def test_flashinfer_gets_the_same_pages(inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer)
    peers = bench_peers.Peers(inputs)
    got = bench_peers.FlashInfer(inputs)(1)
    assert_close(bench_peers.as_rows(got[:, None], 2), peers.p2(1), atol=3e-2, rtol=2e-2)


def test_flashinfer_that_fails_is_left_out_and_said(inputs, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace())
    on_gpu = types.SimpleNamespace(**vars(inputs) | {"device": types.SimpleNamespace(type="cuda")})
    with caplog.at_level("WARNING"):
        assert set(bench_peers.Peers(on_gpu).dense()) == {"P1", "P2"}
    assert "FlashInfer is left out" in caplog.text
    assert set(bench_peers.Peers(inputs).dense()) == {"P1", "P2"}  # not on the CPU


def test_heading_of_a_gpu():
    device = {"name": "GPU", "multiprocessors": 132, "cuda": "13.0"}
    machine = measure.machine() | {"bandwidth": {"read": 4000.0, "copy": 3900.0}, "device": device}
    heading, _, _ = bench_report.report_parts([], machine)
    assert heading[0].startswith("GPU, 132 multiprocessors, CUDA 13.0, torch")
    assert "graphs" in heading[1]


def test_inputs_do_not_depend_on_the_device(inputs):
    again = benches.Inputs(SMALL, sets=3, device="cpu")
    assert torch.equal(again.k_cache, inputs.k_cache)
    assert torch.equal(again.sketch.bits, inputs.sketch.bits)


def test_straight_line():
    a, b, worst = bench_report.straight_line([(x, 3.0 + 2.0 * x) for x in (1, 2, 5, 100)])
    assert (a, b) == pytest.approx((3.0, 2.0))
    assert worst < 1e-9


def test_machine_and_bandwidth():
    facts = measure.machine()
    assert json.dumps(facts)
    assert facts["isa"] in ("plain", "avx2", "avx512", "neon")
    assert measure.last_level_cache() >= 1 << 20
    rates = measure.bandwidth(8 << 20, calls=3)
    assert set(rates) == {"read", "copy", "read_1_thread"}
    assert all(r > 0.05 for r in rates.values())


def test_huge_pages_are_asked_for_and_said(monkeypatch, inputs, memory):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # so that what follows is undone
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    bench = benches.build("select", inputs)
    turns = bench.turns(memory, inputs.sets)
    line = bench_report.row(bench, measure.time_in_turns(bench.function, turns, 2), turns.times(skip=1), memory)
    for asked in (False, True):
        if asked:
            measure.ask_for_huge_pages()
        machine = measure.machine() | {"bandwidth": {"read": 1.0}}
        assert (
            "every tensor, the peers' too, asked for huge pages" in bench_report.text_table([line], machine)
        ) is asked
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    measure.ask_for_huge_pages()
    assert not measure.machine()["torch_asks_for_huge_pages"]


def test_suite_of_one():
    """The command runs bench/ in a checkout and prints one JSON object."""
    command = [sys.executable, "-m", "sic_kernels", "bench", "--quick", "--json", "-k", "bench_call"]
    # A worker of pytest-xdist passes its variables on, and pytest-benchmark would time nothing.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT, env=env)
    report = json.loads(done.stdout)
    assert {r["fact"].split(",")[-1].split()[0] for r in report["rows"]} == {"public", "native"}
    assert report["machine"]["bandwidth"]["read"] > 0
    assert report["machine"]["torch_asks_for_huge_pages"]
    assert "id" in report["commit"]


def test_a_failing_suite_is_an_error():
    command = [sys.executable, "-m", "sic_kernels", "bench", "--quick", "-k", "no_such_benchmark"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    assert "bench: -k: no benchmark matches 'no_such_benchmark'" in done.stderr
