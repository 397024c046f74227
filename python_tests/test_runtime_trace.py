"""Trace of one step: copies, strict JSON, nesting, limits."""

import json
import math
from typing import NamedTuple

import torch

import sic_kernels as sic
from sic_kernels.runtime import trace


class Pair(NamedTuple):
    indices: torch.Tensor
    unit: str


def test_nothing_is_recorded_outside():
    assert not trace.active()
    trace.record("attend", scores=torch.zeros(3))
    with sic.trace() as step:
        assert trace.active()
    assert step.records == []
    assert not trace.active()


def test_record_is_json_and_a_copy(tmp_path):
    scores = torch.tensor([[1.0, -math.inf], [math.nan, 2.0]])
    with sic.trace() as step:
        trace.record(
            "attend", layer=3, scores=scores, chosen=Pair(torch.tensor([4, 5]), "page"), ratio=0.12, bound=math.inf
        )
        scores.zero_()
    step.save(tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_text(), parse_constant=lambda c: 1 / 0)
    assert data["version"] == 1
    assert data["config"]["digest"] == sic.config.digest
    assert data["dropped"] == 0
    (record,) = data["records"]
    assert record == {
        "op": "attend",
        "layer": 3,
        "scores": {"array": "float32[2,2]@cpu", "values": [1.0, "-inf", "nan", 2.0]},
        "chosen": {"indices": {"array": "int64[2]@cpu", "values": [4, 5]}, "unit": "page"},
        "ratio": 0.12,
        "bound": "inf",
    }


def test_limits():
    with sic.trace(max_values=4, max_records=2) as step:
        for layer in range(5):
            trace.record("select", layer=layer, indices=torch.arange(10))
    assert [r["layer"] for r in step.records] == [0, 1]
    assert step.dropped == 3
    assert step.records[0]["indices"] == {"array": "int64[10]@cpu", "values": [0, 1, 2, 3], "cut": 6}


def test_the_innermost_trace_gets_the_record_and_an_error_ends_it():
    with sic.trace() as outer:
        try:
            with sic.trace() as inner:
                trace.record("a")
                raise KeyError
        except KeyError:
            pass
        trace.record("b")
    assert [r["op"] for r in inner.records] == ["a"]
    assert [r["op"] for r in outer.records] == ["b"]
