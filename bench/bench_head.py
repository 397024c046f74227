"""Head: statistics of logits and of an LM head against torch, at the vocabularies of the published table."""

from __future__ import annotations

import pytest

from sic_kernels.head import benches

FAMILY = benches.FAMILY


@pytest.mark.parametrize("name", benches.NAMES)
def bench_op(name, shape, inputs, run):
    run(benches.build(name, inputs), inputs.sets)
