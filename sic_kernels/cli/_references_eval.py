"""How many references in what people say are resolved as a person would, and how long a sentence takes.

The cases are written by hand: an answer, what is said about it, the points that are meant, or that nothing can be. A case counts
if all of it is as expected; it is wrong if it resolves to a point that was not meant.

Timed are the sentences of all cases, and the lines of the answers, which have hardly any reference: most are short, so those of
`LENGTHS` have rows of their own, two neighbours together included. No text is parsed twice: each run adds a space to all of them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from typing import Any

from ..references import grammar, parse, sentences

KINDS = ("points", "ambiguous", "range", "missing", "deep", "vague", "none")
RUNS = 20
LENGTHS = {"en": (55, 70), "zh": (25, 35)}  # characters of a sentence that is not short
LONG_SIZES = (100_000, 10_000_000)  # characters
LONG_PIECES = ("第", "(", "the first of ", "the third point of the first step, ", "point 1, ", "第三点的第二个例子")


def measure(long: bool = False) -> dict[str, Any]:
    """Scores of all lists of cases by language and kind, failed cases, microseconds of `parse`, bytes of the grammar.

    long: milliseconds of texts of `LONG_SIZES` as well.
    """
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
        "long": milliseconds() if long else [],
        "grammar_bytes": sum(path.stat().st_size for path in grammar.SHIPPED),
    }


def timed_texts() -> list[tuple[str, str, tuple[str, ...]]]:
    """Language, text, and the rows that it is for: "any" for one as it is, the length for one of `LENGTHS`."""
    texts = [(case.language, case.text) for name in sentences.LISTS for case in sentences.cases(name)]
    texts += [
        (name.partition("-")[0], line)
        for name, text in sentences.answers().items()
        for line in text.splitlines()
        if line
    ]
    texts = list(dict.fromkeys(texts))
    rows: dict[tuple[str, str], tuple[str, ...]] = dict.fromkeys(texts, ("any",))
    pairs = [
        (language, a + (" " if language == "en" else "") + b)
        for (language, a), (other, b) in itertools.pairwise(texts)
        if language == other
    ]
    for language, text in texts + pairs:
        least, most = LENGTHS[language]
        if least <= len(text) <= most:
            rows[language, text] = (*rows.get((language, text), ()), f"{least} to {most}")
    return [(*key, names) for key, names in rows.items()]


def microseconds() -> list[dict[str, Any]]:
    """Median and 95th percentile of one `parse` over many texts, by language, length, and whether there is a reference."""
    texts = timed_texts()
    seen: dict[tuple[str, str, bool], list[tuple[float, int]]] = defaultdict(list)
    for run in range(RUNS):
        random.Random(run).shuffle(texts)
        for language, text, names in texts:
            padded = text + " " * run
            begin = time.perf_counter()
            found = parse(padded, depth=3)
            taken = (time.perf_counter() - begin) * 1e6
            for name in names:
                seen[language, name, bool(found)].append((taken, len(text)))
    rows = []
    for (language, length, has_reference), timed in sorted(seen.items()):
        times, lengths = sorted(t for t, _ in timed), sorted(n for _, n in timed)
        rows.append({
            "language": language, "length": length, "has_reference": has_reference, "texts": len(timed) // RUNS,
            "characters": lengths[len(lengths) // 2], "median": times[len(times) // 2], "p95": times[len(times) * 95 // 100],
        })  # fmt: skip
    return rows


def milliseconds() -> list[dict[str, Any]]:
    """The best of three `parse` of long texts that repeat one piece."""
    rows = []
    for piece, size in itertools.product(LONG_PIECES, LONG_SIZES):
        text, times = piece * (size // len(piece)), []
        for _ in range(3):
            begin = time.perf_counter()
            found = len(parse(text, depth=3))
            times.append((time.perf_counter() - begin) * 1e3)
        rows.append({"piece": piece, "characters": len(text), "references": found, "milliseconds": min(times)})
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
    for column in ("language", "length", "references", "texts", "characters, median", "median", "p95"):
        times.add_column(column, justify="left" if column in ("language", "length", "references") else "right")
    for row in result["microseconds"]:
        times.add_row(
            row["language"], row["length"], "some" if row["has_reference"] else "none", str(row["texts"]), str(row["characters"]),
            f"{row['median']:.1f}", f"{row['p95']:.1f}",
        )  # fmt: skip
    long = Table(title="time of parse of long texts, milliseconds")
    for column in ("repeated", "characters", "references", "best of three"):
        long.add_column(column, justify="left" if column == "repeated" else "right")
    for row in result["long"]:
        long.add_row(row["piece"], str(row["characters"]), str(row["references"]), f"{row['milliseconds']:.1f}")
    failures = Table(title="not as expected")
    for column in ("cases", "answer", "text", "expected", "seen"):
        failures.add_column(column)
    for row in result["failed"]:
        failures.add_row(row["list"], row["answer"], row["text"], row["expected"], row["seen"])
    return [scores, times, *([long] if result["long"] else []), *([failures] if result["failed"] else [])]
