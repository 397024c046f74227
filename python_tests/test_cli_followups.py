"""Follow-up questions of the demo: the right point is kept, and dense, sliced and kept are told apart."""

import pytest

pytest.importorskip("transformers", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("rich", reason="pip install 'sic_kernels[demo]'")
pytest.importorskip("tokenizers", reason="pip install 'sic_kernels[demo]'")

from sic_kernels import models, references
from sic_kernels.cli import _followups, _run
from sic_kernels.integrations.transformers import SlicedCache
from sic_kernels.runtime.errors import SicError

pytestmark = pytest.mark.usefixtures("keep_threads")


def test_rows_and_spans(folder, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("abc " * 100)
    kept = []
    keep = SlicedCache.keep
    monkeypatch.setattr(SlicedCache, "keep", lambda self, spans: (kept.append(spans[0][0]), keep(self, spans))[1])
    lm = models.load(folder)
    with _run.progress() as bar:
        rows = _followups.evaluate(lm, str(text), 80, [0.1], 2, bar)
    assert [row["policy"] for row in rows] == ["dense", "sliced 10%", "sliced 10%, point kept"]
    assert all(0 <= row["right"] <= row["questions"] == 2 and 0 <= row["probability"] <= 1 for row in rows)
    answer = "Here are some points to remember:\n\n1. "  # a token is a character here
    first, second = models.needle_cases(2)
    assert kept[0][0] in range(len(answer) - 3, len(answer) + 1)
    assert kept[0][1] - kept[0][0] >= len(first.fact.strip())
    assert kept[1][0] >= kept[0][1]
    assert rows[2]["kept"] == (kept[1][1] - kept[1][0]) / rows[2]["context"] > 0 == rows[1]["kept"]
    assert _followups.line(rows).startswith(f"follow-ups on points of an answer {rows[0]['context']} tokens long ago")
    assert lm.model.config._attn_implementation == "sdpa"
    assert second.thing in second.question


def test_a_question_that_means_nothing():
    with pytest.raises(SicError, match="was not resolved"):
        _followups._tokens_of(
            "What about the ninth point?", references.outline("1. a\n2. b\n", offsets=[(0, 4), (5, 9)])
        )
