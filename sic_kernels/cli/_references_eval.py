"""How many references in what people say are resolved as a person would, and how long a sentence takes.

The cases are written by hand: an answer, what is said about it, the points that are meant, or that nothing can be. A case counts
if all of it is as expected; it is wrong if it resolves to a point that was not meant.
"""

from __future__ import annotations

import timeit
from collections import defaultdict
from typing import Any

from ..references import grammar, parse, sentences

SENTENCES = {
    "English, none": "Could you write me a short poem about the sea and the wind?",
    "English, one": "Can you expand on the third point above in a bit more detail",
    "English, nested": "What is the second example in the third point that you made?",
    "Chinese, none": "请帮我写一首关于春天的诗，要求押韵，长度大约二十行左右，语言要优美",
    "Chinese, one": "刚才说的第二个原因能再展开讲讲吗，我觉得还不够清楚，最好举一个例子",
    "Chinese, nested": "第三点的第二个例子是什么意思，能不能用更简单的话再解释一遍，谢谢",
}
KINDS = ("points", "ambiguous", "range", "missing", "deep", "vague", "none")
RUNS, CALLS = 200, 50


def measure() -> dict[str, Any]:
    """Scores of all lists of cases by language and kind, failed cases, microseconds a sentence, bytes of the grammar."""
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
        "microseconds": {name: _microseconds(text) for name, text in SENTENCES.items()},
        "grammar_bytes": sum(path.stat().st_size for path in grammar.SHIPPED),
    }


def _microseconds(text: str) -> float:
    """Of one `parse`: the least of many short runs, so that other programs count little."""
    return min(timeit.repeat(lambda: parse(text, depth=3), number=CALLS, repeat=RUNS)) / CALLS * 1e6


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
    times = Table(title="time of parse")
    for column in ("references in the sentence", "us", "characters"):
        times.add_column(column, justify="left" if column.startswith("references") else "right")
    for name, value in result["microseconds"].items():
        times.add_row(name, f"{value:.1f}", str(len(SENTENCES[name])))
    failures = Table(title="not as expected")
    for column in ("cases", "answer", "text", "expected", "seen"):
        failures.add_column(column)
    for row in result["failed"]:
        failures.add_row(row["list"], row["answer"], row["text"], row["expected"], row["seen"])
    return [scores, times, *([failures] if result["failed"] else [])]
