"""Probes and their thresholds on data whose truth is known."""

import json
import math

import pytest
import torch

from sic_kernels import head
from sic_kernels.head.probe_metrics import calibration_error
from sic_kernels.runtime.errors import ArgumentError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def data(prompts=60, length=40, D=24, seed=0):
    """hidden whose channel 3 says where the answer is complete, and the other channels nothing."""
    gen = generator(seed)
    hidden = torch.randn(prompts * length, D, generator=gen) + 2.0
    prompt = torch.arange(prompts).repeat_interleave(length)
    complete = hidden[:, 3] > 3.2
    return hidden, complete, prompt


# --- training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_a_probe_finds_what_is_there(activation):
    hidden, complete, prompt = data()
    parts = head.split_by_prompt(prompt)
    probe = head.train_probe(hidden[parts.train], complete[parts.train], activation=activation, decay=1e-4)
    assert probe.projection.shape == (16, 24)
    score = head.probe_scores(probe, hidden)
    by_probe, by_chance = head.evaluate_probe(
        {"probe": score, "mean": torch.full_like(score, 0.1)}, complete, parts.test
    )
    assert by_probe["auroc"] > 0.97
    assert by_probe["precision"] > 0.75
    assert by_chance["auroc"] == 0.5
    assert by_probe["brier"] < 0.06 < by_chance["brier"]


def test_a_probe_of_numbers():
    hidden, _, prompt = data()
    truth = 1.5 * hidden[:, 1] - hidden[:, 2]
    parts = head.split_by_prompt(prompt)
    probe = head.train_probe(hidden[parts.train], truth[parts.train], link="identity", decay=1e-5)
    (row,) = head.evaluate_probe({"probe": head.probe_scores(probe, hidden)}, truth, parts.test)
    assert row["r2"] > 0.99
    assert row["mae"] < 0.1


def test_nothing_is_found_in_noise():
    hidden, _, prompt = data()
    truth = torch.rand(len(hidden), generator=generator(7)) < 0.3
    parts = head.split_by_prompt(prompt)
    probe = head.train_probe(hidden[parts.train], truth[parts.train])
    score = head.probe_scores(probe, hidden)
    assert head.auroc(score[parts.test].double(), truth[parts.test]) == pytest.approx(0.5, abs=0.06)


def test_the_same_seed_gives_the_same_probe():
    hidden, complete, _ = data(12)
    first, second, other = (head.train_probe(hidden, complete, seed=seed, activation="relu") for seed in (3, 3, 4))
    for name in ("projection", "vector", "bias"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.projection, other.projection)


def test_the_kernel_gives_the_scores():
    hidden, complete, _ = data(12)
    for activation in ("none", "relu"):
        p = head.train_probe(hidden, complete, activation=activation)
        score = head.probe(hidden, p.projection, p.vector, p.bias, activation=activation)
        torch.testing.assert_close(score[:, 0], head.probe_scores(p, hidden), atol=1e-5, rtol=1e-5)


# --- split --------------------------------------------------------------------------------------------------------------


def test_no_prompt_is_in_two_parts():
    prompt = torch.randint(0, 50, (1000,), generator=generator())
    parts = head.split_by_prompt(prompt, seed=5)
    names = [set(prompt[part].tolist()) for part in parts]
    assert set.union(*names) == set(prompt.tolist())
    assert sum(map(len, names)) == len(set(prompt.tolist()))
    assert sum(map(len, parts)) == 1000
    assert [len(n) for n in names] == [20, 15, 15]
    again, other = (head.split_by_prompt(prompt, seed=seed) for seed in (5, 6))
    assert torch.equal(parts.test, again.test)
    assert names[2] != set(prompt[other.test].tolist())


def test_three_prompts_are_enough():
    parts = head.split_by_prompt(torch.tensor([4, 4, 9, 9, 11]))
    assert all(len(part) for part in parts)


# --- metrics, by hand -----------------------------------------------------------------------------------------------------


def test_auroc_by_hand():
    truth = torch.tensor([False, False, True, True])
    assert head.auroc(torch.tensor([0.1, 0.2, 0.3, 0.4]), truth) == 1.0
    assert head.auroc(torch.tensor([0.4, 0.3, 0.2, 0.1]), truth) == 0.0
    assert head.auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), truth) == 0.75  # of four pairs one is wrong
    assert head.auroc(torch.tensor([0.5, 0.2, 0.5, 0.9]), truth) == 0.875  # and a tie is half
    assert math.isnan(head.auroc(torch.tensor([0.5]), torch.tensor([True])))


def test_calibration_error_by_hand():
    p = torch.tensor([0.05, 0.05, 0.95, 0.95], dtype=torch.float64)
    truth = torch.tensor([False, False, True, False])
    assert calibration_error(p, truth) == pytest.approx((2 * 0.05 + 2 * 0.45) / 4)
    assert calibration_error(torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([True, False])) == 0


def test_the_interval_of_a_difference_knows_what_is_sure():
    _, truth, prompt = data(30)
    good = truth.double() + 0.3 * torch.randn(len(truth), generator=generator(1))
    bad = torch.rand(len(truth), generator=generator(2))
    low, high = head.bootstrap_difference(head.auroc, good, bad, truth, prompt)
    assert 0.3 < low < high
    low, high = head.bootstrap_difference(
        head.auroc, bad, torch.rand(len(truth), generator=generator(3)), truth, prompt
    )
    assert low < 0 < high


# --- stopping and its guarantee ---------------------------------------------------------------------------------------------


def test_stops_by_hand():
    prompts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    score = torch.tensor([0.1, 0.7, 0.2, 0.9, 0.8, 0.1, 0.2, 0.3, 0.99])
    complete = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0, 1]).bool()
    stops = head.stops_at(score, complete, prompts, 0.6)
    assert stops.at.tolist() == [2, 1, 2]  # the last position of an answer is its own end
    assert (stops.prompts, stops.stopped, stops.premature) == (3, 2, 1)
    assert (stops.saved, stops.tokens) == (2 + 2, 9)
    assert stops.risk == pytest.approx(1 / 3)
    shuffled = torch.tensor([4, 0, 5, 1, 7, 2, 6, 3, 8])  # prompts interleaved, each in order
    mixed = head.stops_at(score[shuffled], complete[shuffled], prompts[shuffled], 0.6)
    assert mixed.at.tolist() == stops.at.tolist()
    assert mixed.premature == 1


def test_p_values_by_hand():
    assert head.binomial_p_value(0, 1, 0.5) == pytest.approx(0.5)
    assert head.binomial_p_value(0, 59, 0.05) == pytest.approx(0.95**59)
    assert head.binomial_p_value(1, 3, 0.25) == pytest.approx(0.75**3 + 3 * 0.25 * 0.75**2)
    assert head.binomial_p_value(4, 4, 0.1) == pytest.approx(1.0)
    assert head.binomial_p_value(100, 100_000, 0.002) < 1e-12


def test_59_prompts_are_the_fewest_for_five_percent():
    """0.95^59 = 0.0485, 0.95^58 = 0.051."""
    for count, expected in ((59, True), (58, False)):
        prompts = torch.arange(count).repeat_interleave(2)
        found = head.certify(torch.full((2 * count,), 0.5), torch.ones(2 * count, dtype=torch.bool), prompts)
        assert (found.threshold is not None) == expected


def simulated(seed, prompts, length=12):
    """Scores for which the risk of a threshold is known: one candidate each, premature with probability (1 - score)^2."""
    gen = generator(seed)
    score = torch.zeros(prompts, length)
    score[:, 5] = torch.rand(prompts, generator=gen)
    complete = torch.ones(prompts, length, dtype=torch.bool)
    complete[:, 5] = torch.rand(prompts, generator=gen) >= (1 - score[:, 5]) ** 2
    return score.flatten(), complete.flatten(), torch.arange(prompts).repeat_interleave(length)


def test_learn_then_test_keeps_the_risk():
    """P(risk > 5 %) <= 5 %: the true risk of threshold t is the integral of (1 - s)^2 from t to 1."""
    broken, thresholds = 0, [t / 100 for t in range(80, 30, -2)]  # the true limit, 0.469, is between two of them
    for seed in range(100):
        found = head.certify(*simulated(seed, 100, 7), thresholds=thresholds)
        if found.threshold is not None and (1 - found.threshold) ** 3 / 3 > 0.05:
            broken += 1
    assert broken <= 11  # of 100 at 5 %: more has a probability below 1 %


def test_learn_then_test_is_not_idle():
    found = head.certify(*simulated(0, 2000))
    assert 0.47 < found.threshold < 0.6  # the true limit is 1 - 0.15^(1/3) = 0.469
    assert found.stops.risk <= 0.05
    assert found.p_value <= 0.05


def test_the_search_ends_at_the_first_threshold_that_fails():
    """A lower threshold that would pass by luck is not reached."""
    prompts = torch.arange(100).repeat_interleave(3)
    score = torch.tensor([0.1, 0.9, 0.0]).repeat(100)
    complete = torch.tensor([True, False, True]).repeat(100)
    found = head.certify(score, complete, prompts, thresholds=(0.95, 0.8, 0.05))
    assert found.threshold == 0.95
    assert found.stops.stopped == 0


# --- files and errors ---------------------------------------------------------------------------------------------------------


def test_files(tmp_path):
    pytest.importorskip("safetensors", reason="pip install 'sic_kernels[blobs]'")
    hidden, complete, _ = data(8)
    stop = head.train_probe(hidden, complete, activation="relu")
    ahead = head.train_probe(hidden, hidden[:, 0], link="identity")
    path, meta = tmp_path / "p.safetensors", {"model": "m", "rows": [{"auroc": 0.5}]}
    head.save_probes(path, {"complete": stop, "next_entropy": ahead}, meta)
    probes, found = head.load_probes(path)
    assert found == meta
    assert (probes["complete"].activation, probes["next_entropy"].link) == ("relu", "identity")
    assert torch.equal(head.probe_scores(probes["complete"], hidden), head.probe_scores(stop, hidden))
    json.dumps(found)
    (tmp_path / "other").write_bytes(b"nothing")
    for name in ("other", "absent"):
        with pytest.raises(ArgumentError, match="load_probes: path: got"):
            head.load_probes(tmp_path / name)


def test_errors():
    hidden, complete, prompt = data(4)
    for arguments, options, words in (
        ((hidden[0], complete), {}, "train_probe: hidden: got float32"),
        ((hidden, complete[:5]), {}, r"train_probe: targets: got bool\[5\]"),
        ((hidden, complete), {"link": "probit"}, "train_probe: link: got 'probit'"),
        ((hidden, complete), {"rank": 0}, "train_probe: rank"),
        ((hidden * torch.nan, complete), {}, "not finite"),
    ):
        with pytest.raises(ArgumentError, match=words):
            head.train_probe(*arguments, **options)
    with pytest.raises(ArgumentError, match="split_by_prompt: shares"):
        head.split_by_prompt(prompt, (0.5, 0.6))
    with pytest.raises(ArgumentError, match="split_by_prompt: prompts: got 2"):
        head.split_by_prompt(torch.tensor([0, 1, 1]))
    with pytest.raises(ArgumentError, match="certify: risk"):
        head.certify(hidden[:, 0], complete, prompt, risk=0.0)
    with pytest.raises(ArgumentError, match="certify: thresholds"):
        head.certify(hidden[:, 0], complete, prompt, thresholds=(0.1, 0.9))
    with pytest.raises(ArgumentError, match="stops_at: prompts"):
        head.stops_at(hidden[:, 0], complete, prompt[:3], 0.5)
    with pytest.raises(ArgumentError, match="evaluate_probe: predictions"):
        head.evaluate_probe({"probe": hidden[:3, 0]}, complete)


def test_numbers_need_their_link():
    """Cross-entropy against an entropy of 5 nats would end in NaN."""
    hidden, numbers = torch.randn(40, 8), 5 * torch.rand(40)
    with pytest.raises(
        ArgumentError, match=r"train_probe: targets: got .* to .*, expected targets from 0 to 1, or link="
    ):
        head.train_probe(hidden, numbers)
    assert head.probe_scores(head.train_probe(hidden, numbers, link="identity"), hidden).isfinite().all()
