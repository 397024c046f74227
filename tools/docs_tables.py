"""Write the tables of docs/ from what they describe.

    python tools/docs_tables.py settings                 docs/configuration.md from sic_kernels/runtime/config.py
    python tools/docs_tables.py metrics                  docs/metrics.md from the metrics registry
    python tools/docs_tables.py targets                  docs/rollout.md from the rules of `python -m sic_kernels advise`
    python tools/docs_tables.py speed bench.json         docs/slicing.md from `python -m sic_kernels bench --json`
    python tools/docs_tables.py readme bench.json        README.md: the main lines of the same
    python tools/docs_tables.py quality eval.json        docs/slicing.md from `python -m sic_kernels eval slicing --json`
    python tools/docs_tables.py delta eval.json          docs/delta.md from `python -m sic_kernels eval delta --json`
    python tools/docs_tables.py delta-speed bench.json   docs/delta.md from `python -m sic_kernels bench --family delta --json`
    python tools/docs_tables.py ragged eval.json         docs/ragged.md from `python -m sic_kernels eval ragged --json`
    python tools/docs_tables.py head-speed bench.json    docs/head.md from `python -m sic_kernels bench --family head --json`
    python tools/docs_tables.py ragged-speed bench.json  docs/ragged.md from `python -m sic_kernels bench --family ragged --json`
    python tools/docs_tables.py replay-speed bench.json  docs/replay.md from bench/bench_replay.py with --benchmark-json
    python tools/docs_tables.py pool-speed bench.json    docs/replay_pool.md from bench/bench_replay_pool.py, in the same way
    python tools/docs_tables.py predict                  docs/gpu.md from the model of `python -m sic_kernels bench --predict`
    python tools/docs_tables.py gpu sass.json            docs/gpu.md from `python tools/sass_gate.py --json sass.json`
    python tools/docs_tables.py triton aot.json          docs/gpu.md from `python tools/triton_aot.py --json aot.json`

A table stands between `<!-- NAME: begin ... -->` and `<!-- NAME: end -->`.
"""

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    "settings": "configuration.md", "metrics": "metrics.md", "speed": "slicing.md", "quality": "slicing.md",
    "delta": "delta.md", "delta-speed": "delta.md", "predict": "gpu.md", "gpu": "gpu.md", "triton": "gpu.md",
    "readme": "../README.md", "ragged": "ragged.md", "ragged-speed": "ragged.md",
    "head-speed": "head.md", "replay-speed": "replay.md", "pool-speed": "replay_pool.md", "targets": "rollout.md",
}  # fmt: skip


def table(header, lines):
    """A Markdown table; newlines in a cell become breaks, bars are escaped."""
    clean = [[str(cell).replace("|", r"\|").replace("\n", "<br>") for cell in line] for line in [header, *lines]]
    rows = ["| " + " | ".join(line) + " |" for line in clean]
    return "\n".join([rows[0], "|" + "---|" * len(header), *rows[1:]])


def settings():
    from sic_kernels.runtime.config import SETTINGS

    lines = []
    for s in SETTINGS:
        default = {True: "1", False: "0"}[s.default] if isinstance(s.default, bool) else s.default
        default = "auto" if s.name == "SIC_NUM_THREADS" else default
        lines.append((f"`{s.name}`", f"`{default}`", s.expected, s.about, "yes" if s.affects_results else "no"))
    return table(("variable", "default", "values", "what it sets", "part of the digest"), lines)


def metrics():
    from sic_kernels.runtime.metrics import REGISTRY

    lines = [(f"`{m.name}`", m.about, m.numerator, m.denominator, m.kind + (f", by {m.label}" if m.label else ""))
             for m in REGISTRY._sorted()]  # fmt: skip
    return table(("metric", "what it says", "numerator", "denominator", "kind"), lines)


def targets():
    from sic_kernels.runtime.advice import RULES

    def change(rule):
        both = rule.too_low and rule.too_high
        return f"too low: {rule.too_low}; too high: {rule.too_high}" if both else rule.too_low or rule.too_high

    lines = [(f"`{r.metric}`" + (f" `{r.label}`" if r.label else ""), r.target, change(r)) for r in RULES]
    return table(("metric", "target", "if it is missed"), lines)


def suite_speed(data):
    """`speed` from pytest-benchmark's own JSON."""
    rows = [line for b in data["benchmarks"] for line in b["extra_info"].get("rows", ())]
    return speed({"machine": data["machine_info"]["sic"], "rows": rows})


def speed(report):
    from sic_kernels.runtime.bench_report import report_parts

    heading, tables, notes = report_parts(report["rows"], report["machine"])
    parts = [". ".join(heading) + "."]
    for title, header, lines in tables:
        parts += ["", f"{title[0].upper()}{title[1:]}:", "", table(header, lines)]
    return "\n".join([*parts, "", *(f"{note}\n" for note in notes)]).rstrip()


def readme(report):
    """Decode of one token at 32K: what a reader wants to know first."""
    from sic_kernels.runtime.bench_report import milliseconds

    names = ("attend 12 %", "attend 6 %", "dense", "sliced 12 %")
    rows = {r["name"]: r for r in report["rows"] if r.get("length") == 32768 and r.get("B") == 1 and "linear" not in r}
    lines = []
    for name in names:
        r = rows[name]
        faster = ", ".join(f"{x:.1f}x {peer}" for peer, x in r["speedup"].items())
        lines.append((name, milliseconds(r["seconds"]["median"]), faster))
    machine = report["machine"]
    what = f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}, torch {machine['torch']}"
    return f"{what}:\n\n" + table(("32 768 tokens", "time", "faster than"), lines)


def quality(result):
    what = f"{result['model']}, context {result['context']}, of which the last {result['scored']} tokens are scored"
    lines = [_quality_line(row) for row in result["rows"]]
    header = ("text", "policy", "bytes read", "perplexity", "KL to dense", "KL / oracle's", "same token",
              "mass not read: true", "estimated", "truth within the bound")  # fmt: skip
    parts = [f"{what}, teacher-forced; intervals are 95 %, paired block bootstrap.", "", table(header, lines)]
    if result["needles"]:
        lines = [
            (r["text"], r["policy"], f"{r['as_dense']} of {r['questions']}", r["right"]) for r in result["needles"]
        ]
        parts += [
            "",
            "Questions about facts hidden in the text:",
            "",
            table(("text", "policy", "as dense", "right"), lines),
        ]
    return "\n".join(parts)


def _number(row, name, form):
    return "" if row.get(name) is None else f"{row[name]:{form}}"


def _span_of(row, name, form):
    """A figure with its interval."""
    if row.get(name) is None:
        return ""
    low, high = (row[f"{name.removesuffix('_change')}_{end}"] for end in ("low", "high"))
    return f"{row[name]:{form}} [{low:{form}}, {high:{form}}]"


def delta(result):
    """All texts together first, then each."""
    texts = list(dict.fromkeys(row["text"] for row in result["rows"]))
    heads = {"all": f"All {len(texts) - 1} texts"}
    templates = result["templates"]
    parts = [
        f"{result['model']}, context {result['context']}, of which the last {result['scored']} tokens of each text are scored, "
        f"teacher-forced; intervals are 95 %, paired block bootstrap. {templates['count']} templates a head, "
        f"{templates['bytes'] / 1e6:.1f} MB for all sequences together, made with `{templates['command']}`."
    ]
    for text in sorted(texts, key=lambda text: text != "all"):
        rows = [row for row in result["rows"] if row["text"] == text]
        lines = [_delta_line(row) for row in rows]
        header = ("cache", "size", "sketch", "rows raw", "perplexity", "KL to dense", "KL / of", "same token")
        parts += ["", f"{heads.get(text, f'`{text}`')}:", "", table(header, lines)]
    return "\n".join(parts)


def _delta_line(row):
    if "absent" in row:
        return (row["policy"], "", "", "", row["absent"], "", "", "")
    perplexity = _span_of(row, "perplexity_change", "+.2%") or f"{row['perplexity']:.3f}"
    ratio = _span_of(row, "kl_ratio", ".2f")
    sizes = [_number(row, *what) for what in (("size", ".1%"), ("sketch", ".1%"), ("raw_rows", ".2%"))]
    against = f"{ratio} of {row['against']}" if ratio else ""
    return (row["policy"], *sizes, perplexity, _span_of(row, "kl", ".5f"), against, _number(row, "agreement", ".1%"))


def _quality_line(row):
    perplexity = _span_of(row, "perplexity_change", "+.2%") or f"{row['perplexity']:.3f}"
    return (row["text"], row["policy"], _number(row, "read_ratio", ".1%"), perplexity, _number(row, "kl", ".4f"),
            _span_of(row, "kl_ratio", ".2f"), _number(row, "agreement", ".1%"), _number(row, "omitted_true", ".3f"),
            _number(row, "omitted_estimate", ".3f"), _number(row, "omitted_coverage", ".1%"))  # fmt: skip


def ragged(result):
    """Padding on real texts."""
    from sic_kernels.cli._ragged_eval import HEADER, lines, title

    return f"{title(result)}.\n\n" + table(HEADER, lines(result))


def predict():
    """For each GPU of the model and each family: microseconds of every op at every shape, and the ratios."""
    from sic_kernels.cli.bench import FAMILIES
    from sic_kernels.runtime.roofline import DEVICES

    tables = [
        _predicted(families, gpu, device.name) for gpu, device in DEVICES.items() for families in _alike(FAMILIES)
    ]
    return "\n\n".join(tables)


def _alike(families):
    """The families in groups of the same shapes: each a table."""
    groups = {}
    for family in families.values():
        groups.setdefault(family.shapes, []).append(family)
    return groups.values()


def _predicted(families, gpu, device):
    from sic_kernels.cli.bench import prediction

    report = prediction(families, gpu)
    shapes = list(dict.fromkeys(r["shape"] for r in report["rows"]))
    heads = {r["shape"]: f"{r['length'] // 1024}K" + (f", B={r['B']}" if r["B"] > 1 else "") for r in report["rows"]}
    lines = []
    for name in dict.fromkeys(r["name"] for r in report["rows"]):
        mine = {r["shape"]: r for r in report["rows"] if r["name"] == name}
        lines.append((name, *(f"{1e6 * mine[s]['predicted_seconds']:.0f} us" for s in shapes),
                      " / ".join(str(n) for n in sorted({len(r["launches"]) for r in mine.values()}))))  # fmt: skip
    for slow, fast in dict.fromkeys((r["slow"], r["fast"]) for r in report["ratios"]):
        mine = {r["shape"]: r["predicted_ratio"] for r in report["ratios"] if (r["slow"], r["fast"]) == (slow, fast)}
        lines.append((f"{slow} / {fast}", *(f"{mine[s]:.1f}x" for s in shapes), ""))
    return table((f"predicted for {device}", *(heads[s] for s in shapes), "launches"), lines)


def gpu(report):
    """What the machine code of each kernel has."""
    lines = []
    for r in report["kernels"]:
        wanted = [op for op in ("LDG.128", "LDGSTS.128", "STG.128", "HMMA", "IMMA") if op in r["ops"]]
        registers = f"{_span(r['registers'])} of {r['ceiling'] or 'any number'}"
        ops = ", ".join(f"{op} {_span(r['ops'][op])}" for op in wanted)
        lines.append((f"`{r['kernel']}`", r["variants"], registers, r["spills"], ops))
    archs = sorted({a for r in report["kernels"] for a in r["architectures"]})
    header = ("kernel", "variants", "registers, of at most", "spills", "wide loads and stores, tensor-core operations")
    return f"Over {', '.join(archs)}, smallest and largest of all variants.\n\n" + table(header, lines)


def triton(rows):
    """What the compiled Triton kernels have, over all launches of each."""
    lines = []
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        mine = [r for r in rows if r["kernel"] == kernel]

        def span(name, mine=mine):
            return _span((min(r[name] for r in mine), max(r[name] for r in mine)))

        lines.append((f"`{kernel}`", len(mine), span("registers"), span("shared"), max(r["local"] for r in mine),
                      span("wide_loads"), span("matrix"), "yes" if mine[0]["exact"] else ""))  # fmt: skip
    header = ("kernel", "launches", "registers", "shared bytes", "spills", "loads of 16 bytes", "tensor-core operations",
              "no fused products")  # fmt: skip
    return f"Compiled for {rows[0]['arch']}, smallest and largest of all launches.\n\n" + table(header, lines)


def _span(values):
    low, high = values
    return str(low) if low == high else f"{low} to {high}"


def replaced(text, name, content):
    """`text` with the part between the marks of `name` replaced."""
    pattern = re.compile(rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"no marks for {name}")
    return pattern.sub(lambda m: f"{m[1]}{content}\n{m[2]}", text)


def main(arguments):
    name, *files = arguments
    makers = {
        "settings": settings, "metrics": metrics, "speed": speed, "quality": quality, "delta": delta, "predict": predict,
        "gpu": gpu, "triton": triton, "readme": readme, "delta-speed": speed,
        "ragged": ragged, "ragged-speed": speed, "head-speed": speed, "replay-speed": suite_speed, "pool-speed": suite_speed,
        "targets": targets,
    }  # fmt: skip
    page = DOCS / PAGES[name]
    content = makers[name](*(json.loads(Path(f).read_text()) for f in files))
    page.write_text(replaced(page.read_text(), name, content))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PAGES:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
