"""The launches that the roofline model counts (sic_kernels/head/work.py) are those that the launchers make."""

import pytest
import torch

from sic_kernels.head import cases, work
from sic_kernels.runtime import native, roofline
from sic_kernels.testing import generator, randn, run

# One segment and several; rows of hidden states in blocks of 8, 16 and 32; more than one block of rows.
SHAPES = tuple(cases.HeadShape(B, V, D) for B, V, D in ((1, 300, 32), (9, 5000, 16), (33, 200, 64)))


def inputs_of(op, s):
    gen = generator(0)
    if op == "logits_stats":
        return cases.logits_inputs(cases.bench_logits(s), k=8)
    return cases.lm_head_inputs(randn(gen, s.B, s.D, dtype=s.dtype), randn(gen, s.V, s.D, dtype=s.dtype), k=8)


@pytest.mark.backend("simt")
@pytest.mark.parametrize("op", ["logits_stats", "lm_head_stats"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_model_counts_what_is_launched(op, shape):
    counters = native.simt_module().counters
    inputs = inputs_of(op, shape)
    before = counters()
    run(op, inputs, "simt", family="head")
    after = counters()
    done = work.work(getattr(work, op)(shape))
    assert [after[key] - before[key] for key in ("launches", "fills")] == [done.kernels, done.fills]


@pytest.mark.parametrize("shape", cases.BENCH_SHAPES, ids=lambda s: s.name)
def test_bytes_are_those_of_the_cases(shape):
    logits, head = (work.work(f(shape)) for f in (work.logits_stats, work.lm_head_stats))
    assert logits.nbytes == shape.B * shape.V * torch.float32.itemsize
    assert head.nbytes == (shape.B + shape.V) * shape.D * shape.dtype.itemsize


def test_an_lm_head_is_bound_by_its_weights():
    """At the shape of a large model and up to 8 rows nine tenths of the predicted time are the reading of the weights."""
    for shape in cases.BENCH_SHAPES:
        line = roofline.predict(roofline.DEVICES["h100"], "lm_head", shape, work.work(work.lm_head_stats(shape)))
        if shape.D == 4096 and shape.B <= 8:
            assert line["bytes_seconds"] > 0.9 * line["predicted_seconds"], shape
