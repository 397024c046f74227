"""The launches that the roofline model counts (sic_kernels/delta/work.py) are those that the launchers make."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sic_kernels.delta import benches
from sic_kernels.slicing.cases import BenchShape

PREFILL = 128
# One split; several, on tensor cores; on CUDA cores.
SHAPES = (
    BenchShape(208, heads=2, D=128),
    BenchShape(2608, heads=1, D=128),
    BenchShape(2608, heads=1, group=2, D=64),
)

# One call of each benchmark on the emulator, which counts.
COUNT = """
import json
from sic_kernels.runtime import native
from sic_kernels.delta import benches
from sic_kernels.slicing.cases import BenchShape
benches.PREFILL, benches.TEMPLATES = {prefill}, 16
counters, found = native.simt_module().counters, {{}}
inputs = benches.CodedInputs({shape}, sets=1)
for name in benches.NAMES:
    function = benches.build(name, inputs).function
    before = counters()
    function(0)
    after = counters()
    found[name] = [after[key] - before[key] for key in ("launches", "fills")]
print(json.dumps(found))
"""


@pytest.mark.backend("simt")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_model_counts_what_is_launched(shape, monkeypatch):
    monkeypatch.setattr(benches, "PREFILL", PREFILL)
    arguments = f"BenchShape({shape.length}, heads={shape.heads}, group={shape.group}, D={shape.D})"
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(shape=arguments, prefill=PREFILL)], capture_output=True, text=True,
        timeout=600, env={**os.environ, "SIC_BACKEND": "simt"}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {name: [done.kernels, done.fills] for name in benches.NAMES for done in [benches.work_of(name, shape)]}
    assert json.loads(done.stdout) == expected


def test_the_shapes_take_every_path():
    names = [{launch.kernel for name in benches.NAMES for launch in benches.work_of(name, s).launches} for s in SHAPES]
    assert set().union(*names) >= {"attention_codes", "attention_coded_rows", "encode_rows", "decode_rows"}
    assert "attention_codes" in names[1]
    assert "attention_codes" not in names[2]
