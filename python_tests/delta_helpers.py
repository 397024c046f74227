"""What the delta tests share: running an op on a backend, comparing with the definition."""

import functools

import pytest
import torch
from slicing_helpers import EVERY, NATIVE, by_case, thinned

from sic_kernels import testing
from sic_kernels.delta.cases import preserve, written
from sic_kernels.testing import assert_close, assert_same_bits, guarded_like, leaves

__all__ = ["by_case", "check_case", "every_backend", "native_backend", "run", "thinned"]

every_backend = pytest.mark.parametrize("backend", EVERY)
native_backend = pytest.mark.parametrize("backend", NATIVE)
run = functools.partial(testing.run, family="delta")


def check_case(case, backend, inputs=None):
    """The case's op against its definition: in guarded outputs or in place, every other input untouched."""
    inputs = case.inputs() if inputs is None else inputs
    want = case.expected(inputs)
    before = [preserve(x) for x in leaves(inputs)]
    if case.op == "delta_encode":
        run(case.op, inputs, backend)
        compare_pages(written(inputs), want, str(case))
        changed = {x.data_ptr() for x in written(inputs)}
    else:
        outs = guarded_like(want)
        run(case.op, inputs, backend, outs=[g.tensor for g in outs])
        for i, g in enumerate(outs):
            g.assert_guards(f"{case}: output {i}")
        compare(case, [g.tensor for g in outs], want)
        changed = set()
    for x, old in zip(leaves(inputs), before):
        if x.data_ptr() not in changed:
            assert_same_bits(x, old, f"{case}: an input")


def compare_pages(got, want, what):
    """Bit for bit, but that one NaN of the raw table is as good as another."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if w.dtype.is_floating_point:
            assert torch.equal(g.isnan(), w.isnan()), f"{what}: NaN in result {i}"
            g, w = g.nan_to_num(nan=0.0), w.nan_to_num(nan=0.0)
        assert_same_bits(g, w, f"{what}: result {i}")


def compare(case, got, want):
    """Decoded rows relative to their largest channel, attention within the case's tolerance."""
    t = case.tolerance
    if case.op == "delta_attention":
        assert_close(got[0], want[0], atol=t.atol, rtol=t.rtol, what=f"{case}: out")
        assert_close(got[1], want[1], atol=t.lse, rtol=1e-5, what=f"{case}: lse")
        return
    for name, g, w in zip("kv", got, want, strict=True):
        size = w.float().abs().amax(-1, keepdim=True).clamp(min=1)
        # A channel is off by one unit of the output's type, and by float rounding of the row's largest.
        allowed = t.atol * size + t.rtol * w.float().abs()
        error = (g.float() - w.float()).abs() / allowed
        assert_close(error, torch.zeros_like(error), atol=1.0, what=f"{case}: {name}")
