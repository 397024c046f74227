"""Advice from snapshots, JSON or Prometheus text; every rule on both sides of its target; the dashboard."""

import importlib.util
import io
import json
import math
import re
from pathlib import Path

import pytest

import sic_kernels as sic
from sic_kernels.cli import main
from sic_kernels.runtime import advice
from sic_kernels.runtime.metrics import REGISTRY, Registry, Value

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("grafana_dashboard", ROOT / "tools" / "grafana_dashboard.py")
grafana = importlib.util.module_from_spec(spec)
spec.loader.exec_module(grafana)

# The targets of the mission.
MISSION = {
    "sic_slice_hit_ratio": (0.85, None), "sic_cursor_recovery_rate": (0.9995, None),
    "sic_hash_collision_rate": (None, 0.005), "sic_mem_pool_utilization": (0.65, 0.85),
    "sic_graph_replay_ratio": (0.92, None),
}  # fmt: skip


def registry():
    made = Registry()
    made.register("sic_slice_hit_ratio", "", "n", "d").add(80, 100)
    falls = made.register("sic_slice_fallback_ratio", "", "n", "d", label="reason")
    falls.add(3, 100, reason="omitted_mass")
    falls.add(0, 0, reason="no_sliced_cache")
    made.register("sic_cursor_recovery_rate", "", "n", "d").add(6000, 6000)
    made.register("sic_mem_pool_utilization", "", "n", "d", kind="gauge").set(90, 100)
    made.register("sic_graph_replay_ratio", "", "n", "d")
    return made


def test_the_targets_are_the_missions():
    for name, bounds in MISSION.items():
        (rule,) = [r for r in advice.RULES if r.metric == name]
        assert (rule.low, rule.high) == bounds


def test_every_rule_names_a_metric_and_a_change_for_each_side():
    for rule in advice.RULES:
        assert (REGISTRY.get(rule.metric).label is not None) == bool(rule.label)
        assert bool(rule.too_low) == (rule.low is not None)
        assert bool(rule.too_high) == (rule.high is not None)
        assert rule.target


@pytest.mark.parametrize("rule", advice.RULES, ids=lambda r: r.metric + r.label)
def test_each_rule_on_both_sides(rule):
    def judged(ratio):
        snapshot = {rule.metric: {rule.label: Value(ratio * 1e6, 1e6)}}
        (found,) = [a for a, r in zip(advice.advise(snapshot), advice.RULES) if r is rule]
        return found

    for bound, step, change in ((rule.low, 1e-5, rule.too_low), (rule.high, -1e-5, rule.too_high)):
        if bound is None:
            continue
        assert judged(bound + step).verdict == advice.MET
        assert judged(bound + step).change == ""
        for value in (bound, bound - step):
            assert (judged(value).verdict, judged(value).change) == (advice.MISSED, change)


def test_nothing_measured_is_not_judged():
    assert {a.verdict for a in advice.advise({})} == {advice.UNKNOWN}
    zero = {rule.metric: {rule.label: Value(0, 0)} for rule in advice.RULES}
    assert {a.verdict for a in advice.advise(zero)} == {advice.UNKNOWN}


@pytest.mark.parametrize(
    "top, bottom",
    [(math.nan, 1), (1, math.nan), (math.inf, math.inf), (1, math.inf), (-5, -1), (-1, 10), (500, 1), (5, 0), (0, -1)],
)
def test_what_is_no_share_is_not_usable(top, bottom, tmp_path, capsys):
    """By hand for each rule: of them only the saving, whose numerator is a difference, may be negative."""
    snapshot = {"numerator": top, "denominator": bottom}
    for rule in advice.RULES:
        (found,) = [
            a for a, r in zip(advice.advise({rule.metric: {rule.label: Value(top, bottom)}}), advice.RULES) if r is rule
        ]
        if rule.metric == "sic_redundancy_elimination_ratio" and top == -1:
            assert (found.verdict, found.value) == (advice.MISSED, -0.1)
        else:
            assert (found.verdict, found.value, found.change) == (advice.UNUSABLE, None, "")
            assert found.note.startswith(f"{top:g} of {bottom:g} is no share")
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps({"sic_hash_collision_rate": snapshot}))
    assert main(["advise", str(path)]) == 0
    assert "not usable" in capsys.readouterr().out
    assert main(["advise", str(path), "--strict", "--json"]) == 1
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    path.write_text("".join(f"sic_hash_collision_rate_{k}_total {v}\n" for k, v in snapshot.items()))
    assert main(["advise", str(path), "--strict"]) == 1
    assert "not usable" in capsys.readouterr().out


def test_a_number_beyond_all_floats_is_not_usable():
    for digits in (10**400, -(10**400)):
        read = advice.read(json.dumps({"sic_graph_replay_ratio": {"numerator": digits, "denominator": 1}}))
        assert {a.verdict for a in advice.advise(read)} == {advice.UNUSABLE, advice.UNKNOWN}


@pytest.mark.parametrize("text", [None, 5, b"{}"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(sic.ArgumentError, match=r"advise: snapshot: got .*, expected a string"):
        advice.read(text)


def test_few_events_are_named():
    """log 0.05 / log 0.9995 = 5990.0..; log 0.05 / log 0.995 = 597.6; log 0.05 / log 0.85 = 18.4."""
    rules = {r.metric: r.events_needed() for r in advice.RULES}
    assert rules["sic_cursor_recovery_rate"] == 5990
    assert rules["sic_hash_collision_rate"] == 598
    assert rules["sic_slice_hit_ratio"] == 19
    assert rules["sic_mem_pool_utilization"] == 0
    for events, note in ((5989, "5,989 events; 5,990 without"), (5990, "")):
        (found,) = [
            a for a in advice.advise({"sic_cursor_recovery_rate": {"": Value(events, events)}}) if a.value is not None
        ]
        assert found.verdict == advice.MET
        assert found.note.startswith(note)
        assert bool(found.note) == bool(note)


def test_json_and_prometheus_text_are_read_alike():
    made = registry()
    from_json, from_text = advice.read(json.dumps(made.snapshot())), advice.read(made.prometheus_text())
    assert from_json == from_text
    assert from_json["sic_slice_fallback_ratio"]["omitted_mass"] == Value(3, 100)
    verdicts = {a.metric: a.verdict for a in advice.advise(from_json)}
    assert verdicts["sic_slice_hit_ratio"] == verdicts["sic_mem_pool_utilization"] == advice.MISSED
    assert verdicts["sic_slice_fallback_ratio (no_sliced_cache)"] == verdicts["sic_cursor_recovery_rate"] == advice.MET
    assert verdicts["sic_graph_replay_ratio"] == verdicts["sic_hash_collision_rate"] == advice.UNKNOWN


def test_parts_of_several_processes_add_up():
    samples = [("numerator", "a", 9), ("numerator", "b", 1), ("denominator", "a", 10), ("denominator", "b", 10)]
    text = "".join(
        f'sic_slice_hit_ratio_{part}_total{{instance="{host}",job="x"}} {value}\n' for part, host, value in samples
    )
    assert advice.read(text) == {"sic_slice_hit_ratio": {"": Value(10, 20)}}


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a": 3}', '{"a": {"ratio": 1}}', '{"a": {"numerator": null, "denominator": 1}}', "nonsense{", "# HELP a b",
     "up 1\n", '{"a":' * 100_000, '{"a": {"numerator": "1", "denominator": 1}}',
     '{"a": {"numerator": true, "denominator": 1}}'],
    ids=range(11),
)  # fmt: skip
def test_other_text_is_refused(text, tmp_path, capsys):
    with pytest.raises(sic.ArgumentError, match="advise: snapshot: got"):
        advice.read(text)
    (tmp_path / "x").write_text(text)
    assert main(["advise", str(tmp_path / "x")]) == 1
    assert "advise: snapshot: got" in capsys.readouterr().err


def test_the_command(tmp_path, capsys, monkeypatch):
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(registry().snapshot()))
    assert main(["advise", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "sic_slice_hit_ratio" in printed
    assert "raise SIC_SLICE_RATIO" in " ".join(printed.split())
    assert "not measured" in printed
    assert main(["advise", str(path), "--json", "--strict"]) == 1
    rows = {row["metric"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["sic_slice_hit_ratio"]["verdict"] == "missed"
    assert rows["sic_graph_replay_ratio"]["value"] is None
    monkeypatch.setattr("sys.stdin", io.StringIO(registry().prometheus_text()))
    assert main(["advise", "-"]) == 0
    assert main(["advise", str(tmp_path / "none")]) == 1
    assert "advise: file: got" in capsys.readouterr().err


# --- the dashboard ------------------------------------------------------------------------------------------------------


def test_the_dashboard_is_up_to_date():
    assert grafana.PATH.read_text() == grafana.text(), "run: python tools/grafana_dashboard.py"


def test_every_metric_has_a_panel_over_names_that_are_exported():
    panels = [p for p in grafana.dashboard()["panels"] if p["type"] == "timeseries"]
    assert sorted(p["title"] for p in panels) == [m.name for m in REGISTRY._sorted()]
    exported = {family.name for family in REGISTRY.families()}
    for p in panels:
        (target,) = p["targets"]
        names = re.findall(r"\bsic_\w+", target["expr"])
        assert len(names) == 2
        assert set(names) <= exported, target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")


def test_labels_counters_and_gauges_in_the_queries():
    expressions = {p["title"]: p["targets"][0] for p in grafana.dashboard()["panels"] if p["type"] == "timeseries"}
    assert expressions["sic_slice_fallback_ratio"]["expr"] == (
        'sum by (reason)(rate(sic_slice_fallback_ratio_numerator_total{instance=~"$instance"}[$__rate_interval]))'
        ' / sum by (reason)(rate(sic_slice_fallback_ratio_denominator_total{instance=~"$instance"}[$__rate_interval]))'
    )
    assert expressions["sic_slice_fallback_ratio"]["legendFormat"] == "{{reason}}"
    assert expressions["sic_mem_pool_utilization"]["expr"] == (
        'sum(sic_mem_pool_utilization_numerator{instance=~"$instance"})'
        ' / sum(sic_mem_pool_utilization_denominator{instance=~"$instance"})'
    )


def test_panels_do_not_overlap_and_targets_are_drawn():
    board = grafana.dashboard()
    taken, ids = set(), [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids))
    for p in board["panels"]:
        place = p["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    defaults = {p["title"]: p["fieldConfig"]["defaults"] for p in board["panels"] if "fieldConfig" in p}
    steps = {title: fields.get("thresholds", {}).get("steps") for title, fields in defaults.items()}
    assert steps["sic_mem_pool_utilization"] == [
        {"color": "red", "value": None}, {"color": "green", "value": 0.65}, {"color": "red", "value": 0.85},
    ]  # fmt: skip
    assert steps["sic_hash_collision_rate"] == [{"color": "green", "value": None}, {"color": "red", "value": 0.005}]
    assert steps["sic_token_efficiency_ratio"] is None


def test_what_an_import_needs():
    board = json.loads(grafana.PATH.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert "id" not in board  # an id of another Grafana would replace one of its dashboards
    (source, _) = board["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert all(p["datasource"]["uid"] == "${datasource}" for p in board["panels"] if p["type"] != "row")
