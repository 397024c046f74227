"""What verify and campaigns find wrong with segments."""

import pytest
import torch
from replay_helpers import LAYERS, RUN, TOKENS, assert_state, inputs, plan, segments, state, weights

from sic_kernels import replay
from sic_kernels.replay import Segment, faults


def test_the_campaign_notices_a_segment_that_cannot_be_repeated():
    p = plan(segments=[*segments()[:-1], broken("accumulates")])
    assert faults.campaign(p, inputs(), count=40, seed=1, **RUN).failures


def broken(how):
    """A head that is wrong in one way."""
    w = weights()[-1]
    calls = [0]

    def fn(step):
        x = step[f"h{LAYERS % 2}"][: step.count] @ w
        calls[0] += 1
        if how == "accumulates":
            step["logits"][step.position : step.end] += x
        elif how == "counter":
            at = (calls[0] - 1) * step.count % TOKENS
            step["logits"][at : at + step.count] = x
        elif how == "global_rng":
            step["logits"][step.position : step.end] = x + torch.rand_like(x)
        elif how == "changes_input":
            step[f"h{LAYERS % 2}"].mul_(2)
            step["logits"][step.position : step.end] = x
        elif how == "undeclared_write":
            step["kv0"][0, 0, 0] = 1
            step["logits"][step.position : step.end] = x
        elif how == "undeclared_read":
            step["logits"][step.position : step.end] = x + step["kv0"][0, :1]
        elif how == "partial":
            step["logits"][step.position : step.end - 1] = x[:-1]
        elif how == "beyond":
            step["logits"][step.position : step.end] = x
            step["logits"][step.end :] = 1
        elif how == "call_count":
            step["logits"][step.position : step.end] = x + calls[0]

    return Segment("head", fn, reads=[f"h{LAYERS % 2}"], rows=[replay.Rows("logits")])


def test_verify_finds_nothing_wrong():
    p = plan()
    before = state(p)
    assert p.verify(inputs(), begin=4, end=8) == []
    assert_state(p, before)


@pytest.mark.parametrize(
    ("how", "hazard"),
    [("accumulates", "reads_output"), ("counter", "outside_position"), ("global_rng", "global_rng"),
     ("changes_input", "changes_input"), ("undeclared_write", "undeclared_write"), ("undeclared_read", "undeclared_read"),
     ("partial", "reads_output"),
     ("beyond", "outside_position"), ("call_count", "nondeterministic")],
)  # fmt: skip
def test_verify_finds(how, hazard):
    p = plan(segments=[*segments()[:-1], broken(how)])
    found = p.verify(inputs(), begin=4, end=8)
    assert {e.segment for e in found} == {"head"}
    assert hazard in [e.hazard for e in found], [str(e) for e in found]


def test_verify_says_what_raises():
    def fails(step):
        raise ValueError("no")

    p = plan(
        segments=[*segments()[:-1], Segment("head", fails, reads=[f"h{LAYERS % 2}"], rows=[replay.Rows("logits")])]
    )
    assert [(e.segment, e.hazard) for e in p.verify(inputs(), end=4)] == [("head", "raises")]


POISONED = [
    ("adds to a flag", "reads_output", torch.bool, lambda step: step["o"].logical_and_(step["x"])),
    ("a hidden flag", "undeclared_read", torch.bool, lambda step: step["o"].copy_(step["x"] & step["hidden"])),
    ("sets a flag", "undeclared_write", torch.bool, lambda step: (step["o"].copy_(step["x"]), step["hidden"].fill_(True))),
    ("writes nothing", "not_written", torch.bool, lambda step: None),
    ("a maximum", "reads_output", torch.float32, lambda step: step["o"].copy_(torch.fmax(step["o"], step["x"].abs()))),
    ("a gate", "undeclared_read", torch.float32,
     lambda step: step["o"].copy_(torch.where(step["hidden"] > 0.5, step["x"], -step["x"]))),
    ("without NaN", "undeclared_read", torch.float32, lambda step: step["o"].copy_(step["x"] + step["hidden"].nan_to_num())),
    ("odd or even", "undeclared_read", torch.int64, lambda step: step["o"].copy_(step["x"] + step["hidden"] % 2)),
    ("an index", "undeclared_read", torch.int64, lambda step: step["o"].copy_(step["x"][step["hidden"]])),
    ("-1", "undeclared_write", torch.uint8, lambda step: (step["o"].copy_(step["x"]), step["hidden"].fill_(255))),
]  # fmt: skip


@pytest.mark.parametrize(("hazard", "dtype", "fn"), [row[1:] for row in POISONED], ids=[row[0] for row in POISONED])
def test_verify_on_types_that_hide_a_poison(hazard, dtype, fn):
    held = {name: torch.zeros(4, dtype=dtype) for name in ("x", "o", "hidden")}
    p = plan(segments=[Segment("s", fn, reads=["x"], writes=["o"])], buffers=held, inputs=["x"], outputs=["o"])
    found = p.verify({"x": torch.tensor([1, 0, 1, 1]).to(dtype)}, end=1)
    assert hazard in [e.hazard for e in found], [str(e) for e in found]


def test_verify_on_a_single_number():
    held = {"x": torch.tensor(2.0), "o": torch.tensor(0.0)}
    parts = [Segment("s", lambda step: step["o"].copy_(step["x"] * 2), reads=["x"], writes=["o"])]
    assert plan(segments=parts, buffers=held, inputs=["x"], outputs=["o"]).verify(end=1) == []
