"""page_summary and score_pages: enclosure, rounding by hand, incremental rebuilds, bounds, grids, fuzz."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import by_case, check_case, compare, every_backend, native_backend

from sic_kernels.slicing import cases
from sic_kernels.testing import (
    Tolerance,
    assert_close,
    generator,
    guarded_like,
    paged_cache,
    randn,
    reference,
    run,
    run_guarded,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
F8 = torch.float8_e4m3fn


def summary_of(backend, keys):
    """centre [D], radius [D] of one page of keys [n,D]."""
    k = keys[None, None]
    (s,) = run("page_summary", (k, None, torch.tensor([keys.shape[0]], dtype=torch.int32), None, None), backend)
    return s[0, 0, 0], s[0, 0, 1]


# --- golden values --------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_middle_and_half_width(dtype, backend):
    """Channels (1, 5, 3), (-2, -2, -2) and (-1, 0, 1): centres 3, -2, 0; radii 2, 0, 1."""
    keys = torch.tensor([[1.0, -2, -1], [5, -2, 0], [3, -2, 1]], dtype=dtype)
    centre, radius = summary_of(backend, keys)
    assert centre.tolist() == [3, -2, 0]
    assert radius.tolist() == [2, 0, 1]


@every_backend
def test_golden_rounding_is_outward(backend):
    """bf16 keys 1 and 1 + 2^-7: the middle 1 + 2^-8 rounds to 1 (ties to even), so the radius is 2^-7, not 2^-8."""
    keys = torch.tensor([[1.0], [1.0078125]], dtype=torch.bfloat16)
    centre, radius = summary_of(backend, keys)
    assert centre.item() == 1.0
    assert radius.item() == 2**-7
    # f32 keys 1 and 2^-30: hi - centre is not a f32, and must be rounded up.
    keys = torch.tensor([[1.0], [2.0**-30]])
    centre, radius = summary_of(backend, keys)
    assert centre.item() == 0.5
    assert radius.item() == 0.5
    keys = torch.tensor([[1.0], [-(2.0**-30)]])
    centre, radius = summary_of(backend, keys)
    assert centre.item() == 0.5
    assert radius.item() == math.nextafter(0.5, 1.0) or radius.item() == 0.5 + 2**-24  # the f32 above 0.5
    assert radius.item() > 0.5


# --- enclosure ------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", [*DTYPES, F8])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_every_key_lies_within_centre_and_radius(spread, dtype, backend):
    """Exactly: |key - centre| <= radius in float64, for keys near a large common value and keys of mixed size."""
    gen = generator(3)
    base = randn(gen, 1, 2, 1, 64) * 30
    k = (base + spread * randn(gen, 4, 2, 16, 64).exp() * randn(gen, 4, 2, 16, 64)).clamp(-400, 400).to(dtype)
    scale = torch.tensor([0.3, 7.0]) if dtype == F8 else None
    lens = torch.full((4,), 16, dtype=torch.int32)
    (s,) = run("page_summary", (k, None, lens, scale, None), backend)
    keys = k.float() if scale is None else k.float() * scale[:, None, None]
    assert s.dtype == (torch.float32 if dtype == F8 else dtype)
    centre, radius = s[:, :, :1].double(), s[:, :, 1:].double()
    assert ((keys.double() - centre).abs() <= radius).all()
    # Not loose either: no more than half the width and a few roundings.
    half = (keys.amax(2) - keys.amin(2)).double() / 2
    eps = 2 * torch.finfo(s.dtype).eps
    assert (radius[:, :, 0] <= half * (1 + eps) + eps * keys.double().abs().amax(2) + 1e-7).all()


# --- grids ----------------------------------------------------------------------------------------------------------


@native_backend
@by_case(cases.grid("summary"))
def test_summary_grid(case, backend):
    """Grid 6: last page partly filled; pages that nobody owns read 0 where the op allocates."""
    inputs = case.inputs()
    compare(run(case.op, inputs, backend), case.expected(inputs), what=str(case))


@native_backend
@pytest.mark.parametrize("start", [0, 5, 6, 7, 13])
@pytest.mark.parametrize("page", [1, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_start_rebuilds_from_its_page_on(dtype, page, start, backend):
    """Grid 6: refreshing from `start` equals a full rebuild there, and writes nothing elsewhere."""
    gen = generator(start)
    cache = paged_cache(gen, [14, 9], 2, 64, page, dtype)
    full = (cache.k_cache, cache.block_table, cache.seq_lens, None)
    (want,) = reference("page_summary")(*full, None)
    (out,) = guarded_like([want])
    starts = torch.tensor([start, 4], dtype=torch.int32)
    run("page_summary", (*full, starts), backend, outs=[out.tensor])
    out.assert_guards("page_summary")
    written = torch.zeros(want.shape[0], dtype=torch.bool)
    for b, n in enumerate([14, 9]):
        for i in range(int(starts[b]) // page, -(-n // page)):
            written[cache.block_table[b, i]] = True
    assert torch.equal(out.tensor[written], want[written])
    assert out.untouched()[~written].all()


@native_backend
@by_case(cases.grid("page_score"))
def test_page_score_grid(case, backend):
    check_case(case, backend)


# --- scores ---------------------------------------------------------------------------------------------------------


@every_backend
def test_golden_scores(backend):
    """One head: (q.c + beta |q|.r) * scale relative to the best page; softmax: log of two pages' shares."""
    summary = torch.tensor(
        [[[[1.0, 2.0], [0.5, 0.0]]], [[[0.0, 0.0], [4.0, 2.0]]]]
    )  # pages: c (1,2) r (.5,0); c 0 r (4,2)
    q = torch.tensor([[[[2.0, -1.0]]]])
    table, lens = torch.tensor([[1, 0, 7]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)

    def scores(beta, pool):
        return run("score_pages", (q, summary, table, lens, 4, beta, pool, 0.5, None), backend)[0].flatten()

    # Page 1 comes first: (0 + 10 beta) / 2; then page 0: (0 + 1 beta) / 2; the third is not visible.
    assert scores(1.0, cases.MAX).tolist() == [0.0, -4.5, -math.inf]
    assert scores(0.5, cases.MAX).tolist() == [0.0, -2.25, -math.inf]
    total = math.log(math.exp(5.0) + math.exp(0.5))
    want = torch.tensor([5.0 - total, 0.5 - total, -math.inf])
    assert_close(scores(1.0, cases.SOFTMAX), want, atol=1e-6)


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_beta_one_bounds_every_logit(dtype, backend):
    """With beta = 1 and one head, score(page) - score(page') >= logit of any key in page - bound of page'."""
    gen = generator(6)
    cache = paged_cache(gen, [61], 1, 32, 8, dtype)
    (summary,) = run("page_summary", (cache.k_cache, cache.block_table, cache.seq_lens, None, None), backend)
    q = randn(gen, 1, 1, 1, 32, dtype=dtype)
    (s,) = run("score_pages", (q, summary, cache.block_table, cache.seq_lens, 8, 1.0, cases.MAX, 1.0, None), backend)
    s = s.flatten()[:8].double()
    # The best page's bound, from its summary: what all scores are relative to.
    best = int(s.argmax())
    c, r = summary[int(cache.block_table[0, best]), 0].double()
    bound = (q.flatten().double() @ c) + (q.flatten().double().abs() @ r)
    logits = (cache.k[0, 0, :61].double() @ q.flatten().double()).split(8)
    for page, part in enumerate(logits):
        assert part.max() <= s[page] + bound + 1e-4, page


@every_backend
def test_later_queries_see_more_pages(backend):
    """T = 3 over 9 tokens in pages of 4: the queries see 7, 8 and 9 tokens, 2, 2 and 3 pages."""
    gen = generator(1)
    cache = paged_cache(gen, [9], 1, 8, 4, torch.float32)
    (summary,) = reference("page_summary")(cache.k_cache, cache.block_table, cache.seq_lens, None, None)
    for pool in (cases.MAX, cases.SOFTMAX):
        (s,) = run(
            "score_pages",
            (randn(gen, 1, 3, 2, 8), summary, cache.block_table, cache.seq_lens, 4, 0.5, pool, None, None),
            backend,
        )
        assert (s[0, :, 0] > -torch.inf).tolist() == [
            [True, True, False, False], [True, True, False, False], [True, True, True, False]
        ]  # fmt: skip


# --- fuzz -----------------------------------------------------------------------------------------------------------


@native_backend
@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    lens=st.lists(st.integers(0, 90), max_size=3),
    T=st.integers(1, 3),
    H=st.integers(1, 3),
    G=st.integers(1, 9),
    D=st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 200])),
    page=st.integers(1, 40),
    dtype=st.sampled_from([*DTYPES, F8]),
    layout=st.sampled_from(["HND", "NHD"]),
    beta=st.floats(0, 1),
    pool=st.sampled_from([cases.MAX, cases.SOFTMAX]),
)
def test_fuzz(seed, lens, T, H, G, D, page, dtype, layout, beta, pool, backend):
    gen = generator(seed)
    cache = paged_cache(gen, lens, H, D, page, dtype, layout=layout)
    scale = torch.tensor(0.6) if dtype == F8 else None
    inputs = (cache.k_cache, cache.block_table, cache.seq_lens, scale, None)
    want = reference("page_summary")(*inputs)
    compare(run("page_summary", inputs, backend), want)
    q = randn(gen, len(lens), T, H * G, D, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    inputs = (q, *want, cache.block_table, cache.seq_lens, page, beta, pool, None, None)
    want = reference("score_pages")(*inputs)
    outs = run_guarded("score_pages", inputs, backend, want)
    compare([g.tensor for g in outs], want, Tolerance(1e-4, 1e-4, 0.0), "score_pages")
