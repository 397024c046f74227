"""logits_stats and merge_stats: values by hand, the acceptance grid, offsets, faults, ties, splits, determinism."""

import math

import pytest
import torch
from head_helpers import by_case, check_case, every_backend, native_backend, run, same_nan, stats_of, thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from test_slicing_determinism import instruction_set

from sic_kernels import head
from sic_kernels.head import cases
from sic_kernels.runtime.native import module
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn

INF, NAN = math.inf, math.nan
GRID = list(cases.logits_grid())
LM_HEAD_GRID = list(cases.lm_head_grid())


def stats(backend, rows, dtype=torch.float32, **options):
    x = torch.as_tensor(rows, dtype=dtype)
    return stats_of(backend, "logits_stats", cases.logits_inputs(x, **options))


# --- values by hand -------------------------------------------------------------------------------------------------


@every_backend
def test_two_equal_logits(backend):
    """p = 1/2 each: entropy and -log p are ln 2; -inf adds nothing."""
    got = stats(backend, [[0.0, 0.0, -INF], [0.0, -INF, -INF]], k=3, watch_ids=torch.tensor([1, 2]))
    assert got.entropy.tolist() == pytest.approx([math.log(2), 0.0])
    assert got.lse.tolist() == pytest.approx([math.log(2), 0.0])
    assert got.varentropy.tolist() == [0.0, 0.0]
    assert got.argmax.tolist() == [0, 0]
    assert got.topk_ids.tolist() == [[0, 1, -1], [0, -1, -1]]
    assert got.topk_logprobs.tolist() == [pytest.approx([-math.log(2)] * 2 + [-INF]), [0.0, -INF, -INF]]
    assert got.watch_logprobs.tolist() == [[pytest.approx(-math.log(2)), -INF], [-INF, -INF]]
    assert got.status.tolist() == [0, 0]


@every_backend
def test_a_distribution_worked_out(backend):
    """p = (1/2, 1/4, 1/4): entropy 3/2 ln 2, variance of -log p = (ln 2)^2 / 4."""
    log2 = math.log(2)
    got = stats(backend, [[5 + log2, 5.0, 5.0]], k=2, target_ids=torch.tensor([2]))
    assert got.lse.item() == pytest.approx(5 + 2 * log2)
    assert got.entropy.item() == pytest.approx(1.5 * log2, abs=1e-6)
    assert got.varentropy.item() == pytest.approx(log2**2 / 4, abs=1e-6)
    assert got.topk_ids.tolist() == [[0, 1]]
    assert got.target_logprob.item() == pytest.approx(-2 * log2)


@every_backend
def test_temperature(backend):
    """At 1/2 the logits double; 0 is greedy, with the statistics of 1; one number is for all rows."""
    x = [[1.0, 0.0]] * 3
    got = stats(backend, x, temperature=torch.tensor([0.5, 1.0, 0.0]), k=1)
    want = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(-1.0))]
    assert (-got.topk_logprobs[:, 0]).tolist() == pytest.approx([want[0], want[1], want[1]])
    assert got.lse.tolist() == pytest.approx([2 + want[0], 1 + want[1], 1 + want[1]])
    assert_same_bits(stats(backend, x, temperature=0.5).entropy[0], got.entropy[0])


@pytest.mark.parametrize("backend", ["ref", "simt"])
def test_a_temperature_near_zero(backend):
    """Its inverse is no f32: the greatest logits alone are left."""
    got = stats(backend, [[1.0, 2.0, 2.0]], temperature=torch.tensor([1e-44]), k=3)
    assert got.status.item() == 0
    assert got.entropy.item() == pytest.approx(math.log(2))
    assert got.topk_ids.tolist() == [[1, 2, 0]]
    assert got.topk_logprobs[0].tolist() == [pytest.approx(-math.log(2))] * 2 + [-INF]


@every_backend
def test_softcap_and_bias(backend):
    """softcap * tanh(x / softcap), then the bias."""
    got = stats(backend, [[100.0, 0.0]], softcap=2.0, bias=torch.tensor([0.0, 1.0]))
    assert got.lse.item() == pytest.approx(math.log(math.exp(2.0) + math.e), abs=1e-6)


@every_backend
def test_one_hot_and_uniform(backend):
    """Certain: 0 exactly. Uniform: ln V."""
    x = torch.full((4, 129), -INF)
    x[0, 77] = 12.5
    x[1] = 3.0
    x[2], x[2, 5] = -3.4e38, 3.4e38
    x[3, :2] = torch.tensor([0.0, -200.0])
    got = stats(backend, x)
    assert got.entropy[[0, 2, 3]].tolist() == [0.0] * 3
    assert got.varentropy[:3].tolist() == [0.0] * 3
    assert got.entropy[1].item() == pytest.approx(math.log(129), abs=1e-6)
    assert got.argmax.tolist() == [77, 0, 5, 0]
    assert stats(backend, [[65504.0, -65504.0]], torch.float16).entropy.item() == 0.0


@every_backend
@pytest.mark.parametrize("value", [-20.0, -150.0, -200.0, 3000.0, -3000.0])
def test_uniform_with_a_padded_tail(backend, value):
    """V = 129920, the last 320 of them padding that would win."""
    x = torch.full((1, 129920), value)
    x[:, -320:] = 1e4
    got = stats(backend, x, valid_vocab=129600)
    assert got.entropy.item() == pytest.approx(math.log(129600), abs=1e-5)
    want = value + math.log(129600)
    assert got.lse.item() == pytest.approx(want, abs=max(1e-5, torch.finfo(torch.float32).eps * abs(want)))
    assert got.argmax.item() == 0


@native_backend
@pytest.mark.parametrize("offset", [0.0, 3000.0, -3000.0])
def test_offsets_lose_nothing(backend, offset):
    """Logits that are exact at the offset: the same entropy everywhere."""
    x = (randn(generator(3), 3, 20011) * 3 * 64).round() / 64  # steps of 1/64 survive an offset of 3000 in f32
    exact, got = stats("ref", x), stats(backend, x + offset, k=4)
    assert_close(got.entropy, exact.entropy, atol=1e-5, what="entropy")
    assert_close(got.varentropy, exact.varentropy, atol=1e-4, what="varentropy")
    want = (x + offset).double().logsumexp(1)
    ulp = torch.finfo(torch.float32).eps * want.abs()
    assert ((got.lse.double() - want).abs() <= ulp.clamp(min=1e-5)).all()


# --- rows that are wrong --------------------------------------------------------------------------------------------


@every_backend
def test_faults_have_their_bits_and_touch_no_other_row(backend):
    x = randn(generator(1), 8, 5000)
    clean = stats(backend, x, k=3, watch_ids=torch.tensor([7]), target_ids=torch.arange(8))
    bad = x.clone()
    bad[1, 4999], bad[2, 0], bad[3] = NAN, INF, -INF
    bad[4, 10], bad[4, 4000] = NAN, INF
    bad[5], bad[5, 17] = -INF, NAN
    got = stats(backend, bad, k=3, watch_ids=torch.tensor([7]), target_ids=torch.arange(8))
    status = head.Status
    assert got.status.tolist() == [0, status.NAN, status.INF, status.EMPTY, status.NAN | status.INF, status.NAN, 0, 0]
    wrong = got.status > 0
    for name, value in got._asdict().items():
        if value is None or name in ("status", "argmax", "topk_ids"):
            continue
        assert value[wrong].isnan().all(), name
        assert_same_bits(value[~wrong], getattr(clean, name)[~wrong], name)
    assert got.argmax[wrong].tolist() == [0] * 5
    assert got.topk_ids[wrong].tolist() == [[0, -1, -1]] * 5
    assert torch.equal(got.topk_ids[~wrong], clean.topk_ids[~wrong])


@every_backend
def test_what_takes_no_part_cannot_be_wrong(backend):
    """NaN that are masked or behind the valid vocabulary."""
    x = torch.zeros(1, 70)
    x[0, 3], x[0, 69] = NAN, NAN
    mask = torch.tensor([[-1 ^ 8, -1, -1]], dtype=torch.int32)
    got = stats(backend, x, mask_bits=mask, valid_vocab=69)
    assert got.status.item() == 0
    assert got.entropy.item() == pytest.approx(math.log(68), abs=1e-6)


@every_backend
def test_nothing_left(backend):
    """A vocabulary without a valid id, or all masked: EMPTY."""
    assert stats(backend, torch.zeros(2, 5), valid_vocab=0, k=1).status.tolist() == [head.Status.EMPTY] * 2
    mask = torch.zeros(1, 1, dtype=torch.int32)
    assert stats(backend, torch.zeros(1, 5), mask_bits=mask).status.item() == head.Status.EMPTY
    assert stats(backend, torch.zeros(2, 0)).status.tolist() == [head.Status.EMPTY] * 2
    assert stats(backend, torch.zeros(0, 5), k=2).topk_ids.shape == (0, 2)


# --- lists ----------------------------------------------------------------------------------------------------------


@every_backend
def test_of_equals_the_lowest_id(backend):
    x = torch.zeros(2, 4099)
    x[0, [4098, 17, 2050]] = 1.0
    x[1, 1::2], x[1, 4098] = -0.0, 0.0
    got = stats(backend, x, k=5)
    assert got.topk_ids.tolist() == [[17, 2050, 4098, 0, 1], [0, 1, 2, 3, 4]]
    assert got.argmax.tolist() == [17, 0]


@every_backend
def test_padding_never_wins(backend):
    """The maximum at 151757 of 151936, behind the valid 151669."""
    x = randn(generator(4), 1, 151936)
    x[0, 151757], x[0, 151668] = 90.0, 50.0
    got = stats(backend, x, valid_vocab=151669, k=2)
    assert got.argmax.item() == 151668
    assert (got.topk_ids < 151669).all()


@native_backend
def test_sorted_rows_and_wide_rows(backend):
    """The most that a list can change (ascending), rows of a larger stride, and lists as long as they may be."""
    x = torch.arange(1000.0).expand(2, 1000) / 8
    got = stats(backend, x, k=64)
    assert got.topk_ids[0].tolist() == list(range(999, 935, -1))
    wide = randn(generator(5), 4, 1024)[:, :1000]
    inputs = cases.logits_inputs(wide, k=64)
    for got, want in zip(
        run("logits_stats", inputs, backend), run("logits_stats", (wide.clone(), *inputs[1:]), backend)
    ):
        assert_same_bits(got, want)


# --- the grid, parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend, case", [(b, c) for b in ("cpu", "simt") for c in thinned(GRID, b, 5)], ids=str)
def test_grid(case, backend):
    check_case(case, backend)


@native_backend
@by_case([*cases.part_grid(), *cases.merge_grid()])
def test_parts(case, backend):
    check_case(case, backend)


def ulps(a, b):
    """Units in the last place between f32 tensors."""
    a, b = a.double(), b.double()
    unit = torch.finfo(torch.float32).eps * torch.maximum(a.abs(), b.abs()).clamp(min=1e-30)
    return torch.where(a == b, 0.0, (a - b).abs() / unit).max().item()


@native_backend
@pytest.mark.parametrize("at", [[], [64], [32, 32, 5024], [2048, 2080, 20000]])
def test_any_split_merges_to_the_whole(backend, at):
    gen = generator(6)
    x = randn(gen, 5, 20011) * 3
    x[1, 5000:] = -INF
    x[2, 7], x[3] = NAN, -INF
    inputs = cases.logits_inputs(x, **{**cases.all_extras(gen, 5, 20011), "k": 6})
    whole = head.TokenStats(*run("logits_stats", inputs, backend))
    parts = [run("logits_part", p, backend) for p in cases.split(inputs, at)]

    def merged(order):
        stacked = [torch.stack(x) for x in zip(*(parts[i] for i in order))]
        return head.TokenStats(*run("merge_stats", (*stacked, inputs[1]), backend))

    order = list(range(len(parts)))
    got, turned = merged(order), merged(order[::-1])
    good = whole.status == 0
    for other in (got, turned):
        assert torch.equal(other.status, whole.status)
        assert torch.equal(other.topk_ids, whole.topk_ids)
        assert torch.equal(other.argmax, whole.argmax)
        for name in ("lse", "entropy", "topk_logprobs", "watch_logprobs", "target_logprob"):
            a, b = same_nan(getattr(other, name)[good], getattr(whole, name)[good], name)
            assert ulps(a, b) <= 4, name
        assert_close(other.varentropy[good], whole.varentropy[good], atol=2e-5, what="varentropy")
    for a, b in zip(merged(order)[:9], got[:9]):
        assert_same_bits(a, b)


@every_backend
def test_of_equals_in_several_parts_the_lowest_id(backend):
    """In whatever order the parts come."""
    x = torch.zeros(1, 96)
    x[0, [20, 40, 70, 90]] = 1.0
    x[0, [10, 50]] = -0.0
    parts = [run("logits_part", p, backend) for p in cases.split(cases.logits_inputs(x, k=6), [32, 64])]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        stacked = [torch.stack(t) for t in zip(*(parts[i] for i in order))]
        got = head.TokenStats(*run("merge_stats", (*stacked, None), backend))
        assert got.topk_ids.tolist() == [[20, 40, 70, 90, 0, 1]], order


@every_backend
def test_an_empty_part_is_the_identity(backend):
    x = randn(generator(8), 3, 300)
    part = run("logits_part", cases.logits_inputs(x, k=2), backend)
    empty = run("logits_part", cases.logits_inputs(torch.full_like(x, -INF), k=2, vocab_start=300), backend)
    alone = run("merge_stats", (*(p[None] for p in part), None), backend)
    for order in ((part, empty), (empty, part)):
        both = run("merge_stats", (*(torch.stack(p) for p in zip(*order)), None), backend)
        for a, b in zip(both, alone):
            assert_same_bits(a, b)


def test_public_functions_of_parts():
    """partial_stats of logits and of hidden states, merged in one call, is the whole."""
    gen = generator(9)
    hidden, weight = randn(gen, 3, 64), randn(gen, 200, 64)
    whole = head.lm_head_stats(hidden, weight, k=4, temperature=0.7, target_ids=torch.tensor([0, 150, -1]))
    shards = [
        head.partial_stats(
            hidden=hidden,
            weight=weight[a:b],
            vocab_start=a,
            k=4,
            temperature=0.7,
            target_ids=torch.tensor([0, 150, -1]),
        )
        for a, b in ((0, 96), (96, 200))
    ]
    assert [p.vocab_start for p in shards] == [0, 96]
    got = head.merge_stats(shards)
    assert torch.equal(got.topk_ids, whole.topk_ids)
    assert_close(got.entropy, whole.entropy, atol=1e-6)
    assert got.target_logprob[:2].tolist() == pytest.approx(whole.target_logprob[:2].tolist(), abs=1e-6)
    assert got.target_logprob[2].isnan()
    gathered = head.StatsPart(*(torch.stack(x) for x in zip(*(p[:9] for p in shards))), 0.7)
    for a, b in zip(head.merge_stats(gathered)[:9], got[:9]):
        assert_same_bits(a, b)


# --- promises -------------------------------------------------------------------------------------------------------


@native_backend
def test_a_row_does_not_depend_on_its_batch(backend):
    x = randn(generator(11), 7, 33003) * 2
    inputs = cases.logits_inputs(x, k=8, watch_ids=torch.tensor([5, 33002]))
    whole = run("logits_stats", inputs, backend)
    for got, want in zip(run("logits_stats", inputs, backend), whole):
        assert_same_bits(got, want, "again")
    for rows in (slice(3, 4), slice(2, 7)):
        for got, want in zip(run("logits_stats", (x[rows], *inputs[1:]), backend), whole):
            assert_same_bits(got, want[rows] if len(want) else want)


@pytest.mark.parametrize("isa", ["plain", "avx2", "neon"])
def test_other_instruction_sets(isa):
    """The whole grids on the instruction sets that the other tests do not run on."""
    if isa not in module().supported_isas():
        pytest.skip(f"this machine has no {isa}: it has {', '.join(module().supported_isas())}")
    with instruction_set(isa):
        for case in (*GRID[::5], *GRID[-3:], *LM_HEAD_GRID[::2], *cases.part_grid(), *cases.probe_grid()):
            check_case(case, "cpu")


def test_zeros_are_listed_whatever_threads_do_with_subnormal_numbers():
    """A row of zeros: the lowest ids, also where subnormal numbers count as zero."""
    x = torch.zeros(2, 200_000)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush subnormal numbers")
        for _ in range(5):
            assert head.logits_stats(x, k=3).topk_ids.tolist() == [[0, 1, 2]] * 2
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("op", ["logits_stats", "lm_head_stats"])
def test_threads_do_not_matter(op):
    """Three different logits, so that each segment's list is full of the greatest: what one thread has listed tells the
    others what they need not list, and that must not cost a lower id."""
    gen = generator(12)
    x = torch.randint(0, 3, (3, 100_003), generator=gen).float()
    hidden, weight = torch.ones(3, 2), torch.randint(0, 2, (20_011, 2), generator=gen).float()
    inputs = cases.logits_inputs(x, k=64) if op == "logits_stats" else cases.lm_head_inputs(hidden, weight, k=64)
    want = run(op, inputs, "ref")[4]
    results = []
    try:
        for threads in (1, 2, 5):
            module().set_num_threads(threads)
            results += [run(op, inputs, "cpu") for _ in range(5)]
    finally:
        module().set_num_threads(0)
    assert results[0][4].tolist() == want.tolist()
    for other in results[1:]:
        for got, first in zip(other, results[0]):
            assert_same_bits(got, first)


@native_backend
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    B=st.integers(1, 4),
    V=st.integers(1, 4200),
    k=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    holes=st.floats(0, 1),
)
def test_fuzz(backend, seed, B, V, k, dtype, holes):
    gen = generator(seed)
    x = randn(gen, B, V) * 10
    x[torch.rand(B, V, generator=gen) < holes] = -INF
    x = (x.round() if seed % 2 else x).to(dtype)  # many ties
    inputs = cases.logits_inputs(x, **cases.all_extras(gen, B, V, k))
    case = cases.holes_case(B, V, 1.0, dtype)
    case.compare(case.run(inputs, backend), case.expected(inputs))
