"""A benchmark report as one HTML page: a roofline, bars against peers, the tables. SVG inside, nothing from the network."""

from __future__ import annotations

import html
import importlib.util
import io
import re
from typing import Any

from . import bench_report, html_page
from .errors import SicError
from .html_page import FAINT, GREY, INK

Row = dict[str, Any]

# Told apart by most colour-blind people; the first are used most.
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#7b5ea7", "#8a8d00", "#5f6b73")
MARKERS = "oDs^vP*Xh"
WIDTH = 4.8  # inches: about a phone's width, so that text is as large there as anywhere
GAP = 0.7  # between the bars of two ops
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sic",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class PlotError(SicError):
    """The plots cannot be made."""


def require() -> None:
    """A `PlotError` that names the remedy if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install 'sic_kernels[bench]'")


def page(rows: list[Row], machine: dict[str, Any], peers: dict[str, str]) -> str:
    """The whole page. peers: what the peers are, by name."""
    require()
    import matplotlib

    ops = [r for r in rows if "fact" not in r and "linear" not in r]
    heading, tables, notes = bench_report.report_parts(rows, machine, peers)
    with matplotlib.rc_context(STYLE):
        plots = [_roofline(ops)] if ops else []
        plots += [(_bars(shape, ops), "") for shape in dict.fromkeys(r["shape"] for r in ops if r["speedup"])]
    figures = "\n".join(html_page.figure(svg, text) for svg, text in plots)
    parts = [f"<p>{'<br>'.join(map(html.escape, heading))}</p>", f"<main>{figures}</main>"]
    parts.append(f"<ul>{''.join(f'<li>{html.escape(n)}</li>' for n in notes)}</ul>")
    parts += [html_page.table(*each) for each in tables]
    return html_page.document("sic_kernels: benchmarks", "\n".join(parts), _GRID)


_GRID = """\
main { display: grid; gap: 1.5rem 2rem; align-items: start; }
main { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { max-width: 36rem; }
"""


def _svg(figure: Any) -> str:
    """The figure as an SVG element that takes the width it is given."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text[text.index("<svg") :])
    )


# --- the roofline -------------------------------------------------------------------------------------------------------


def _roofline(ops: list[Row]) -> tuple[str, str]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title("bytes a second over bytes", loc="left", fontsize=10.5)
    axes.set(xscale="log", yscale="log", xlabel="bytes that a call must touch", ylabel="GB/s")
    for n, name in enumerate(dict.fromkeys(r["name"] for r in ops)):
        style: dict[str, Any] = {
            "color": COLOURS[n % len(COLOURS)],
            "marker": MARKERS[n % len(MARKERS)],
            "markersize": 6,
        }
        single, batched = (
            sorted((r["bytes"], r["rate"]) for r in ops if r["name"] == name and (r["B"] > 1) is many)
            for many in (False, True)
        )
        axes.plot(*zip(*single or [(None, None)]), label=name, linewidth=1, **style)
        if batched:
            axes.plot(*zip(*batched), linestyle="none", markerfacecolor="white", **style)
    _frame(axes, ops)
    _equal_times(axes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, handlelength=1.6, columnspacing=1.2)
    return _svg(figure), (
        "One point for each op and length, joined by op; hollow: several sequences. Above: what a plain read and a plain "
        "copy of memory reached in the same turns (band: lowest to highest, line: median). Along a dotted line calls take "
        "equally long; where points follow one, a fixed cost rules, not memory."
    )


def _frame(axes: Any, ops: list[Row]) -> None:
    """Limits, ceilings and tick labels."""
    sizes, rates = [r["bytes"] for r in ops], [r["rate"] for r in ops]
    top = max(r[f"{way}_rate"] for r in ops for way in ("read", "copy"))
    axes.set_xlim(min(sizes) / 2, max(sizes) * 3)
    axes.set_ylim(min(rates) / 2, 2.2 * max([top, *rates]))
    axes.xaxis.set_major_formatter(lambda x, _: _bytes(x))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.tick_params(which="minor", length=0, labelleft=False, labelbottom=False)
    for way, colour, above in (("read", INK, True), ("copy", GREY, False)):
        seen = sorted(r[f"{way}_rate"] for r in ops)
        middle = seen[len(seen) // 2]
        axes.axhspan(seen[0], seen[-1], color=colour, alpha=0.07, linewidth=0)
        axes.axhline(middle, color=colour, linewidth=1.2, linestyle="-" if above else "--")
        axes.annotate(
            f"{way} {middle:.0f} GB/s", (0.01, seen[-1 if above else 0]), xycoords=axes.get_yaxis_transform(),
            xytext=(0, 3 if above else -3), textcoords="offset points", va="bottom" if above else "top", color=colour, fontsize=9,
        )  # fmt: skip


def _bytes(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:g} {unit}"
    return f"{n:g} B"


def _equal_times(axes: Any) -> None:
    """Dotted lines along which a call takes equally long, named where they leave the frame."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    for power in range(-7, 2):
        seconds = 10.0**power
        right = min(x1, y1 * 1e9 * seconds)
        if right / seconds / 1e9 < 1.3 * y0 or right < 1.3 * x0:
            continue
        axes.plot([x0, x1], [x0 / seconds / 1e9, x1 / seconds / 1e9], color=FAINT, linewidth=1, linestyle=":", zorder=0)
        label = f"{seconds:g} s" if power >= 0 else f"{1e3 * seconds:g} ms" if power >= -3 else f"{1e6 * seconds:g} us"
        axes.annotate(
            label,
            (right, right / seconds / 1e9),
            color=GREY,
            fontsize=8,
            textcoords="offset points",
            xytext=(-3, -9),
            ha="right",
        )


# --- bars ---------------------------------------------------------------------------------------------------------------


def _bars(shape: str, ops: list[Row]) -> str:
    """How many times faster than each peer, at one shape; a bar that ends at the line is as fast as its peer."""
    from matplotlib.figure import Figure

    rows = [r for r in ops if r["shape"] == shape and r["speedup"]]
    peers = list(dict.fromkeys(name for r in ops for name in r["speedup"]))
    figure = Figure(figsize=(WIDTH, 0.55 + 0.23 * sum(len(r["speedup"]) + GAP for r in rows)), layout="constrained")
    axes = figure.add_subplot()
    _draw_bars(axes, rows, {peer: COLOURS[n % len(COLOURS)] for n, peer in enumerate(peers)})
    values = [x for r in rows for x in r["speedup"].values()]
    axes.set(xscale="log", xlim=(min(1.0, 0.9 * min(values)), 3.2 * max(values)))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", which="minor", length=0, labelbottom=False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_title(f"times faster, {_words(rows[0])}", loc="left", fontsize=10.5)
    return _svg(figure)


def _draw_bars(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    """From 1 to the speed-up, grouped by op, from the top down."""
    y, middles = 0.0, []
    for r in rows:
        middles.append(y + (len(r["speedup"]) - 1) / 2)
        for peer, x in r["speedup"].items():
            axes.barh(y, x - 1, left=1, height=0.8, color=colours[peer])
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
            axes.annotate(f"{x:.1f}x {peer}", (max(x, 1), y), **place)
            y += 1
        y += GAP
    axes.set_ylim(y - GAP - 0.2, -0.7)
    axes.set_yticks(middles, [r["name"] for r in rows], color=INK)


def _words(row: Row) -> str:
    batch = f", {row['B']} sequences" if row["B"] > 1 else ""
    return f"{row['length'] // 1024}K tokens{batch}"
