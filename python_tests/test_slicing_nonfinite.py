"""NaN and infinity among the inputs: every backend gives NaN and infinity where the definition does, and nowhere else."""

import pytest
import torch
from slicing_helpers import native_backend
from test_slicing_attend import Problem

from sic_kernels.slicing import cases, cases_select
from sic_kernels.testing import generator, randn, run

NAN, INF = float("nan"), float("inf")
F32, BF16 = torch.float32, torch.bfloat16
LENS = [81, 16]

# Case -> its inputs of floats, by place.
OPS = {
    "attention": (cases.attention_case(LENS, 2, 2, 2, 64, 16, F32, density=0.5), {"q": 0, "k": 1}),
    "dense": (cases.attention_case(LENS, 1, 2, 8, 64, 16, BF16), {"q": 0, "k": 1}),
    "pages": (cases.attention_case(LENS, 2, 2, 2, 64, 16, BF16, density=0.5, unit=cases.PAGE), {"q": 0, "k": 1}),
    "summary": (cases.summary_case(LENS, 16, 64, F32), {"k": 0}),
    "summary-bf16": (cases.summary_case(LENS, 16, 64, BF16), {"k": 0}),
    "page-max": (cases.page_score_case(LENS, 2, 2, 4, 64, 16, F32, 0.5, cases.MAX), {"q": 0, "summary": 1}),
    "page-softmax": (cases.page_score_case(LENS, 2, 2, 4, 64, 16, BF16, 1.0, cases.SOFTMAX), {"q": 0, "summary": 1}),
    "merge": (cases.merge_case((3, 4), 64, F32), {"out": 0, "lse": 1}),
    "gather": (cases.gather_case(LENS, 2, 2, 64, 40, 16, F32, cases.TOKEN), {"k": 0, "v": 1}),
}  # fmt: skip
# Their results are integers, the same on every backend: what is not finite has an integer too.
INTEGERS = {
    "sketch": (cases.sketch_case(LENS, 2, 64, 16, F32, 2), {"k": 0, "centre": 3}),
    "score-max": (cases.score_case(LENS, 2, 2, 4, 64, 16, F32, 2, cases.MAX), {"q": 0, "norm": 2}),
    "score-softmax": (cases.score_case(LENS, 2, 2, 4, 64, 16, F32, 2, cases.SOFTMAX), {"q": 0, "norm": 2}),
    "refine": (cases.refine_case(cases.score_case(LENS, 2, 2, 4, 64, 16, F32, 2, cases.MAX)), {"q": 0, "norm": 2}),
    "select": (cases_select.topk_case(2, 1024, 64, F32, randn), {"scores": 0}),
}


def poisoned(x, value, share):
    """x with the value in a share of its elements."""
    at = torch.rand(x.shape, generator=generator(3)) < share
    return torch.where(at, torch.full_like(x, value), x)


def poisoned_inputs(case, at, value, share):
    """The case's inputs, the one at `at` poisoned."""
    inputs = case.inputs()
    return (*inputs[:at], poisoned(inputs[at], value, share), *inputs[at + 1 :])


def kind(x):
    """0 finite, 1 NaN, 2 infinite, 3 minus infinite; integers are themselves."""
    if not x.dtype.is_floating_point:
        return x
    return x.isnan() + 2 * (x == INF) + 3 * (x == -INF)


def check(got, want):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        differs = kind(g) != kind(w)
        at = tuple(differs.nonzero()[0].tolist()) if bool(differs.any()) else ()
        assert not differs.any(), f"result {i} at {at}: got {g[at].item()}, expected {w[at].item()}"


def places(ops):
    return [
        pytest.param(case, at, id=f"{op}-{name}") for op, (case, inputs) in ops.items() for name, at in inputs.items()
    ]


every_value = pytest.mark.parametrize("value", [NAN, INF, -INF])
some_and_all = pytest.mark.parametrize("share", [0.005, 1.0])


@native_backend
@some_and_all
@every_value
@pytest.mark.parametrize("case, at", places(OPS))
def test_results_of_nonfinite_inputs(case, at, value, share, backend):
    inputs = poisoned_inputs(case, at, value, share)
    check(run(case.op, inputs, backend), case.expected(inputs))


@native_backend
@some_and_all
@every_value
@pytest.mark.parametrize("case, at", places(INTEGERS))
def test_integers_of_nonfinite_inputs(case, at, value, share, backend):
    inputs = poisoned_inputs(case, at, value, share)
    for got, want in zip(run(case.op, inputs, backend), case.expected(inputs), strict=True):
        assert torch.equal(kind(got), kind(want))
        assert torch.equal(got[got.isfinite()], want[want.isfinite()])


@native_backend
@some_and_all
@every_value
@pytest.mark.parametrize("unit", [cases.TOKEN, cases.PAGE])
def test_nonfinite_values_keep_to_their_channel(unit, value, share, backend):
    """A value that is not finite reaches its own channel of rows that may read its token, and nothing else."""
    case = cases.attention_case(LENS, 1, 2, 2, 64, 16, F32, density=0.5, unit=unit)
    inputs = poisoned_inputs(case, 2, value, share)
    out, lse = run(case.op, inputs, backend)
    want, want_lse = case.expected(inputs)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(out.isfinite(), want.isfinite())


@native_backend
@some_and_all
@every_value
@pytest.mark.parametrize("limit", [None, 0.9])
@pytest.mark.parametrize("change", ["none", "bias", "softcap", "window"])
@pytest.mark.parametrize(
    "unit, what", [(cases.TOKEN, "q"), (cases.TOKEN, "centre"), (cases.PAGE, "q"), (cases.PAGE, "summary")]
)
def test_an_estimate_that_is_not_finite(unit, what, change, limit, value, share, backend):
    """What is not known to be little is read: an estimate of NaN is a reason to read everything."""
    p = Problem([300, 90], unit=unit)
    setattr(p, what, poisoned(getattr(p, what), value, share))
    extra = {
        "none": {},
        "bias": {"key_bias": randn(generator(1), 2, p.cache.block_table.shape[1] * 16)},
        "softcap": {"softcap": 5.0},
        "window": {"window": 200},
    }
    inputs = p.inputs(max_omitted_mass=limit, ratio=0.3, **extra[change])
    check(run("attend", inputs, backend), run("attend", inputs, "ref"))
