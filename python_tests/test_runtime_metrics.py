"""Metrics: numerator and denominator, null for nothing measured, valid Prometheus text, threads."""

import json
import math
import re
import threading

import pytest

import sic_kernels as sic
from sic_kernels.runtime.metrics import REGISTRY, Registry

MISSION = {
    "sic_slice_hit_ratio", "sic_cursor_recovery_ratio", "sic_hash_collision_rate", "sic_mem_pool_utilization",
    "sic_graph_replay_ratio", "sic_redundancy_elimination_ratio", "sic_termination_accuracy_ratio",
    "sic_cache_hit_drift_ratio", "sic_token_efficiency_ratio", "sic_padding_efficiency_ratio",
    "sic_delta_size_ratio", "sic_prediction_latency_seconds",
}  # fmt: skip


@pytest.fixture
def registry():
    registry = Registry()
    registry.register("hits", "Share of hits.", "hits counted", "tries")
    registry.register("pool", "Share in use.", "bytes in use", "bytes", kind="gauge")
    registry.register("falls", 'A "quoted" \\ help\nwith a line.', "falls", "tries", label="reason")
    return registry


def test_the_mission_has_its_metrics():
    assert set(sic.metrics.snapshot()) >= MISSION


def test_nothing_measured_is_null_not_zero(registry):
    assert registry.snapshot()["hits"] == {"ratio": None, "numerator": 0.0, "denominator": 0.0}
    assert "null" in json.dumps(registry.snapshot())


def test_sums(registry):
    hits = registry.get("hits")
    hits.add(3, 4)
    hits.add(0, 4)
    assert registry.snapshot()["hits"] == {"ratio": 0.375, "numerator": 3.0, "denominator": 8.0}
    registry.reset()
    assert registry.snapshot()["hits"]["ratio"] is None


def test_gauge_replaces(registry):
    registry.get("pool").set(10, 100)
    registry.get("pool").set(30, 100)
    assert registry.snapshot()["pool"] == {"ratio": 0.3, "numerator": 30.0, "denominator": 100.0}


def test_labels_share_the_denominator(registry):
    falls = registry.get("falls")
    falls.add(1, 10, reason="mass")
    falls.add(2, 10, reason="short")
    by_reason = registry.snapshot()["falls"]["by_reason"]
    assert by_reason["mass"] == {"ratio": 0.05, "numerator": 1.0, "denominator": 20.0}
    assert by_reason["short"]["ratio"] == 0.1


@pytest.mark.parametrize("bad", [(-1, 1), (1, -1), (math.nan, 1), (1, math.inf)])
def test_bad_numbers_are_refused_and_change_nothing(registry, bad):
    with pytest.raises(sic.ArgumentError, match=r"^hits: (numerator|denominator): got .*, expected a finite number"):
        registry.get("hits").add(*bad)
    assert registry.snapshot()["hits"]["denominator"] == 0


def test_wrong_use_is_refused(registry):
    with pytest.raises(sic.ArgumentError, match=r"metrics: name: got 'hit', expected falls\|hits\|pool"):
        registry.get("hit")
    with pytest.raises(sic.ArgumentError, match="not registered yet"):
        registry.register("hits", "", "", "")
    with pytest.raises(sic.ArgumentError, match="Prometheus name"):
        registry.register("hit rate", "", "", "")
    with pytest.raises(sic.ArgumentError, match="reserved"):
        registry.register("hits_total", "", "", "")
    with pytest.raises(sic.ArgumentError, match="a counter"):
        registry.get("hits").set(1, 1)
    with pytest.raises(sic.ArgumentError, match="a gauge"):
        registry.get("pool").add(1, 1)
    with pytest.raises(sic.ArgumentError, match="labels"):
        registry.get("falls").add(1, 1)
    with pytest.raises(sic.ArgumentError, match="labels"):
        registry.get("hits").add(1, 1, reason="x")


SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"\})? (\S+)')


def parse_exposition(text):
    """Name -> (type, [(label value, number)]): a strict reader of the Prometheus text format."""
    assert text.endswith("\n")
    families, name = {}, None
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, about = line[7:].split(" ", 1)
            assert name not in families, "one HELP for a family"
            assert re.fullmatch(r"(?:[^\\]|\\\\|\\n)*", about)
            families[name] = (None, [])
        elif line.startswith("# TYPE "):
            typed, kind = line[7:].split(" ")
            assert typed == name
            assert kind in ("gauge", "counter")
            assert (kind == "counter") == name.endswith("_total")
            families[name] = (kind, families[name][1])
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == name, "samples follow their own TYPE line"
            families[name][1].append((match[3], float(match[4])))
    return families


def test_exposition(registry):
    registry.get("hits").add(1, 3)
    registry.get("falls").add(0.5, 2, reason='a "b" \\ c\nd')
    families = parse_exposition(registry.prometheus_text())
    assert families["hits"] == ("gauge", [(None, 1 / 3)])
    assert families["hits_numerator_total"] == ("counter", [(None, 1.0)])
    assert families["hits_denominator_total"] == ("counter", [(None, 3.0)])
    assert families["pool_numerator"] == ("gauge", [(None, 0.0)])
    assert math.isnan(families["pool"][1][0][1])
    assert families["falls"] == ("gauge", [(r"a \"b\" \\ c\nd", 0.25)])


def test_exposition_of_all_metrics_of_the_library():
    families = parse_exposition(sic.metrics.prometheus_text())
    assert set(families) >= MISSION
    assert Registry().prometheus_text() == ""


def test_official_parser_agrees(registry):
    from prometheus_client import parser

    registry.get("falls").add(1, 2, reason='x"y')
    families = {f.name: f for f in parser.text_string_to_metric_families(registry.prometheus_text())}
    assert families["falls"].samples[0].labels == {"reason": 'x"y'}


def test_threads_lose_nothing(registry):
    hits = registry.get("hits")
    start = threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(2000):
            hits.add(1, 2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.snapshot()["hits"] == {"ratio": 0.5, "numerator": 16000.0, "denominator": 32000.0}


def test_one_registry():
    assert sic.metrics.REGISTRY is REGISTRY


def test_what_a_runner_measures_itself():
    sic.metrics.reset()
    assert sic.metrics.record_time_per_token(0.04, 0.01) == 0.75
    assert sic.metrics.record_time_per_token(0.01, 0.02) == -1
    assert sic.metrics.record_hit_rates(0.5, 0.4) == pytest.approx(0.2)
    assert sic.metrics.record_hit_rates(0.0, 0.4) is None
    sic.metrics.record_tokens(30, 40)
    sic.metrics.record_tokens(10, 40)
    with sic.metrics.timed_predictions(4):
        pass
    seen = sic.metrics.snapshot()
    assert seen["sic_redundancy_elimination_ratio"]["ratio"] == -1
    assert seen["sic_cache_hit_drift_ratio"]["ratio"] is None
    assert seen["sic_token_efficiency_ratio"]["ratio"] == 0.5
    assert seen["sic_prediction_latency_seconds"]["denominator"] == 4
    assert 0 < seen["sic_prediction_latency_seconds"]["ratio"] < 1
    with pytest.raises(sic.ArgumentError, match="record_tokens: useful: got 3, expected at most"):
        sic.metrics.record_tokens(3, 2)
    with pytest.raises(sic.ArgumentError, match="record_hit_rates: old: got 2, expected a rate"):
        sic.metrics.record_hit_rates(2, 1)
    sic.metrics.reset()
