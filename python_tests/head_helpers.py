"""What the head tests share: running an op on a backend."""

import functools

import pytest
from slicing_helpers import EVERY, NATIVE, by_case, thinned

from sic_kernels import testing
from sic_kernels.head import StatsPart, TokenStats
from sic_kernels.head.cases import same_nan

__all__ = [
    "by_case", "check_case", "every_backend", "native_backend", "run", "same_nan", "stats_of", "thinned",
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
    case.compare([g.tensor for g in outs], want)
