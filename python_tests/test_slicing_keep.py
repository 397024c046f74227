"""Kept spans: what they mean by hand, the grids, what they must not change, and a fuzz against sets of positions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import by_case, check_case, chosen_lists, every_backend, native_backend
from test_slicing_attend import Problem, assert_attend, fuzzed
from test_slicing_determinism import instruction_set

import sic_kernels as sic
from sic_kernels import ArgumentError
from sic_kernels.runtime import native
from sic_kernels.slicing import cases, cases_inputs
from sic_kernels.slicing.cases_select import KEPT_SPANS, kept
from sic_kernels.testing import (
    PagedCache,
    assert_same_bits,
    assert_unchanged,
    copies,
    guarded_like,
    reference,
    run,
    run_guarded,
)

UNITS = pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE], ids=["token", "page"])
SLICED, DENSE_SHORT = 0, 2
NOTHING = {"sink": 0, "recent": 0}


def spans(*rows, dtype=torch.int32):
    """[B,n,2] of one list of spans for each row, of equal numbers."""
    return torch.tensor([list(row) for row in rows], dtype=dtype).view(len(rows), -1, 2)


# --- by hand --------------------------------------------------------------------------------------------------------


def uniform(backend, lens, keep, unit=cases.TOKEN, T=1, **policy):
    """attend where every key is 0 and the value of position i is i; page 2. Rows' lists, out, lse, omitted_mass, status."""
    B, S = len(lens), max(lens)
    S += S % 2
    pages = torch.arange(B * S // 2, dtype=torch.int32).view(B, S // 2)
    k = torch.zeros(B * S // 2, 1, 2, 16)
    v = torch.arange(float(S)).repeat(B).view(-1, 1, 2, 1).expand(-1, 1, 2, 16).contiguous()
    cache = PagedCache(k, v, pages, torch.tensor(lens, dtype=torch.int32), k, v)
    where, centre = (k, pages, cache.seq_lens), torch.zeros(1, 16)
    if unit == cases.TOKEN:
        index = (*reference("key_sketch")(*where, centre, None, 2, None), centre, 2, None)
    else:
        index = (None, None, None, 2, reference("page_summary")(*where, None, None)[0])
    policy = {"ratio": 0.01, "max_seq_len": max(lens), **NOTHING, **policy}
    inputs = cases_inputs.attend_inputs(torch.zeros(B, T, 1, 16), cache, index, keep=keep, **policy)
    out, lse, indices, counts, omitted, status = run("attend", inputs, backend)
    return chosen_lists((indices, counts)), out[..., 0].flatten(), lse.flatten(), omitted.flatten(), status.flatten()


def assert_numbers(got, want):
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-6, rtol=1e-6)


@every_backend
def test_tokens_by_hand(backend):
    """Six equal tokens, 1 to 3 kept: their mean is 2, their sum 3 of 6."""
    lists, out, lse, omitted, status = uniform(backend, [6], spans([(1, 4)]))
    assert lists == [[1, 2, 3]]
    assert_numbers(out, [2.0])
    assert_numbers(lse, [math.log(3)])
    assert_numbers(omitted, [0.5])
    assert status.tolist() == [SLICED]


@every_backend
def test_pages_by_hand(backend):
    """The same span touches pages 0 and 1, so tokens 0 to 3 are read."""
    lists, out, lse, omitted, _ = uniform(backend, [6], spans([(1, 4)]), cases.PAGE)
    assert lists == [[0, 1]]
    assert_numbers(out, [1.5])
    assert_numbers(lse, [math.log(4)])
    assert_numbers(omitted, [1 / 3])


@every_backend
def test_kept_tokens_are_within_the_budget(backend):
    """Half of six tokens: 4 is kept, and two others, of equals the first. Budget 3 and 4 kept: these four."""
    lists, out, *_ = uniform(backend, [6], spans([(4, 5)]), ratio=0.5, candidates=0.5)
    assert lists == [[0, 1, 4]]
    assert_numbers(out, [5 / 3])
    lists, *_ = uniform(backend, [6], spans([(2, 6)]), ratio=0.5, candidates=0.5)
    assert lists == [[2, 3, 4, 5]]


@every_backend
def test_rows_have_their_own_spans_and_lengths(backend):
    """Spans that overlap, that end beyond the row, that lie beyond it, that are empty; query tokens see to themselves."""
    keep = spans([(4, 99), (-1, -1), (0, 1)], [(1, 3), (2, 4), (5, 9)], [(9, 12), (3, 3), (2, 0)])
    lists, out, *_ = uniform(backend, [6, 5, 4], keep, T=2)
    assert lists == [[0, 4], [0, 4, 5], [1, 2, 3], [1, 2, 3], [0], [0]]  # at least one token, of equals the first
    assert_numbers(out, [2.0, 3, 2, 2, 0, 0])


@every_backend
def test_kept_and_forced_tokens_overlap(backend):
    lists, _, lse, *_ = uniform(backend, [9], spans([(1, 4), (7, 8)]), sink=2, recent=3)
    assert lists == [[0, 1, 2, 3, 6, 7, 8]]
    assert_numbers(lse, [math.log(7)])


@every_backend
@UNITS
def test_everything_kept_is_the_dense_answer(unit, backend):
    lists, out, lse, omitted, status = uniform(backend, [6, 3], spans([(0, 6)], [(0, 2**31 - 1)]), unit)
    assert lists == ([[0, 1, 2], [0, 1]] if unit == cases.PAGE else [[0, 1, 2, 3, 4, 5], [0, 1, 2]])
    assert_numbers(out, [2.5, 1.0])
    assert_numbers(lse, [math.log(6), math.log(3)])
    assert omitted.tolist() == [0, 0]
    assert status.tolist() == [DENSE_SHORT] * 2


@native_backend
def test_a_list_that_is_too_short_is_an_error(backend):
    inputs = cases.select_inputs(
        torch.zeros(1, 1, 1, 9), torch.tensor([9]), keep=spans([(1, 8)]), capacity=4, **NOTHING
    )
    with pytest.raises(ArgumentError, match=r"^select: indices: got 4 slots a row, expected at least 7$"):
        run("select", inputs, backend)


# --- the grids ------------------------------------------------------------------------------------------------------


@native_backend
@by_case(cases.grid("keep_select"))
def test_keep_select_grid(case, backend):
    check_case(case, backend)


@native_backend
@by_case(cases.grid("keep_attend"))
def test_keep_attend_grid(case, backend):
    inputs = case.inputs()
    want = case.expected(inputs)
    got = [g.tensor for g in run_guarded("attend", inputs, backend, want)]
    assert_attend(got, want, torch.float32)
    size = case.shape["page"] if case.shape["unit"] == "p" else 1
    for row, (b, t) in zip(chosen_lists(got[2:4])[::2], ((b, t) for b in range(2) for t in range(2))):
        seen = (300, 90)[b] - 1 + t
        kept = {i // size for begin, end in KEPT_SPANS[case.shape["keep"]][b] for i in range(begin, min(end, seen))}
        assert kept <= set(row)


@native_backend
@by_case(cases.grid("select_slice"))
def test_select_slice_grid(case, backend):
    check_case(case, backend)


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "neon"])
def test_every_instruction_set(isa):
    if isa not in native.module().supported_isas():
        pytest.skip(f"this machine has no {isa}: it has {', '.join(native.module().supported_isas())}")
    with instruction_set(isa):
        for case in cases.grid("keep_select"):
            check_case(case, "cpu")
        for case in cases.grid("keep_attend"):
            inputs = case.inputs()
            assert_attend(run("attend", inputs, "cpu"), case.expected(inputs), torch.float32)


# --- what it must not change ----------------------------------------------------------------------------------------


def same_lists(got, want):
    """(indices, counts) of lists of different capacity."""
    assert chosen_lists(got) == chosen_lists(want)


def assert_same_answer(got, want, what):
    for i, name in ((0, "out"), (1, "lse"), (4, "omitted_mass"), (5, "status")):
        assert_same_bits(got[i], want[i], f"{what}: {name}")
    same_lists(got[2:4], want[2:4])


@every_backend
@UNITS
def test_nothing_kept_changes_no_bits(unit, backend):
    """No spans, empty ones, ones beyond the rows, ones of sinks and recent tokens: as keep=None."""
    p = Problem([330, 90], unit=unit, T=2)
    want = p.call(backend)
    for name in ("none", "padding"):
        assert_same_answer(p.call(backend, keep=kept(name)), want, name)
    assert_same_answer(p.call(backend, keep=spans([(330, 400)], [(90, 2**40)], dtype=torch.int64)), want, "beyond")
    assert_same_answer(p.call(backend, keep=spans([(0, 16), (298, 330)], [(3, 9), (58, 70)])), want, "forced")


@native_backend
@UNITS
def test_kept_ends_are_sinks_and_recent_tokens(unit, backend):
    """By any other name: the same bits."""
    p = Problem([330, 90], unit=unit)
    want = p.call(backend, sink=20, recent=30)
    got = p.call(backend, keep=spans([(0, 20), (300, 330)], [(0, 20), (60, 90)]), **NOTHING)
    assert_same_answer(got, want, "ends")


@native_backend
def test_kinds_of_arrays(backend):
    """int64, and views with gaps or one row for all: the same bits."""
    p = Problem([330, 90])
    keep = kept("edges")
    want = p.call(backend, keep=keep)
    wide = torch.full((4, 7, 2), -5, dtype=torch.int64)
    view = wide[::2, 1:6:2]
    view.copy_(keep)
    one = spans([(20, 40)])
    for got, w in (
        (view, want),
        (keep.long(), want),
        (one.expand(2, -1, -1), p.call(backend, keep=one.repeat(2, 1, 1))),
    ):
        assert_same_answer(p.call(backend, keep=got), w, f"{got.dtype}, strides {got.stride()}")


@native_backend
@UNITS
def test_a_row_does_not_depend_on_its_neighbours_spans(unit, backend):
    p = Problem([330, 90, 150], unit=unit)
    keep = spans([(300, 340), (5, 6)], [(0, 90), (-1, -1)], [(17, 160), (145, 200)])
    inputs = p.inputs(keep=keep)
    by_row = {id(x) for x in (p.q, keep, p.cache.block_table, p.cache.seq_lens)}
    together = run("attend", inputs, backend)
    for b in range(3):
        alone = [x[b : b + 1] if id(x) in by_row else x for x in inputs]
        for got, want in zip(run("attend", alone, backend), together):
            assert_same_bits(got[0], want[b], f"row {b}")


@native_backend
def test_kept_tokens_are_not_in_the_estimate(backend):
    """All but one token kept: what is not read is that token, 0.8 of its score and the centre's share."""
    p = Problem([300], H=1, G=1)
    scores = p.scores(backend, cases.MAX)[0, 0, 0]
    logs = {}
    for missing in (40, 41, 200):
        keep = spans([(0, missing), (missing + 1, 300)])
        _, lse, _, counts, omitted, _ = p.call(backend, keep=keep, **NOTHING)
        assert counts.item() == 299
        logs[missing] = (torch.logit(omitted.double()) + lse.double()).item()
    for a, b in ((40, 41), (40, 200)):
        assert logs[a] - logs[b] == pytest.approx(0.8 * (scores[a] - scores[b]).item() / 256, abs=1e-2)


# --- wrong arguments ------------------------------------------------------------------------------------------------


def select_call(keep):
    return "select", cases.select_inputs(torch.zeros(2, 1, 2, 90), torch.tensor([90, 9]), keep=keep)


def attend_call(keep):
    return "attend", Problem([90, 9]).inputs(keep=keep)


BAD = {
    "float": kept("one").float(), "int16": kept("one").to(torch.int16),
    "one row": kept("one")[:1], "three rows": kept("one")[[0, 1, 1]], "rank": kept("one")[:, 0],
    "three numbers": torch.zeros(2, 1, 3, dtype=torch.int32), "text": "1-2", "list": [[[1, 2]], [[1, 2]]],
    "gaps": torch.zeros(2, 1, 4, dtype=torch.int32)[..., ::2], "below 0": spans([(1, 2)], [(-1, 1)]),
    "far below 0": spans([(-(2**40), 3)], [(0, 1)], dtype=torch.int64),
}  # fmt: skip


@native_backend
@pytest.mark.parametrize("call", [select_call, attend_call])
@pytest.mark.parametrize("name", BAD)
def test_wrong_spans(name, call, backend):
    """Named, before anything is touched."""
    op, inputs = call(BAD[name])
    outs = guarded_like(reference(op)(*call(kept("one"))[1]))
    before = copies(inputs)
    with pytest.raises(ArgumentError, match=rf"^{op}: keep: got .+, expected "):
        run(op, inputs, backend, outs=[g.tensor for g in outs])
    assert_unchanged(inputs, before)
    for g in outs:
        g.assert_guards(op)
        assert g.untouched().all()


def test_the_message_says_which_span():
    with pytest.raises(
        ArgumentError, match=r"keep: got tokens -1 to 1 at \[1,0\], expected a span that begins at 0 or later"
    ):
        run(*select_call(BAD["below 0"]), "cpu")


@pytest.mark.backend("simt")
def test_unchecked_spans_below_0_begin_at_0():
    """Where values are not read back from the device, nothing asked for is dropped."""
    simt = native.simt_module()
    scores, lens = torch.zeros(1, 1, 1, 9), torch.tensor([9])
    inputs = cases.select_inputs(scores, lens, budget=0, keep=spans([(-3, 2)]), **NOTHING)
    simt.set_device_checks(False)
    try:
        assert chosen_lists(run("select", inputs, "simt")) == [[0, 1]]
    finally:
        simt.set_device_checks(True)


# --- the public functions -------------------------------------------------------------------------------------------


def test_public_functions_take_them():
    """attend, select_slice and workspace_bytes; q without query tokens."""
    p = Problem([700, 90])
    params = sic.slicing.SketchParams(p.centre, torch.ones(2))
    sketch = sic.slicing.KeySketch(*p.sketch, params, 64, 16)
    keep, policy = kept("one"), sic.slicing.SlicePolicy(candidates=0.25)
    place = (p.cache.block_table, p.cache.seq_lens)
    args = (p.q[:, 0], p.cache.k_cache, p.cache.v_cache, sketch, *place)
    got = sic.slicing.attend(*args, policy=policy, keep=keep)
    same_lists(got.selection[:2], p.call("cpu", keep=keep)[2:4])
    assert got.selection.indices.shape[-1] == p.cache.block_table.shape[1] * 16
    chosen, _ = sic.slicing.select_slice(p.q[:, 0], sketch, *place, policy=policy, keep=keep)
    assert_same_bits(chosen.indices, got.selection.indices)
    assert sic.slicing.workspace_bytes("attend", *args, policy=policy, keep=keep) >= 0
    assert sic.slicing.workspace_bytes("select_slice", p.q[:, 0], sketch, *place, policy=policy, keep=keep) >= 0


# --- fuzz -----------------------------------------------------------------------------------------------------------


@st.composite
def kept_spans(draw, rows):
    """Up to five spans a row: of tokens, of none, beyond the row."""
    n, bound = draw(st.integers(0, 5)), st.integers(0, 300)
    span = st.one_of(
        st.tuples(bound, bound), st.just((-1, -1)), st.builds(lambda a, k: (a, a + k), bound, st.integers(1, 90))
    )
    found = draw(st.lists(st.lists(span, min_size=n, max_size=n), min_size=rows, max_size=rows))
    return torch.tensor(found, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).view(rows, n, 2)


@native_backend
@settings(max_examples=40)
@given(fuzz=fuzzed(min_len=st.sampled_from([0, 100])), data=st.data())
def test_fuzz_attend(fuzz, data, backend):
    p, args = fuzz
    inputs = p.inputs(**args, keep=data.draw(kept_spans(len(p.q)), "keep"))
    want = reference("attend")(*inputs)
    assert_attend([g.tensor for g in run_guarded("attend", inputs, backend, want)], want, torch.float32)
