"""What the delta tests share: running an op on a backend, comparing with the definition."""

import functools

import pytest
from slicing_helpers import EVERY, NATIVE, by_case, thinned

from sic_kernels import testing
from sic_kernels.delta.cases import written
from sic_kernels.testing import assert_same_bits, guarded_like, leaves, preserve

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
        case.compare(case.run(inputs, backend), want)
        changed = {x.data_ptr() for x in written(inputs)}
    else:
        outs = guarded_like(want)
        run(case.op, inputs, backend, outs=[g.tensor for g in outs])
        for i, g in enumerate(outs):
            g.assert_guards(f"{case}: output {i}")
        case.compare([g.tensor for g in outs], want)
        changed = set()
    for x, old in zip(leaves(inputs), before):
        if x.data_ptr() not in changed:
            assert_same_bits(x, old, f"{case}: an input")
