"""The page of a trace: what was read is worked by hand, every record is there, text stays text."""

import json
import math
from pathlib import Path

import pytest
import torch
from html_reader import Page

import sic_kernels as sic
from sic_kernels.cli import main
from sic_kernels.runtime import trace, trace_file, trace_page

NAMES = ["sliced", "dense_layer", "dense_short", "dense_prefill", "fallback_mass"]


def attend(layer, **changes):
    """One sequence of 10 tokens in pages of 4, two KV heads of two query heads; head 0 read 0, 1, 9, head 1 reads 4 to 9."""
    fields = {
        "unit": "token", "page_size": 4, "kv_heads": 2, "seq_lens": torch.tensor([10]),
        "selection": torch.tensor([[[[0, 1, 9, -1, -1, -1], [4, 5, 6, 7, 8, 9]]]]), "counts": torch.tensor([[[3, 6]]]),
        "page_scores": torch.tensor([[[[512, -32768, 256], [-128, 0, 128]]]]), "score_step": 1 / 256,
        "omitted_mass": torch.tensor([[[0.25, 0.125, 0.0, 0.0]]]), "status": torch.tensor([[[0, 0, 0, 4]]]),
        "status_names": NAMES, "status_counts": {"sliced": 3, "fallback_mass": 1}, "reasons": ["fallback_mass"],
    }  # fmt: skip
    trace.record("attend", layer=layer, **(fields | changes))


def dense(layer):
    nothing = {"selection": None, "counts": None, "page_scores": None, "reasons": []}
    attend(layer, **nothing, status=torch.ones(1, 1, 4, dtype=torch.int64), status_counts={"dense_layer": 4})


def recorded(*calls, **limits):
    with sic.trace(**limits) as step:
        for call in calls:
            call()
    return json.loads(step.to_json())


def test_rows_by_hand():
    ((step,), cut) = trace_file.steps(recorded(lambda: attend(3)))
    assert cut == 0
    assert (step.number, step.sequence, step.token, step.page_size) == (0, 0, 0, 4)
    first, second = step.rows
    assert (first.layer, first.head, first.dense, first.answered) == (3, 0, False, {"sliced": 2})
    assert (first.read, first.size, first.score, first.omitted) == ([2, 0, 1], [4, 4, 2], [2.0, -128.0, 1.0], 0.25)
    assert (second.read, second.answered, second.fell_back) == ([0, 4, 2], {"sliced": 1, "fallback_mass": 1}, True)
    assert (first.tokens, second.tokens) == (3, 6 + 10)


def test_pages_as_units_and_the_layers_that_ran_dense():
    chosen = {"unit": "page", "selection": torch.tensor([[[[0, 2], [1, -1]]]]), "counts": torch.tensor([[[2, 1]]])}
    scores = {"page_scores": torch.tensor([[[[0.5, -math.inf, 1], [0, 0, 0]]]]), "score_step": 1.0}
    trace = recorded(lambda: attend(0, **chosen, **scores), lambda: dense(1))
    ((step,), _) = trace_file.steps(trace)
    assert [row.read for row in step.rows] == [[4, 0, 2], [0, 4, 0], [4, 4, 2], [4, 4, 2]]
    assert [row.dense for row in step.rows] == [False, False, True, True]
    assert step.rows[0].score == [0.5, None, 1.0]


def test_a_layer_that_comes_again_is_the_next_step():
    steps, _ = trace_file.steps(recorded(*(lambda layer=layer: attend(layer) for layer in (0, 1, 0, 1))))
    assert [(s.number, [row.layer for row in s.rows]) for s in steps] == [(0, [0, 0, 1, 1]), (1, [0, 0, 1, 1])]


def test_queries_see_only_what_is_before_them():
    """Two query tokens of a sequence of 6: the first sees 5."""
    two = {
        "seq_lens": torch.tensor([6]), "kv_heads": 1, "selection": torch.tensor([[[[0]], [[5]]]]),
        "counts": torch.ones(1, 2, 1), "page_scores": torch.zeros(1, 2, 1, 2), "omitted_mass": torch.zeros(1, 2, 1),
        "status": torch.zeros(1, 2, 1, dtype=torch.int64),
    }  # fmt: skip
    steps, _ = trace_file.steps(recorded(lambda: attend(0, **two)))
    assert [(s.token, s.rows[0].size, s.rows[0].read) for s in steps] == [(0, [4, 1], [1, 0]), (1, [4, 2], [0, 1])]


def boxes(page):
    """Class -> the path of its boxes in the first drawing."""
    end = next(i for i, (tag, at) in enumerate(page.tags) if at.get("class") == "frame")
    return {at["class"]: at["d"] for tag, at in page.tags[:end] if tag == "path"}


def test_the_drawing_by_hand():
    """Three columns of 860 / 3; head 0: half of page 0 and half of page 2; head 1: all of pages 1 and 2, one box."""
    page = Page(trace_page.page(recorded(lambda: attend(3))))
    assert boxes(page) == {
        "r2": "M46 4h286.667v8h-286.667zM619.333 4h286.667v8h-286.667z",
        "r4": "M332.667 13h573.333v8h-573.333z",
        "fell": "M912 13h10v8h-10z",
    }


def test_every_record_is_in_the_page_and_text_stays_text():
    hostile = '</script><b onload="x">&amp; 上文 '
    trace = recorded(
        lambda: attend(0),
        lambda: dense(1),
        lambda: sic_record("replay.run", layer=11, segments=30, first=0, stop=11, status="interrupted"),
        lambda: sic_record("slot", layer=11, action="put", nbytes=2304),
        lambda: sic_record("reference", text=hostile, tokens=[310, 355]),
        lambda: sic_record(hostile, **{hostile: [hostile]}, reasons=[hostile]),
    )
    page = Page(trace_page.page(trace))
    assert page.data["trace"] == trace
    assert [tag for tag, _ in page.tags].count("svg") == 6 + 2  # keys; the heat map and the strip
    assert sum(tag == "b" for tag, _ in page.tags) == 0
    assert hostile in page.cells
    for op in ("attend", "replay.run", "slot", "reference"):
        assert page.cells.count(op) == sum(r["op"] == op for r in trace["records"])
    assert "fallback_mass in 1 records" in page.text
    assert "0b5a94" in trace_page.page(trace)  # light, and
    assert "prefers-color-scheme: dark" in trace_page.page(trace)


def sic_record(op, **fields):
    trace.record(op, **fields)


def test_what_hover_shows():
    (drawing,) = Page(trace_page.page(recorded(lambda: attend(3)))).data["hover"]
    assert drawing["columns"] == drawing["pages"] == 3
    assert drawing["rows"][0] == {
        "name": "layer 3, KV head 0", "read": [2, 0, 1], "size": [4, 4, 2], "score": [2.0, -128.0, 1.0],
        "answered": "sliced 2, omitted at most 0.2500",
    }  # fmt: skip


def test_long_sequences_share_columns():
    """1000 pages in at most 480 columns: 3 to a column, 334 columns."""
    length = 4000
    long = {
        "seq_lens": torch.tensor([length]), "kv_heads": 1, "selection": torch.tensor([[[[0, 4, 8, 3999]]]]),
        "counts": torch.tensor([[[4]]]), "page_scores": torch.arange(1000.0)[None, None, None], "score_step": 1.0,
        "omitted_mass": torch.zeros(1, 1, 1), "status": torch.zeros(1, 1, 1, dtype=torch.int64),
    }  # fmt: skip
    page = Page(trace_page.page(recorded(lambda: attend(0, **long))))
    (drawing,) = page.data["hover"]
    assert (drawing["columns"], drawing["step"], drawing["pages"]) == (334, 3, 1000)
    row = drawing["rows"][0]
    assert (row["read"][0], row["size"][0], row["score"][0], row["read"][-1], row["size"][-1]) == (3, 12, 2.0, 1, 4)
    assert "3 pages to a column" in page.text


def test_what_is_not_drawn_is_said():
    page = Page(trace_page.page(recorded(lambda: attend(0), max_values=4)))
    assert "1 calls of attend are not drawn" in page.text
    assert page.data["hover"] == []
    page = Page(trace_page.page(recorded(*[lambda: attend(0)] * 14, max_records=13)))
    assert "1 records came after the limit" in page.text
    assert "12 of 13 steps" in page.text
    assert "nothing recorded" in Page(trace_page.page(recorded())).text


def test_status_of_a_trace():
    good = recorded(lambda: dense(0))
    assert (good["status"], good["reasons"]) == ("active", {})
    bad = recorded(lambda: attend(0), lambda: attend(1), lambda: trace.record("replay.resume", reasons=["stale", "x"]))
    assert (bad["status"], bad["reasons"]) == ("fallback", {"fallback_mass": 2, "stale": 1, "x": 1})


@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("paged", [True, False])
def test_attend_records_what_the_page_needs(unit, paged):
    gen = torch.Generator().manual_seed(0)
    lens = torch.tensor([90, 70], dtype=torch.int32)
    if paged:
        k = torch.randn(12, 2, 16, 64, generator=gen)
        table = torch.arange(12, dtype=torch.int32).view(2, 6)
    else:
        k, table = torch.randn(2, 2, 96, 64, generator=gen), None
    q = torch.randn(2, 4, 64, generator=gen)
    if unit == "token":
        index = sic.slicing.key_sketch(k, table, lens, sic.slicing.calibrate(k.transpose(1, 2).reshape(-1, 2, 64)))
    else:
        index = sic.slicing.page_summary(k, table, lens)
    policy = sic.slicing.SlicePolicy(unit=unit, ratio=0.25, sink=4, recent=8, min_len=0, dense_layers=(1,))
    with sic.trace() as step:
        results = [sic.slicing.attend(q, k, k, index, table, lens, policy=policy, layer=layer) for layer in (0, 1)]
    (first, second), cut = trace_file.steps(json.loads(step.to_json()))
    assert cut == 0
    page = 16 if paged or unit == "token" else 96
    whole = page == 96  # the only page: everything is read
    for s, length in ((first, 90), (second, 70)):
        assert s.page_size == page
        assert [(row.layer, row.dense) for row in s.rows] == [(0, whole)] * 2 + [(1, True)] * 2
        assert all(sum(row.size) == length for row in s.rows)
        assert all(len(row.score) == len(row.size) for row in s.rows[:2])
    counts = results[0].selection.counts.tolist()
    if unit == "token":
        assert [[sum(row.read) for row in s.rows[:2]] for s in (first, second)] == counts
    Page(trace_page.page(json.loads(step.to_json())))


def test_the_command(tmp_path, capsys):
    source, target = tmp_path / "step.json", tmp_path / "page.html"
    source.write_text(json.dumps(recorded(lambda: attend(0))))
    assert main(["trace-view", str(source), "-o", str(target)]) == 0
    assert Page(target.read_text()).data["trace"]["records"]
    assert main(["trace-view", str(source)]) == 0
    assert (tmp_path / "step.html").read_text() == target.read_text()
    assert capsys.readouterr().out.split() == [str(target), str(tmp_path / "step.html")]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "trace: file: got no JSON"),
        ("[" * 100_000, "trace: file: got no JSON"),
        ("[]", "trace: file: got JSON without records"),
        ('{"version": 1, "records": [3]}', "JSON without records"),
        ('{"version": 7, "records": []}', "trace: version: got 7, expected 1"),
        ('{"version": 1, "records": [{"op": "attend", "layer": 0}]}', r"trace: records\[0\]: got KeyError"),
    ],
    ids=range(6),
)
def test_other_files_are_refused(text, message, tmp_path):
    with pytest.raises(sic.ArgumentError, match=message):
        trace_page.page(trace_file.load(text))
    (tmp_path / "step.json").write_text(text)
    assert main(["trace-view", str(tmp_path / "step.json")]) == 1
    assert not (tmp_path / "step.html").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer": []}, "layer"), ({"layer": {}}, "layer"), ({"layer": "x"}, "layer"), ({"layer": True}, "layer"),
        ({"kv_heads": 0}, "kv_heads 0"), ({"kv_heads": 3}, "4 query heads of 3"), ({"kv_heads": None}, "kv_heads"),
        ({"page_size": 0}, "page_size 0"), ({"page_size": -1}, "page_size -1"), ({"score_step": []}, "TypeError"),
        ({"seq_lens": {"array": "int64[1]", "values": [10**400]}}, "tokens in pages of 4"),
        ({"seq_lens": {"array": "int64[1]", "values": []}}, "values of int64"),
        ({"status": {"array": "int32[1,1000000000,4]", "values": [0]}}, "values of int32"),
        ({"page_scores": {"array": "int32[1,1,2,3]", "values": [10**400] * 6}}, "OverflowError"),
        ({"status": {"array": "int32[1000000,1000000,0]", "values": []}}, "0 query heads"),
    ],
    ids=range(15),
)  # fmt: skip
def test_a_malformed_attend_is_refused_by_its_number(changes, message):
    saved = recorded(lambda: sic_record("slot"), lambda: attend(0))
    saved["records"][1] |= changes
    with pytest.raises(sic.ArgumentError, match=rf"trace: records\[1\]: got .*{message}"):
        trace_page.page(trace_file.load(json.dumps(saved)))


def test_an_attend_without_a_layer_is_refused():
    with pytest.raises(sic.ArgumentError, match=r"trace: records\[0\]: got KeyError\('layer'\)"):
        trace_page.page(trace_file.load('{"version": 1, "records": [{"op": "attend"}]}'))


@pytest.mark.parametrize(
    "field, message",
    [('"config": []', "config: got list"), ('"reasons": [3]', "reasons: got list"), ('"status": 3', "status: got int"),
     ('"dropped": "<b>"', "dropped: got str"), ('"x": NaN', "file: got no JSON"), ('"x": 1e999', "file: got no JSON")],
)  # fmt: skip
def test_other_headings_are_refused(field, message):
    with pytest.raises(sic.ArgumentError, match="trace: " + message):
        trace_file.load('{"version": 1, "records": [], ' + field + "}")


@pytest.mark.parametrize("value", [None, 5, []])
def test_what_is_no_text_is_refused(value):
    with pytest.raises(sic.ArgumentError, match="trace: file: got no JSON"):
        trace_file.load(value)


def test_runs_that_cannot_be_drawn_are_in_the_tables():
    odd = [{"first": "x"}, {"stop": [1]}, {"segments": 10**400}, {"segments": "x"}]
    records = [{"op": "replay.run", "segments": 3, "first": 0, "stop": 2} | changes for changes in odd]
    page = Page(trace_page.page(trace_file.load(json.dumps({"version": 1, "records": records}))))
    assert page.cells.count("replay.run") == 4
    assert sum(tag == "svg" for tag, _ in page.tags) == 0


def test_half_a_character_is_shown_as_its_code(tmp_path):
    (tmp_path / "t.json").write_text('{"version": 1, "records": [{"op": "\\ud800", "\\udfff": "\\ud801"}]}')
    assert main(["trace-view", str(tmp_path / "t.json")]) == 0
    page = Page((tmp_path / "t.html").read_text(encoding="utf-8"))
    assert "\\ud800" in page.cells
    assert page.data["trace"]["records"] == [{"op": "\ud800", "\udfff": "\ud801"}]


@pytest.mark.parametrize("how", ["default", "named", "link"])
def test_a_trace_is_not_overwritten_by_its_page(tmp_path, capsys, how):
    source = tmp_path / "t.html"
    text = json.dumps(recorded(lambda: attend(0)))
    source.write_text(text)
    (tmp_path / "link.html").symlink_to(source)
    options = {"default": [], "named": ["-o", str(source)], "link": ["-o", str(tmp_path / "link.html")]}[how]
    assert main(["trace-view", str(source), *options]) == 1
    assert "trace-view: output: got" in capsys.readouterr().err
    assert source.read_text() == text


def test_a_page_is_there_whole_or_as_it_was(tmp_path, capsys, monkeypatch):
    source, target = tmp_path / "t.json", tmp_path / "t.html"
    source.write_text(json.dumps(recorded(lambda: attend(0))))
    target.write_text("before")

    def full(path, data):
        path.open("wb").write(data[:10])
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["trace-view", str(source)]) == 1
    assert "trace-view: output: got" in capsys.readouterr().err
    assert target.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.html", "t.json"]


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["trace-view", str(tmp_path / "none.json")]) == 1
    assert "trace-view: file: got" in capsys.readouterr().err
