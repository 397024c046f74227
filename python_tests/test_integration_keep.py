"""Tokens that a cache in transformers must read: from columns to stored tokens, and through everything that moves rows."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'sic_kernels[demo]'"
)

from test_integration_delta import cache_of  # noqa: E402
from tiny_llama import generate, padded, policy, prompt  # noqa: E402

from sic_kernels import ArgumentError, slicing  # noqa: E402
from sic_kernels.integrations.transformers import SlicedCache  # noqa: E402

FEW = {"ratio": 0.01, "sink": 0, "recent": 16}  # nothing of an older token is read unless it is kept
pytestmark = pytest.mark.usefixtures("one_thread")


def sliced(model, **options):
    return SlicedCache(model.config, policy(**FEW), **options)


def coded(model, **options):
    return cache_of(model, "raw", policy=policy(**FEW), **options)


every_cache = pytest.mark.parametrize("make", [sliced, coded])


@pytest.fixture
def read(monkeypatch):
    """The stored tokens that the last layer's last sliced call read: of each row, those of its first query token and head."""
    rows: list[set[int]] = []

    def watched(function, selection_of):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            chosen = selection_of(result)
            rows[:] = [set(row[:n].tolist()) for row, n in zip(chosen.indices[:, 0, 0], chosen.counts[:, 0, 0])]
            return result

        return call

    monkeypatch.setattr(slicing, "attend", watched(slicing.attend, lambda result: result.selection))
    monkeypatch.setattr(slicing, "select_slice", watched(slicing.select_slice, lambda result: result[0]))
    return rows


def step(model, cache, batch, mask=None, tokens=1):
    """One decode step of all rows; every token is real."""
    mask = None if mask is None else torch.cat([mask, torch.ones(batch, tokens, dtype=torch.long)], 1)
    with torch.inference_mode():
        return model(prompt(batch, tokens, seed=5), cache=cache, attention_mask=mask, use_cache=True).logits, mask


def filled(model, cache, batch=1, tokens=100):
    with torch.inference_mode():
        model(prompt(batch, tokens), cache=cache, use_cache=True)
    return cache


def recent(n, *kept):
    """What is read of n tokens: the last 16, and the kept ranges."""
    return set(range(n - 16, n)).union(*(range(*span) for span in kept))


# --- what is read ---------------------------------------------------------------------------------------------------


@every_cache
def test_kept_columns_are_read_until_they_change(make, model, read):
    cache = filled(model, make(model, keep=[[(10, 20), (40, 41)]]))
    step(model, cache, 1)
    assert read == [recent(101, (10, 20), (40, 41))]
    step(model, cache, 1)
    assert read == [recent(102, (10, 20), (40, 41))]
    cache.keep([[(7, 9)]])
    step(model, cache, 1)
    assert read == [recent(103, (7, 9))]
    cache.keep(None)
    step(model, cache, 1)
    assert read == [recent(104)]


@every_cache
def test_everything_kept_answers_as_the_plain_model(make, plain, model):
    ids, mask, _ = padded([96, 70, 33])
    cache = make(model, keep=[[(0, 10**6)]])
    got = generate(model, ids, cache, attention_mask=mask)
    assert torch.equal(got, generate(plain, ids, attention_mask=mask))
    assert cache.stats().omitted_max in (None, 0.0)  # the coded cache counts all as sliced


def test_pages_that_a_span_touches(model, read):
    cache = filled(model, SlicedCache(model.config, policy(unit="page", **FEW), page_size=8, keep=[[(15, 17)]]))
    step(model, cache, 1)
    assert read == [{1, 2, 10, 11, 12}]  # 101 tokens: the last 16 begin at 85


@every_cache
def test_padding_counts_as_columns_and_takes_no_place(make, model, read):
    """Rows of 100 and 80 tokens: column 30 is token 30 of the one and 10 of the other; padding that is kept is nothing."""
    ids, mask, _ = padded([100, 80])
    cache = make(model, keep=[[(30, 34), (50, 51)], [(30, 34), (0, 23)]])
    with torch.inference_mode():
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
    step(model, cache, 2, mask)
    assert read == [recent(101, (30, 34), (50, 51)), recent(81, (10, 14), (0, 3))]


def test_a_padded_row_answers_as_alone(model):
    ids, mask, rows = padded([120, 90, 77])
    warm = sliced(model)
    generate(model, prompt(1, 100, seed=9), warm, steps=1)  # one calibration for all
    spans = [[(10, 40)], [(5, 9), (50, 60)], [(0, 30)]]
    shifted = [[(a + 120 - row.shape[1], b + 120 - row.shape[1]) for a, b in own] for own, row in zip(spans, rows)]
    got = generate(model, ids, sliced(model, params=warm.params, keep=shifted), attention_mask=mask)
    for i, row in enumerate(rows):
        cache = sliced(model, params=warm.params, keep=[spans[i]])
        alone = generate(model, row, cache, attention_mask=torch.ones_like(row))
        assert torch.equal(got[i, ids.shape[1] :], alone[0, row.shape[1] :])


def test_columns_to_come(model, read):
    """A span may reach beyond what is stored, also where the next turn brings padding."""
    ids, mask, _ = padded([90, 60])
    cache = sliced(model, keep=[[(85, 96)]])
    with torch.inference_mode():
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
        turn, new, _ = padded([40, 35], seed=7)
        mask = torch.cat([mask, new], 1)
        model(turn, attention_mask=mask, cache=cache, use_cache=True)
    step(model, cache, 2, mask)
    assert read == [recent(131, (85, 96)), recent(96, (55, 61))]  # of its columns 90 to 95 the first five are padding


@every_cache
def test_nothing_kept_costs_nothing(make, model, monkeypatch):
    """The operations get no spans at all."""
    given = []
    for name in ("attend", "select_slice"):
        function = getattr(slicing, name)
        monkeypatch.setattr(slicing, name, lambda *a, f=function, **k: given.append(k["keep"]) or f(*a, **k))
    for keep in (None, [], [[]], [[], []]):
        cache = filled(model, make(model, keep=keep), 2)
        step(model, cache, 2)
    assert given == [None] * 3 * 4


def test_several_query_tokens(model, read):
    cache = filled(model, sliced(model, keep=[[(10, 20)]]))
    step(model, cache, 1, tokens=5)
    assert read == [recent(101, (10, 20))]  # the first of five


# --- what moves rows ------------------------------------------------------------------------------------------------

OWN = [[(10, 12)], [(20, 23), (40, 41)], [(30, 31)]]


def rows_read(n, *rows):
    return [recent(n, *OWN[row]) for row in rows]


@every_cache
def test_reordered_rows_take_their_spans_along(make, model, read):
    cache = filled(model, make(model, keep=OWN), 3)
    step(model, cache, 3)
    assert read == rows_read(101, 0, 1, 2)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    step(model, cache, 3)
    assert read == rows_read(102, 2, 0, 2)
    cache.batch_select_indices(torch.tensor([True, True, False]))
    step(model, cache, 2)
    assert read == rows_read(103, 2, 0)
    cache.batch_repeat_interleave(2)
    step(model, cache, 4)
    assert read == rows_read(104, 2, 2, 0, 0)


@every_cache
def test_spans_of_one_row_are_for_all(make, model, read):
    cache = filled(model, make(model, keep=OWN[:1]), 1)
    cache.batch_repeat_interleave(3)
    step(model, cache, 3)
    assert read == rows_read(101, 0, 0, 0)
    cache.reorder_cache(torch.tensor([1, 2, 0]))
    step(model, cache, 3)
    assert read == rows_read(102, 0, 0, 0)
    cache.batch_select_indices(torch.tensor([2, 0]))
    step(model, cache, 2)
    assert read == rows_read(103, 0, 0)


def test_beams(plain, model):
    ids = prompt(1, 80)
    options = {"attention_mask": torch.ones_like(ids), "num_beams": 3}
    got = generate(model, ids, sliced(model, keep=[[(0, 10**6)]]), **options)
    assert torch.equal(got, generate(plain, ids, **options))


@every_cache
def test_crop_cuts_spans(make, model, read):
    """The tokens that follow a crop are others: they are not kept for what lay there before."""
    cache = filled(model, make(model, keep=[[(10, 20), (60, 75), (90, 95), (200, 300)]]))
    cache.crop(-30)
    assert cache.get_seq_length() == 70
    filled(model, cache, tokens=60)
    step(model, cache, 1)
    assert read == [recent(131, (10, 20), (60, 70))]


def test_crop_of_padded_rows(model, read):
    ids, mask, _ = padded([100, 80])
    cache = sliced(model, keep=[[(30, 34), (88, 93)]])
    with torch.inference_mode():
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
    cache.crop(-10)
    _, mask = step(model, cache, 2, mask[:, :-10], tokens=30)
    step(model, cache, 2, mask)
    assert read == [recent(121, (30, 34), (88, 90)), recent(101, (10, 14), (68, 70))]


@every_cache
def test_reset_forgets_them(make, model, read):
    cache = filled(model, make(model, keep=[[(10, 20)]]))
    cache.reset()
    filled(model, cache)
    step(model, cache, 1)
    assert read == [recent(101)]


# --- wrong spans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spans",
    [3, "ab", [3], [(1, 2)], [[(1, 2, 3)]], [[(-1, 2)]], [[(5, 4)]], [[(1.5, 2)]], [[(0, 2**31)]], [[(True, 2)]]],
)
def test_what_is_no_list_of_spans_is_refused(spans, model):
    with pytest.raises(
        ArgumentError, match=r"^keep: spans: got .+, expected for each row a list of \(begin, end\) columns"
    ):
        sliced(model, keep=spans)
    cache = sliced(model)
    with pytest.raises(ArgumentError, match=r"^keep: spans: got "):
        cache.keep(spans)


@every_cache
def test_as_many_rows_as_the_cache_has(make, model, read):
    """Refused at once where it is known how many; with the first prompt where not, and nothing of it is stored."""
    cache = make(model, keep=OWN)
    with pytest.raises(ArgumentError, match=r"^keep: spans: got spans of 3 rows, expected those of 1 or 2, as "):
        filled(model, cache, 2)
    assert cache.get_seq_length() == 0
    filled(model, cache, 3)
    with pytest.raises(ArgumentError, match="expected those of 1 or 3"):
        cache.keep(OWN[:2])
    step(model, cache, 3)
    assert read == rows_read(101, 0, 1, 2)  # those before are still there
