"""`eval references`: scores by language and kind, failed cases, times."""

import json

import pytest

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("rich", reason="pip install 'sic_kernels[demo]'")

from sic_kernels.cli import _references_eval, main
from sic_kernels.references.sentences import LISTS, Case, cases


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(_references_eval, "RUNS", 2)


def test_scores_add_up(capsys):
    assert main(["eval", "references", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {(r["list"], r["language"], r["kind"]): r for r in result["rows"]}
    for name in LISTS:
        assert rows[name, "both", "all"]["cases"] == len(cases(name))
        for part in ("cases", "exact", "wrong"):
            whole = rows[name, "both", "all"][part]
            assert (
                sum(r[part] for key, r in rows.items() if key[0] == name and key[1] == "both" and key[2] != "all")
                == whole
            )
            assert sum(rows[name, language, "all"][part] for language in ("en", "zh")) == whole
    misses = sum(rows[name, "both", "all"]["cases"] - rows[name, "both", "all"]["exact"] for name in LISTS)
    assert len(result["failed"]) == misses
    times = {(row["language"], row["has_reference"]): row for row in result["microseconds"]}
    assert set(times) == {("en", False), ("en", True), ("zh", False), ("zh", True)}
    assert all(0 < row["median"] <= row["p95"] for row in times.values())
    assert min(row["texts"] for row in times.values()) > 60
    assert 0 < result["grammar_bytes"] < 50_000


def test_failed_cases_are_shown(monkeypatch, capsys):
    wrong, right = (
        Case("en-reasons", "Is the third reason true?", "= Latency"),
        Case("zh-reasons", "第三点呢", "= 成本"),
    )
    monkeypatch.setattr(_references_eval.sentences, "cases", lambda name="cases": [wrong, right])
    assert main(["eval", "references"]) == 0
    shown = capsys.readouterr().out
    assert "not as expected" in shown
    assert "Is the third reason true?" in shown
    assert "1 of 2" in shown


def test_other_options_are_refused(capsys):
    assert main(["eval", "references", "--context", "9"]) == 1
    assert "eval references: options: got context, expected --json only" in capsys.readouterr().err


def test_no_text_is_timed_twice(monkeypatch):
    seen = []
    monkeypatch.setattr(_references_eval, "parse", lambda text, depth: seen.append(text) or [])
    _references_eval.microseconds()
    assert len(seen) == len(set(seen)) > 2 * 500
