"""verify_determinism sees one bit, wherever it is."""

import dataclasses
import json
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.autograd.profiler_legacy

import sic_kernels as sic
from sic_kernels.cli import main
from sic_kernels.cli import verify_determinism as command
from sic_kernels.runtime import run_costs
from sic_kernels.testing import RESULTS


class Result(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


@dataclasses.dataclass
class Box:
    x: torch.Tensor


def results(values):
    queue = iter(values)
    return lambda: next(queue)


def test_equal():
    calls = []

    def fn():
        calls.append(1)
        return {
            "a": [torch.arange(6.0).view(2, 3).t(), 1.5, None, "x", True],
            "b": Box(torch.ones(2, dtype=torch.bfloat16)),
        }

    report = sic.verify_determinism(fn, runs=4)
    assert report
    assert report.equal
    assert report.runs == 4
    assert len(calls) == 4
    assert report.difference == ""
    assert report.digest == sic.verify_determinism(fn, runs=2).digest


def test_one_bit_in_one_run_is_found_and_named():
    good, bad = torch.zeros(5), torch.zeros(5)
    bad.view(torch.int32)[3] = 1  # the smallest denormal
    fn = results([Result(good, good), Result(good, good), Result(good, bad)])
    report = sic.verify_determinism(fn, runs=3)
    assert not report
    assert report.difference == "run 3 of 3: result.lse: float32[5]@cpu differs from byte 12"


@pytest.mark.parametrize(
    "first, second",
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([0.0]), torch.tensor([0])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (numpy.zeros(2), numpy.zeros(3)),
        (1, 2),
        (0.0, -0.0),
        ([1], [1, 2]),
        ((1, None), (1, 0)),
        ({"a": 1}, {"b": 1}),
        ("a", "b"),
    ],
)
def test_differences(first, second):
    report = sic.verify_determinism(results([first, second]), runs=2)
    assert not report.equal
    assert report.difference
    assert sic.verify_determinism(results([first, first]), runs=2).equal


def test_equal_nans_are_equal():
    nan = torch.tensor([float("nan"), float("-inf")])
    assert sic.verify_determinism(lambda: nan.clone(), runs=3)


def test_empty_and_strided():
    base = torch.arange(12.0)
    assert sic.verify_determinism(lambda: (base[::2], torch.empty(0, 3)), runs=2)


def test_wrong_use():
    with pytest.raises(sic.ArgumentError, match="runs: got 1, expected at least 2"):
        sic.verify_determinism(lambda: 1, runs=1)
    with pytest.raises(sic.ArgumentError, match="got object"):
        sic.verify_determinism(lambda: object(), runs=2)


def test_memory_and_time_are_measured_when_asked():
    calls = []

    def fn():
        """At most 4000 + 2000 bytes at once."""
        calls.append(1)
        first = torch.empty(1000)
        second = torch.zeros(500)
        del first
        return second, torch.zeros(3000, dtype=torch.uint8)

    report = sic.verify_determinism(fn, runs=3, measure=True)
    assert report
    assert len(calls) == 3 + 1 + 3 + 3
    assert report.costs.peak_bytes == (6000, 6000)
    assert report.costs.memory_equal
    assert len(report.costs.seconds) == 3
    assert 0 < report.costs.percentile(0.5) <= report.costs.percentile(0.99)
    assert report.costs.spread >= 1
    as_json = json.loads(json.dumps(report.as_dict()))
    assert as_json["costs"]["peak_bytes"] == [6000, 6000]
    assert sic.verify_determinism(fn, runs=2).as_dict()["costs"] is None


def test_other_memory_is_not_the_same_although_the_bits_are():
    sizes = iter([8] * 4 + [8, 24, 16] + [8] * 3)
    report = sic.verify_determinism(lambda: torch.zeros(next(sizes))[:1].clone(), runs=3, measure=True)
    assert report.equal
    assert not report
    assert report.costs.peak_bytes == (8 * 4 + 4, 24 * 4 + 4)


def test_percentiles_by_hand():
    costs = run_costs.Costs(100, (1, 1), 0, tuple(float(n) for n in range(1, 101)))
    assert [costs.percentile(share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert costs.spread == 99 / 50
    few = run_costs.Costs(3, (1, 1), 0, (1.0, 2.0, 5.0))
    assert [few.percentile(share) for share in (0.5, 0.99)] == [2.0, 5.0]


def test_on_cuda_the_peak_is_its_allocators(monkeypatch):
    """The device's counters, made up: 100 bytes are there before, 350 at most."""
    done = []
    for name, answer in (("memory_allocated", 100), ("max_memory_allocated", 350)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    costs = run_costs.measure(lambda: done.append("run"), 1)
    assert costs.peak_bytes == (250, 250)
    memory = ["synchronize", "reset_peak_memory_stats", "run", "synchronize"]
    assert done == ["run", *memory, "synchronize", "run", "synchronize"]


def test_threads_count_at_the_same_time(monkeypatch):
    """Made up: one holds 100 bytes from 1 to 4, the other 50 from 2 to 3, and 30 twice at 5: 150, not 100."""
    moves = [[(1, 100), (4, -100)], [(2, 50), (3, -50), (5, 30), (5, -30), (5, 30), (5, -30)]]

    def event(at, size):
        return SimpleNamespace(kind=lambda: "memory_alloc", start_us=lambda: at, cpu_memory_usage=lambda: size)

    threads = [[event(*move) for move in thread] for thread in moves]
    monkeypatch.setattr(torch.autograd.profiler_legacy, "_enable_profiler_legacy", lambda config: None)
    monkeypatch.setattr(torch.autograd.profiler_legacy, "_disable_profiler_legacy", lambda: threads)
    assert run_costs._cpu_peak(lambda: None) == 150


def test_an_error_in_a_run_ends_the_record():
    def fails():
        raise KeyError

    for _ in range(2):  # a recorder left running would refuse the second
        with pytest.raises(KeyError):
            run_costs._cpu_peak(fails)
    assert run_costs._cpu_peak(lambda: torch.zeros(2)) == 8


def test_wrong_measure():
    with pytest.raises(sic.ArgumentError, match="measure: got int, expected True or False"):
        sic.verify_determinism(lambda: 1, measure=1)


def test_the_command_names_what_differs(monkeypatch, capsys):
    rows = {"op": {"digest": "0" * 16, "why": "", "costs": None}}
    other = {"op": {"digest": "1" * 16, "why": "peak memory from 1 to 2 bytes", "costs": None}}
    answers = {1: rows, 2: other}
    monkeypatch.setattr(command, "_in_process", lambda args, threads: answers[threads])
    assert main(["verify-determinism", "--runs", "2"]) == 1
    printed = capsys.readouterr().out
    for part in ("DIFFERS", "2 threads: peak memory from 1 to 2 bytes", "differs between thread counts", "some runs"):
        assert part in printed
    assert main(["verify-determinism", "--runs", "2", "--threads", "1", "--no-measure"]) == 0
    assert "every bit agrees" in capsys.readouterr().out


def test_the_command_runs_every_operation(capsys):
    assert main(["verify-determinism", "--runs", "2", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    named = {"delta_encode": "encode", "delta_decode": "decode"}
    named |= dict.fromkeys(("logits_part", "lm_head_part"), "partial_stats")
    assert set(report["operations"]) >= {named.get(op, op) for op in RESULTS}
    for row in report["operations"].values():
        assert row["digest"]
        assert not row["why"]
        assert row["costs"]["1"]["memory_equal"]
        assert row["costs"]["1"]["p50"] > 0
