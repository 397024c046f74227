"""sliced_attention: acceptance grids 1-3 and 8, the edge cases, every extra, and a fuzz against the reference."""

import math

import pytest
import slicing_naive as naive
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
    thinned,
)

from sic_kernels.slicing import cases
from sic_kernels.slicing.reference_layout import visible
from sic_kernels.testing import (
    TOLERANCE,
    assert_close,
    assert_same_bits,
    generator,
    paged_cache,
    randn,
    random_selection,
    reference,
    run,
    run_guarded,
)

LN2 = math.log(2.0)


# --- grids ----------------------------------------------------------------------------------------------------------


def expected_over_selected(inputs):
    """out, lse in float64 from each head's selected rows alone (B = T = 1): what long caches can afford."""
    q = inputs[0]
    k, v, indptr = reference("gather")(*inputs[1:8])
    heads = indptr.numel() - 1
    outs, lses = [], []
    for h, query in enumerate(q[0, 0].double().unflatten(0, (heads, -1))):
        rows = slice(int(indptr[h]), int(indptr[h + 1]))
        logits = query @ k[rows].double().T / math.sqrt(q.shape[-1])
        outs.append(logits.softmax(-1) @ v[rows].double())
        lses.append(logits.logsumexp(-1))
    return torch.cat(outs)[None, None].to(q.dtype), torch.cat(lses)[None, None].float()


@native_backend
@pytest.mark.parametrize("length", cases.LENGTHS)
def test_decode_grid(length, backend):
    """Grid 1: every page size, budget, head size and dtype at one length."""
    at_length = [case for case in cases.grid("decode") if case.shape["len"] == length]
    for case in thinned(at_length, backend, 7 if length < 5000 else 29):
        inputs = case.inputs()
        got = run(case.op, inputs, backend)
        compare(got, expected_over_selected(inputs), case.tolerance, str(case))


@native_backend
@by_case(cases.grid("per_head"))
def test_per_head_grid(case, backend):
    """Grid 2: each head has its own tokens; tolerance 1e-2."""
    inputs = case.inputs()
    got = run(case.op, inputs, backend)
    assert_close(got[0], case.expected(inputs)[0], atol=1e-2, rtol=1e-2, what=str(case))


@native_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "page, heads, group, length, T", [(16, 2, 8, 110, 1), (64, 4, 1, 8192, 1), (16, 2, 4, 1000, 3)]
)
def test_full_density_is_dense_bit_for_bit(page, heads, group, length, T, dtype, unit, backend):
    case = cases.attention_case([length], T, heads, group, 128, page, dtype, density=1.0, unit=unit)
    inputs = case.inputs()
    dense = (*inputs[:5], None, None, unit, *inputs[8:])
    for got, want in zip(run(case.op, inputs, backend), run(case.op, dense, backend)):
        assert_same_bits(got, want)


@native_backend
@by_case(cases.grid("group"))
def test_group_grid(case, backend):
    """Grid 3: 28/4, 9/3, 20/4, 24/4, 64/4 and 7/1 heads."""
    check_case(case, backend)


@native_backend
@by_case(cases.grid("head_size"))
def test_head_size_grid(case, backend):
    """Grid 8: odd head sizes, caches that start at element 1, NHD caches."""
    check_case(case, backend)


# --- against an independent formula ---------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("T", [1, 3])
def test_dense_is_torch_attention(T, backend):
    """Dense attention is scaled_dot_product_attention with a causal mask aligned to the end."""
    gen = generator(7)
    cache = paged_cache(gen, [130, 77], 2, 64, 16, torch.float32)
    q = randn(gen, 2, T, 8, 64)
    out, lse = attention(backend, q, cache)
    for b, n in enumerate([130, 77]):
        mask = torch.ones(T, n, dtype=torch.bool).tril(n - T)
        k, v = cache.k[b : b + 1, :, :n], cache.v[b : b + 1, :, :n]
        want = torch.nn.functional.scaled_dot_product_attention(
            q[b : b + 1].transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True
        )
        assert_close(out[b], want[0].transpose(0, 1), atol=2e-6, what="out")
        logits = torch.einsum("thd,hsd->ths", q[b], k[0].repeat_interleave(4, 0)) / 8
        want_lse = logits.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)
        assert_close(lse[b], want_lse, atol=5e-6, what="lse")


@every_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("extras", [(), ("key_bias",), ("sinks",), ("key_bias", "sinks")])
def test_extras_against_loops(unit, window, softcap, extras, backend):
    """Scale, soft cap, bias, window and sinks against loops over Python floats."""
    gen = generator(11)
    lens, T, H, G, page = [23, 14], 2, 2, 2, 4
    cache = paged_cache(gen, lens, H, 8, page, torch.float32, Dv=5)
    S = cache.block_table.shape[1] * page
    q = randn(gen, 2, T, H * G, 8)
    given = {"key_bias": randn(gen, 2, S), "sinks": randn(gen, H * G)}
    given = {name: given[name] for name in extras}
    size = 1 if unit == cases.TOKEN else page
    chosen = random_selection(gen, visible(cache.seq_lens, T, S), H, S // size, 0.5, size)
    out, lse = attention(backend, q, cache, chosen, unit, scale=0.3, window=window, softcap=softcap, **given)
    for b, t, h in ((b, t, h) for b in range(2) for t in range(T) for h in range(H * G)):
        vis = naive.visible(lens[b], T, t, S)
        units = chosen[0][b, t, h // G, : chosen[1][b, t, h // G]].tolist()
        positions = [u * size + i for u in units for i in range(size) if u * size + i < vis]
        if window is not None:
            positions = [s for s in positions if s > lens[b] - T + t - window]
        want = naive.attention_row(
            q[b, t, h].tolist(), cache.k[b, h // G].tolist(), cache.v[b, h // G].tolist(), positions, 0.3,
            None if "key_bias" not in given else given["key_bias"][b].tolist(), softcap,
            None if "sinks" not in given else float(given["sinks"][h]),
        )  # fmt: skip
        assert_close(out[b, t, h], torch.tensor(want[0]), atol=2e-6, what=f"out[{b},{t},{h}]")
        assert_close(lse[b, t, h], torch.tensor(want[1], dtype=torch.float32), atol=2e-6, what=f"lse[{b},{t},{h}]")


@every_backend
@pytest.mark.parametrize("per_head", [False, True])
def test_f8_cache_with_scales(per_head, backend):
    """An f8 cache stands for its values times the scales."""
    gen = generator(3)
    cache = paged_cache(gen, [50], 2, 32, 16, torch.float8_e4m3fn, Dv=16)
    q = randn(gen, 1, 1, 4, 32)
    k_scale = torch.tensor([0.5, 2.0]) if per_head else torch.tensor(0.75)
    v_scale = torch.tensor([3.0, 0.25]) if per_head else torch.tensor(1.5)
    out, lse = attention(backend, q, cache, k_scale=k_scale, v_scale=v_scale)
    k = cache.k.float() * (k_scale[:, None, None] if per_head else k_scale)
    v = cache.v.float() * (v_scale[:, None, None] if per_head else v_scale)
    plain = contiguous_cache(k, v, [50])
    want = attention("ref", q, plain)
    assert_close(out, want[0], atol=2e-5, what="out")
    assert_close(lse, want[1], atol=2e-5, what="lse")


# --- golden values --------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_golden_two_tokens(dtype, backend):
    """Logits ln 2 and ln 8 (a base of 0): weights 0.2 and 0.8, values 0 and 1; LSE ln 10."""
    bias = torch.tensor([[LN2, 3 * LN2]])
    cache = contiguous_cache(torch.zeros(1, 1, 2, 4, dtype=dtype), torch.tensor([[[[0.0], [1.0]]]], dtype=dtype), [2])
    out, lse = attention(backend, torch.ones(1, 1, 1, 4, dtype=dtype), cache, key_bias=bias)
    assert_close(out, torch.full((1, 1, 1, 1), 0.8, dtype=dtype), atol=1e-6 if dtype == torch.float32 else 4e-3)
    assert_close(lse, torch.full((1, 1, 1), math.log(10.0)), atol=1e-6)


@every_backend
def test_golden_one_token_returns_its_value(backend):
    """One token: out is its value, LSE its logit 0.5 * (1*3 + 2*4)."""
    cache = contiguous_cache(torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[7.0, -5.0, 0.25]]]]), [1])
    out, lse = attention(backend, torch.tensor([[[[1.0, 2.0]]]]), cache, scale=0.5)
    assert out.flatten().tolist() == [7.0, -5.0, 0.25]
    assert lse.item() == 5.5


@every_backend
def test_golden_window_softcap_sink(backend):
    """Window 2 leaves positions 2 and 3; logits cap to 2*tanh(x/2); the sink ln 2 adds 2 to the denominator."""
    k = torch.tensor([9.0, 9.0, 0.0, 0.0]).reshape(1, 1, 4, 1)
    v = torch.tensor([100.0, 100.0, 4.0, 8.0]).reshape(1, 1, 4, 1)
    q = torch.ones(1, 1, 1, 1)
    out, lse = attention(backend, q, contiguous_cache(k, v, [4]), window=2, softcap=2.0, sinks=torch.tensor([LN2]))
    assert_close(out.flatten(), torch.tensor([(4.0 + 8.0) / 4.0]), atol=1e-6)
    assert_close(lse.flatten(), torch.tensor([math.log(4.0)]), atol=1e-6)
    out, lse = attention(backend, q, contiguous_cache(k, v, [1]), softcap=2.0)
    assert_close(lse.flatten(), torch.tensor([2.0 * math.tanh(4.5)]), atol=1e-6)


@every_backend
def test_empty_row_between_full_ones(backend):
    """Lengths [5,0,7]: row 1 is out 0, LSE -inf, over a prefilled NaN."""
    gen = generator(1)
    cache = paged_cache(gen, [5, 0, 7], 2, 16, 4, torch.float32)
    inputs = cases.attention_inputs(randn(gen, 3, 1, 4, 16), cache)
    if backend == "ref":
        out, lse = run("sliced_attention", inputs, backend)
    else:
        out, lse = (
            g.tensor for g in run_guarded("sliced_attention", inputs, backend, reference("sliced_attention")(*inputs))
        )
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()
    assert out[[0, 2]].isfinite().all()
    assert lse[[0, 2]].isfinite().all()


@every_backend
def test_query_tokens_before_the_first_position(backend):
    """T = 3 over a length of 1: only the last query token sees anything."""
    cache = contiguous_cache(torch.ones(1, 1, 4, 2), torch.full((1, 1, 4, 2), 5.0), [1])
    out, lse = attention(backend, torch.ones(1, 3, 1, 2), cache, scale=1.0)
    assert out[0, :, 0].tolist() == [[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]]
    assert lse[0, :, 0].tolist() == [-math.inf, -math.inf, 2.0]


@every_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
def test_empty_selection(unit, backend):
    """Nothing selected: out 0, LSE -inf; the other head is not disturbed."""
    gen = generator(2)
    cache = paged_cache(gen, [20], 2, 16, 4, torch.float32)
    out, lse = attention(backend, randn(gen, 1, 1, 4, 16), cache, listing([[], [1, 2]], H=2), unit)
    assert out[0, 0, :2].eq(0).all()
    assert lse[0, 0, :2].eq(-torch.inf).all()
    assert lse[0, 0, 2:].isfinite().all()


@native_backend
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
@pytest.mark.parametrize("length", [1, 10, 50, 63, 64, 65])
def test_budget_covers_the_sequence(length, unit, backend):
    """Page 16, budget 64: up to 64 tokens the selected attention is the dense one bit for bit; at 65 it is not."""
    gen = generator(length)
    cache = paged_cache(gen, [length], 2, 32, 16, torch.float32)
    q = randn(gen, 1, 1, 4, 32)
    width = cache.block_table.shape[1] * (16 if unit == cases.TOKEN else 1)
    scores = randn(gen, 1, 1, 2, width)
    args = {"unit": unit, "page_size": 16, "budget": 64, "sink": 0, "recent": 0}
    chosen = run("select", cases.select_inputs(scores, cache.seq_lens, **args), backend)
    assert int(chosen[1].max()) <= (64 if unit == cases.TOKEN else 4)
    pairs = zip(attention(backend, q, cache, chosen, unit), attention(backend, q, cache))
    assert all(torch.equal(a, b) for a, b in pairs) == (length <= 64)


@every_backend
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_surplus_page_has_no_influence(length, backend):
    """Page 16: a surplus page full of 1e4, and the last page's free slots, change nothing."""
    gen = generator(length)
    cache = paged_cache(gen, [length], 1, 32, 16, torch.float32)
    table = cache.block_table.clone()
    used = -(-length // 16)
    table[0, used:] = next(p for p in range(cache.k_cache.shape[0]) if p not in table[0, :used].tolist())
    q = randn(gen, 1, 1, 2, 32)
    surplus = cases.attention_inputs(q, cache)[:3] + (table,) + cases.attention_inputs(q, cache)[4:]
    exact = attention(backend, q, contiguous_cache(cache.k[:, :, :length], cache.v[:, :, :length], [length]))
    for got, want in zip(run("sliced_attention", surplus, backend), exact):
        assert_close(got, want, atol=1e-6)


@every_backend
def test_f16_dot_beyond_its_range(backend):
    """q = 24, keys 24 and 23, D = 128: the raw dots 73728 and 70656 exceed f16; the first value wins, LSE 6516.6."""
    k = torch.tensor([24.0, 23.0], dtype=torch.float16)[None, None, :, None].expand(1, 1, 2, 128).contiguous()
    v = torch.tensor([1.5, -2.0], dtype=torch.float16)[None, None, :, None].expand(1, 1, 2, 128).contiguous()
    out, lse = attention(backend, torch.full((1, 1, 1, 128), 24.0, dtype=torch.float16), contiguous_cache(k, v, [2]))
    assert out.eq(1.5).all()
    assert_close(lse.flatten(), torch.tensor([128 * 576 / math.sqrt(128.0)]), atol=1e-2)


@every_backend
@pytest.mark.parametrize("B", [0, 65535, 65536])
def test_batch_sizes(B, backend):
    """Batch 0 returns empty; 65535 and 65536 are right in every row."""
    k = torch.arange(4.0).reshape(1, 1, 4, 1)
    v = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4, 1)
    lens = torch.arange(B, dtype=torch.int32) % 5
    cache = contiguous_cache(k.expand(B, 1, 4, 1), v.expand(B, 1, 4, 1), lens)
    out, lse = attention(backend, torch.zeros(B, 1, 1, 1), cache)
    assert out.shape == (B, 1, 1, 1)
    # All logits are 0: the mean of the first n values, LSE ln n.
    mean = torch.tensor([0.0, 1.0, 1.5, 2.0, 2.5])
    logs = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]).log()
    assert_close(out.flatten(), mean[lens.long()], atol=1e-6)
    assert_close(lse.flatten(), logs[lens.long()], atol=1e-6)


# --- layouts --------------------------------------------------------------------------------------------------------


@native_backend
def test_strides_do_not_matter(backend):
    """Expanded (stride 0) queries, transposed queries, strided outputs, i64 tables and lengths: the same bits."""
    gen = generator(5)
    cache = paged_cache(gen, [90, 41], 2, 64, 16, torch.float32)
    q = randn(gen, 1, 1, 4, 64).expand(2, 1, 4, 64)
    inputs = cases.attention_inputs(q, cache)
    want = run("sliced_attention", cases.attention_inputs(q.contiguous(), cache), backend)
    wide = (*inputs[:3], inputs[3].long(), inputs[4].long(), *inputs[5:])
    turned = (q.transpose(1, 2).contiguous().transpose(1, 2), *inputs[1:])
    padded = (torch.cat((q, q), -1)[..., :64], *inputs[1:])
    for variant in (inputs, wide, turned, padded):
        for g, w in zip(run("sliced_attention", variant, backend), want):
            assert_same_bits(g, w)
    outs = (torch.full((2, 1, 4, 128), torch.nan)[..., :64], torch.full((2, 1, 8), torch.nan)[..., :4])
    run("sliced_attention", inputs, backend, outs=outs)
    for g, w in zip(outs, want):
        assert_same_bits(g.contiguous(), w)


@native_backend
def test_values_as_a_view_of_keys(backend):
    """MLA: V is the first 32 channels of K."""
    gen = generator(6)
    cache = paged_cache(gen, [70], 1, 48, 16, torch.bfloat16)
    q = randn(gen, 1, 1, 8, 48, dtype=torch.bfloat16)
    inputs = cases.attention_inputs(q, cache)
    inputs = (*inputs[:2], cache.k_cache[..., :32], *inputs[3:])
    want = reference("sliced_attention")(*inputs)
    compare(run("sliced_attention", inputs, backend), want, TOLERANCE[torch.bfloat16], "MLA view")


@native_backend
def test_outputs_may_start_anywhere(backend):
    case = cases.attention_case([37, 5], 2, 2, 3, 48, 7, torch.bfloat16, density=0.5)
    inputs = case.inputs()
    want = case.expected(inputs)
    outs = run_guarded(case.op, inputs, backend, want, skew=1)
    compare([g.tensor for g in outs], want, case.tolerance, "skewed outputs")


# --- fuzz -----------------------------------------------------------------------------------------------------------


@st.composite
def attention_problems(draw):
    """Shapes, layouts, dtypes and extras of one call, with a seed for the values."""
    H, G = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    page = draw(st.integers(1, 35))
    B = draw(st.integers(0, 3))
    return {
        "seed": draw(st.integers(0, 2**31)),
        "lens": [draw(st.integers(0, 150)) for _ in range(B)],
        "T": draw(st.integers(1, 4)),
        "H": H,
        "G": G,
        "D": draw(st.one_of(st.integers(1, 40), st.sampled_from([48, 64, 80, 96, 128, 160]))),
        "Dv": draw(st.one_of(st.integers(1, 40), st.sampled_from([48, 64, 80, 96, 128, 160]))),
        "page": page,
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        "f8": draw(st.booleans()),
        "layout": draw(st.sampled_from(["HND", "NHD"])),
        "skew": draw(st.integers(0, 2)),
        "contiguous": draw(st.booleans()),
        "unit": draw(st.sampled_from([None, cases.TOKEN, cases.PAGE])),
        "density": draw(st.floats(0.0, 1.0)),
        "scale": draw(st.sampled_from([None, 0.2])),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "window": draw(st.sampled_from([None, 1, 20])),
        "extras": draw(st.sets(st.sampled_from(["key_bias", "sinks"]))),
        "wide": draw(st.booleans()),
    }


def build_attention(p):
    gen = generator(p["seed"])
    index = torch.int64 if p["wide"] else torch.int32
    cache = paged_cache(
        gen, p["lens"], p["H"], p["D"], p["page"], torch.float8_e4m3fn if p["f8"] else p["dtype"], Dv=p["Dv"],
        layout=p["layout"], skew=p["skew"], table_dtype=index, lens_dtype=index,
    )  # fmt: skip
    B, Hq, S = len(p["lens"]), p["H"] * p["G"], cache.block_table.shape[1] * p["page"]
    if p["contiguous"]:
        cache = contiguous_cache(cache.k, cache.v, cache.seq_lens)
    extra = {name: p[name] for name in ("scale", "softcap", "window")}
    if "key_bias" in p["extras"]:
        extra["key_bias"] = randn(gen, B, S)
    if "sinks" in p["extras"]:
        extra["sinks"] = randn(gen, Hq)
    if p["f8"]:
        extra["k_scale"], extra["v_scale"] = torch.tensor(0.5), 0.25 + torch.rand(p["H"], generator=gen)
    q = randn(gen, B, p["T"], Hq, p["D"], dtype=p["dtype"])
    if p["unit"] is None:
        return cases.attention_inputs(q, cache, **extra)
    size = 1 if p["unit"] == cases.TOKEN else cache.page
    chosen = random_selection(gen, visible(cache.seq_lens, p["T"], S), p["H"], S // size, p["density"], size)
    return cases.attention_inputs(q, cache, chosen, p["unit"], **extra)


@native_backend
@settings(max_examples=150)
@given(p=attention_problems())
def test_fuzz(p, backend):
    inputs = build_attention(p)
    want = reference("sliced_attention")(*inputs)
    outs = run_guarded("sliced_attention", inputs, backend, want, skew=p["skew"])
    compare([g.tensor for g in outs], want, TOLERANCE[p["dtype"]], "fuzz")
