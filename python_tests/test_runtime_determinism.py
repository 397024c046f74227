"""verify_determinism sees one bit, wherever it is."""

import dataclasses
import json
from typing import NamedTuple

import numpy
import pytest
import torch

import sic_kernels as sic
from sic_kernels.cli import main
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


def test_the_command_runs_every_operation(capsys):
    assert main(["verify-determinism", "--runs", "2", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    named = {"delta_encode": "encode", "delta_decode": "decode"}
    named |= dict.fromkeys(("logits_part", "lm_head_part"), "partial_stats")
    assert set(report["operations"]) >= {named.get(op, op) for op in RESULTS}
    assert all(row["digest"] and not row["why"] for row in report["operations"].values())
