"""Benchmarks of every operation against torch, in one run: times, GB/s, share of the measured bandwidth, targets.

In a checkout this runs the suite in bench/ (pytest-benchmark); elsewhere the operations at one length. Every result is
verified before it is timed. `--json` prints one object: machine, bandwidth, commit, rows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..runtime import bench_report, measure
from ..runtime.errors import SicError
from ..slicing import benches
from ..slicing.cases import BenchShape

SUITE = Path(__file__).resolve().parents[2] / "bench"


class BenchError(SicError):
    """The suite did not finish: a result was wrong, or it could not start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--quick", action="store_true", help="short: two lengths in a checkout, 4K elsewhere")
    parser.add_argument("--builtin", action="store_true", help="the operations at one length, even in a checkout")
    parser.add_argument(
        "-k", dest="only", metavar="WORDS", help="only benchmarks whose name matches, as pytest's -k (suite)"
    )
    parser.add_argument("--save", metavar="FILE", help="also keep pytest-benchmark's own JSON (suite)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 when all results were right; whether targets are reached does not change the status."""
    measure.ask_for_huge_pages()  # before any tensor
    if args.builtin or not (SUITE / "bench_slicing.py").exists():
        report = builtin(args.quick)
    else:
        report = suite(args.quick, args.only, args.save)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0


# --- without a checkout -------------------------------------------------------------------------------------------------


def builtin(quick: bool) -> dict[str, Any]:
    """The operations at 32K (quick: 4K), without pytest."""
    shape, rows = BenchShape(4096) if quick else benches.MAIN, []
    with torch.inference_mode(), _progress() as bar:
        advance = bar(f"operations at {shape.length // 1024}K", len(benches.NAMES) + 1)
        bandwidth, memory = measure.bandwidth(), measure.Memory()
        inputs = benches.Inputs(shape)
        advance()
        for name in benches.NAMES:
            bench = benches.build(name, inputs)
            bench.verify()
            turns = bench.turns(memory, inputs.sets)
            rounds = measure.rounds_for(bench.function, turns, 0.5 if quick else 2.0)
            times = measure.time_in_turns(bench.function, turns, rounds)
            rows.append(bench_report.row(bench, times, turns.times(skip=1), memory))
            advance()
    return {"machine": measure.machine() | {"bandwidth": bandwidth, "quick": quick}, "commit": None, "rows": rows}


# --- the suite ----------------------------------------------------------------------------------------------------------


def suite(quick: bool, only: str | None = None, save: str | None = None) -> dict[str, Any]:
    """Run bench/ in this process; its output is shown only if something fails."""
    for package in ("pytest", "pytest_benchmark"):
        if importlib.util.find_spec(package) is None:
            raise BenchError(f"the suite needs {package}: pip install 'sic_kernels[test,bench]' (or use --builtin)")
    import pytest

    with tempfile.TemporaryDirectory() as folder, _progress() as bar:
        file = Path(save) if save else Path(folder) / "bench.json"
        options = [str(SUITE), f"--benchmark-json={file}", "-p", "no:cacheprovider"]
        options += ["--quick"] if quick else []
        options += ["-k", only] if only else []
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = pytest.main(options, plugins=[_Watcher(bar)])
        if status != pytest.ExitCode.OK:
            raise BenchError(f"pytest ended with status {int(status)}\n{said.getvalue()}")
        data = json.loads(file.read_text())
    rows = [line for b in data["benchmarks"] for line in b["extra_info"].get("rows", ())]
    return {"machine": data["machine_info"]["sic"], "commit": data["commit_info"], "rows": rows}


class _Watcher:
    """A pytest plug-in that moves the progress bar."""

    def __init__(self, bar: Callable[[str, int], Callable[[], None]]) -> None:
        self.bar, self.advance = bar, lambda: None

    def pytest_collection_finish(self, session: Any) -> None:
        self.advance = self.bar("benchmarks", len(session.items))

    def pytest_runtest_logfinish(self) -> None:
        self.advance()


# --- for people ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """bar(text, total) -> advance(), on stderr; without rich nothing is shown."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda text, total: lambda: None
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:

        def bar(text: str, total: int) -> Callable[[], None]:
            task = progress.add_task(text, total=total)
            return lambda: progress.advance(task)

        yield bar


def show(report: dict[str, Any]) -> None:
    """Tables on stdout; plain text without rich."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(bench_report.text_table(report["rows"], report["machine"]))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=170)
    heading, tables, notes = bench_report.report_parts(report["rows"], report["machine"])
    console.print(*heading, sep="\n", highlight=False)
    for title, header, lines in tables:
        table = Table(title=title, title_justify="left")
        for name in header:
            table.add_column(name)
        for line in lines:
            table.add_row(*(_coloured(cell) for cell in line))
        console.print(table)
    console.print(*notes, sep="\n", highlight=False)


def _coloured(cell: str) -> str:
    words = {"yes": "[green]yes[/green]", "no": "[red]no[/red]"}
    return "\n".join(words.get(part, part.replace("[", r"\[")) for part in cell.split("\n"))
