"""The launches that the roofline model counts (sic_kernels/slicing/work.py) are those that the launchers make."""

import pytest
from launch_counts import counted

from sic_kernels.slicing import benches, work
from sic_kernels.slicing.cases import BenchShape

# Rows of one block and lists of one split; several of either; rows of several blocks.
SHAPES = (
    BenchShape(200, heads=2, D=64),
    BenchShape(2600, heads=1, group=2, D=32),
    BenchShape(16500, heads=1, group=1, D=32),
)

# By the shared memory of a block: rows of attend in one launch, or step by step.
WAYS = {"rows": (227 * 1024, work.ROW_POSITIONS), "steps": (36 * 1024, 0)}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.backend("simt")
@every_way
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_model_counts_what_is_launched(shape, way, monkeypatch):
    shared, positions = WAYS[way]
    monkeypatch.setattr(work, "ROW_POSITIONS", positions)
    found = counted("slicing", "Inputs", SHAPES, f"native.simt_module().set_shared_memory({shared})")
    expected = {name: [done.kernels, done.fills] for name in benches.NAMES for done in [work.work(name, shape)]}
    assert found[shape] == expected


def kernels(shape, names=benches.NAMES):
    return [launch.kernel for name in names for launch in work.work(name, shape).launches]


def test_the_shapes_take_every_path(monkeypatch):
    paths = []
    for way in WAYS:
        monkeypatch.setattr(work, "ROW_POSITIONS", WAYS[way][1])
        paths += [tuple(kernels(shape, ["attend 12 %"])) for shape in SHAPES]
    assert {k for path in paths for k in path} >= {"attend_rows", "select_rows", "select_digit", "attention_merge"}
    assert len(set(paths)) == 2 + len(SHAPES)
