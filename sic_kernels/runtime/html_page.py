"""Reports as one HTML file each: nothing from the network, the house's colours, everything escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

INK, GREY, FAINT, PAPER = "#1c2126", "#6a737b", "#d8dde1", "#fff"

_STYLE = f"""\
:root {{ --ink: {INK}; --grey: {GREY}; --faint: {FAINT}; --paper: {PAPER}; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.4rem; margin: 0; }}
figure {{ margin: 0; }}
figcaption {{ color: var(--grey); font-size: 0.85rem; }}
svg {{ display: block; width: 100%; height: auto; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.82rem; white-space: nowrap; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid var(--faint); }}
summary {{ font-weight: 600; margin: 1rem 0 0.5rem; cursor: pointer; }}
p, ul {{ color: var(--grey); font-size: 0.85rem; }}
"""


def document(title: str, body: str, style: str = "") -> str:
    """The whole file. body: HTML; style: CSS after that of the house."""
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{_STYLE}{style}</style>
<h1>{title}</h1>
{body}
</html>
"""


def table(title: str, header: Sequence[str], lines: Iterable[Sequence[str]], is_open: bool = True) -> str:
    """A table that folds away; newlines in a cell become breaks."""

    def row(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c).replace(chr(10), '<br>')}</{tag}>" for c in cells) + "</tr>"

    body = "\n".join([row("th", header), *(row("td", line) for line in lines)])
    state = " open" if is_open else ""
    return f'<details{state}><summary>{html.escape(title)}</summary><div class="wide"><table>{body}</table></div></details>'


def figure(drawing: str, text: str = "") -> str:
    """An SVG element with a caption."""
    return f"<figure>{drawing}{f'<figcaption>{html.escape(text)}</figcaption>' if text else ''}</figure>"
