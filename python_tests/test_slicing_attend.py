"""attend: the same as its parts, its policy's rules, its status codes, and a fuzz against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import chosen_lists, compare, every_backend, native_backend

from sic_kernels.slicing import cases, cases_inputs
from sic_kernels.slicing.types import STATUS
from sic_kernels.testing import (
    TOLERANCE,
    Tolerance,
    assert_close,
    assert_same_bits,
    generator,
    paged_cache,
    randn,
    reference,
    run,
    run_guarded,
)

SLICED, DENSE_LAYER, DENSE_SHORT, DENSE_PREFILL, FALLBACK = range(5)


class Problem:
    """A cache with its index and a query; `call` runs attend with a policy and extras by name."""

    def __init__(self, lens, T=1, H=2, G=3, D=64, page=16, dtype=torch.float32, unit=cases.TOKEN, planes=2, seed=0):
        gen = generator(seed)
        self.cache = cache = paged_cache(gen, lens, H, D, page, dtype)
        self.unit, self.planes = unit, planes
        self.q = randn(gen, len(lens), T, H * G, D, dtype=dtype) * 2
        self.centre = 0.3 * randn(gen, H, D)
        place = (cache.k_cache, cache.block_table, cache.seq_lens)
        self.sketch = reference("key_sketch")(*place, self.centre, None, planes, None)
        self.summary = reference("page_summary")(*place, None, None)[0]

    def inputs(self, **args):
        index = (*self.sketch, self.centre, self.planes, None)
        if self.unit == cases.PAGE:
            index = (None, None, None, 2, self.summary)
        return cases_inputs.attend_inputs(self.q, self.cache, index, **args)

    def call(self, backend, **args):
        """out, lse, indices, counts, omitted_mass, status."""
        return run("attend", self.inputs(**args), backend)

    def attention(self, backend, selection=None, **extras):
        return run(
            "sliced_attention", cases.attention_inputs(self.q, self.cache, selection, self.unit, **extras), backend
        )

    def scores(self, backend, pool):
        """First-stage scores, as a separate call."""
        c = self.cache
        place = (c.block_table, c.seq_lens, c.page)
        if self.unit == cases.PAGE:
            return run("score_pages", (self.q, self.summary, *place, 0.5, pool, None, None), backend)[0]
        return run("score_tokens", (self.q, *self.sketch, *place, self.planes, pool, None, None), backend)[0]


@st.composite
def fuzzed(draw, sizes=None, **policy):
    """A `Problem` and arguments for its `inputs`: what every fuzz draws. sizes: more of the problem; policy: more arguments, or
    others of these. A `bias` that is drawn becomes a key_bias."""
    sizes = {
        "lens": st.lists(st.integers(0, 260), min_size=1, max_size=3), "T": st.integers(1, 3), "H": st.just(2),
        "G": st.integers(1, 8), "D": st.just(64), "page": st.sampled_from([1, 7, 16, 32]),
        "planes": st.sampled_from([1, 2]), "seed": st.integers(0, 2**31), **(sizes or {}),
    }  # fmt: skip
    problem = Problem(**{name: draw(value) for name, value in sizes.items()})
    policy = {
        "ratio": st.floats(0.01, 1.0), "candidates": st.floats(0.01, 1.0), "top_p": st.sampled_from([None, 0.5, 0.9]),
        "forced": st.sampled_from([(0, 0), (1, 2), (16, 32)]), "window": st.sampled_from([None, 50]),
        "bias": st.booleans(), **policy,
    }  # fmt: skip
    args = {name: draw(value) for name, value in policy.items()}
    args["sink"], args["recent"] = args.pop("forced")
    if args.pop("bias"):
        B, pages = problem.cache.block_table.shape
        args["key_bias"] = randn(generator(draw(st.integers(0, 2**31))), B, pages * problem.cache.page)
    return problem, args


POOLS = st.sampled_from([cases.MAX, cases.SOFTMAX])


# --- attend is its parts --------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("planes", [1, 2])
def test_a_short_sequence_reads_at_least_one_token(planes, backend):
    """35 % of two tokens is no candidate at all; with no sinks and nothing recent one token is read all the same."""
    _, lse, indices, counts, *_ = Problem([2, 1, 3], D=48, page=7, planes=planes).call(backend, sink=0, recent=0)
    assert counts.flatten().tolist() == [1] * 6
    assert bool((indices[..., 0] >= 0).all())
    assert bool(lse.isfinite().all())


@native_backend
@pytest.mark.parametrize("unit, planes", [(cases.PAGE, 2), (cases.TOKEN, 1)])
def test_one_stage_is_score_select_attend(unit, planes, backend):
    """Page summaries, and sketches of one plane: bit for bit the separate calls."""
    p = Problem([900, 333, 0, 20], unit=unit, planes=planes, T=2)
    out, lse, indices, counts, _, _ = p.call(backend)
    scores = p.scores(backend, cases.SOFTMAX)
    want = run("select", cases.select_inputs(scores, p.cache.seq_lens, unit=unit, page_size=16), backend)
    assert_same_bits(indices, want[0], "indices")
    assert_same_bits(counts, want[1], "counts")
    for got, w in zip((out, lse), p.attention(backend, want)):
        assert_same_bits(got, w)


@native_backend
@pytest.mark.parametrize("pool", [cases.MAX, cases.SOFTMAX])
def test_two_stages_are_score_shortlist_refine_select_attend(pool, backend):
    """The two-stage sketch, put together from separate calls: bit for bit."""
    p = Problem([900, 333], T=2)
    out, lse, indices, counts, _, _ = p.call(backend, pool=pool)
    c = p.cache
    scores = p.scores(backend, cases.MAX)
    share = cases.select_inputs(scores, c.seq_lens, ratio=0.25, sink=0, recent=0)
    listed, count = run("select", share, backend)
    place = (c.block_table, c.seq_lens, c.page)
    (fine,) = run("refine_tokens", (p.q, *p.sketch, *place, listed, count, pool, None, None), backend)
    # Tokens outside the shortlist are below every candidate; the budget never reaches them here.
    S = scores.shape[-1]
    wide = torch.full((*scores.shape[:-1], S + 1), -32768, dtype=torch.int16)
    wide = wide.scatter(-1, torch.where(listed >= 0, listed.long(), S), fine)[..., :S].contiguous()
    want = run("select", cases.select_inputs(wide, c.seq_lens), backend)
    assert_same_bits(indices, want[0], "indices")
    assert_same_bits(counts, want[1], "counts")
    for got, w in zip((out, lse), p.attention(backend, want)):
        assert_same_bits(got, w)


@every_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
@pytest.mark.parametrize(
    "extras",
    [{}, {"softcap": 20.0, "window": 300}, {"top_p": 0.9}, {"keep": torch.tensor([[[100, 150], [320, 400]]] * 4)}],
    ids=["plain", "extras", "top_p", "keep"],
)
def test_select_slice_is_attend_before_its_attention(unit, extras, backend):
    """The same lists bit for bit, and the same omitted mass once the lse is known."""
    p = Problem([900, 333, 0, 20], unit=unit, T=2)
    named = {**cases_inputs.ATTEND_POLICY, **extras}
    c, index = p.cache, p.inputs(**extras)[3:8]
    chosen = [
        named[name] for name in ("ratio", "candidates", "top_p", "sink", "recent", "beta", "pool", "min_len", "keep")
    ]
    rest = [extras.get(name) for name in ("scale", "key_bias", "softcap", "window", "max_seq_len")]
    inputs = (p.q, *index, c.block_table, c.seq_lens, c.page, *chosen, *rest)
    indices, counts, log_unread = run("select_slice", inputs, backend)
    _, lse, want, want_counts, omitted, _ = p.call(backend, **extras)
    assert_same_bits(indices, want, "indices")
    assert_same_bits(counts, want_counts, "counts")
    share = torch.where(log_unread == -math.inf, 0.0, torch.sigmoid(log_unread.double() - lse.double())).float()
    assert_close(share, omitted, atol=1e-5, what="omitted mass")


@native_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratio_one_is_dense_bit_for_bit(unit, dtype, backend):
    p = Problem([700, 90, 1], unit=unit, dtype=dtype, T=2)
    out, lse, _, counts, omitted, status = p.call(backend, ratio=1.0)
    for got, want in zip((out, lse), p.attention(backend)):
        assert_same_bits(got, want)
    assert omitted.eq(0).all()
    assert status.eq(DENSE_SHORT).all()
    if unit == cases.TOKEN:
        assert counts[:, :, 0].tolist() == [[699, 700], [89, 90], [0, 1]]


@every_backend
@pytest.mark.parametrize("length", [1, 10, 47, 48])
def test_short_sequences_are_read_whole(length, backend):
    """Sink 16 and recent 32 cover 48 tokens: up to there everything is read, whatever the ratio."""
    p = Problem([length])
    out, lse, indices, counts, omitted, status = p.call(backend)
    assert chosen_lists((indices, counts)) == [list(range(length))] * 2
    want = p.attention("ref")
    assert_close(out, want[0], atol=1e-5)
    assert_close(lse, want[1], atol=1e-5)
    assert omitted.eq(0).all()
    assert status.eq(DENSE_SHORT).all()


# --- rules of the policy --------------------------------------------------------------------------------------------


@every_backend
def test_sink_recent_and_budget(backend):
    """Every list holds the sinks and the recent tokens, and floor(0.12 * visible) tokens in all."""
    p = Problem([1000, 600], T=2)
    _, _, indices, counts, omitted, status = p.call(backend)
    rows = iter(chosen_lists((indices, counts)))
    for n in (1000, 600):
        for visible in (n - 1, n):
            for _ in range(2):
                row = next(rows)
                assert row[:16] == list(range(16))
                assert row[-32:] == list(range(visible - 32, visible))
                assert len(row) == math.floor(0.12 * visible)
    assert status.eq(SLICED).all()
    assert ((omitted > 0) & (omitted < 1)).all()


@every_backend
def test_shortlist_smaller_than_the_ratio_is_widened(backend):
    """candidates below ratio means ratio: the budget is always filled."""
    p = Problem([1000])
    _, _, _, counts, _, _ = p.call(backend, ratio=0.3, candidates=0.05)
    assert counts.eq(300).all()


@every_backend
def test_it_finds_the_needle(backend):
    """One key that points where the query points, among noise, is read; the output is nearly its value."""
    p = Problem([2000], H=1, G=1)
    needle = p.q[0, 0, 0] * 1.5
    page, offset = p.cache.block_table[0, 777 // 16], 777 % 16
    p.cache.k_cache[page, 0, offset] = needle
    place = (p.cache.k_cache, p.cache.block_table, p.cache.seq_lens)
    p.sketch = reference("key_sketch")(*place, p.centre, None, 2, None)
    out, _, indices, counts, omitted, _ = p.call(backend, ratio=0.05)
    assert 777 in chosen_lists((indices, counts))[0]
    assert_close(out[0, 0, 0], p.cache.v_cache[page, 0, offset], atol=1e-2)
    assert omitted.item() < 1e-3


@every_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
def test_key_bias_steers_the_selection(unit, backend):
    """A bias of +50 on a token makes it chosen; -inf elsewhere leaves only the forced ones any weight."""
    p = Problem([800], unit=unit)
    S = p.cache.block_table.shape[1] * 16
    bias = torch.zeros(1, S)
    bias[0, [300, 301, 450]] = 50.0
    _, _, indices, counts, _, _ = p.call(backend, key_bias=bias, ratio=0.1)
    wanted = {300, 301, 450} if unit == cases.TOKEN else {300 // 16, 450 // 16}
    for row in chosen_lists((indices, counts)):
        assert wanted <= set(row)


@every_backend
def test_kept_spans_are_read(backend):
    keep = torch.tensor([[[200, 210], [-1, -1]]], dtype=torch.int32)
    _, _, indices, counts, _, _ = Problem([800]).call(backend, keep=keep, sink=0, recent=0, ratio=0.05)
    for row in chosen_lists((indices, counts)):
        assert set(range(200, 210)) <= set(row)
        assert len(row) == 40


@every_backend
def test_top_p_stops_early(backend):
    """A small top_p reads fewer tokens than the budget, but never fewer than the forced ones."""
    p = Problem([1000])
    full, some = (p.call(backend, top_p=x)[3] for x in (None, 0.3))
    assert (some < full).all()
    assert (some >= 48).all()


@every_backend
def test_min_len_reads_short_sequences_whole(backend):
    _, _, _, counts, _, status = Problem([300, 301]).call(backend, min_len=300)
    assert counts[0].eq(300).all()
    assert status[0].eq(DENSE_SHORT).all()
    assert counts[1].eq(48).all()
    assert status[1].eq(SLICED).all()


# --- dense by policy, fallback --------------------------------------------------------------------------------------


@native_backend
@pytest.mark.parametrize("why, policy", [(DENSE_LAYER, {"dense_layer": True}), (DENSE_PREFILL, {"max_sliced_T": 2})])
def test_dense_by_policy(why, policy, backend):
    """Dense layers, more query tokens than max_sliced_T: the dense result bit for bit, no selection, no estimate."""
    p = Problem([500, 70], T=3)
    out, lse, indices, _, omitted, status = p.call(backend, **policy)
    for got, want in zip((out, lse), p.attention(backend)):
        assert_same_bits(got, want)
    assert status.eq(why).all()
    assert omitted.eq(0).all()
    assert indices.shape[-1] == 0


@native_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
def test_heads_above_the_limit_are_recomputed_dense(unit, backend):
    """Each head by itself: above max_omitted_mass it is dense bit for bit, below it is what it was."""
    p = Problem([1500, 700], G=4, unit=unit)
    sliced = p.call(backend)
    limit = sliced[4].median().item()
    out, lse, _, _, omitted, status = p.call(backend, max_omitted_mass=limit)
    again = sliced[4] > limit
    assert again.any()
    assert (~again).any()
    assert torch.equal(status == FALLBACK, again)
    dense = p.attention(backend)
    for got, was, whole in ((out, sliced[0], dense[0]), (lse, sliced[1], dense[1])):
        assert_same_bits(got[again], whole[again], "dense heads")
        assert_same_bits(got[~again], was[~again], "sliced heads")
    assert omitted[again].eq(0).all()


@native_backend
def test_omitted_mass_estimates_what_was_not_read(backend):
    """Against the true unread softmax mass, on Gaussian keys: it goes along with it, within 0.35."""
    p = Problem([3000], G=8, H=4, D=128)
    _, lse, _, _, omitted, _ = p.call(backend)
    omitted, dense_lse = omitted.double().flatten(), p.attention(backend)[1].double()
    true = (1 - (lse.double() - dense_lse).exp()).flatten()
    assert torch.corrcoef(torch.stack((omitted, true)))[0, 1] > 0.8
    assert (omitted - true).abs().max() < 0.35


# --- against the reference ------------------------------------------------------------------------------------------


def assert_attend(got, want, dtype, exact_selection=True):
    """Selection and status bit for bit, output within the dtype's tolerance, the estimate to 1e-3."""
    if exact_selection:
        for i, what in ((2, "indices"), (3, "counts"), (5, "status")):
            assert_same_bits(got[i], want[i], f"attend: {what}")
    compare(got[:2], want[:2], TOLERANCE[dtype], "attend")
    assert_close(got[4], want[4], atol=1e-3, what="attend: omitted_mass")


@native_backend
@settings(max_examples=40)
@given(
    fuzz=fuzzed(
        sizes={
            "H": st.integers(1, 2),
            "D": st.sampled_from([16, 46, 64, 80, 128]),
            "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        },
        pool=POOLS,
        min_len=st.sampled_from([0, 100]),
        softcap=st.sampled_from([None, 5.0]),
    ),
    sinks=st.booleans(),
)
def test_fuzz_sketch(fuzz, sinks, backend):
    p, args = fuzz
    if sinks:
        args["sinks"] = randn(generator(1), p.q.shape[2])
    inputs = p.inputs(**args)
    want = reference("attend")(*inputs)
    outs = run_guarded("attend", inputs, backend, want)
    assert_attend([g.tensor for g in outs], want, p.q.dtype)


NO_WINDOW = {name: st.none() for name in ("top_p", "window")}


@native_backend
@settings(max_examples=20)
@given(fuzz=fuzzed(sizes={"unit": st.just(cases.PAGE)}, pool=POOLS, **NO_WINDOW))
def test_fuzz_pages(fuzz, backend):
    """Page scores are f32 sums: where the reference chooses otherwise, the choice must be a near tie."""
    p, args = fuzz
    inputs = p.inputs(**args)
    want = reference("attend")(*inputs)
    got = [g.tensor for g in run_guarded("attend", inputs, backend, want)]
    if torch.equal(got[2], want[2]):
        assert_attend(got, want, torch.float32)
        return
    assert_same_bits(got[3], want[3], "counts")
    place = (p.cache.block_table, p.cache.seq_lens, p.cache.page)
    scores = reference("score_pages")(p.q, p.summary, *place, 0.5, args["pool"], None, None)[0]
    for a, b, s in zip(got[2].flatten(0, 2).tolist(), want[2].flatten(0, 2).tolist(), scores.flatten(0, 2).tolist()):
        for x, y in zip(sorted(set(a) - set(b)), sorted(set(b) - set(a))):
            assert abs(s[x] - s[y]) < 1e-4 or "key_bias" in args
    compare(got[:2], p.attention("ref", (got[2], got[3])), Tolerance(1e-5, 1e-5, 1e-5))


def test_status_names():
    assert len(STATUS) == 5
    assert STATUS[SLICED] == "sliced"
    assert STATUS[FALLBACK].startswith("fallback")
