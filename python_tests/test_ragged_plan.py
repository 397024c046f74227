"""The planner, padding efficiency and token budgets: plans by hand, properties of any plan, wrong arguments by name."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sic_kernels as sic
from sic_kernels import ArgumentError, ragged

BUCKETS = (8, 16, 32)
lengths_lists = st.lists(st.integers(0, 60), max_size=40)


def parts(segments):
    return [(s.kind, s.bound, s.rows, s.padded_length) for s in segments]


# --- plans by hand --------------------------------------------------------------------------------------------------


def test_golden_plan():
    """Bounds 8 +- 1, 16 +- 2, 32 +- 4: a length belongs to the first bucket that takes it."""
    lengths = [9, 3, 10, 37, 18, 36, 40, 0]
    segments = ragged.plan(lengths, BUCKETS)
    assert parts(segments) == [
        ("bucket", 8, (0, 1, 7), 9), ("bucket", 16, (2, 4), 18), ("bucket", 32, (5,), 36), ("long", None, (3, 6), 40),
    ]  # fmt: skip
    first, second = segments[0], segments[1]
    assert first.lengths == (9, 3, 0)
    assert (first.tokens, first.computed, first.wasted) == (12, 27, 15)
    assert first.padding_efficiency == 12 / 27
    assert first.cu_seqlens.tolist() == [0, 9, 12, 12]
    assert first.cu_seqlens.dtype == torch.int32
    assert (second.tokens, second.computed) == (28, 36)
    assert (segments.tokens, segments.computed, segments.wasted) == (153, 27 + 36 + 36 + 80, 26)
    assert segments.padding_efficiency == 153 / 179
    assert segments.order == (0, 1, 7, 2, 4, 5, 3, 6)


def test_the_default_is_that_of_the_sources():
    """512 + 64, 1024 + 128, 2048 + 256."""
    lengths = [576, 577, 1152, 1153, 2304, 2305]
    assert [s.rows for s in ragged.plan(lengths)] == [(0,), (1, 2), (3, 4), (5,)]


def test_slack_of_every_kind():
    assert [s.rows for s in ragged.plan([8, 9], BUCKETS, 0)] == [(0,), (1,)]
    assert [s.rows for s in ragged.plan([12, 13], BUCKETS, 4)] == [(0,), (1,)]
    assert [s.rows for s in ragged.plan([12, 13], BUCKETS, 0.5)] == [(0,), (1,)]
    assert [s.rows for s in ragged.plan([8, 9, 20, 21], BUCKETS, (0, 4, 0))] == [(0,), (1, 2), (3,)]


def test_golden_ragged():
    segments = ragged.plan([3, 0, 5], None)
    assert parts(segments) == [("ragged", None, (0, 1, 2), 5)]
    assert segments[0].cu_seqlens.tolist() == [0, 3, 3, 8]
    assert (segments.tokens, segments.computed, segments.wasted, segments.padding_efficiency) == (8, 8, 0, 1.0)


def test_nothing_to_plan():
    for buckets in (BUCKETS, None):
        segments = ragged.plan([], buckets)
        assert len(segments) == 0
        assert segments.padding_efficiency is None
        assert segments.restore([]) == []
    only_empty = ragged.plan([0, 0], BUCKETS)
    assert parts(only_empty) == [("bucket", 8, (0, 1), 0)]
    assert only_empty.padding_efficiency is None


def test_lengths_in_any_array():
    want = ragged.plan([3, 20], BUCKETS)
    for lengths in ((3, 20), torch.tensor([3, 20]), torch.tensor([3, 20], dtype=torch.uint8), np.array([3, 20])):
        assert ragged.plan(lengths, BUCKETS) == want


def test_results_in_the_order_of_the_batch():
    lengths = [20, 3, 40, 5]
    segments = ragged.plan(lengths, BUCKETS)
    assert segments.restore([[f"row {row}" for row in s.rows] for s in segments]) == [f"row {i}" for i in range(4)]
    tensors = [torch.tensor(s.rows) for s in segments]
    assert [int(x) for x in segments.restore(tensors)] == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match=r"^restore: results: got lengths \[1\], expected \[2, 1, 1\]"):
        segments.restore([[0]])


def test_a_recorded_batch_is_counted():
    metric = sic.metrics.get("sic_padding_efficiency_ratio")
    before = metric.read()[""]
    ragged.plan([9, 3], BUCKETS).record()
    after = metric.read()[""]
    assert (after.numerator - before.numerator, after.denominator - before.denominator) == (12, 18)


# --- any plan -------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(lengths=lengths_lists, slack=st.sampled_from([0, 0.125, 2, (1, 2, 3)]))
def test_properties_of_a_plan(lengths, slack):
    segments = ragged.plan(lengths, BUCKETS, slack)
    assert ragged.plan(lengths, BUCKETS, slack) == segments
    assert sorted(segments.order) == list(range(len(lengths)))
    assert segments.restore([s.lengths for s in segments]) == lengths
    assert segments.tokens == sum(lengths)
    assert segments.computed <= len(lengths) * max(lengths, default=0)
    assert segments.wasted >= 0
    longest = -1
    for segment in segments:
        assert segment.rows == tuple(sorted(segment.rows))
        assert min(segment.lengths) > longest
        longest = segment.padded_length
        assert segment.cu_seqlens.diff().tolist() == list(segment.lengths)
    assert ragged.padding_efficiency(lengths, segments) == segments.padding_efficiency
    assert ragged.plan(lengths, None).wasted == 0


# --- padding efficiency ---------------------------------------------------------------------------------------------


def test_golden_efficiency():
    assert ragged.padding_efficiency([1, 3], 4) == 0.5
    assert ragged.padding_efficiency([4, 4], 4) == 1.0
    assert ragged.padding_efficiency([1, 3], ragged.plan([1, 3], None)) == 1.0
    assert ragged.padding_efficiency([], 4) is None
    assert ragged.padding_efficiency([0, 0], 0) is None


# --- token budgets --------------------------------------------------------------------------------------------------


def test_golden_batches():
    """7 opens a batch, 6 one more; 4 fills the second, 3 the first; what is empty goes into the first full one."""
    assert ragged.batch_by_tokens([4, 7, 3, 6, 0], 10) == [[0, 3], [1, 2, 4]]
    assert ragged.batch_by_tokens([4, 7, 3, 6, 0], 10, max_rows=2) == [[0, 3], [1, 2], [4]]
    # Padded: 7 alone (2 x 7 > 10), 6 alone, then two of 4, then the empty one.
    assert ragged.batch_by_tokens([4, 7, 3, 6, 0], 10, padded=True) == [[0, 2], [1], [3], [4]]
    assert ragged.batch_by_tokens([5, 5, 5, 5], 10, padded=True) == [[0, 1], [2, 3]]
    assert ragged.batch_by_tokens([], 10) == []
    assert ragged.batch_by_tokens([0, 0, 0], 1, max_rows=2) == [[0, 1], [2]]


def test_the_batch_size_follows_the_length():
    """The same budget: 64 sequences of 32 tokens, or 1 of 2048."""
    sizes = {n: len(ragged.batch_by_tokens([n] * 256, 2048)[0]) for n in (32, 256, 2048)}
    assert sizes == {32: 64, 256: 8, 2048: 1}


@settings(max_examples=150)
@given(lengths=lengths_lists, budget=st.integers(60, 200), max_rows=st.none() | st.integers(1, 6), padded=st.booleans())
def test_properties_of_batches(lengths, budget, max_rows, padded):
    batches = ragged.batch_by_tokens(lengths, budget, max_rows=max_rows, padded=padded)
    assert (
        ragged.batch_by_tokens(torch.tensor(lengths, dtype=torch.int64), budget, max_rows=max_rows, padded=padded)
        == batches
    )
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert batches == sorted(sorted(batch) for batch in batches)
    for batch in batches:
        assert 0 < len(batch) <= (max_rows or len(lengths))
        cost = len(batch) * max(lengths[r] for r in batch) if padded else sum(lengths[r] for r in batch)
        assert cost <= budget
    if max_rows is None and not padded and lengths:  # best fit decreasing, against the least that any way needs
        assert len(batches) <= 11 / 9 * max(1, math.ceil(sum(lengths) / (budget - 59))) + 1


# --- wrong arguments ------------------------------------------------------------------------------------------------

WRONG = {
    "plan: lengths: got -1 at [1], expected integers, 0 or more": lambda: ragged.plan([1, -1]),
    "plan: lengths: got 1.5 at [0], expected integers, 0 or more": lambda: ragged.plan([1.5]),
    f"plan: lengths: got {1 << 64} at [1], expected integers, 0 or more": lambda: ragged.plan([1, 1 << 64]),
    "plan: lengths: got True at [0], expected integers, 0 or more": lambda: ragged.plan([True]),
    "plan: lengths: got float32[2], expected integers, one for each sequence": lambda: ragged.plan(torch.zeros(2)),
    "plan: lengths: got int64[1,2], expected": lambda: ragged.plan(torch.zeros(1, 2, dtype=torch.int64)),
    "plan: lengths: got str, expected a list or an array of integers": lambda: ragged.plan("12"),
    "plan: lengths: got 2147483648 tokens, expected at most 2147483647": lambda: ragged.plan([1 << 30, 1 << 30]),
    "plan: buckets: got (16, 8), expected ascending numbers of tokens, or None": lambda: ragged.plan([1], (16, 8)),
    "plan: buckets: got (), expected": lambda: ragged.plan([1], ()),
    "plan: buckets: got (8, 8), expected": lambda: ragged.plan([1], (8, 8)),
    "plan: buckets: got 512, expected": lambda: ragged.plan([1], 512),
    "plan: slack: got -1, expected": lambda: ragged.plan([1], BUCKETS, -1),
    "plan: slack: got nan, expected": lambda: ragged.plan([1], BUCKETS, math.nan),
    "plan: slack: got (1, 2), expected a share, tokens, or tokens for each of 3 buckets": lambda: ragged.plan(
        [1], BUCKETS, (1, 2)
    ),
    "plan: slack: got (9, 1, 0), expected less than takes a bucket beyond the next": lambda: ragged.plan(
        [1], BUCKETS, (9, 1, 0)
    ),
    "padding_efficiency: padded: got 3, expected Segments, or at least the longest, 4": lambda: (
        ragged.padding_efficiency([4], 3)
    ),
    "padding_efficiency: padded: got the plan of other lengths, expected one of": lambda: ragged.padding_efficiency(
        [4], ragged.plan([5])
    ),
    "batch_by_tokens: lengths: got 11 at [1], expected at most the budget, 10": lambda: ragged.batch_by_tokens(
        [1, 11], 10
    ),
    "batch_by_tokens: token_budget: got 0, expected an integer, 1 or more": lambda: ragged.batch_by_tokens([1], 0),
    "batch_by_tokens: max_rows: got 0, expected an integer, 1 or more": lambda: ragged.batch_by_tokens(
        [1], 1, max_rows=0
    ),
    "cu_seqlens: dtype: got torch.float32, expected int32|int64": lambda: ragged.cu_seqlens([1], dtype=torch.float32),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises(ArgumentError) as error:
        WRONG[message]()
    assert str(error.value).startswith(message)


def test_cumulative_lengths():
    assert ragged.cu_seqlens([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert ragged.cu_seqlens(np.array([], dtype=np.int32), dtype=torch.int64).tolist() == [0]


# --- what no caller should give -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: ragged.plan([1, 2], (4, 8), 10**400),
        lambda: ragged.plan([1, 2], (4, 8), 1e308),
        lambda: ragged.plan([1, 2], (4, 8), (10**400, 1)),
        lambda: ragged.plan([1, 2], (4, 10**400)),
        lambda: ragged.plan([1, 2], (4, 8), True),
        lambda: ragged.plan(np.array(["1"])),
        lambda: ragged.plan(np.zeros(2, ">i8")),
        lambda: ragged.plan(torch.zeros(2, dtype=torch.int64, device="meta")),
        lambda: ragged.cu_seqlens([1], device="nowhere"),
        lambda: ragged.cu_seqlens([1], dtype=np.zeros(2)),
        lambda: ragged.batch_by_tokens([1], 2, padded=torch.zeros(2)),
        *(lambda results=results: ragged.plan([1, 9], (4,)).restore(results) for results in (3, None, [1, 2], ["a", {2}])),
        *(lambda fill=fill: ragged.unpack(torch.zeros(1, 2), [0, 1], 1, fill=fill) for fill in (10**400, 1e39, 1j)),
        lambda: ragged.unpack(torch.zeros(1, 2).to_sparse(), [0, 1], 1),
        lambda: ragged.pack(torch.zeros(1, 2, 3), torch.zeros(1, dtype=torch.int64, device="meta")),
    ],
)  # fmt: skip
def test_nonsense(call):
    with pytest.raises(ArgumentError, match=r"^\w+: [\w.]+: got .+, expected .+"):
        call()


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 20), max_size=40), budget=st.integers(20, 40), most=st.integers(1, 5))
def test_best_fit_is_the_search_through_all_batches(lengths, budget, most):
    batches = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        left = [budget - sum(lengths[r] for r in batch) for batch in batches]
        fits = [b for b in range(len(batches)) if len(batches[b]) < most and left[b] >= lengths[row]]
        if fits:
            batches[min(fits, key=lambda b: (left[b], b))].append(row)
        else:
            batches.append([row])
    assert ragged.batch_by_tokens(lengths, budget, max_rows=most) == sorted(sorted(batch) for batch in batches)
