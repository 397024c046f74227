"""The launches that the roofline model counts (sic_kernels/slicing/work.py) are those that the launchers make."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sic_kernels.slicing import benches, work
from sic_kernels.slicing.cases import BenchShape

# Rows of one block and lists of one split; several of either; rows of several blocks.
SHAPES = (
    BenchShape(200, heads=2, D=64),
    BenchShape(2600, heads=1, group=2, D=32),
    BenchShape(16500, heads=1, group=1, D=32),
)

# One call of each benchmark on the emulator, which counts.
COUNT = """
import json, torch
from sic_kernels.runtime import native
from sic_kernels.slicing import benches
from sic_kernels.slicing.cases import BenchShape
native.simt_module().set_shared_memory({shared})
counters, found = native.simt_module().counters, {{}}
inputs = benches.Inputs({shape}, sets=1)
for name in benches.NAMES:
    function = benches.build(name, inputs).function
    before = counters()
    function(0)
    after = counters()
    found[name] = [after[key] - before[key] for key in ("launches", "fills")]
print(json.dumps(found))
"""


# By the shared memory of a block: rows of attend in one launch, or step by step.
WAYS = {"rows": (227 * 1024, work.ROW_POSITIONS), "steps": (36 * 1024, 0)}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.backend("simt")
@every_way
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_model_counts_what_is_launched(shape, way, monkeypatch):
    shared, positions = WAYS[way]
    monkeypatch.setattr(work, "ROW_POSITIONS", positions)
    arguments = f"BenchShape({shape.length}, heads={shape.heads}, group={shape.group}, D={shape.D})"
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(shape=arguments, shared=shared)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "SIC_BACKEND": "simt"}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {name: [done.kernels, done.fills] for name in benches.NAMES for done in [work.work(name, shape)]}
    assert json.loads(done.stdout) == expected


def kernels(shape, names=benches.NAMES):
    return [launch.kernel for name in names for launch in work.work(name, shape).launches]


def test_the_shapes_take_every_path(monkeypatch):
    paths = []
    for way in WAYS:
        monkeypatch.setattr(work, "ROW_POSITIONS", WAYS[way][1])
        paths += [tuple(kernels(shape, ["attend 12 %"])) for shape in SHAPES]
    assert {k for path in paths for k in path} >= {"attend_rows", "select_rows", "select_digit", "attention_merge"}
    assert len(set(paths)) == 2 + len(SHAPES)
