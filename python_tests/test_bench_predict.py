"""The roofline model: its formula by hand, bytes equal to those of the benchmarks, every line headed as a prediction."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sic_kernels import cli
from sic_kernels.cli import bench
from sic_kernels.runtime import roofline
from sic_kernels.runtime.roofline import Device, Launch, Work
from sic_kernels.slicing import benches, work
from sic_kernels.slicing.cases import BENCH_SHAPES, BenchShape

# 900 bytes a second for many blocks, 10 a block; 4 multiprocessors of 1 clock a second.
TOY = Device(
    "toy", memory=1000.0, cache=2000.0, multiprocessors=4, clock=1.0, copy_share=0.9, bytes_a_clock=10.0, launch=2.0
)
WIDE = Device(
    "wide", memory=1000.0, cache=2000.0, multiprocessors=400, clock=1.0, copy_share=0.9, bytes_a_clock=10.0, launch=2.0
)


def test_one_launch_by_hand():
    assert roofline.seconds(WIDE, Launch("k", nbytes=1800, blocks=1000)) == pytest.approx(2 + 1800 / 900)
    assert roofline.seconds(WIDE, Launch("k", nbytes=1800, blocks=3)) == pytest.approx(2 + 1800 / 30)
    assert roofline.seconds(TOY, Launch("k", nbytes=1800, blocks=1000)) == pytest.approx(2 + 1800 / 40)
    assert roofline.seconds(WIDE, Launch("k", nbytes=900, again=4000, blocks=1000)) == pytest.approx(2 + 1 + 2)
    assert roofline.seconds(WIDE, Launch("k", nbytes=900, blocks=1000, clocks=4000.0)) == pytest.approx(2 + 10)
    assert roofline.seconds(TOY, Launch("k")) == 2


def test_a_prediction_adds_its_launches_up():
    done = Work((Launch("a", 1800, blocks=1000), Launch("b", 900, 4000, 1000)))
    assert done.nbytes == 2700
    line = roofline.predict(WIDE, "x", BenchShape(4096), done)
    assert (
        line["predicted_seconds"]
        == pytest.approx(sum(k["predicted_seconds"] for k in line["launches"]))
        == 4 + 2 + 1 + 2
    )
    assert line["bytes_seconds"] == 3
    assert line["launch_seconds"] == 4
    assert json.loads(json.dumps(line)) == line


@pytest.fixture(scope="module")
def inputs():
    return benches.Inputs(BenchShape(1000, B=2, heads=2, D=64), sets=2)


@pytest.mark.parametrize("name", benches.NAMES)
def test_the_bytes_are_those_of_the_benchmark(name, inputs):
    """...which counts what a call really listed and wrote."""
    bench = benches.build(name, inputs)
    s, item = inputs.shape, 2
    row = 2 * s.D * item
    listed = {
        "attend 12 %": lambda: int(0.12 * s.kv_bytes) + s.sketch_bytes(2),
        "attend 6 %": lambda: int(0.06 * s.kv_bytes) + s.sketch_bytes(2),
        "attend pages 12 %": lambda: s.B * inputs.M * s.heads * row + int(bench.out[3].sum()) * s.page * row,
        "dense": lambda: s.kv_bytes,
        "sliced 12 %": lambda: int(inputs.random(0.12)[0].counts.sum()) * row,
        "score_tokens": lambda: s.sketch_bytes(1),
        "select": lambda: s.B * s.heads * inputs.M * s.page * 2 + bench.out[0].nbytes,
        "gather": lambda: 2 * (bench.out[0].nbytes + bench.out[1].nbytes),
        "key_sketch": lambda: s.kv_bytes // 2 + s.sketch_bytes(2),
    }
    assert bench.nbytes == work.work(name, s).nbytes == listed[name]()


@pytest.mark.parametrize("shape", BENCH_SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", benches.NAMES)
def test_every_cell_has_a_prediction(name, shape):
    done = work.work(name, shape)
    assert all(
        launch.kernel and launch.nbytes >= 0 and launch.again >= 0 and launch.blocks > 0 for launch in done.launches
    )
    for device in roofline.DEVICES.values():
        line = roofline.predict(device, name, shape, done)
        assert line["predicted_seconds"] >= line["bytes_seconds"] + line["launch_seconds"]


def test_listed_tokens_and_pages():
    s = BenchShape(1000)
    assert work.listed_tokens(s, 0.12) == 120
    assert work.listed_tokens(s, 0.01) == 48  # sink and recent
    assert work.listed_pages(s, 0.12) == 7
    assert work.listed_pages(s, 0.01) == 4  # the first page, and the last 32 tokens on three


def test_the_command_says_what_it_is(capsys):
    assert cli.main(["bench", "--predict", "h200"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("PREDICTION for H200, not a measurement")
    assert all(text in " ".join(said.split()) for text in roofline.assumptions(roofline.DEVICES["h200"]))
    assert said.count("not measured") == 2


def test_as_json(capsys):
    assert cli.main(["bench", "--predict", "h100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prediction"] is True
    assert report["device"]["memory"] == 3.35e12
    assert len(report["rows"]) == sum(len(f.shapes) * len(f.names) for f in bench.FAMILIES.values())
    lines = {(r["shape"], r["name"]): r["predicted_seconds"] for r in report["rows"]}
    for ratio in report["ratios"]:
        quotient = lines[ratio["shape"], ratio["slow"]] / lines[ratio["shape"], ratio["fast"]]
        assert ratio["predicted_ratio"] == pytest.approx(quotient)
    assert not any("seconds" in r or "rate" in r for r in report["rows"])  # not to be taken for a measurement


def test_no_plot_of_a_prediction(capsys):
    assert cli.main(["bench", "--predict", "h100", "--plot", "x.html"]) == 1
    assert "--plot shows measurements" in capsys.readouterr().err


def test_no_kernel_is_needed():
    """The native module is not even imported."""
    code = (
        "import sys; sys.modules['sic_kernels._C'] = None; from sic_kernels.cli import main; "
        "main(['bench', '--predict', 'h100'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert "PREDICTION" in done.stdout
