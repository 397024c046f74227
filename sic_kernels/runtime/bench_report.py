"""Benchmarks as data: what one is, what it must reach, and the table that its times become.

A family's `benches.py` makes `Bench`es and says so in a `Family`; `row` turns the times of one into a line of JSON;
`report_parts` and `text_table` turn lines into tables. bench/ and `python -m sic_kernels bench` share all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from . import native
from .clocks import Function
from .measure import DISTURBED, FAR, Interleaved, Memory, Times
from .roofline import Work


class Shape(Protocol):
    """What a table says about a shape."""

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def B(self) -> int: ...


# --- one benchmark ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """What an op must reach at the main shape.

    kind: "speedup" over a peer, "read" or "copy" (share of that bandwidth), "ns" (per unit)."""

    kind: str
    bound: float
    peer: str = ""

    def measure(self, row: dict[str, Any]) -> float | None:
        """The value to hold against the bound; None where it was not measured."""
        if self.kind == "speedup":
            return row["speedup"].get(self.peer)
        return row["ns"] if self.kind == "ns" else row[f"{self.kind}_share"]

    def reached(self, value: float) -> bool:
        return value <= self.bound if self.kind == "ns" else value >= self.bound

    def words(self, value: float | None = None) -> str:
        """The target, or a value written as the target is."""
        text = {"speedup": "{}x " + self.peer, "read": "{} of read", "copy": "{} of copy", "ns": "{} ns"}[self.kind]
        x = self.bound if value is None else value
        if self.kind in ("read", "copy"):
            number = f"{x:.0%}"
        else:
            number = f"{x:g}" if value is None else f"{x:.2f}" if x < 10 else f"{x:.1f}"
        return ("" if value is not None else "<= " if self.kind == "ns" else ">= ") + text.format(number)


@dataclasses.dataclass(frozen=True)
class Bench:
    """function, peers: take the number of a set.  out: what function writes into.
    nbytes: what the op must touch at least, once.
    unit: what `count` counts, for nanoseconds each; threads working on it are added up where `per_thread`."""

    name: str
    shape: Shape
    function: Function
    out: tuple[Any, ...]
    peers: dict[str, Function]
    verify: Callable[[], None]
    nbytes: int
    unit: str = ""
    count: int = 0
    per_thread: bool = False
    targets: tuple[Target, ...] = ()
    warm: bool = False  # its code is in the cache when it is timed (measure.Interleaved)

    def turns(self, memory: Memory, sets: int) -> Interleaved:
        """The peers in turn, a copy and a read last: they leave nothing of theirs in the cache."""
        peers = {name: memory.clock.ready(peer, sets) for name, peer in self.peers.items()}
        warm = memory.clock.ready(self.function, sets) if self.warm else None
        return Interleaved({**peers, "copy": memory.copy, "read": memory.read}, sets, memory.clock, warm)


@dataclasses.dataclass(frozen=True)
class Family:
    """The benchmarks of a family.

    names: of its benchmarks.  shapes: of the published table, `main` among them, `quick` some of them.
    inputs(shape, device); build(name, inputs).  work(name, shape): what a GPU has to do, from shapes alone.
    ratios: pairs of benchmarks (slow, fast) whose quotient is worth knowing.  peers: what the peers are, by name.
    """

    name: str
    names: tuple[str, ...]
    main: Any
    shapes: tuple[Any, ...]
    quick: tuple[Any, ...]
    inputs: Callable[[Any, str], Any]
    build: Callable[[str, Any], Bench]
    work: Callable[[str, Any], Work]
    ratios: tuple[tuple[str, str], ...] = ()
    peers: dict[str, str] = dataclasses.field(default_factory=dict)


# --- results ------------------------------------------------------------------------------------------------------------


def row(bench: Bench, times: Times, turns: dict[str, Times], memory: Memory) -> dict[str, Any]:
    """One line of the table, JSON-ready. Rates are GB/s; shares are of the bandwidth in the same turns."""
    rate = bench.nbytes / times.median / 1e9
    read_rate, copy_rate = (memory.rate(turns[name].median) for name in ("read", "copy"))
    peers = {name: turns[name] for name in bench.peers}
    threads = native.module().num_threads() if bench.per_thread and memory.device.type == "cpu" else 1
    functions = {bench.name: bench.function, **bench.peers}
    line: dict[str, Any] = {
        "name": bench.name,
        "shape": bench.shape.name,
        "length": bench.shape.length,
        "B": bench.shape.B,
        "seconds": times.as_dict(),
        "peers": {name: t.as_dict() for name, t in peers.items()},
        "speedup": {name: t.median / times.median for name, t in peers.items()},
        "bytes": bench.nbytes,
        "rate": rate,
        "read_rate": read_rate,
        "copy_rate": copy_rate,
        "read_share": rate / read_rate,
        "copy_share": rate / copy_rate,
        "unit": bench.unit,
        "ns": 1e9 * times.median * threads / bench.count if bench.count else None,
        "disturbed": [name for name, t in {bench.name: times, **turns}.items() if t.disturbed],
        "not_captured": [name for name, f in functions.items() if f in memory.clock.refused],
    }
    values = [(t, t.measure(line)) for t in bench.targets]
    line["targets"] = [
        {"target": t.words(), "measured": t.words(v), "reached": t.reached(v)} for t, v in values if v is not None
    ]
    return line


COLUMNS = (
    "what",
    "shape",
    "time",
    "P99/P50",
    "GB/s",
    "of read",
    "of copy",
    "ns",
    "faster than",
    "target",
    "measured",
    "reached",
)


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """A line of `row` as text, one cell for each of COLUMNS; "~" marks a time that the machine's other work disturbed."""
    seconds = line["seconds"]
    faster = "\n".join(f"{x:.1f}x {name}" for name, x in line["speedup"].items())
    targets = line["targets"]
    return (
        line["name"], _short_shape(line), milliseconds(seconds["median"]) + ("~" if line["disturbed"] else ""),
        f"{seconds['p99'] / seconds['median']:.2f}", f"{line['rate']:.1f}", f"{line['read_share']:.0%}",
        f"{line['copy_share']:.0%}", "" if line["ns"] is None else f"{line['ns']:.2f}", faster,
        "\n".join(t["target"] for t in targets), "\n".join(t["measured"] for t in targets),
        "\n".join("yes" if t["reached"] else "no" for t in targets),
    )  # fmt: skip


def _short_shape(line: dict[str, Any]) -> str:
    return f"{line['length'] // 1024}K" + (f", B={line['B']}" if line["B"] > 1 else "")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.2f} us"


def straight_line(points: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Least squares y = a + b * x over (x, y), weighted by 1 / y so that small ones count: a, b, largest |error| / y."""
    w = [1 / y**2 for _, y in points]
    total = sum(w)
    mx = sum(u * x for u, (x, _) in zip(w, points)) / total
    my = sum(u * y for u, (_, y) in zip(w, points)) / total
    b = sum(u * (x - mx) * (y - my) for u, (x, y) in zip(w, points)) / sum(
        u * (x - mx) ** 2 for u, (x, _) in zip(w, points)
    )
    a = my - b * mx
    return a, b, max(abs(a + b * x - y) / y for x, y in points)


Line = tuple[str, ...]
Table = tuple[str, Line, list[Line]]  # title, header, lines
Parts = tuple[list[str], list[Table], list[str]]  # heading, tables, notes


def report_parts(rows: list[dict[str, Any]], machine: dict[str, Any], peers: dict[str, str] | None = None) -> Parts:
    """A whole report: what the machine is, the tables (ops, cost over the share read, facts), notes.

    peers: what the peers are, by name; those that occur are explained.
    """
    heading = _heading(machine)
    tables: list[Table] = []
    ops = [cells(r) for r in rows if "fact" not in r and "linear" not in r]
    if ops:
        tables.append(("operations", COLUMNS, ops))
    notes = []
    for op in ("sliced", "attend"):
        points = [r for r in rows if r.get("linear") == op]
        if len(points) >= 3:
            tables.append(_linear_table(op, points))
            a, b, worst = straight_line([(r["ratio"], r["seconds"]["median"]) for r in points])
            notes.append(
                f"{op}: time = {milliseconds(a)} + {milliseconds(b / 100)} per percent, largest error {worst:.0%}"
            )
    facts: list[Line] = [
        (r["fact"], r["measured"], r["target"], {True: "yes", False: "no", None: ""}[r["reached"]])
        for r in rows
        if "fact" in r
    ]
    if facts:
        tables.append(("overhead and steadiness", ("what", "measured", "target", "reached"), facts))
    reads = [r["read_rate"] for r in rows if "read_rate" in r]
    if reads:
        notes.append(f"a plain read ran at {min(reads):.0f} to {max(reads):.0f} GB/s in the turns of this table")
    if machine.get("torch_asks_for_huge_pages") and not machine.get("device"):
        notes.append(
            "every tensor, the peers' too, asked for huge pages (THP_MEM_ALLOC_ENABLE=1), as SlicedKVCache does"
        )
    if any(r.get("disturbed") for r in rows):
        notes.append(
            f"~ disturbed: its times, or a peer's, spread by more than {DISTURBED:.0%} or have a median {FAR:g}x the best"
        )
    seen = {name for r in rows for name in r.get("speedup", ())}
    notes += [f"{name}: {about}" for name, about in (peers or {}).items() if name in seen]
    eager = sorted({name for r in rows for name in r.get("not_captured", ())})
    if eager:
        notes.append(f"timed as launched, since they cannot be captured in a graph: {', '.join(eager)}")
    return heading, tables, notes


def _heading(machine: dict[str, Any]) -> list[str]:
    rates = (f"{name.replace('_', ' ')} {rate:.1f}" for name, rate in machine["bandwidth"].items())
    versions = f"torch {machine['torch']}, sic_kernels {machine['sic_kernels']}"
    measured = "GB/s at the start: " + ", ".join(rates)
    device = machine.get("device")
    if device:
        what = f"{device['name']}, {device['multiprocessors']} multiprocessors, CUDA {device['cuda']}, {versions}"
        return [what, "times by CUDA events around replays of captured graphs", measured]
    what = f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}, {versions}"
    return [what, f"huge pages: {_huge_pages(machine)}", measured]


def _huge_pages(machine: dict[str, Any]) -> str:
    policy, asked = machine.get("huge_pages"), machine.get("torch_asks_for_huge_pages")
    if policy == "madvise":
        return "yes, torch asks for them" if asked else "no (THP_MEM_ALLOC_ENABLE=1 makes torch ask for them)"
    return {"always": "yes", "never": "no", None: "unknown"}.get(policy, str(policy))


def _linear_table(op: str, rows: list[dict[str, Any]]) -> Table:
    lines: list[Line] = []
    for r in rows:
        time = milliseconds(r["seconds"]["median"]) + ("~" if r["disturbed"] else "")
        lines.append((f"{r['ratio']:.0%}", time, f"{r['ns']:.1f}", f"{r['rate']:.1f}", f"{r['read_share']:.0%}"))
    return f"{op}: cost over the share of the tokens read", ("read", "time", "ns per row", "GB/s", "of read"), lines


def prediction_parts(report: dict[str, Any]) -> Parts:
    """A prediction as a report; every heading says what it is."""
    heading = [
        f"PREDICTION for {report['device']['name']}, not a measurement: a roofline model of the CUDA kernels. It assumes:"
    ]
    heading += [f"  - {text}" for text in report["assumptions"]]
    header = ("what", "shape", "predicted", "bytes alone", "launches", "kernels, us each")
    lines = [_predicted_line(r) for r in report["rows"]]
    ratios: list[Line] = [
        (r["shape"], f"{r['slow']} / {r['fast']}", f"{r['predicted_ratio']:.1f}x") for r in report["ratios"]
    ]
    tables: list[Table] = [("predicted, not measured", header, lines)]
    if ratios:
        tables.append(("predicted ratios, not measured", ("shape", "times", "predicted"), ratios))
    return heading, tables, []


def _predicted_line(r: dict[str, Any]) -> Line:
    kernels = ", ".join(f"{k['kernel']} {1e6 * k['predicted_seconds']:.1f}" for k in r["launches"])
    return (
        r["name"], _short_shape(r), microseconds(r["predicted_seconds"]), microseconds(r["bytes_seconds"]),
        str(len(r["launches"])), kernels,
    )  # fmt: skip


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"


def text_table(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The report as plain text."""
    return as_text(report_parts(rows, machine))


def as_text(parts: Parts) -> str:
    heading, tables, notes = parts
    lines = list(heading)
    for title, header, table in tables:
        lines += ["", title, *_aligned([header, *table])]
    return "\n".join([*lines, "", *notes]) + "\n"


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Columns of equal width; a cell of several lines takes several rows."""
    tall = [[cell.split("\n") for cell in line] for line in table]
    widths = [max(len(part) for line in tall for part in line[c]) for c in range(len(table[0]))]
    lines = []
    for line in tall:
        for r in range(max(map(len, line))):
            lines.append(
                "  ".join((cell[r] if r < len(cell) else "").ljust(w) for cell, w in zip(line, widths)).rstrip()
            )
    return lines
