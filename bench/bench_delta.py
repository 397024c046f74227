"""Delta: the ops on codes against torch and against the same in bfloat16, at the lengths of the published table."""

from __future__ import annotations

import pytest

from sic_kernels.delta import benches

FAMILY = benches.FAMILY


@pytest.mark.parametrize("name", benches.NAMES)
def bench_op(name, shape, inputs, run):
    run(benches.build(name, inputs), inputs.sets)
