"""Benchmarks of every operation against torch, in one run: times, GB/s, share of the measured bandwidth, targets.

In a checkout this runs the suite in bench/ (pytest-benchmark); elsewhere the operations at one length. On a CUDA device it is
the operations at all lengths. Every result is verified before it is timed. `--json` prints one object: machine, bandwidth,
commit, rows. `--plot` writes a page with the roofline and the peers. `--predict` measures nothing: it says what the CUDA
kernels would need at least on a GPU that need not be there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..delta import benches as delta
from ..head import benches as head
from ..ragged import benches as ragged
from ..runtime import backends, bench_plot, bench_report, measure, roofline
from ..runtime.bench_report import Family
from ..runtime.errors import SicError
from ..slicing import benches as slicing
from ._options import output_file

FAMILIES: dict[str, Family] = {
    family.name: family for family in (slicing.FAMILY, delta.FAMILY, head.FAMILY, ragged.FAMILY)
}

SUITE = Path(__file__).resolve().parents[2] / "bench"


class BenchError(SicError):
    """The suite did not finish: a result was wrong, or it could not start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--family", choices=tuple(FAMILIES), help="only the operations of this family (default: all)")
    parser.add_argument("--quick", action="store_true", help="short: two lengths in a checkout, 4K elsewhere")
    parser.add_argument("--builtin", action="store_true", help="the operations at one length, even in a checkout")
    parser.add_argument(
        "-k", dest="only", metavar="WORDS", help="only benchmarks whose name matches, as pytest's -k (suite)"
    )
    parser.add_argument(
        "--save", metavar="FILE", type=output_file, help="also keep pytest-benchmark's own JSON (suite)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (the default), or a CUDA device: cuda, cuda:1")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument(
        "--plot", metavar="FILE.html", type=output_file, help="also write a page with plots, which needs no network"
    )
    parser.add_argument(
        "--predict",
        choices=tuple(roofline.DEVICES),
        help="a roofline model of the CUDA kernels on this GPU; measures nothing",
    )


def run(args: argparse.Namespace) -> int:
    """0 when all results were right; whether targets are reached does not change the status."""
    families = [FAMILIES[args.family]] if args.family else list(FAMILIES.values())
    if args.predict:
        return _predict(families, args)
    if args.plot:
        bench_plot.require()
        if not args.plot.absolute().parent.is_dir():
            raise BenchError(f"--plot: got {str(args.plot)!r}, expected a file in a folder that is there")
    measure.ask_for_huge_pages()  # before any tensor
    device = _device(args.device)
    backends.pick("bench", torch.empty(0, device=device))  # an operation that cannot run at all is said at once
    if device != "cpu" or args.builtin or not all(_suite_file(f).exists() for f in families):
        _refuse(args, ("only", "save"), "they belong to the suite, which runs in a checkout on the CPU")
        report = builtin(families, args.quick, device)
    else:
        report = suite(families, args.quick, args.only, args.save)
    peers = {name: about for family in families for name, about in family.peers.items()}
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(bench_report.report_parts(report["rows"], report["machine"], peers))
    if args.plot:
        args.plot.write_text(bench_plot.page(report["rows"], report["machine"], peers), encoding="utf-8")
        print(f"plots: {args.plot}", file=sys.stderr)
    return 0


def _predict(families: list[Family], args: argparse.Namespace) -> int:
    if args.plot:
        raise BenchError("--plot shows measurements: it does not go with --predict")
    _refuse(args, ("quick", "builtin", "only", "save"), "--predict measures nothing")
    report = prediction(families, args.predict)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(bench_report.prediction_parts(report))
    return 0


def _refuse(args: argparse.Namespace, options: tuple[str, ...], why: str) -> None:
    """An error for options that would be ignored."""
    flags = {"only": "-k"}
    given = [flags.get(name, f"--{name}") for name in options if getattr(args, name)]
    if given:
        raise BenchError(f"{', '.join(given)}: not possible here: {why}")


def _device(name: str) -> str:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BenchError(f"--device: got {name!r}, expected cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"--device {name}: no CUDA device: torch.cuda.is_available() is False")
    return str(device)


def _suite_file(family: Family) -> Path:
    return SUITE / f"bench_{family.name}.py"


# --- a prediction -------------------------------------------------------------------------------------------------------


def prediction(families: list[Family], gpu: str) -> dict[str, Any]:
    """What the launches of every cell of the published table would take at least; no GPU is touched."""
    device = roofline.DEVICES[gpu]
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for family in families:
        for shape in family.shapes:
            lines = {name: roofline.predict(device, name, shape, family.work(name, shape)) for name in family.names}
            rows += lines.values()
            for slow, fast in family.ratios:
                quotient = lines[slow]["predicted_seconds"] / lines[fast]["predicted_seconds"]
                ratios.append({"shape": shape.name, "slow": slow, "fast": fast, "predicted_ratio": quotient})
    return {
        "prediction": True,
        "device": dataclasses.asdict(device),
        "assumptions": roofline.assumptions(device),
        "rows": rows,
        "ratios": ratios,
    }


# --- without a checkout -------------------------------------------------------------------------------------------------


def builtin(families: list[Family], quick: bool, device: str = "cpu") -> dict[str, Any]:
    """The operations without pytest: on the CPU at one length (quick: the shortest), on a GPU at all (quick: some)."""
    rows: list[dict[str, Any]] = []
    with torch.inference_mode(), _progress() as bar:
        bandwidth, memory = measure.bandwidth(device=device), measure.Memory(device=device)
        for family in families:
            if device == "cpu":
                shapes = family.quick[:1] if quick else (family.main,)
            else:
                shapes = family.quick if quick else family.shapes
            advance = bar(f"{family.name} operations", len(shapes) * len(family.names))
            for shape in shapes:
                inputs = family.inputs(shape, device)
                for name in family.names:
                    rows.append(_timed(family.build(name, inputs), inputs.sets, memory, 0.5 if quick else 2.0))
                    advance()
    machine = measure.machine(device) | {"bandwidth": bandwidth, "quick": quick}
    return {"machine": machine, "commit": None, "rows": rows}


def _timed(bench: bench_report.Bench, sets: int, memory: measure.Memory, seconds: float) -> dict[str, Any]:
    """Verified, then timed; its line."""
    bench.verify()
    turns, function = bench.turns(memory, sets), memory.clock.ready(bench.function, sets)
    rounds = measure.rounds_for(function, turns, seconds)
    times = measure.time_in_turns(function, turns, rounds)
    return bench_report.row(bench, times, turns.times(skip=1), memory)


# --- the suite ----------------------------------------------------------------------------------------------------------


def suite(families: list[Family], quick: bool, only: str | None = None, save: Path | None = None) -> dict[str, Any]:
    """Run bench/ in this process; its output is shown only if something fails."""
    for package in ("pytest", "pytest_benchmark"):
        if importlib.util.find_spec(package) is None:
            raise BenchError(f"the suite needs {package}: pip install 'sic_kernels[test,bench]' (or use --builtin)")
    import pytest

    with tempfile.TemporaryDirectory() as folder, _progress() as bar:
        file = save or Path(folder) / "bench.json"
        options = [*(str(_suite_file(f)) for f in families), f"--benchmark-json={file}", "-p", "no:cacheprovider"]
        options += ["--quick"] if quick else []
        options += ["-k", only] if only else []
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = pytest.main(options, plugins=[_Watcher(bar)])
        if only and status == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise BenchError(f"-k: no benchmark matches {only!r}")
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


def show(parts: bench_report.Parts) -> None:
    """Tables on stdout; plain text without rich."""
    heading, tables, notes = parts
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(bench_report.as_text(parts))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=170)
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
