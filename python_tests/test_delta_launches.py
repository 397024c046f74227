"""The launches that the roofline model counts (sic_kernels/delta/work.py) are those that the launchers make."""

import pytest
from launch_counts import counted

from sic_kernels.delta import benches
from sic_kernels.slicing.cases import BenchShape

PREFILL = 128
# One split; several, on tensor cores; on CUDA cores.
SHAPES = (
    BenchShape(208, heads=2, D=128),
    BenchShape(2608, heads=1, D=128),
    BenchShape(2608, heads=1, group=2, D=64),
)


@pytest.mark.backend("simt")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_model_counts_what_is_launched(shape, monkeypatch):
    monkeypatch.setattr(benches, "PREFILL", PREFILL)
    found = counted("delta", "CodedInputs", SHAPES, f"benches.PREFILL, benches.TEMPLATES = {PREFILL}, 16")
    expected = {name: [done.kernels, done.fills] for name in benches.NAMES for done in [benches.work_of(name, shape)]}
    assert found[shape] == expected


def test_the_shapes_take_every_path():
    names = [{launch.kernel for name in benches.NAMES for launch in benches.work_of(name, s).launches} for s in SHAPES]
    assert set().union(*names) >= {"attention_codes", "attention_coded_rows", "encode_rows", "decode_rows"}
    assert "attention_codes" in names[1]
    assert "attention_codes" not in names[2]
