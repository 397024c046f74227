"""Confidence, used later: the ring, the bias on keys, the budget of a verification; values worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sic_kernels as sic
from sic_kernels.head import ConfidenceRing, verify_budget
from sic_kernels.testing import assert_close, generator

NAN, INF = math.nan, math.inf


def pushed(values, **options):
    ring = ConfidenceRing(1, **options)
    for value in values:
        ring.push(torch.tensor([value]))
    return ring


# --- the ring -------------------------------------------------------------------------------------------------------


def test_a_confidence_is_read_three_tokens_later():
    ring, seen = ConfidenceRing(2), []
    for i in range(6):
        seen.append(ring.read().tolist())
        ring.push(torch.tensor([0.25, 0.5]) / 2**i)
    assert seen == [[1, 1], [1, 1], [1, 1], [0.25, 0.5], [0.125, 0.25], [0.0625, 0.125]]


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_lags_and_small_rings(lag):
    values = [i / 32 for i in range(20)]
    for n in range(20):
        ring = pushed(values[:n], lag=lag, capacity=5)
        assert ring.read().item() == (values[n - lag] if n >= lag else 1)


def test_what_is_no_confidence():
    assert [pushed([x], lag=1).read().item() for x in (NAN, 2.0, -1.0, INF)] == [1, 1, 0, 1]


def test_rows_begin_anew_and_are_reordered():
    ring = ConfidenceRing(3, lag=1)
    ring.push(torch.tensor([0.25, 0.5, 0.75]))
    ring.reset([1])
    assert ring.read().tolist() == [0.25, 1, 0.75]
    ring.push(torch.tensor([0.5, 0.5, 0.5]))
    ring.reorder([2, 2, 1])
    assert ring.count.tolist() == [2, 2, 1]
    ring.reset(torch.tensor([True, False, False]))
    assert ring.read().tolist() == [1, 0.5, 0.5]
    ring.reset()
    assert ring.count.tolist() == [0, 0, 0]


def test_a_ring_keeps_its_memory():
    """Updated in place, so that a captured graph advances it."""
    ring = ConfidenceRing(2, capacity=4)
    memory = ring.confidence.data_ptr(), ring.count.data_ptr()
    for _ in range(9):
        ring.push(torch.rand(2))
    ring.reorder([1, 0])
    ring.reset()
    assert memory == (ring.confidence.data_ptr(), ring.count.data_ptr())


def test_nothing_depends_on_a_number_of_the_host():
    """All of a step runs on tensors without values, so it cannot wait for one."""
    ring = ConfidenceRing(2, device="meta")
    ring.push(torch.empty(2, device="meta"))
    assert ring.read().shape == (2,)
    assert ring.as_key_bias(torch.empty(2, dtype=torch.int64, device="meta"), 9).shape == (2, 9)
    assert verify_budget(torch.empty(2, 4, device="meta")).shape == (2,)


# --- the bias -------------------------------------------------------------------------------------------------------


def test_bias():
    """Prompt of 2, tokens of confidence 1/2, 1/4, 0, 1; with lag 2 the newest is not known yet."""
    bias = pushed([0.5, 0.25, 0.0, 1.0], lag=2).as_key_bias(torch.tensor([2]), 8, strength=2.0, floor=0.1)
    want = [0, 0, 2 * math.log(0.5), 2 * math.log(0.25), 2 * math.log(0.1), 0, 0, 0]
    assert_close(bias, torch.tensor([want]), atol=1e-6)
    assert bias.dtype == torch.float32


def test_bias_of_rows_and_of_a_ring_gone_round():
    ring = ConfidenceRing(2, lag=1, capacity=3)
    for i in range(5):
        ring.push(torch.tensor([2.0 ** -(i + 1), 0.5]))
    ring.reset([1])
    bias = ring.as_key_bias(torch.tensor([1, 0], dtype=torch.int32), 7, floor=1e-3)
    want = [[0, 0, 0, *(math.log(2.0**-i) for i in (3, 4, 5)), 0], [0] * 7]
    assert_close(bias, torch.tensor(want), atol=1e-6)


def test_bias_into_given_memory():
    ring, out = pushed([0.5], lag=1), torch.full((1, 3), NAN)
    assert ring.as_key_bias(torch.tensor([1]), 3, out=out) is out
    assert torch.equal(out, ring.as_key_bias(torch.tensor([1]), 3))
    assert ring.as_key_bias(torch.tensor([5]), 3).tolist() == [[0, 0, 0]]
    assert not ring.as_key_bias(torch.tensor([1]), 3, strength=0.0).any()


def test_bias_in_attention():
    """At strength 1 a key's weight is multiplied by its token's confidence."""
    gen = generator(0)
    k, v, q = (torch.randn(1, 1, n, 16, generator=gen) for n in (4, 4, 1))
    bias = pushed([0.5, 0.25], lag=1).as_key_bias(torch.tensor([2]), 4)
    lens = torch.tensor([4], dtype=torch.int32)
    out, _ = sic.slicing.sliced_attention(q.transpose(1, 2), k, v, None, lens, key_bias=bias)
    weights = (q @ k.transpose(2, 3) / 4).softmax(-1) * torch.tensor([1, 1, 0.5, 0.25])
    assert_close(out.flatten(), (weights / weights.sum() @ v).flatten(), atol=1e-5)


# --- the budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "cost", "bonus", "length"),
    [
        ([0.9, 0.5, 0.1], 0.1, 1, 2),  # 1, 1.9/1.1, 2.35/1.2, 2.395/1.3
        ([1.0] * 4, 0.1, 1, 4),
        ([0.0, 1.0, 1.0], 0.1, 1, 0),  # nothing after a sure rejection
        ([0.9, 0.9], (1.0, 1.0), 1, 0),  # 1, 1.9/2, 2.71/3
        ([0.5, 0.5], 0.1, 0, 2),  # 0, 0.5/1.1, 0.75/1.2
        ([0.5, 0.5], (0.1, 1.0), 0, 1),  # 0, 0.5/1.1, 0.75/2.1
        ([0.5, 0.5], (2.0, 1.0), 1, 0),  # 1/2 = 1.5/3: the fewest of equally good
        ([0.9, NAN, 0.9], 0.1, 1, 1),
        ([], 0.1, 1, 0),
        ([7.0, -3.0], 0.1, 1, 1),  # clipped to 1, 0
    ],
)
def test_budget(confidence, cost, bonus, length):
    got = verify_budget(torch.tensor([confidence]).float(), cost, bonus=bonus)
    assert got.tolist() == [length]
    assert got.dtype == torch.int64


@settings(max_examples=60)
@given(alpha=st.floats(0.01, 0.99), cost=st.floats(0.01, 1.0), K=st.integers(0, 24))
def test_one_probability_for_all_is_the_known_formula(alpha, cost, K):
    """Leviathan et al.: (1 - alpha^(k+1)) / ((1 - alpha) (1 + cost k)) tokens per cost."""
    rate = lambda k: (1 - alpha ** (k + 1)) / (1 - alpha) / (1 + cost * k)
    best = max(rate(k) for k in range(K + 1))
    got = verify_budget(torch.full((1, K), alpha, dtype=torch.float64), cost).item()
    assert rate(got) == pytest.approx(best, rel=1e-12)
    assert all(rate(k) < best for k in range(got)) or rate(got - 1) == pytest.approx(best, rel=1e-12)


def test_budget_of_a_row_is_its_own_and_of_any_kind():
    c = torch.rand(9, 12, generator=generator(1))
    together = verify_budget(c, 0.2)
    assert together.tolist() == [verify_budget(row[None], 0.2).item() for row in c]
    assert verify_budget(np.float32([[0.9, 0.1]]), 0.1).tolist() == [1]
    out = torch.empty(9, dtype=torch.int64)
    assert verify_budget(c, 0.2, out=out) is out
    assert torch.equal(out, together)


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arg", "call"),
    [
        ("batch", lambda: ConfidenceRing(0)),
        ("lag", lambda: ConfidenceRing(1, 0)),
        ("lag", lambda: ConfidenceRing(1, 9, capacity=8)),
        ("capacity", lambda: ConfidenceRing(1, capacity=0)),
        ("confidence", lambda: ConfidenceRing(2).push(torch.ones(3))),
        ("confidence", lambda: ConfidenceRing(2).push(torch.ones(2, dtype=torch.int64))),
        ("confidence", lambda: ConfidenceRing(2).push([0.5, 0.5])),
        ("prompt_lens", lambda: ConfidenceRing(2).as_key_bias(torch.tensor([1]), 4)),
        ("prompt_lens", lambda: ConfidenceRing(1).as_key_bias(torch.tensor([1.0]), 4)),
        ("size", lambda: ConfidenceRing(1).as_key_bias(torch.tensor([1]), -1)),
        ("strength", lambda: ConfidenceRing(1).as_key_bias(torch.tensor([1]), 4, strength=-1)),
        ("floor", lambda: ConfidenceRing(1).as_key_bias(torch.tensor([1]), 4, floor=0.0)),
        ("out", lambda: ConfidenceRing(1).as_key_bias(torch.tensor([1]), 4, out=torch.zeros(1, 3))),
        ("rows", lambda: ConfidenceRing(2).reorder([0])),
        ("confidence", lambda: verify_budget(torch.ones(3))),
        ("confidence", lambda: verify_budget(torch.ones(3, 2, dtype=torch.int64))),
        ("cost", lambda: verify_budget(torch.ones(1, 2), -0.1)),
        ("cost", lambda: verify_budget(torch.ones(1, 2), (0.0, 0.1))),
        ("cost", lambda: verify_budget(torch.ones(1, 2), (1, 2, 3))),
        ("cost", lambda: verify_budget(torch.ones(1, 2), NAN)),
        ("bonus", lambda: verify_budget(torch.ones(1, 2), 0.1, bonus=INF)),
    ],
)
def test_bad_arguments(arg, call):
    with pytest.raises(sic.ArgumentError, match=rf"^(ConfidenceRing|verify_budget)[\w.]*: {arg}: got .*, expected "):
        call()
