"""The public functions: shapes, kinds of arrays, outputs, backends, and that the pieces fit together."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slicing_helpers import chosen_lists

import sic_kernels as sic
from sic_kernels.slicing import cases
from sic_kernels.testing import assert_close, assert_same_bits, generator, paged_cache, randn, reference, run

S = sic.slicing


@pytest.fixture
def problem():
    """cache, params, sketch, q: two sequences of 300 and 90 tokens, Hkv = 2, G = 3, D = 64."""
    gen = generator(1)
    cache = paged_cache(gen, [300, 90], 2, 64, 16, torch.float32)
    params = S.calibrate(randn(gen, 500, 2, 64) + 0.2)
    sketch = S.key_sketch(cache.k_cache, cache.block_table, cache.seq_lens, params)
    return cache, params, sketch, randn(gen, 2, 1, 6, 64)


def place(cache):
    return cache.block_table, cache.seq_lens


def pipeline(cache, sketch, q, backend):
    """Every op, called as a runner would; a flat list of results."""
    scores = S.score_tokens(q, sketch, *place(cache), backend=backend)
    short = S.select(scores, cache.seq_lens, ratio=0.5, sink=0, recent=0, backend=backend)
    fine = S.refine_tokens(q, sketch, short, *place(cache), backend=backend)
    chosen = S.select(scores, cache.seq_lens, budget=60, backend=backend)
    k, v, indptr = S.gather(cache.k_cache, cache.v_cache, *place(cache), chosen, backend=backend)
    out, lse = S.sliced_attention(q, cache.k_cache, cache.v_cache, *place(cache), chosen, backend=backend)
    summary = S.page_summary(cache.k_cache, *place(cache), backend=backend)
    pages = S.score_pages(q, summary, *place(cache), page_size=16, backend=backend)
    listed = S.select(pages, cache.seq_lens, unit="page", page_size=16, backend=backend)
    page_out, page_lse = S.sliced_attention(q, cache.k_cache, cache.v_cache, *place(cache), listed, backend=backend)
    merged, merged_lse = S.merge_states(out, lse, page_out, page_lse, backend=backend)
    many, many_lse = S.merge_many(torch.stack((out, page_out)), torch.stack((lse, page_lse)), backend=backend)
    exact = [scores, *short[:2], fine, *chosen[:2], k, v, indptr, summary, *listed[:2]]
    return exact, [out, lse, pages, page_out, page_lse, merged, merged_lse, many, many_lse]


def test_every_op_on_cpu_equals_ref(problem):
    cache, params, sketch, q = problem
    ref = S.key_sketch(cache.k_cache, *place(cache), params, backend="ref")
    assert_same_bits(sketch.bits, ref.bits)
    assert_same_bits(sketch.norm, ref.norm)
    (exact, close), (exact_ref, close_ref) = (pipeline(cache, sketch, q, b) for b in ("cpu", "ref"))
    for got, want in zip(exact, exact_ref):
        assert_same_bits(got, want)
    for got, want in zip(close, close_ref):
        assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_attend_on_cpu_equals_ref(problem):
    cache, _, sketch, q = problem
    for index, policy in (
        (sketch, S.SlicePolicy(max_omitted_mass=0.4)),
        (S.page_summary(cache.k_cache, *place(cache)), S.SlicePolicy(unit="page", ratio=0.25)),
    ):
        got, want = (
            S.attend(q, cache.k_cache, cache.v_cache, index, *place(cache), policy=policy, backend=b)
            for b in ("cpu", "ref")
        )
        assert_same_bits(got.selection.indices, want.selection.indices)
        assert_same_bits(got.status, want.status)
        assert_close(got.out, want.out, atol=1e-5)
        assert_close(got.lse, want.lse, atol=1e-5)
        assert_close(got.omitted_mass, want.omitted_mass, atol=1e-3)


def test_3d_queries_mean_one_token(problem):
    """q [B,Hq,D]: results without the T dimension, with the same bits."""
    cache, _, sketch, q = problem
    flat = q[:, 0]
    (exact, close), (exact_flat, close_flat) = (pipeline(cache, sketch, x, "cpu") for x in (q, flat))
    for wide, narrow in zip(exact + close, exact_flat + close_flat):
        if wide.shape != narrow.shape:
            assert wide.numel() == narrow.numel()
            assert wide.dim() == narrow.dim() + 1
        assert_same_bits(wide.reshape(narrow.shape), narrow)
    result = S.attend(flat, cache.k_cache, cache.v_cache, sketch, *place(cache))
    assert result.out.shape == flat.shape
    assert result.status.shape == (2, 6)
    assert_same_bits(result.out, S.attend(q, cache.k_cache, cache.v_cache, sketch, *place(cache)).out[:, 0])


def test_append_keeps_an_index_up_to_date(problem):
    """Rows appended with index= leave the sketch, or the summary, of a rebuild."""
    cache, params, _, _ = problem
    gen = generator(3)
    sketch = S.key_sketch(cache.k_cache, *place(cache), params)
    summary = S.page_summary(cache.k_cache, *place(cache))
    rows = randn(gen, 2, 2, 64)
    slots = torch.tensor([cache.block_table[b, n // 16] * 16 + n % 16 for b, n in enumerate([300, 90])])
    S.append_kv(rows, -rows, cache.k_cache, cache.v_cache, slots, index=sketch)
    S.append_kv(rows, -rows, cache.k_cache, cache.v_cache, slots, index=summary)
    lens = cache.seq_lens + 1
    want = S.key_sketch(cache.k_cache, cache.block_table, lens, params)
    assert_same_bits(sketch.bits, want.bits)
    assert_same_bits(sketch.norm, want.norm)
    assert_same_bits(summary, S.page_summary(cache.k_cache, cache.block_table, lens))
    start = torch.tensor([300, 90])
    again = S.key_sketch(cache.k_cache, cache.block_table, lens, params, start=start, out=sketch)
    assert again.bits.data_ptr() == sketch.bits.data_ptr()
    assert_same_bits(again.bits, want.bits)


def test_numpy_in_numpy_out(problem):
    """Arrays of another kind: results of that kind, the same numbers, inputs not copied."""
    cache, _, _, q = problem
    arrays = [x.numpy() for x in (q, cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens)]
    out, lse = S.sliced_attention(*arrays)
    assert isinstance(out, np.ndarray)
    assert isinstance(lse, np.ndarray)
    want = S.sliced_attention(q, cache.k_cache, cache.v_cache, *place(cache))
    np.testing.assert_array_equal(out, want[0].numpy())
    np.testing.assert_array_equal(lse, want[1].numpy())
    selection = S.select(
        np.arange(20, dtype=np.float32).reshape(1, 1, 1, 20), np.array([20]), budget=3, sink=0, recent=0
    )
    assert isinstance(selection.indices, np.ndarray)
    assert selection.indices.tolist() == [[[[17, 18, 19]]]]


def test_out_and_workspace(problem):
    """Given outputs are the results; a dirty workspace of workspace_bytes is enough and changes nothing."""
    cache, _, _, q = problem
    args = (q, cache.k_cache, cache.v_cache, *place(cache))
    want = S.sliced_attention(*args)
    size = S.workspace_bytes("sliced_attention", *args)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    out = (torch.full_like(want[0], torch.nan), torch.full_like(want[1], torch.nan))
    got = S.sliced_attention(*args, out=out, workspace=workspace)
    for g, o, w in zip(got, out, want):
        assert g.data_ptr() == o.data_ptr()
        assert_same_bits(g, w)


def test_workspace_that_is_too_small_is_an_error():
    """A long row needs partial results; one byte less than workspace_bytes is refused."""
    cache = paged_cache(generator(2), [5000], 1, 32, 16, torch.float32)
    q = randn(generator(3), 1, 1, 2, 32)
    args = (q, cache.k_cache, cache.v_cache, *place(cache))
    size = S.workspace_bytes("sliced_attention", *args)
    assert size > 0
    with pytest.raises(sic.ArgumentError, match="workspace"):
        S.sliced_attention(*args, workspace=torch.empty(size // 2, dtype=torch.uint8))
    got = S.sliced_attention(*args, workspace=torch.full((size,), 0xFF, dtype=torch.uint8))
    for g, w in zip(got, S.sliced_attention(*args)):
        assert_same_bits(g, w)


def test_merge_takes_any_leading_dimensions():
    gen = generator(4)
    outs, lses = randn(gen, 3, 2, 5, 4, 16), randn(gen, 3, 2, 5, 4)
    out, lse = S.merge_many(outs, lses)
    assert out.shape == (2, 5, 4, 16)
    want = reference("merge_many")(outs, lses)
    assert_close(out, want[0], atol=1e-5)
    assert_close(lse, want[1], atol=1e-5)
    pair = S.merge_states(outs[0], lses[0], outs[1], lses[1])
    for g, w in zip(pair, S.merge_many(outs[:2], lses[:2])):
        assert_same_bits(g, w)
    one = S.merge_states(outs[0, 0, 0], lses[0, 0, 0], outs[1, 0, 0], lses[1, 0, 0])  # [H,D]
    assert_same_bits(one[0], pair[0][0, 0])


def test_defaults_of_select():
    """ratio 0.12, sink 16, recent 32."""
    scores = torch.zeros(1, 1, 1, 1000)
    scores[..., 500:600] = 1.0
    (row,) = chosen_lists(S.select(scores, torch.tensor([1000]))[:2])
    assert row == [*range(16), *range(500, 572), *range(968, 1000)]


def test_calibration_is_the_mean_and_is_identified():
    samples = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]])
    params = S.calibrate(samples)
    assert params.centre.tolist() == [[2.0, 4.0]]
    assert params.scale.tolist() == pytest.approx([(2.5) ** 0.5])
    assert params.id == S.calibrate(samples.clone()).id
    assert params.id != S.calibrate(samples + 1).id
    with pytest.raises(AttributeError):
        params.id = "x"
    with pytest.raises(sic.ArgumentError, match=r"^calibrate: samples: got "):
        S.calibrate(samples[0])


def test_params_survive_saving(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed: SketchParams.save needs it")
    params = S.calibrate(randn(generator(5), 30, 2, 16))
    params.save(tmp_path / "params.safetensors")
    loaded = S.SketchParams.load(tmp_path / "params.safetensors")
    assert loaded.id == params.id
    assert_same_bits(loaded.centre, params.centre)


# --- errors of the public layer -------------------------------------------------------------------------------------


def attend_with(index, **policy):
    return lambda p: S.attend(*p.dense[:3], index(p), *p.place, policy=S.SlicePolicy(**policy))


PUBLIC_ERRORS = {
    "backend": lambda p: S.sliced_attention(*p.dense, backend="fpga"),
    "selection unit": lambda p: S.sliced_attention(*p.dense, S.Selection(*p.chosen[:2], "word")),
    "pool": lambda p: S.score_tokens(p.q, p.sketch, *p.place, pool="mean"),
    "unit": lambda p: S.select(p.scores, p.place[1], unit="word"),
    "capacity": lambda p: S.select(p.scores, p.place[1], budget=50, capacity=10),
    "head size": lambda p: S.score_tokens(p.q[..., :32], p.sketch, *p.place),
    "head size of as many bytes": lambda p: S.score_tokens(p.q[..., :63], p.sketch, *p.place),
    "other params": lambda p: S.key_sketch(p.dense[1], *p.place, S.calibrate(torch.ones(1, 2, 64)), out=p.sketch),
    "summary for tokens": attend_with(lambda p: S.page_summary(p.dense[1], *p.place)),
    "sketch for pages": attend_with(lambda p: p.sketch, unit="page"),
    "one plane": lambda p: S.refine_tokens(
        p.q, S.key_sketch(p.dense[1], *p.place, p.params, planes=1), p.chosen, *p.place
    ),
    "no selection": lambda p: S.gather(*p.dense[1:], None),
    "workspace of no op": lambda p: S.workspace_bytes("choose", p.scores, p.place[1]),
    "ratio 0": lambda p: S.SlicePolicy(ratio=0.0),
    "ratio 1.5": lambda p: S.SlicePolicy(ratio=1.5),
    "policy unit": lambda p: S.SlicePolicy(unit="word"),
    "policy sink": lambda p: S.SlicePolicy(sink=-1),
    "pages of no size": lambda p: S.select(p.scores, p.place[1], unit="page"),
    "pages of size 0": lambda p: S.select(p.scores, p.place[1], unit="page", page_size=0),
    "unit of a strange kind": lambda p: S.select(p.scores, p.place[1], unit=["page"]),
    "negative budget": lambda p: S.select(p.scores, p.place[1], budget=np.int64(-1)),
    "huge budget": lambda p: S.select(p.scores, p.place[1], budget=2**31),
    "half a slot": lambda p: S.select(p.scores, p.place[1], capacity=1.5),
    "negative capacity": lambda p: S.select(p.scores, p.place[1], capacity=-1),
    "scale as text": lambda p: S.score_tokens(p.q, p.sketch, *p.place, scale="0.1"),
    "one output of two": lambda p: S.sliced_attention(*p.dense, out=(p.q,)),
    "three outputs of two": lambda p: S.sliced_attention(*p.dense, out=(p.q, p.q, None)),
    "an output that is no tuple": lambda p: S.select(p.scores, p.place[1], out=p.chosen.indices),
    "two outputs of six": lambda p: S.attend(*p.dense[:3], p.sketch, *p.place, out=(p.q, p.q)),
    "one output of gather": lambda p: S.gather(*p.dense[1:], p.chosen, out=(p.q,)),
    "a number as selection": lambda p: S.sliced_attention(*p.dense, 5),
    "a pair as candidates": lambda p: S.refine_tokens(p.q, p.sketch, p.chosen[:2], *p.place),
    "bits as sketch": lambda p: S.score_tokens(p.q, p.sketch.bits, *p.place),
    "a centre as params": lambda p: S.key_sketch(p.dense[1], *p.place, p.params.centre),
    "a policy of a dictionary": lambda p: S.attend(*p.dense[:3], p.sketch, *p.place, policy={"ratio": 0.1}),
    "no index": lambda p: S.attend(*p.dense[:3], None, *p.place),
    "q of a list": lambda p: S.score_tokens([1.0], p.sketch, *p.place),
    "states of a list": lambda p: S.merge_states([1.0], p.q, p.q, p.q),
    "states of other rows": lambda p: S.merge_states(p.q[None], p.q[None, ..., 0], p.q[None], p.q[..., 0]),
    "lses of other rows": lambda p: S.merge_many(p.q[None, None], p.q[None, ..., 0]),
    "backends": lambda p: S.sliced_attention(*p.dense, backend=["cpu"]),
    "window of a half": lambda p: S.sliced_attention(*p.dense, window=1.5),
}

BAD_POLICIES = [
    {"max_omitted_mass": math.nan}, {"max_omitted_mass": -0.1}, {"max_omitted_mass": "0.5"}, {"beta": math.nan},
    {"beta": math.inf}, {"beta": None}, {"ratio": math.nan}, {"ratio": "0.1"}, {"candidates": None}, {"top_p": 0.0},
    {"sink": 1.5}, {"recent": math.nan}, {"max_sliced_T": None}, {"min_len": "8"}, {"sink": 2**31}, {"min_len": 2**40},
    {"dense_layers": 3}, {"dense_layers": (0, 1.5)}, {"dense_layers": "01"}, {"dense_layers": (-1,)}, {"pool": 0},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_POLICIES, ids=str)
def test_bad_policies(options):
    (name,) = options
    with pytest.raises(sic.ArgumentError, match=rf"^SlicePolicy: {name}: got .+, expected .+"):
        S.SlicePolicy(**options)


def test_numbers_of_numpy_are_numbers():
    policy = S.SlicePolicy(
        ratio=np.float32(0.25), sink=np.int64(4), recent=np.int32(8), dense_layers=np.arange(2), max_omitted_mass=1
    )
    assert policy == S.SlicePolicy(ratio=0.25, sink=4, recent=8, dense_layers=(0, 1), max_omitted_mass=1.0)
    assert (type(policy.sink), type(policy.ratio), type(policy.dense_layers[0])) == (int, float, int)


def test_budget_and_capacity_of_numpy(problem):
    cache, _, sketch, q = problem
    scores = S.score_tokens(q, sketch, *place(cache))
    want = S.select(scores, cache.seq_lens, budget=50, capacity=60)
    got = S.select(scores, cache.seq_lens, budget=np.int32(50), capacity=np.int64(60))
    assert_same_bits(got.indices, want.indices)


def test_a_wrong_kind_is_named_shortly(problem):
    cache, _, sketch, q = problem
    with pytest.raises(sic.ArgumentError) as error:
        S.score_tokens(q, sketch, *place(cache), scale="0.1", max_seq_len=2.5)
    assert str(error.value) == (
        "score_tokens: arguments: got scale str, max_seq_len float, "
        "expected scale a number or None, max_seq_len an integer or None"
    )
    with pytest.raises(sic.ArgumentError, match=r"^score_tokens: arguments: got a number out of range, expected "):
        S.score_tokens(q, sketch, *place(cache), max_seq_len=2**70)


def test_params_compare_by_id():
    samples = randn(generator(6), 30, 2, 16)
    a, b, c = S.calibrate(samples), S.calibrate(samples.clone()), S.calibrate(samples + 1)
    assert a == b
    assert hash(a) == hash(b)
    assert a != c
    assert a != "a"
    assert a in [c, b]


@pytest.mark.parametrize("what", PUBLIC_ERRORS)
def test_public_errors(what, problem):
    cache, params, sketch, q = problem
    dense = (q, cache.k_cache, cache.v_cache, *place(cache))
    scores = S.score_tokens(q, sketch, *place(cache))
    chosen = S.select(scores, cache.seq_lens)
    p = SimpleNamespace(
        q=q, dense=dense, place=place(cache), params=params, sketch=sketch, scores=scores, chosen=chosen
    )
    with pytest.raises(sic.ArgumentError, match=r"^[\w.]+: [\w.]+: got .+, expected .+") as error:
        PUBLIC_ERRORS[what](p)
    assert isinstance(error.value, sic.SicError)
    assert isinstance(error.value, ValueError)


def test_policy_is_frozen():
    policy = S.SlicePolicy()
    assert (policy.ratio, policy.candidates, policy.sink, policy.recent) == (0.12, 0.35, 16, 32)
    with pytest.raises(AttributeError):
        policy.ratio = 0.5
    assert hash(policy) == hash(S.SlicePolicy())


def test_dense_layers_by_policy(problem):
    cache, _, sketch, q = problem
    args = (q, cache.k_cache, cache.v_cache, sketch, *place(cache))
    policy = S.SlicePolicy(dense_layers=(0, 3))
    for layer, status in ((3, 1), (2, 0)):
        result = S.attend(*args, policy=policy, layer=layer)
        assert result.status.eq(status).all()
        assert ("dense" in S.STATUS[status]) == (layer == 3)
        assert (result.selection is None) == (layer == 3)


# --- threads --------------------------------------------------------------------------------------------------------


def test_calls_from_several_python_threads():
    """Ops called at once from four Python threads give the results of one."""
    lengths = [[2000 + 10 * i, 33] for i in range(4)]
    problems = [cases.attention_case(n, 1, 2, 4, 64, 16, torch.bfloat16, density=0.4).inputs() for n in lengths]
    want = [run("sliced_attention", inputs, "cpu") for inputs in problems]
    failures = []

    def work(i):
        for _ in range(20):
            for got, w in zip(run("sliced_attention", problems[i], "cpu"), want[i]):
                if not torch.equal(got, w):
                    failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
