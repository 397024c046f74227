"""How many references in what people say are resolved as a person would, and how long a sentence takes.

The cases are written by hand: an answer, what is said about it, the points that are meant, or that nothing can be. A case counts
if all of it is as expected; it is wrong if it resolves to a point that was not meant.

Timed are the sentences of all cases, and the lines of the answers, which have hardly any reference. No text is parsed twice: each
run adds a space to all of them.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import Any

from ..references import grammar, parse, sentences

KINDS = ("points", "ambiguous", "range", "missing", "deep", "vague", "none")
RUNS = 20


def measure() -> dict[str, Any]:
    """Scores of all lists of cases by language and kind, failed cases, microseconds of `parse`, bytes of the grammar."""
    rows, failed = [], []
    for name in sentences.LISTS:
        counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for case in sentences.cases(name):
            verdict = sentences.judge(case)
            for key in ((case.language, case.kind), (case.language, "all"), ("both", case.kind), ("both", "all")):
                for i, value in enumerate((1, verdict.exact, verdict.wrong)):
                    counts[key][i] += value
            if not verdict.exact:
                failed.append({"list": name, **case._asdict(), "seen": verdict.seen})
        rows += [
            {"list": name, "language": language, "kind": kind, "cases": n, "exact": exact, "wrong": wrong}
            for (language, kind), (n, exact, wrong) in counts.items()
        ]
    return {
        "rows": rows,
        "failed": failed,
        "microseconds": microseconds(),
        "grammar_bytes": sum(path.stat().st_size for path in grammar.SHIPPED),
    }


def microseconds() -> list[dict[str, Any]]:
    """Median and 95th percentile of one `parse` over many different texts, by language and by whether there is a reference."""
    texts = [(case.language, case.text) for name in sentences.LISTS for case in sentences.cases(name)]
    texts += [
        (name.partition("-")[0], line)
        for name, text in sentences.answers().items()
        for line in text.splitlines()
        if line
    ]
    texts = list(dict.fromkeys(texts))
    seen: dict[tuple[str, bool], list[tuple[float, int]]] = defaultdict(list)
    for run in range(RUNS):
        random.Random(run).shuffle(texts)
        for language, text in texts:
            padded = text + " " * run
            begin = time.perf_counter()
            found = parse(padded, depth=3)
            seen[language, bool(found)].append(((time.perf_counter() - begin) * 1e6, len(text)))
    rows = []
    for (language, has_reference), timed in sorted(seen.items()):
        times, lengths = sorted(t for t, _ in timed), sorted(n for _, n in timed)
        rows.append({
            "language": language, "has_reference": has_reference, "texts": len(timed) // RUNS,
            "characters": lengths[len(lengths) // 2], "median": times[len(times) // 2], "p95": times[len(times) * 95 // 100],
        })  # fmt: skip
    return rows


def tables(result: dict[str, Any]) -> list[Any]:
    from rich.table import Table

    scores = Table(title=f"references resolved as expected; grammar of {result['grammar_bytes'] / 1e3:.1f} kB")
    for column in ("cases", "language", *KINDS, "all", "wrong"):
        scores.add_column(column, justify="left" if column in ("cases", "language") else "right")
    for name in sentences.LISTS:
        for language in ("en", "zh", "both"):
            rows = {r["kind"]: r for r in result["rows"] if (r["list"], r["language"]) == (name, language)}
            shown = [
                f"{rows[kind]['exact']} of {rows[kind]['cases']}" if kind in rows else "" for kind in (*KINDS, "all")
            ]
            scores.add_row(name, language, *shown, str(rows["all"]["wrong"]))
    times = Table(title="time of parse, microseconds")
    for column in ("language", "references", "texts", "characters, median", "median", "p95"):
        times.add_column(column, justify="left" if column in ("language", "references") else "right")
    for row in result["microseconds"]:
        times.add_row(
            row["language"], "some" if row["has_reference"] else "none", str(row["texts"]), str(row["characters"]),
            f"{row['median']:.1f}", f"{row['p95']:.1f}",
        )  # fmt: skip
    failures = Table(title="not as expected")
    for column in ("cases", "answer", "text", "expected", "seen"):
        failures.add_column(column)
    for row in result["failed"]:
        failures.add_row(row["list"], row["answer"], row["text"], row["expected"], row["seen"])
    return [scores, times, *([failures] if result["failed"] else [])]
