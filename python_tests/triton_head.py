"""The head kernels of Triton against the definition, called as the backend calls them.  Run by triton_small.py."""

import pytest
import torch

from sic_kernels.head import cases, triton_kernels
from sic_kernels.head.types import TokenStats
from sic_kernels.testing import assert_close, assert_same_bits, generator, guarded_like, leaves, randn, reference

MOST_ROWS, MOST_PRODUCTS = 20, 1 << 22  # of a case
ULPS = 4 * 2**-23


def some(grid, step=1):
    """Every step-th case of a grid that the interpreter can manage, by name."""
    kept = [case for case in grid if case.shape.get("B", 1) <= MOST_ROWS and products_of(case) <= MOST_PRODUCTS]
    return pytest.mark.parametrize("case", kept[::step], ids=str)


def products_of(case):
    return case.shape.get("D", 0) * case.shape.get("V", 1)


def run(op, inputs, like=None):
    """An op's results, in guarded outputs shaped as `like` if that is given; inputs are left as they were."""
    before = [x.clone() for x in leaves(inputs)]
    outs = None if like is None else guarded_like(like)
    got = getattr(triton_kernels, op)(*inputs, outs=None if outs is None else tuple(g.tensor for g in outs))
    for g in outs or ():
        g.assert_guards(op)
    for x, old in zip(leaves(inputs), before):
        assert_same_bits(x.contiguous(), old.contiguous(), f"{op}: an input")
    return got if outs is None else tuple(g.tensor for g in outs)


def close(got, want, atol, rtol, what):
    """As `assert_close`, and NaN where the definition has NaN."""
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN"
    assert_close(got.nan_to_num(0.0, torch.inf, -torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf), atol=atol,
                 rtol=rtol, what=what)  # fmt: skip


def check(case, inputs=None):
    inputs = case.inputs() if inputs is None else inputs
    want = case.expected(inputs)
    case.compare(run(case.op, inputs, want), want)


@some(cases.logits_grid(), 2)
def test_logits_grid(case):
    check(case)


@some(cases.lm_head_grid(), 2)
def test_lm_head_grid(case):
    check(case)


@some([*cases.part_grid(), *cases.merge_grid()])
def test_part_grid(case):
    check(case)


@some(cases.probe_grid())
def test_probe_grid(case):
    check(case)


# --- edges ----------------------------------------------------------------------------------------------------------


def stats_of(x, **given):
    """Statistics of logits, compared with the definition."""
    inputs = cases.logits_inputs(x, **given)
    case = cases.extras_case(*x.shape, x.dtype, 0)
    check(case, inputs)
    return TokenStats(*run("logits_stats", inputs))


def test_values_that_are_not_finite_stay_in_their_row():
    x = randn(generator(1), 6, 300)
    x[1, 7], x[2, 9], x[3] = torch.nan, torch.inf, -torch.inf
    x[4, 7], x[4, 9] = torch.nan, torch.inf
    stats = stats_of(x, k=3, watch_ids=torch.tensor([7]), target_ids=torch.tensor([0, 1, 2, 3, 4, -1]))
    assert stats.status.tolist() == [0, 1, 2, 4, 3, 0]


def test_masked_values_that_are_not_finite_do_not_count():
    x = randn(generator(2), 2, 40)
    x[:, 33], x[:, 39] = torch.nan, torch.inf
    mask = torch.tensor([[-1, ~(1 << 1)]] * 2, dtype=torch.int32)
    assert stats_of(x, k=2, mask_bits=mask, valid_vocab=39).status.tolist() == [0, 0]


def test_of_equals_the_lowest_id():
    """-0 equals 0; over the border of a tile."""
    x = torch.full((1, 2200), -1.0)
    x[0, [5, 1000, 2100]] = torch.tensor([-0.0, 0.0, 0.0])
    assert stats_of(x, k=4).topk_ids.tolist() == [[5, 1000, 2100, 0]]


def test_one_hot_and_uniform_rows():
    x = torch.zeros(2, 2500)
    x[0] = -torch.inf
    x[0, 2400] = 3000.0
    stats = stats_of(x)
    assert stats.entropy[0] == 0
    assert stats.varentropy.tolist() == [0, 0]
    assert abs(stats.entropy[1] - torch.tensor(2500.0).log()) < 1e-5


@pytest.mark.parametrize("offset", [3000.0, -3000.0, -200.0])
def test_offsets(offset):
    stats_of(randn(generator(3), 1, 500) + offset, temperature=0.1)


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-3, 1e30])
def test_temperatures(temperature):
    stats_of(randn(generator(4), 1, 100) * 30, temperature=temperature, k=2)


@pytest.mark.parametrize("softcap", [1e-3, 5.0, 1e4])
def test_softcaps(softcap):
    stats_of(randn(generator(5), 1, 500) * 5, softcap=softcap, temperature=1.0)


def test_nothing_to_look_at():
    """No ids, none that is valid, no rows, no channels."""
    stats_of(torch.zeros(2, 0), k=2)
    stats_of(torch.zeros(2, 5), k=2, valid_vocab=0)
    stats_of(torch.zeros(0, 5), k=2)
    run("probe", (torch.zeros(0, 4), torch.zeros(2, 4), torch.zeros(1, 2), torch.zeros(1), 0, 0))
    case = cases.lm_head_case(2, 1, 5, torch.float32)
    check(case, cases.lm_head_inputs(torch.zeros(2, 0), torch.zeros(5, 0), k=6))


def test_outputs_with_gaps():
    inputs = cases.logits_inputs(randn(generator(6), 3, 50), k=2)
    want = triton_kernels.logits_stats(*inputs)
    gaps = tuple(torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., : x.shape[-1]] for x in want[4:6])
    got = triton_kernels.logits_stats(*inputs, outs=(*want[:4], *gaps, *want[6:]))
    for a, b in zip(got, want):
        assert_same_bits(a.contiguous(), b)


# --- parts, batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [32], [64, 64, 4096]])
def test_merged_parts_are_the_whole(cuts):
    """Within 4 units in the last place, whatever their order; the definition's merge of the same parts."""
    gen = generator(7)
    given = cases.all_extras(gen, 3, 4500)
    inputs = cases.logits_inputs(randn(gen, 3, 4500) * 3, **given)
    whole = triton_kernels.logits_stats(*inputs)
    parts = [triton_kernels.logits_part(*part) for part in cases.split(inputs, cuts)]
    for order in (parts, parts[::-1]):
        stacked = (*(torch.stack(x) for x in zip(*order)), given["temperature"])
        merged = run("merge_stats", stacked, whole)
        for name, got, want in zip(TokenStats._fields, merged, whole):
            if got.dtype.is_floating_point:
                close(got, want, ULPS, ULPS, name)
            else:
                assert_same_bits(got, want, name)
    want = reference("merge_stats", "head")(*stacked)
    cases.extras_case(3, 4500, torch.float32, 5).compare(merged, want)


def test_merged_lists_of_negative_logits():
    """Three ids in a list that the kernel has room for four in: what fills it is below every logit."""
    part = triton_kernels.logits_part(*cases.logits_inputs(torch.tensor([[-3.0, -1.0, -torch.inf, -2.0]]), k=3))
    empty = triton_kernels.logits_part(*cases.logits_inputs(torch.full((1, 2), -torch.inf), k=3, vocab_start=4))
    merged = TokenStats(*triton_kernels.merge_stats(*(torch.stack(x) for x in zip(part, empty)), None))
    assert merged.argmax.tolist() == [1]
    assert merged.topk_ids.tolist() == [[1, 3, 0]]
    assert merged.topk_logprobs[0].tolist() == pytest.approx([-0.407606, -1.407606, -2.407606], abs=1e-6)


@pytest.mark.parametrize("op", ["logits_stats", "lm_head_stats", "probe"])
def test_a_row_does_not_depend_on_its_batch(op):
    """Rows of 20 alone, at other places of a tile; and the whole once more."""
    gen = generator(8)
    hidden, projection = randn(gen, 20, 37), randn(gen, 5, 37)
    of_probe = (projection, randn(gen, 2, 5), randn(gen, 2), 1, 0)
    inputs = {
        "logits_stats": lambda rows: cases.logits_inputs(hidden[rows], k=3, softcap=2.0),
        "lm_head_stats": lambda rows: cases.lm_head_inputs(hidden[rows], projection, of_probe, k=3),
        "probe": lambda rows: (hidden[rows], *of_probe),
    }[op]
    together = run(op, inputs(slice(0, 20)))
    for rows in (slice(0, 20), slice(3, 4), slice(17, 20)):
        for a, b in zip(run(op, inputs(rows)), together):
            assert_same_bits(a, b[rows] if len(b) else b, op)
