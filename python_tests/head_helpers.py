"""What the head tests share: running an op on a backend, comparing with the definition."""

import functools

import pytest
import torch
from slicing_helpers import EVERY, NATIVE, by_case, thinned

from sic_kernels import testing
from sic_kernels.head import StatsPart, TokenStats
from sic_kernels.head.cases import ENTROPY
from sic_kernels.testing import assert_close

__all__ = [
    "by_case", "check_case", "compare", "every_backend", "native_backend", "run", "same_nan", "stats_of", "thinned",
]  # fmt: skip

every_backend = pytest.mark.parametrize("backend", EVERY)
native_backend = pytest.mark.parametrize("backend", NATIVE)
run = functools.partial(testing.run, family="head")


def stats_of(backend, op, inputs):
    """The results by name."""
    results = run(op, inputs, backend)
    return StatsPart(*results) if op.endswith("_part") else TokenStats(*results)


def check_case(case, backend, inputs=None):
    """The case's op against its definition, into guarded outputs; inputs stay as they are."""
    inputs = case.inputs() if inputs is None else inputs
    want = case.expected(inputs)
    outs = testing.run_guarded(case.op, inputs, backend, want, family="head")
    compare(case, [g.tensor for g in outs], want)


def same_nan(got, want, what):
    """Both without their NaN, which must be at the same places."""
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN at other places"
    return got.masked_fill(got.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0)


def compare(case, got, want):
    """Integers equal; numbers within the case's tolerance."""
    t = case.tolerance
    if case.op == "probe":
        assert_close(got[0], want[0], atol=t.atol, rtol=t.rtol, what=f"{case}: score")
        return
    names = (StatsPart if case.op.endswith("_part") else TokenStats)._fields
    for name, g, w in zip(names, got, want):
        what = f"{case}: {name}"
        if not g.dtype.is_floating_point:
            assert g.dtype == w.dtype, what
            assert torch.equal(g, w), f"{what}: got {g.tolist()}, expected {w.tolist()}"
            continue
        g, w = same_nan(g, w, what)
        if name in ("entropy", "varentropy"):
            atol, rtol = ENTROPY[t]
            # The variance is a difference of two terms, each of the size of the entropy squared.
            atol *= 1 if name == "entropy" else 10
            assert_close(g, w, atol=atol, rtol=rtol, what=what)
        elif name in ("s", "t", "u"):
            assert_close(g, w, atol=t.atol, rtol=max(t.rtol, 1e-5), what=what)
        else:
            assert_close(g, w, atol=t.lse if name == "lse" else t.atol, rtol=max(t.rtol, 2e-6), what=what)
