"""A trace as one page: which pages of the cache each head read, how it was answered, and every record.

One HTML file with nothing from the network: drawings as SVG, light and dark. Without scripts everything but the hover works.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from . import html_page, trace_file
from .trace_file import HeadRow, Record, Step

COLUMNS = 480  # of a drawing at most; longer sequences have several pages in a column
LEVELS = 4  # shades of the share read
FIGURES = 12  # steps drawn at most
LEFT, WIDTH, RIGHT, ROW, TOP, BOTTOM = 46, 860, 26, 9, 4, 22  # of a drawing, in its own units

_STYLE = """\
:root { color-scheme: light dark; --read1: #c6dcec; --read2: #86b6d8; --read3: #3f8dc0; --read4: #0b5a94;
  --dense: #a9b0b6; --fell: #d55e00; --run: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --grey: #9aa4ac; --faint: #333a40; --paper: #14181b;
  --read1: #143a56; --read2: #1d5f8f; --read3: #4195d0; --read4: #a5d8ff; --dense: #59626a; --fell: #ff8c42;
  --run: #56b4e9; } }
figure { margin: 1.2rem 0; }
figure svg { min-width: 640px; }
.badge { display: inline-block; border-radius: 1em; padding: 0 0.7em; color: #fff; background: #2f7d4f; font-size: 0.9rem; }
.badge.fallback { background: #b34700; }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; color: var(--grey); font-size: 0.85rem; }
.key svg { width: 0.8em; height: 0.8em; display: inline-block; vertical-align: -0.05em; margin-right: 0.35em; }
.r1 { fill: var(--read1); } .r2 { fill: var(--read2); } .r3 { fill: var(--read3); } .r4 { fill: var(--read4); }
.dense { fill: var(--dense); } .fell { fill: var(--fell); } .run { fill: var(--run); } .left { fill: var(--faint); }
.frame { fill: none; stroke: var(--faint); } text { fill: var(--grey); font-size: 10px; } .stop { fill: var(--ink); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.78rem; color: var(--grey); }
#tip { position: fixed; display: none; pointer-events: none; white-space: pre; font-size: 0.8rem; padding: 0.3rem 0.6rem;
  color: var(--ink); background: var(--paper); border: 1px solid var(--grey); border-radius: 0.3rem; }
"""

# What is under the pointer: the row and column of a drawing index what `_hover` made of it.
_SCRIPT = f"""\
<script>
const drawings = JSON.parse(document.getElementById("hover").textContent), tip = document.getElementById("tip");
document.querySelectorAll("svg.heat").forEach((svg, n) => {{
  const d = drawings[n];
  svg.addEventListener("pointermove", e => {{
    const box = svg.getBoundingClientRect(), unit = svg.viewBox.baseVal.width / box.width;
    const x = (e.clientX - box.left) * unit - {LEFT}, y = (e.clientY - box.top) * unit - {TOP};
    const column = Math.floor(x / {WIDTH} * d.columns), line = Math.floor(y / {ROW}), row = d.rows[line];
    const inside = row && x >= 0 && column < d.columns;
    tip.style.display = inside ? "block" : "none";
    if (!inside) return;
    const size = row.size[column] || 0, score = row.score[column];
    const first = column * d.step, last = Math.min(first + d.step, d.pages) - 1;
    tip.textContent = row.name + "\\npage" + (first === last ? " " + first : "s " + first + " to " + last)
      + "\\nread " + (row.read[column] || 0) + " of " + size + " tokens"
      + (score == null ? "" : "\\nbest score " + score.toFixed(2) + " nats") + "\\n" + row.answered;
    tip.style.left = Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 4) + "px";
    tip.style.top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 4) + "px";
  }});
  svg.addEventListener("pointerleave", () => {{ tip.style.display = "none"; }});
}});
</script>"""


def page(trace: Record) -> str:
    """The whole file, from what `Trace.as_dict` made or `trace_file.load` read; `ArgumentError` for records that are no such.

    Halves of surrogate pairs, which no file can have, are shown as \\udxxx.
    """
    steps, cut = trace_file.steps(trace)
    drawn = [_Drawing(step) for step in steps[:FIGURES]]
    parts = [_heading(trace, steps), *_notes(trace, steps, cut)]
    if drawn:
        parts += [_KEY, *(html_page.figure(f'<div class="wide">{d.svg()}</div>', d.caption()) for d in drawn)]
    parts += _strips(trace["records"])
    parts += _tables(trace["records"], steps)
    parts += [_data("hover", [d.hover() for d in drawn]), _data("trace", trace), '<div id="tip"></div>', _SCRIPT]
    document = html_page.document("sic_kernels: one step", "\n".join(parts), _STYLE)
    return document.encode("utf-8", "backslashreplace").decode("utf-8")


def _data(name: str, value: Any) -> str:
    """JSON for scripts and programs. Nothing in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _heading(trace: Record, steps: list[Step]) -> str:
    reasons = ", ".join(f"{name} in {n} records" for name, n in (trace.get("reasons") or {}).items())
    status = str(trace.get("status", "active"))
    badge = f'<span class="badge {html.escape(status)}">{html.escape(status)}</span>'
    ops = ", ".join(f"{n} {op}" for op, n in Counter(r["op"] for r in trace["records"]).items()) or "nothing recorded"
    facts = [html.escape(ops)]
    rows = [row for step in steps for row in step.rows]
    visible = sum(sum(row.size) for row in rows)
    if visible:
        facts.append(f"{sum(row.tokens for row in rows) / visible:.1%} of the keys and values read")
    facts.append(f"settings {html.escape(str(trace.get('config', {}).get('digest', '')))}")
    return f"<p>{badge} {html.escape(reasons)}<br>{'; '.join(facts)}</p>"


def _notes(trace: Record, steps: list[Step], cut: int) -> Iterator[str]:
    """What the page does not show."""
    if trace.get("dropped"):
        yield f"<p>{trace['dropped']} records came after the limit and were dropped: raise max_records.</p>"
    if cut:
        yield f"<p>{cut} calls of attend are not drawn, their arrays were cut: raise max_values.</p>"
    if len(steps) > FIGURES:
        yield f"<p>{FIGURES} of {len(steps)} steps, sequences and query tokens are drawn; the rest is in the records.</p>"


# --- the drawing of one step ------------------------------------------------------------------------------------------

_KEY_ENTRIES = (
    *((f"r{n}", f"{(n - 1) / LEVELS:.0%} to {n / LEVELS:.0%} of the page read") for n in range(1, LEVELS + 1)),
    ("dense", "dense by policy"),
    ("fell", "heads that fell back to dense (strip on the right)"),
)
_KEY = '<div class="key">{}</div>'.format(
    "".join(
        f'<span><svg viewBox="0 0 10 10"><rect class="{name}" width="10" height="10"/></svg>{text}</span>'
        for name, text in _KEY_ENTRIES
    )
)


class _Drawing:
    """Rows: layer and KV head. Columns: pages. Shade: the share of the page's tokens that was read."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.rows = sorted(step.rows, key=lambda row: (-1 if row.layer is None else row.layer, row.head))
        self.pages = max((len(row.size) for row in self.rows), default=0)
        self.per_column = max(1, -(-self.pages // COLUMNS))
        self.columns = max(1, -(-self.pages // self.per_column))

    def caption(self) -> str:
        s = self.step
        where = f"step {s.number + 1}, sequence {s.sequence}, query token {s.token}"
        several = f", {self.per_column} pages to a column" if self.per_column > 1 else ""
        return f"{where}: {self.pages} pages of {s.page_size} tokens{several}; a row for each KV head, layers from the top."

    def svg(self) -> str:
        height = TOP + ROW * len(self.rows) + BOTTOM
        parts = [f'<svg class="heat" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" role="img">']
        parts += [f'<path class="{name}" d="{path}"/>' for name, path in self._paths().items()]
        parts.append(f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{ROW * len(self.rows)}"/>')
        parts += [*self._labels(), "</svg>"]
        return "".join(parts)

    def _paths(self) -> dict[str, str]:
        """Class -> one path of all its boxes; neighbours of one shade are one box."""
        paths: dict[str, list[str]] = {}
        wide = WIDTH / self.columns
        for line, row in enumerate(self.rows):
            shades = self._shades(row)
            first = 0
            for at in range(1, len(shades) + 1):
                if at < len(shades) and shades[at] == shades[first]:
                    continue
                if shades[first]:
                    box = _box(LEFT + first * wide, TOP + line * ROW, (at - first) * wide, ROW - 1)
                    paths.setdefault(shades[first], []).append(box)
                first = at
            if row.fell_back:
                paths.setdefault("fell", []).append(_box(LEFT + WIDTH + 6, TOP + line * ROW, 10, ROW - 1))
        return {name: "".join(boxes) for name, boxes in paths.items()}

    def _shades(self, row: HeadRow) -> list[str]:
        """The class of each column, "" for what was not read."""
        if row.dense:
            return ["dense"] * -(-len(row.size) // self.per_column)
        shares = zip(self._joined(row.read, sum), self._joined(row.size, sum))
        return [f"r{-(-read * LEVELS // size)}" if read else "" for read, size in shares]

    def _joined(self, values: list[Any], how: Any) -> list[Any]:
        return [how(values[at : at + self.per_column]) for at in range(0, len(values), self.per_column)]

    def _labels(self) -> Iterator[str]:
        """The number of each layer where it begins, as far as there is room, and a few token positions."""
        below = -ROW
        for line, row in enumerate(self.rows):
            y = TOP + line * ROW
            if (line == 0 or self.rows[line - 1].layer != row.layer) and y - below >= ROW:
                yield f'<text x="{LEFT - 6}" y="{y + 8}" text-anchor="end">{_layer(row.layer)}</text>'
                below = y + 3
        tokens, y = max((sum(row.size) for row in self.rows), default=0), TOP + ROW * len(self.rows) + 14
        for quarter in range(5):
            anchor = ("start", "middle", "middle", "middle", "end")[quarter]
            x = LEFT + WIDTH * quarter / 4
            yield f'<text x="{x:g}" y="{y}" text-anchor="{anchor}">{tokens * quarter // 4}</text>'
        yield f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">token</text>'

    def hover(self) -> dict[str, Any]:
        """What the script needs to say what is under the pointer."""
        return {"columns": self.columns, "step": self.per_column, "pages": self.pages, "rows": [
            {
                "name": f"layer {_layer(row.layer)}, KV head {row.head}", "read": self._joined(row.read, sum),
                "size": self._joined(row.size, sum), "score": self._joined(row.score, _best),
                "answered": _answered(row.answered) + ("" if row.omitted is None else f", omitted at most {row.omitted:.4f}"),
            }
            for row in self.rows
        ]}  # fmt: skip


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.6g} {y:g}h{width:.6g}v{height:g}h-{width:.6g}z"


def _layer(layer: int | None) -> str:
    return "?" if layer is None else str(layer)


def _best(scores: list[float | None]) -> float | None:
    return max((round(s, 4) for s in scores if s is not None), default=None)


def _answered(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())


# --- cursors, slots, references, records --------------------------------------------------------------------------------


def _strips(records: list[Record]) -> Iterator[str]:
    """Runs and resumes as strips of segments: skipped, run, left; a mark where the cursor stands."""
    runs = [r for r in records if r["op"] in ("replay.run", "replay.resume") and _is_run(r)]
    if not runs:
        return
    parts = [f'<svg viewBox="0 0 {LEFT + WIDTH + RIGHT} {TOP + 18 * len(runs) + 4}" role="img">']
    for line, run in enumerate(runs):
        count, y = max(1, run["segments"]), TOP + 18 * line
        first, stop = (min(max(0, run.get(name) or 0), count) for name in ("first", "stop"))
        unit = WIDTH / count
        parts.append(f'<path class="left" d="{_box(LEFT, y, WIDTH, 12)}"/>')
        parts.append(f'<path class="run" d="{_box(LEFT + first * unit, y, max(0, stop - first) * unit, 12)}"/>')
        x = LEFT + stop * unit
        parts.append(f'<path class="stop" d="M{x:.6g} {y + 12}l-4 5h8z"/>')
        name = html.escape(run["op"].removeprefix("replay."))
        parts.append(f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{name}</text>')
    parts.append("</svg>")
    caption = "Segments of each run: blue ran, grey was finished before or is left; the mark is where the cursor stood."
    yield html_page.figure(f'<div class="wide">{"".join(parts)}</div>', caption)


def _is_run(record: Record) -> bool:
    """Whether it can be drawn; what cannot is in the tables."""
    first, stop, segments = (record.get(name) for name in ("first", "stop", "segments"))
    return (
        isinstance(segments, int) and segments < 1 << 31 and all(n is None or isinstance(n, int) for n in (first, stop))
    )


def _tables(records: list[Record], steps: list[Step]) -> Iterator[str]:
    """A table of each kind of record, then all of them in order."""
    if steps:
        header = ("layer", "query heads", "tokens read", "of", "omitted mass, at most")
        yield html_page.table("Layers", header, _layer_lines(steps))
    for op in ("replay.run", "replay.resume", "slot", "reference"):
        mine = [r for r in records if r["op"] == op]
        if mine:
            names = list(dict.fromkeys(name for r in mine for name in r if name != "op"))
            yield html_page.table(op, names, [[_cell(r.get(name)) for name in names] for r in mine])
    lines = [
        (str(at), r["op"], _cell(r.get("layer")), _fields(r)) for at, r in enumerate(records)
    ]  # fmt: skip
    yield html_page.table("All records", ("", "op", "layer", "fields"), lines, is_open=len(lines) <= 20)


def _layer_lines(steps: list[Step]) -> Iterator[tuple[str, ...]]:
    by_layer: dict[str, list[HeadRow]] = {}
    for step in steps:
        for row in step.rows:
            by_layer.setdefault(_layer(row.layer), []).append(row)
    for layer, rows in by_layer.items():
        answered: Counter[str] = Counter()
        for row in rows:
            answered.update(row.answered)
        omitted = [row.omitted for row in rows if row.omitted is not None]
        most = f"{max(omitted):.4f}" if omitted else ""
        visible = sum(sum(row.size) for row in rows)
        yield layer, _answered(answered), f"{sum(row.tokens for row in rows):,}", f"{visible:,}", most


def _fields(record: Record) -> str:
    return "\n".join(f"{name}: {_cell(value)}" for name, value in record.items() if name not in ("op", "layer"))


def _cell(value: Any) -> str:
    """A value in a table: arrays by shape and first elements; all of them are in the data of the page."""
    if value is None:
        return ""
    if isinstance(value, dict) and isinstance(value.get("values"), list) and "array" in value:
        shown = ", ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in value["values"][:8])
        return f"{value['array']} {shown}{', ...' if len(value['values']) > 8 or 'cut' in value else ''}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
