"""gather, merge_states and merge_many: bit-exact rows, golden merges, grid 7, splits of real attention, fuzz."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import (
    attention,
    by_case,
    check_case,
    compare,
    contiguous_cache,
    every_backend,
    listing,
    native_backend,
)

from sic_kernels.slicing import cases
from sic_kernels.slicing.reference_layout import visible
from sic_kernels.testing import (
    Tolerance,
    assert_close,
    assert_same_bits,
    generator,
    guarded,
    paged_cache,
    randn,
    random_selection,
    reference,
    run,
)

INF = math.inf


# --- gather ---------------------------------------------------------------------------------------------------------


@every_backend
def test_golden_gather(backend):
    """Two sequences, two heads; rows packed by (sequence, query, head); a listed page is cut at the length."""
    k = torch.arange(24.0).reshape(2, 2, 6, 1)  # head h of sequence b, position s: 12 b + 6 h + s
    lens = torch.tensor([6, 5], dtype=torch.int32)
    tokens = listing([[0, 5], [], [1], [2, 3, 4]], B=2, H=2)
    rows_k, rows_v, indptr = run("gather", (k, -k, None, lens, *tokens, 0), backend)
    assert rows_k.flatten().tolist() == [0, 5, 13, 20, 21, 22]
    assert rows_v.flatten().tolist() == [0, -5, -13, -20, -21, -22]
    assert indptr.tolist() == [0, 2, 2, 3, 6]
    # The same keys as pages of 2, in order: head h of page p holds the rows 2p and 2p + 1.
    paged = k.reshape(2, 2, 3, 2, 1).transpose(1, 2).reshape(6, 2, 2, 1)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    pages = listing([[0, 2], [], [1], [0, 2]], B=2, H=2)
    rows_k, _, indptr = run("gather", (paged, paged, table, lens, *pages, 1), backend)
    assert rows_k.flatten().tolist() == [0, 1, 4, 5, 14, 15, 18, 19, 22]
    assert indptr.tolist() == [0, 4, 4, 6, 9]


@native_backend
@by_case(cases.grid("gather"))
def test_gather_grid(case, backend):
    """Bit-exact; given outputs of full capacity are written up to the last row only."""
    inputs = case.inputs()
    want = case.expected(inputs)
    compare(run(case.op, inputs, backend), want, what=str(case))
    rows = inputs[4].numel() * (1 if inputs[6] == cases.TOKEN else inputs[0].shape[2])
    outs = [guarded((rows, x.shape[1]), x.dtype) for x in want[:2]] + [guarded(want[2].shape, want[2].dtype)]
    run(case.op, inputs, backend, outs=[g.tensor for g in outs])
    for g, w in zip(outs, want):
        g.assert_guards(case.op)
        assert_same_bits(g.tensor[: len(w)], w)
        assert g.untouched()[len(w) :].all()


@native_backend
def test_gather_keeps_every_bit(backend):
    """NaN payloads, negative zero and f8 codes are copied, not converted."""
    raw = torch.randint(-(2**15), 2**15, (1, 2, 64, 16), generator=generator(1), dtype=torch.int16)
    chosen = listing([[0, 3, 63], [5]], H=2)
    lens = torch.tensor([64], dtype=torch.int32)
    for dtype in (torch.float16, torch.bfloat16):
        k, _, _ = run("gather", (raw.view(dtype), raw.view(dtype), None, lens, *chosen, 0), backend)
        want = torch.cat((raw[0, 0, [0, 3, 63]], raw[0, 1, [5]]))
        assert torch.equal(k.view(torch.int16), want)
    f8 = raw.view(torch.float8_e4m3fn)
    k, _, _ = run("gather", (f8, f8, None, lens, *chosen, 0), backend)
    assert torch.equal(k.view(torch.int16), want)


@native_backend
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    lens=st.lists(st.integers(0, 90), max_size=3),
    T=st.integers(1, 3),
    H=st.integers(1, 3),
    Dk=st.integers(1, 70),
    Dv=st.integers(1, 70),
    page=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["HND", "NHD"]),
    skew=st.integers(0, 2),
    unit=st.sampled_from([cases.TOKEN, cases.PAGE]),
    density=st.floats(0, 1),
    contiguous=st.booleans(),
)
def test_gather_fuzz(seed, lens, T, H, Dk, Dv, page, dtype, layout, skew, unit, density, contiguous, backend):
    gen = generator(seed)
    cache = paged_cache(gen, lens, H, Dk, page, dtype, Dv=Dv, layout=layout, skew=skew)
    if contiguous:
        cache = contiguous_cache(cache.k, cache.v, cache.seq_lens)
    S = cache.k.shape[2]
    size = 1 if unit == cases.TOKEN else cache.page
    chosen = random_selection(gen, visible(cache.seq_lens, T, S), H, S // size, density, size)
    inputs = (cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens, *chosen, unit)
    compare(run("gather", inputs, backend), reference("gather")(*inputs))


# --- merge: golden values -------------------------------------------------------------------------------------------


def merge(backend, a, b):
    """Merge (out, lse) pairs of one head and one channel; returns two numbers."""
    tensors = [torch.tensor(x).reshape(1, 1, *[1] * (i % 2 == 0)) for i, x in enumerate((*a, *b))]
    out, lse = run("merge_states", tensors, backend)
    stacked = (torch.stack(tensors[::2]), torch.stack(tensors[1::2]))
    for got, want in zip(run("merge_many", stacked, backend), (out, lse)):
        assert_same_bits(got, want, "merge_many of two")
    return out.item(), lse.item()


@every_backend
def test_golden_merge(backend):
    """Sums 2 and 8, outputs 0 and 1: 0.8, LSE ln 10."""
    out, lse = merge(backend, (0.0, math.log(2.0)), (1.0, math.log(8.0)))
    assert out == pytest.approx(0.8, abs=1e-6)
    assert lse == pytest.approx(math.log(10.0), abs=1e-6)


@every_backend
def test_merge_with_empty_states(backend):
    """Two empty states give (0, -inf); an empty state changes nothing, whatever stands in its output."""
    assert merge(backend, (0.0, -INF), (0.0, -INF)) == (0.0, -INF)
    assert merge(backend, (5.0, -INF), (math.nan, -INF)) == (0.0, -INF)
    assert merge(backend, (3.0, 1.5), (math.nan, -INF)) == (3.0, 1.5)
    assert merge(backend, (math.nan, -INF), (3.0, 1.5)) == (3.0, 1.5)


@every_backend
def test_positive_infinity_marks_an_empty_state_too(backend):
    """As FlashAttention 2 writes it."""
    assert merge(backend, (5.0, INF), (math.nan, -INF)) == (0.0, -INF)
    assert merge(backend, (3.0, 1.5), (math.nan, INF)) == (3.0, 1.5)
    assert merge(backend, (math.nan, INF), (3.0, 1.5)) == (3.0, 1.5)


@every_backend
def test_finite_lse_survives(backend):
    """An LSE of -1e30 is not empty."""
    low = torch.tensor(-1e30).item()
    assert merge(backend, (3.0, -1e30), (0.0, -INF)) == (3.0, low)
    assert merge(backend, (3.0, -1e30), (5.0, 0.0)) == (5.0, 0.0)
    assert merge(backend, (3.0, -1e30), (5.0, -1e30)) == (4.0, low)


# --- merge: grid 7, splits ------------------------------------------------------------------------------------------


@native_backend
@by_case([*cases.grid("merge"), *cases.grid("merge_many")])
def test_merge_grid(case, backend):
    check_case(case, backend)


@every_backend
@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_parts_are_the_whole(parts, dtype, backend):
    """Attention over disjoint token lists, some of them empty, merged: attention over all of them."""
    gen = generator(parts)
    cache = paged_cache(gen, [90], 2, 64, 16, dtype)
    q = randn(gen, 1, 1, 6, 64, dtype=dtype)
    owner = torch.randint(0, parts, (2, 90), generator=gen)
    owner[0, owner[0] == 1] = 0  # head 0 has nothing in part 1
    states = []
    for part in range(parts):
        rows = [(owner[h] == part).nonzero().flatten().tolist() for h in range(2)]
        states.append([x[0] for x in attention(backend, q, cache, listing(rows, H=2))])
    out, lse = run("merge_many", tuple(torch.stack(x) for x in zip(*states)), backend)
    want = [x[0] for x in attention(backend, q, cache)]
    tolerance = Tolerance(2e-5, 1e-5, 2e-5) if dtype == torch.float32 else Tolerance(1e-3, 2e-2, 1e-3)
    compare((out, lse), want, tolerance, "merged")


@native_backend
def test_merge_of_one_state_and_of_strided_states(backend):
    gen = generator(4)
    outs, lses = randn(gen, 5, 3, 4, 16), 3 * randn(gen, 5, 3, 4)
    one = run("merge_many", (outs[:1], lses[:1]), backend)
    assert_same_bits(one[0], outs[0])
    assert_same_bits(one[1], lses[0])
    want = run("merge_many", (outs, lses), backend)
    wide = torch.cat((outs, outs), -1)[..., :16]
    turned = lses.transpose(0, 1).contiguous().transpose(0, 1)
    for g, w in zip(run("merge_many", (wide, turned), backend), want):
        assert_same_bits(g, w)


@native_backend
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 6),
    rows=st.integers(0, 5),
    H=st.integers(1, 5),
    D=st.integers(1, 140),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    empty=st.floats(0, 1),
    spread=st.sampled_from([0.1, 5.0, 80.0]),
)
def test_merge_fuzz(seed, n, rows, H, D, dtype, empty, spread, backend):
    gen = generator(seed)
    lses = (spread * randn(gen, n, rows, H)).masked_fill(torch.rand(n, rows, H, generator=gen) < empty, -INF)
    inputs = (randn(gen, n, rows, H, D, dtype=dtype), lses)
    tolerance = Tolerance(1e-5, 1e-5 if dtype == torch.float32 else 1e-2, 1e-4)
    compare(run("merge_many", inputs, backend), reference("merge_many")(*inputs), tolerance, "merge_many")


def test_nothing_is_close_to_nan():
    """The comparison itself: NaN fails, equal infinities pass."""
    inf = torch.tensor([INF, -INF])
    assert_close(inf, inf, atol=0)
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        assert_close(torch.tensor([0.0, math.nan]), torch.zeros(2), atol=1e9)
    with pytest.raises(AssertionError, match="worst at"):
        assert_close(inf, -inf, atol=1e9)
