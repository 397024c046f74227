"""select: acceptance grids 4 and 5, the edge cases, and a fuzz against a sort written in plain Python."""

import math

import pytest
import slicing_naive as naive
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_helpers import by_case, check_case, chosen_lists, every_backend, native_backend

from sic_kernels.slicing import cases, cases_select
from sic_kernels.testing import assert_same_bits, generator, randn, reference, run


def select(backend, scores, lens=None, **args):
    """Chosen units of each row; scores [..., units] of one sequence per leading row unless 4-D."""
    scores = torch.as_tensor(scores)
    if scores.dim() < 4:
        scores = scores.reshape(-1, 1, 1, scores.shape[-1])
    size = args.get("page_size", 1) if args.get("unit") == cases.PAGE else 1
    lens = [scores.shape[-1] * size] * scores.shape[0] if lens is None else lens
    args = {"sink": 0, "recent": 0, **args}
    return chosen_lists(
        run("select", cases.select_inputs(scores, torch.as_tensor(lens, dtype=torch.int32), **args), backend)
    )


# --- grid 5 ---------------------------------------------------------------------------------------------------------


@native_backend
@by_case(cases.grid("topk"))
def test_topk_grid(case, backend):
    check_case(case, backend)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("draw", ["normal", "ties"])
def test_chosen_values_are_those_of_torch_topk(draw, dtype, backend):
    """The multiset of chosen scores is torch.topk's, and no tied score of lower index was passed over."""
    gen = generator(1)
    scores = randn(gen, 4, 3000, dtype=dtype) if draw == "normal" else cases_select.near_ties(gen, (4, 3000), dtype)
    for row, chosen in zip(scores, select(backend, scores, budget=300)):
        got = row[chosen]
        assert torch.equal(got.sort(descending=True).values, row.topk(300).values)
        threshold = got.min()
        tied = (row == threshold).nonzero().flatten().tolist()
        taken = [i for i in chosen if row[i] == threshold]
        assert taken == tied[: len(taken)]


@native_backend
def test_dirty_outputs_are_rewritten(backend):
    """Rows of different lengths into outputs that hold another call's result: every slot is written."""
    gen = generator(2)
    outs = (torch.empty(3, 1, 2, 64, dtype=torch.int32), torch.empty(3, 1, 2, dtype=torch.int32))
    for lens in ([500, 64, 3], [2, 500, 0], [500, 499, 498]):
        inputs = cases.select_inputs(
            randn(gen, 3, 1, 2, 500), torch.tensor(lens, dtype=torch.int32), budget=64, sink=0, recent=0
        )
        run("select", inputs, backend, outs=outs)
        for got, want in zip(outs, reference("select")(*inputs)):
            assert_same_bits(got, want)


# --- edge cases worked by hand --------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int16])
def test_zeros_beyond_the_positives(dtype, backend):
    """8320 scores, k = 2048: 100 distinct positives and 8220 exact zeros: all 100, then the lowest-index zeros."""
    positives = torch.randperm(8320, generator=generator(3))[:100]
    scores = torch.zeros(8320, dtype=dtype)
    scores[positives] = torch.arange(1, 101).to(dtype)
    (chosen,) = select(backend, scores, budget=2048)
    zeros = [i for i in range(8320) if i not in set(positives.tolist())]
    assert len(set(chosen)) == 2048
    assert chosen == sorted(positives.tolist() + zeros[: 2048 - 100])


@every_backend
def test_infinite_row(backend):
    """Width 51, three finite scores among 48 of -inf, k = 16: the three, then the lowest ids; every slot written."""
    scores = torch.full((51,), -torch.inf)
    scores[[7, 30, 50]] = torch.tensor([-70000.0, 1.0, -3.0])
    assert select(backend, scores, budget=16) == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 30, 50]]


@every_backend
def test_scores_beyond_f16(backend):
    """f32 scores around -70000 keep their order."""
    scores = torch.full((51,), -70000.0)
    scores[[50, 3, 20]] = torch.tensor([-69999.0, -69998.0, -70001.0])
    assert select(backend, scores, budget=4) == [[0, 1, 3, 50]]
    assert 20 not in select(backend, scores, budget=50)[0]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_negative_zero_equals_zero(dtype, backend):
    assert select(backend, torch.tensor([-0.0, 0.0, -1.0, 0.0, -0.0], dtype=dtype), budget=3) == [[0, 1, 3]]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_is_last(dtype, backend):
    """NaN of either sign is below -inf, and takes part by index when nothing else is left."""
    nan = torch.tensor(math.nan, dtype=dtype)
    scores = torch.stack([nan, torch.tensor(-math.inf, dtype=dtype), -nan, torch.tensor(math.inf, dtype=dtype), nan])
    assert select(backend, scores, budget=2) == [[1, 3]]
    assert select(backend, scores, budget=3) == [[0, 1, 3]]
    assert select(backend, scores, budget=4) == [[0, 1, 2, 3]]


@every_backend
def test_integer_extremes(backend):
    scores = torch.tensor([-32768, 32767, -32767, 0, 32767, -1], dtype=torch.int16)
    assert select(backend, scores, budget=1) == [[1]]
    assert select(backend, scores, budget=4) == [[1, 3, 4, 5]]
    assert select(backend, scores, budget=5) == [[1, 2, 3, 4, 5]]


@every_backend
def test_invisible_scores_are_never_read(backend):
    """Scores past the length are the best and NaN: they are not chosen."""
    scores = torch.tensor([1.0, 2.0, 3.0, math.inf, math.nan, math.inf])
    assert select(backend, scores, lens=[3], budget=2) == [[1, 2]]
    assert select(backend, scores, lens=[3], budget=6) == [[0, 1, 2]]
    assert select(backend, scores, lens=[0], budget=6) == [[]]


@every_backend
@pytest.mark.parametrize("length", [1, 10, 50, 63, 64, 65])
def test_budget_covers_a_short_sequence(length, backend):
    """Page 16, budget 64: everything up to 64 tokens, never more pages than the budget."""
    scores = randn(generator(length), 8)
    (pages,) = select(backend, scores, lens=[length], unit=cases.PAGE, page_size=16, budget=64)
    visible = -(-length // 16)
    assert len(pages) == min(visible, 4)
    if length <= 64:
        assert pages == list(range(visible))


@every_backend
def test_several_query_tokens_see_causally(backend):
    """T = 3, length 5: the queries see 3, 4 and 5 tokens."""
    scores = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]).expand(1, 3, 1, 5)
    assert select(backend, scores, lens=[5], budget=2) == [[1, 2], [2, 3], [3, 4]]
    assert select(backend, scores, lens=[1], budget=2) == [[], [], [0]]


# --- grid 4: forced tokens and pages --------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(
    "sink, recent, want, padding",
    [
        (0, 0, [4, 5], 0),
        (0, 1, [4, 8, 9], 0),
        (1, 1, [0, 4, 8, 9], 0),
        (2, 3, [0, 1, 4, 6, 7, 8, 9], 0),
        (1, 1, [0, 8, 9], 1),
    ],
)
def test_forced_pages(sink, recent, want, padding, backend):
    """Sink and recent pages, given in tokens.  Length 150 at page 16: pages 0 to 9.

    The last page holds 6 tokens, so the recent tokens reach one page further.  Best are page 4, then 5; the budget is
    as many pages as are wanted, or (last row) fewer than are forced: then the exact padding is what K leaves.
    """
    scores = torch.tensor([0.0, 0, 0, 0, 9, 8, 0, 0, 0, 0, 99, 99]).reshape(1, 1, 1, -1)
    budget = 16 if padding else 16 * len(want)
    lens = torch.tensor([150], dtype=torch.int32)
    args = {"unit": cases.PAGE, "page_size": 16, "budget": budget, "sink": 16 * sink, "recent": 16 * recent}
    indices, counts = run("select", cases.select_inputs(scores, lens, **args), backend)
    slots = max(budget // 16, sink + recent + 1 if recent else sink)
    assert indices.flatten().tolist() == want + [-1] * (slots - len(want))
    assert counts.item() == len(want)


@every_backend
def test_forced_win_over_the_budget(backend):
    """count = min(visible, max(budget, forced)): forced tokens are all taken, and nothing else when they fill it."""
    scores = torch.tensor([0.0, 0, 0, 9, 8, 7, 0, 0, 0, 0])
    assert select(backend, scores, budget=2, sink=2, recent=1) == [[0, 1, 9]]
    assert select(backend, scores, budget=4, sink=2, recent=1) == [[0, 1, 3, 9]]
    assert select(backend, scores, budget=0) == [[]]
    assert select(backend, scores, budget=99, sink=2, recent=1) == [list(range(10))]
    assert select(backend, scores, lens=[2], budget=1, sink=16, recent=32) == [[0, 1]]


@every_backend
def test_sink_and_recent_that_overlap_count_once(backend):
    scores = torch.tensor([0.0, 0, 0, 5, 6, 0])
    assert select(backend, scores, lens=[4], budget=3, sink=2, recent=3) == [[0, 1, 2, 3]]
    assert select(backend, scores, budget=5, sink=3, recent=1) == [[0, 1, 2, 4, 5]]


@every_backend
def test_page_budget(backend):
    """Pages: max(1, budget // page)."""
    scores = torch.tensor([1.0, 4.0, 3.0, 2.0])
    for budget, want in ((1, [1]), (31, [1]), (32, [1, 2]), (47, [1, 2]), (48, [1, 2, 3])):
        assert select(backend, scores, unit=cases.PAGE, page_size=16, budget=budget) == [want]


@every_backend
def test_page_budget_of_all_tokens_is_everything(backend):
    """A budget that covers the visible tokens takes the partly filled last page too; one token less does not."""
    scores = torch.tensor([1.0, 4.0, 3.0, 2.0])
    args = {"unit": cases.PAGE, "page_size": 16}
    assert select(backend, scores, lens=[50], budget=50, **args) == [[0, 1, 2, 3]]
    assert select(backend, scores, lens=[50], budget=49, **args) == [[1, 2, 3]]
    assert select(backend, scores, lens=[50], ratio=1.0, **args) == [[0, 1, 2, 3]]
    assert select(backend, scores, lens=[50], budget=torch.tensor([[50]]), **args) == [[0, 1, 2, 3]]


@every_backend
def test_ratio(backend):
    """floor(ratio * visible) of each query; pages: that, // page, at least one."""
    scores = torch.arange(100.0)
    assert [len(x) for x in select(backend, scores, ratio=0.12)] == [12]
    assert [len(x) for x in select(backend, scores, lens=[99], ratio=0.12)] == [11]
    assert [len(x) for x in select(backend, scores, lens=[8], ratio=0.12)] == [0]
    assert [len(x) for x in select(backend, scores, ratio=1.0)] == [100]
    assert [len(x) for x in select(backend, scores, unit=cases.PAGE, page_size=16, ratio=0.12)] == [12]
    assert [len(x) for x in select(backend, scores, lens=[20], unit=cases.PAGE, page_size=16, ratio=0.12)] == [1]


@every_backend
def test_capacity(backend):
    """K = min(units, max(budget, sink + recent)); all units where the budget is a tensor or spans are kept."""

    def width(units=200, **args):
        scores = torch.zeros(1, 1, 1, units)
        inputs = cases.select_inputs(scores, torch.tensor([5], dtype=torch.int32), **args)
        return run("select", inputs, backend)[0].shape[-1]

    assert width(budget=70) == 70
    assert width(budget=7) == 48
    assert width(budget=7, sink=1, recent=2) == 7
    assert width(ratio=0.5) == 100
    assert width(budget=999) == 200
    assert width(units=30, budget=7) == 30
    assert width(budget=torch.tensor([[5]])) == 200
    assert width(keep=torch.tensor([[[3, 5]]], dtype=torch.int32)) == 200
    assert width(budget=70, capacity=128) == 128
    # Pages: the recent tokens may straddle one page more than they fill.
    assert width(budget=64, unit=cases.PAGE, page_size=16) == 4
    assert width(budget=16, unit=cases.PAGE, page_size=16) == 1 + 2 + 1


@every_backend
def test_budget_tensor(backend):
    """One budget per sequence and head."""
    scores = torch.arange(10.0).expand(2, 1, 3, 10)
    budget = torch.tensor([[1, 2, 0], [10, 99, 3]], dtype=torch.int32)
    got = select(backend, scores, budget=budget)
    assert [len(x) for x in got] == [1, 2, 0, 10, 10, 3]
    assert got[1] == [8, 9]


@every_backend
def test_keep_spans(backend):
    """Kept spans are half-open, clipped to what is visible, and padded with -1."""
    scores = torch.tensor([0.0, 9, 0, 0, 0, 0, 0, 0, 0, 8])
    keep = torch.tensor([[[3, 5], [7, 99], [-1, -1]]], dtype=torch.int32)
    assert select(backend, scores, budget=0, keep=keep) == [[3, 4, 7, 8, 9]]
    assert select(backend, scores, budget=6, keep=keep) == [[1, 3, 4, 7, 8, 9]]
    assert select(backend, scores, lens=[8], budget=0, keep=keep) == [[3, 4, 7]]
    assert select(backend, scores, lens=[4], budget=0, keep=keep) == [[3]]
    # Pages of 2: every page that a span touches.
    assert select(backend, torch.zeros(5), unit=cases.PAGE, page_size=2, budget=0, keep=keep) == [[1, 2, 3, 4]]


# --- top-p ----------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("kind", ["float", "int16"])
def test_top_p_by_hand(kind, backend):
    """Weights 1/2, 1/4, 1/8, 1/8 (in nats: multiples of ln 2, here 177/256): the shortest prefix that reaches p."""
    steps = torch.tensor([-354, 0, -531, -177, -531])  # 1/4, 1, 1/8, 1/2, 1/8 of the best; sum 2
    scores = steps.to(torch.int16) if kind == "int16" else steps.float() / 256
    assert select(backend, scores, budget=5, top_p=0.4) == [[1]]
    assert select(backend, scores, budget=5, top_p=0.6) == [[1, 3]]
    assert select(backend, scores, budget=5, top_p=0.8) == [[0, 1, 3]]
    assert select(backend, scores, budget=5, top_p=0.9) == [[0, 1, 2, 3]]
    assert select(backend, scores, budget=5, top_p=0.99) == [[0, 1, 2, 3, 4]]
    # Never beyond the budget; forced tokens count towards the mass.
    assert select(backend, scores, budget=2, top_p=0.9) == [[1, 3]]
    assert select(backend, scores, budget=5, top_p=0.6, sink=1) == [[0, 1]]
    assert select(backend, scores, budget=5, top_p=0.4, sink=2) == [[0, 1]]


@every_backend
def test_top_p_of_almost_one(backend):
    """Tokens 17 nats below the best weigh nothing: p just below 1 is reached without them; 1 is no limit."""
    scores = torch.tensor([0.0, -17.0, -1.0, -100.0])
    assert select(backend, scores, budget=4, top_p=0.9999999) == [[0, 2]]
    assert select(backend, scores, budget=4, top_p=1.0) == [[0, 1, 2, 3]]


# --- fuzz -----------------------------------------------------------------------------------------------------------


@st.composite
def select_problems(draw):
    B, T, H = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    unit = draw(st.sampled_from([cases.TOKEN, cases.PAGE]))
    return {
        "seed": draw(st.integers(0, 2**31)),
        "shape": (B, T, H, draw(st.integers(1, 90))),
        "unit": unit,
        "page_size": draw(st.integers(1, 20)) if unit == cases.PAGE else 1,
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int16])),
        "kind": draw(st.sampled_from(["normal", "coarse", "odd"])),
        "budget": draw(st.one_of(st.none(), st.integers(0, 120), st.just("tensor"))),
        "ratio": draw(st.floats(0.01, 1.0)),
        "top_p": draw(st.one_of(st.none(), st.floats(0.05, 1.0))),
        "sink": draw(st.sampled_from([0, 1, 5, 40])),
        "recent": draw(st.sampled_from([0, 1, 7, 50])),
        "keep": draw(st.booleans()),
    }


def build_select(p):
    gen = generator(p["seed"])
    B, _, H, n = p["shape"]
    scores = randn(gen, *p["shape"]) * 3
    if p["kind"] == "coarse":
        scores = scores.round()
    if p["dtype"] == torch.int16:
        scores = (scores * 256).to(torch.int16)
    else:
        scores = scores.to(p["dtype"])
        if p["kind"] == "odd":  # special values here and there
            special = torch.tensor([torch.nan, -torch.inf, -0.0, 0.0]).to(p["dtype"])
            pick = torch.randint(0, 16, p["shape"], generator=gen)
            scores = torch.where(pick < 4, special[pick.clamp(max=3)], scores)
            scores[..., 0] = 0.5  # one finite best, so that weights are defined
    size = p["page_size"]
    lens = torch.randint(0, n * size + 1, (B,), generator=gen)
    budget = torch.randint(0, n + 3, (B, H), generator=gen) if p["budget"] == "tensor" else p["budget"]
    keep = None
    if p["keep"]:
        lo = torch.randint(-1, n * size, (B, 2), generator=gen)
        keep = torch.stack((lo, lo + torch.randint(0, 9, (B, 2), generator=gen)), -1).to(torch.int32)
        keep[lo < 0] = -1
    return scores, lens, budget, keep


@every_backend
@settings(max_examples=150)
@given(p=select_problems())
def test_fuzz_against_sorting(p, backend):
    scores, lens, budget, keep = build_select(p)
    args = {name: p[name] for name in ("unit", "page_size", "ratio", "top_p", "sink", "recent")}
    got = chosen_lists(run("select", cases.select_inputs(scores, lens, budget=budget, keep=keep, **args), backend))
    B, T, H, n = scores.shape
    size, log_unit = p["page_size"], 1 if p["dtype"] == torch.int16 else 256
    rows = iter(got)
    for b, t, h in ((b, t, h) for b in range(B) for t in range(T) for h in range(H)):
        vis = naive.visible(int(lens[b]), T, t, n * size)
        if budget is None:
            tokens = math.floor(p["ratio"] * vis)
        else:
            tokens = int(budget[b, h]) if isinstance(budget, torch.Tensor) else budget
        limit = tokens
        if p["unit"] == cases.PAGE:
            limit = n if tokens >= vis else max(1, tokens // size)
        spans = [] if keep is None else [tuple(span) for span in keep[b].tolist()]
        want = naive.select_row(
            scores[b, t, h].double().tolist(), vis, size, limit, p["top_p"], p["sink"], p["recent"], spans, log_unit
        )
        assert next(rows) == want, (b, t, h)
