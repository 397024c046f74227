"""termination_step: each reason worked by hand, random steps on every backend against the definition, wrong arguments."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import by_case, every_backend, native_backend
from triton_process import check_interpreted, needs_triton

import sic_kernels as sic
from sic_kernels.head import Reason, TerminationRule, TerminationState, TokenStats, record_stops, termination_step
from sic_kernels.head.cases import random_rule, random_step, termination_grid, termination_inputs
from sic_kernels.testing import assert_same_bits, generator, guarded, run

NAN = math.nan
EOS, STRING, SCORE, LENGTH, PLATEAU, SCORE_NAN, STATS_STATUS = Reason


def stats_of(entropy, status=None):
    """TokenStats of which only what the rule reads is there."""
    entropy = torch.as_tensor(entropy, dtype=torch.float32)
    status = torch.zeros(len(entropy), dtype=torch.uint8) if status is None else torch.tensor(status, dtype=torch.uint8)
    return TokenStats(*[None] * 8, status)._replace(entropy=entropy)


def tensors(state):
    return tuple(getattr(state, field.name) for field in dataclasses.fields(state))


def step(backend, rule, state, tokens, score=None, stats=None, matched=None):
    """One step; the reasons of the rows, which are done if and only if one of them is a stop."""
    tokens = torch.tensor(tokens)
    score = None if score is None else torch.tensor(score)
    matched = None if matched is None else torch.tensor(matched)
    inputs = termination_inputs(rule, state, tokens, score, stats, matched)
    done, reason = run("termination_step", inputs, backend, family="head")
    assert torch.equal(done, state.done)
    assert torch.equal(reason, state.reason)
    assert done.dtype == torch.bool
    return [Reason(r) for r in reason.tolist()]


def scored(backend, scores, input_len=0, **rule):
    """The reasons of one row after each of these scores."""
    rule, state = TerminationRule(**rule), TerminationState.allocate(1, input_len)
    return [step(backend, rule, state, [5], None if s is None else [s])[0] for s in scores]


# --- each reason ----------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_eos(dtype, backend):
    rule, state = TerminationRule(eos_ids=[2, 9]), TerminationState.allocate(4)
    tokens = torch.tensor([2, 3, 9, -1], dtype=dtype)
    done, reason = run("termination_step", termination_inputs(rule, state, tokens), backend, family="head")
    assert done.tolist() == [True, False, True, False]
    assert reason.tolist() == [EOS, 0, EOS, 0]
    assert state.generated.tolist() == [1] * 4


@every_backend
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_stop_string(dtype, backend):
    state = TerminationState.allocate(2)
    matched = torch.tensor([0, 1], dtype=dtype)
    inputs = termination_inputs(TerminationRule(), state, torch.tensor([5, 5]), matched=matched)
    assert run("termination_step", inputs, backend, family="head")[1].tolist() == [0, STRING]


@every_backend
def test_length(backend):
    rule, state = TerminationRule(max_tokens=3), TerminationState.allocate(1)
    assert [step(backend, rule, state, [5]) for _ in range(4)] == [[0], [0], [LENGTH], [LENGTH]]
    assert state.generated.tolist() == [3]


@every_backend
def test_score_above_the_threshold(backend):
    """Above, not at it; 0.01 more for each 1000 tokens of the prompt, 0.99 at most."""
    above = lambda x: float(np.nextafter(np.float32(x), np.float32(2)))
    rule = TerminationRule()
    for tokens, bar in ((0, 0.92), (1000, 0.93), (2500, 0.945), (7000, 0.99), (100_000, 0.99)):
        assert rule.threshold_at(tokens) == pytest.approx(bar, abs=1e-12)
        assert scored(backend, [bar, above(bar)], tokens) == [0, SCORE], tokens


@every_backend
def test_patience(backend):
    assert scored(backend, [0.95, 0.95, 0.5, 0.95, 0.95, 0.95], patience=3) == [0, 0, 0, 0, 0, SCORE]


@every_backend
def test_hysteresis(backend):
    """A streak begins above 0.9 and goes on down to 0.8; below it begins anew."""
    bars = {"threshold": 0.9, "slope_per_1k": 0.0, "patience": 3, "hysteresis": 0.1}
    assert scored(backend, [0.85, 0.95, 0.81, 0.81], **bars) == [0, 0, 0, SCORE]
    assert scored(backend, [0.95, 0.85, 0.79, 0.85, 0.95], **bars) == [0] * 5


@every_backend
def test_nan_never_stops_and_is_said(backend):
    assert scored(backend, [NAN, NAN]) == [SCORE_NAN] * 2
    assert scored(backend, [0.95, NAN, 0.95, 0.95], patience=2) == [0, SCORE_NAN, SCORE_NAN, SCORE_NAN | SCORE]


@every_backend
def test_a_step_without_a_score_is_no_step_of_the_streak(backend):
    assert scored(backend, [0.95, None, 0.95], patience=2) == [0, 0, SCORE]
    assert scored(backend, [math.inf, -math.inf], patience=2) == [0, 0]


@every_backend
def test_plateau(backend):
    """max - min of the last three within a quarter; the ring of four has gone round."""
    rule, state = TerminationRule(plateau_window=3, plateau_width=0.25), TerminationState.allocate(1, window=4)
    entropies = [3.0, 2.0, 2.5, 2.0, 2.5, 2.25, 2.5]
    seen = [step(backend, rule, state, [5], stats=stats_of([h]))[0] for h in entropies]
    assert seen == [0] * 6 + [PLATEAU]
    assert state.recent.tolist() == [[2.5, 2.25, 2.5, 2.0]]


@every_backend
def test_what_is_not_known_is_part_of_no_plateau(backend):
    """NaN with a status; steps before the first."""
    rule, state = TerminationRule(plateau_window=2), TerminationState.allocate(1)
    steps = [([1.0], [0]), ([NAN], [4]), ([1.0], [0]), ([1.0], [0])]
    seen = [step(backend, rule, state, [5], stats=stats_of(h, s))[0] for h, s in steps]
    assert seen == [0, STATS_STATUS, STATS_STATUS, STATS_STATUS | PLATEAU]
    infinite = TerminationState.allocate(1)
    assert [step(backend, rule, infinite, [5], stats=stats_of([math.inf]))[0] for _ in range(2)] == [0, 0]


@every_backend
def test_min_tokens_lets_only_the_length_stop(backend):
    rule = TerminationRule(min_tokens=3, max_tokens=3, eos_ids=2, plateau_window=1)
    state = TerminationState.allocate(1)
    every = {"score": [0.95], "stats": stats_of([1.0]), "matched": [True]}
    assert [step(backend, rule, state, [2], **every)[0] for _ in range(2)] == [0, 0]
    assert step(backend, rule, state, [2], **every) == [EOS | STRING | SCORE | LENGTH | PLATEAU]


@every_backend
def test_a_row_that_is_done_stays_so(backend):
    rule, state = TerminationRule(eos_ids=[2]), TerminationState.allocate(2)
    assert step(backend, rule, state, [2, 5], [0.1, 0.1], stats_of([1.0, 1.0])) == [EOS, 0]
    before = [x[0].clone() for x in tensors(state)]
    assert step(backend, rule, state, [5, 5], [NAN, 0.95], stats_of([NAN, 1.0], [1, 0]), [True, False]) == [EOS, SCORE]
    for x, old in zip(tensors(state), before):
        assert_same_bits(x[0], old)


# --- on every backend as the definition -----------------------------------------------------------------------------


def check_steps(backend, seed, B, steps, window):
    """Results and states bit for bit after every step."""
    gen = generator(seed)
    lens = torch.randint(0, 5000, (B,), generator=gen)
    rule = random_rule(gen, window)
    want, got = (TerminationState.allocate(B, lens, window=window) for _ in range(2))
    for _ in range(steps):
        inputs = random_step(gen, B, rule)
        expected = run("termination_step", termination_inputs(rule, want, *inputs), "ref", family="head")
        outs = [guarded((B,), torch.bool), guarded((B,), torch.uint8)]
        mine = termination_inputs(rule, got, *inputs)
        run("termination_step", mine, backend, outs=[g.tensor for g in outs], family="head")
        for g, w in zip(outs, expected):
            g.assert_guards("termination_step")
            assert_same_bits(g.tensor, w)
        for g, w in zip(tensors(got), tensors(want)):
            assert_same_bits(g, w, "state")


@native_backend
@by_case(list(termination_grid()))
def test_grid(case, backend):
    """Rows in the middle of their text."""
    inputs = case.inputs()
    want = case.expected(inputs)
    case.compare(case.run(inputs, backend), want)


@native_backend
@pytest.mark.parametrize("B", [1, 3, 129, 300])
def test_steps(B, backend):
    check_steps(backend, B, B, 6 if B < 200 else 2, 5)


@native_backend
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), B=st.integers(0, 5), window=st.integers(1, 7))
def test_fuzz(seed, B, window, backend):
    check_steps(backend, seed, B, 12, window)


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "neon"])
def test_instruction_sets(isa):
    from sic_kernels.runtime import native

    module = native.module()
    if isa not in module.supported_isas():
        pytest.skip(f"this processor has no {isa}")
    before = module.isa()
    module.force_isa(isa)
    try:
        check_steps("cpu", 7, 9, 8, 3)
    finally:
        module.force_isa(before)


@native_backend
def test_a_row_does_not_depend_on_its_batch(backend):
    gen = generator(1)
    rule = random_rule(gen, 4)
    together = TerminationState.allocate(7, torch.arange(7) * 900, window=4)
    alone = together.reorder([3])
    for _ in range(8):
        inputs = random_step(gen, 7, rule)
        run("termination_step", termination_inputs(rule, together, *inputs), backend, family="head")
        one = [x if x is None else x[3:4] for x in (*inputs[:2], None, inputs[3])]
        one[2] = inputs[2] and inputs[2]._replace(entropy=inputs[2].entropy[3:4], status=inputs[2].status[3:4])
        run("termination_step", termination_inputs(rule, alone, *one), backend, family="head")
    for x, y in zip(tensors(together), tensors(alone)):
        assert_same_bits(x[3:4], y)


@pytest.mark.backend("simt")
def test_it_can_be_captured():
    """A graph of one step, replayed, advances the state; nothing is allocated and nothing waits."""
    from sic_kernels.runtime import native

    simt = native.simt_module()
    rule, state = TerminationRule(max_tokens=3, patience=2), TerminationState.allocate(2)
    score, tokens = torch.tensor([0.5, 0.95]), torch.tensor([4, 4])
    outs = (torch.empty(2, dtype=torch.bool), torch.empty(2, dtype=torch.uint8))
    graph = simt.Graph(lambda: termination_step(rule, state, score, None, tokens, out=outs, backend="simt"))
    before = simt.counters()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(outs[1].tolist())
    assert seen == [[0, 0], [0, SCORE], [LENGTH, SCORE]]
    after = simt.counters()
    assert all(after[n] == before[n] for n in ("allocations", "synchronisations", "copies"))


@pytest.mark.backend("cuda")
def test_on_a_gpu():
    state = TerminationState.allocate(2, device="cuda")
    done, _ = termination_step(TerminationRule(eos_ids=[2]), state, None, None, torch.tensor([2, 3], device="cuda"))
    assert done.tolist() == [True, False]


@needs_triton
@pytest.mark.slow
def test_triton():
    """All of the above on Triton's interpreter."""
    check_interpreted(["test_head_termination.py"], 23)


# --- the public function --------------------------------------------------------------------------------------------


def test_numpy_in_numpy_out():
    state = TerminationState.allocate(2, [10, 20])
    done, reason = termination_step(
        TerminationRule(eos_ids=[2]), state, np.float32([0.1, 0.99]), None, np.array([2, 3])
    )
    assert done.tolist() == [True, True]
    assert reason.dtype == np.uint8
    assert reason.tolist() == [EOS, SCORE]


def test_states_begin_anew_and_are_reordered():
    rule, state = TerminationRule(eos_ids=[2], plateau_window=2), TerminationState.allocate(3, [1, 2, 3], window=2)
    termination_step(rule, state, None, stats_of([1.0, 2.0, 3.0]), torch.tensor([2, 2, 5]))
    forked = state.reorder(torch.tensor([0, 2, 2, 2]))
    assert forked.done.tolist() == [True, False, False, False]
    assert forked.input_lens.tolist() == [1, 3, 3, 3]
    state.reset([0], input_lens=[8])
    assert state.done.tolist() == [False, True, False]
    assert state.generated.tolist() == [0, 1, 1]
    assert state.input_lens.tolist() == [8, 2, 3]
    assert state.recent[0].isnan().all()
    state.reset()
    assert not state.done.any()


def test_stops_are_counted_by_reason():
    sic.metrics.reset()
    bits = [EOS, EOS | LENGTH, SCORE | SCORE_NAN, SCORE_NAN, 0]
    record_stops(torch.tensor(bits, dtype=torch.uint8), complete=torch.tensor([True, False, True, True, True]))
    by_reason = sic.metrics.snapshot()["sic_stop_reason_ratio"]["by_reason"]
    assert {name: v["numerator"] for name, v in by_reason.items()} == {
        "eos": 2, "string": 0, "score": 1, "length": 1, "plateau": 0,
    }  # fmt: skip
    assert by_reason["eos"]["denominator"] == 3
    assert sic.metrics.snapshot()["sic_termination_accuracy_ratio"]["ratio"] == pytest.approx(2 / 3)
    sic.metrics.reset()


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 1.5}, {"threshold": -0.1}, {"threshold": NAN}, {"threshold": 0.995}, {"threshold": "high"},
        {"max_threshold": 1.01}, {"slope_per_1k": -1}, {"slope_per_1k": math.inf}, {"hysteresis": 2}, {"patience": 0},
        {"patience": 1.5}, {"min_tokens": -1}, {"max_tokens": 0}, {"min_tokens": 5, "max_tokens": 4},
        {"eos_ids": [-1]}, {"eos_ids": "2"}, {"eos_ids": range(33)}, {"eos_ids": [1.0]}, {"plateau_window": -1},
        {"plateau_width": NAN}, {"threshold": True},
    ],
    ids=str,
)  # fmt: skip
def test_bad_rules(options):
    with pytest.raises(sic.ArgumentError, match=r"^TerminationRule: \w+: got .*, expected "):
        TerminationRule(**options)


def test_rules_are_values():
    assert TerminationRule(eos_ids=[3, 3, 2]) == TerminationRule(eos_ids=(3, 2))
    assert hash(TerminationRule()) == hash(TerminationRule())
    with pytest.raises(dataclasses.FrozenInstanceError):
        TerminationRule().threshold = 0.5


WRONG = {
    "tokens": {"tokens": torch.tensor([1.0, 2.0])},
    "score": {"score": torch.zeros(3)},
    "matched": {"matched": torch.zeros(2)},
    "stats": {"rule": TerminationRule(plateau_window=2)},
    "stats.entropy": {"stats": stats_of([0.0] * 3)},
    "stats.status": {"stats": stats_of([0.0, 0.0])._replace(status=None)},
    "plateau_window": {"rule": TerminationRule(plateau_window=65), "stats": stats_of([0.0, 0.0])},
    "rule": {"rule": 0.92},
    "state": {"state": None},
    "state.generated": {"state": dataclasses.replace(TerminationState.allocate(2), generated=torch.zeros(2))},
    "state.recent": {"state": dataclasses.replace(TerminationState.allocate(2), recent=torch.zeros(2, 0))},
    "state.streak": {
        "state": dataclasses.replace(TerminationState.allocate(2), streak=torch.tensor(0).int().expand(2))
    },
    "out": {"out": torch.zeros(2)},
    "done": {"out": (torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8))},
}


@pytest.mark.parametrize("arg", WRONG)
@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_wrong_arguments_touch_nothing(arg, backend):
    call = {"rule": TerminationRule(), "state": TerminationState.allocate(2), "score": None, "stats": None,
            "tokens": torch.tensor([1, 2]), **WRONG[arg]}  # fmt: skip
    state = call["state"]
    before = [] if state is None else [x.clone() for x in tensors(state)]
    with pytest.raises(sic.ArgumentError, match=rf"^termination_step: {arg}: got .*, expected "):
        termination_step(**call, backend=backend)
    for x, old in zip([] if state is None else tensors(state), before):
        assert_same_bits(x, old)


def test_outputs_may_not_be_the_state():
    state = TerminationState.allocate(2)
    out = (torch.empty(2, dtype=torch.bool), state.reason)
    with pytest.raises(sic.ArgumentError, match=r"reason: got .* in the memory of an input"):
        termination_step(TerminationRule(), state, None, None, torch.tensor([1, 2]), out=out)
    twice = dataclasses.replace(state, streak=state.generated)
    with pytest.raises(sic.ArgumentError, match=r"state.generated: got .* in the memory of state.streak"):
        termination_step(TerminationRule(), twice, None, None, torch.tensor([1, 2]))


@pytest.mark.parametrize("lens", [[1, 2, 3], "12", 1.5, [1.0, 2.0]])
def test_bad_prompt_lengths(lens):
    with pytest.raises(
        sic.ArgumentError, match=r"TerminationState: input_lens: got .*, expected a number of tokens, or 2"
    ):
        TerminationState.allocate(2, lens)
