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
    times = {(row["language"], row["length"], row["has_reference"]): row for row in result["microseconds"]}
    lengths = [("en", "any"), ("en", "55 to 70"), ("zh", "any"), ("zh", "25 to 35")]
    assert set(times) == {(*key, found) for key in lengths for found in (False, True)}
    assert all(0 < row["median"] <= row["p95"] for row in times.values())
    assert min(row["texts"] for row in times.values()) > 20
    for (language, length, _), row in times.items():
        least, most = _references_eval.LENGTHS[language]
        assert least <= row["characters"] <= most if length != "any" else row["characters"] < least
    assert result["long"] == []
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
    assert "eval references: options: got context, expected --json and --long only" in capsys.readouterr().err


def test_long_texts(monkeypatch, capsys):
    monkeypatch.setattr(_references_eval, "LONG_SIZES", (1000, 4000))
    assert main(["eval", "references", "--long", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["long"]
    assert len(rows) == 2 * len(_references_eval.LONG_PIECES)
    assert all(row["milliseconds"] > 0 and 900 < row["characters"] <= 4000 for row in rows)
    found = {(row["piece"], row["characters"]): row["references"] for row in rows}
    assert found["point 1, ", 3996] == 444
    assert found["(", 4000] == 0
    assert main(["eval", "references", "--long"]) == 0
    assert "time of parse of long texts" in capsys.readouterr().out


def test_no_text_is_timed_twice(monkeypatch):
    seen = []
    monkeypatch.setattr(_references_eval, "parse", lambda text, depth: seen.append(text) or [])
    _references_eval.microseconds()
    assert len(seen) == len(set(seen)) > 2 * 500
