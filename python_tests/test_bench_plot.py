"""The page of plots: one file that needs nothing else, from a report of rows; families by name."""

import html.parser
import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from sic_kernels import cli
from sic_kernels.cli import bench as command
from sic_kernels.runtime import bench_plot, bench_report, measure
from sic_kernels.slicing import benches
from sic_kernels.slicing.cases import BenchShape

MACHINE = {"cpu": "c & d", "threads": 2, "isa": "plain", "torch": "t", "sic_kernels": "s", "bandwidth": {"read": 50.0}}
pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'sic_kernels[bench]'")


def rows():
    """Two ops at three shapes; the first has a peer."""
    memory = types.SimpleNamespace(
        rate=lambda s: 1.0 / s, device=types.SimpleNamespace(type="cpu"), clock=types.SimpleNamespace(refused=[])
    )
    lines = []
    for shape in (BenchShape(4096), BenchShape(8192), BenchShape(4096, B=8)):
        for name, peers in (("attend", {"P1": None}), ("select", {})):
            bench = bench_report.Bench(name, shape, None, (), peers, None, shape.kv_bytes)
            times = measure.Times.of([1e-3, 2e-3, 3e-3])
            turns = {
                "P1": measure.Times.of([9e-3]),
                "read": measure.Times.of([0.02]),
                "copy": measure.Times.of([0.025]),
            }
            lines.append(bench_report.row(bench, times, {k: turns[k] for k in (*peers, "read", "copy")}, memory))
    return [*lines, {"fact": "a call", "measured": "2 us", "target": "", "reached": None}]


class Reader(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_needs_no_network():
    text = bench_plot.page(rows(), MACHINE, {"P1": "a peer", "P9": "another"})
    page = Reader(text)
    assert page.tags.count("svg") == page.tags.count("figure") == 4  # the roofline, and a shape each
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)|<script|<image", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    words = " ".join(page.words)
    for expected in (
        "c & d",
        "read 50 GB/s",
        "copy 40 GB/s",
        "4.5x P1",
        "a call",
        "P1: a peer",
        "4K tokens, 8 sequences",
    ):
        assert expected in words, expected
    assert "another" not in words
    assert len(text) < 200_000
    assert text == bench_plot.page(rows(), MACHINE, {"P1": "a peer", "P9": "another"})


def test_svg_takes_the_width_it_is_given():
    text = bench_plot.page(rows(), MACHINE, {})
    heads = re.findall(r"<svg[^>]*>", text)
    assert all("viewBox" in head and not re.search(r' (width|height)="', head) for head in heads)


def test_a_report_without_ops_has_its_tables():
    page = Reader(bench_plot.page(rows()[-1:], MACHINE, {}))
    assert "svg" not in page.tags
    assert "table" in page.tags


def test_missing_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--plot", "out.html"]) == 1
    assert "bench: --plot needs matplotlib: pip install 'sic_kernels[bench]'" in capsys.readouterr().err


def test_the_command_writes_the_page(monkeypatch, tmp_path, capsys):
    report = {"rows": rows(), "machine": MACHINE, "commit": None}
    monkeypatch.setattr(command, "builtin", lambda families, quick, device: report)
    target = tmp_path / "page.html"
    assert cli.main(["bench", "--builtin", "--json", "--plot", str(target)]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == report["rows"]
    assert "</html>" in target.read_text()


def test_families_by_name(monkeypatch, capsys):
    assert command.FAMILIES["slicing"] is benches.FAMILY
    seen = []
    monkeypatch.setattr(
        command, "suite", lambda families, *rest: seen.append(families) or {"rows": [], "machine": MACHINE}
    )
    assert cli.main(["bench", "--family", "slicing"]) == 0
    assert cli.main(["bench"]) == 0
    assert seen == [[benches.FAMILY], list(command.FAMILIES.values())]
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "--family", "nothing"])
    assert stop.value.code == 2
    assert "'nothing' (choose from" in capsys.readouterr().err


def test_the_suite_of_every_family_is_there():
    assert all(command._suite_file(family).exists() for family in command.FAMILIES.values())


@pytest.mark.parametrize("device", ["tpu", "cuda", "meta"])
def test_a_device_that_is_not_there(device, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "--device", device]) == 1
    assert f"--device{' ' if device == 'cuda' else ': got '}" in capsys.readouterr().err


def test_help_needs_no_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; from sic_kernels.cli import main; main(['bench', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert "--plot" in done.stdout
