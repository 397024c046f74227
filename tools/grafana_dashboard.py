"""Write docs/grafana/sic_kernels.json, a dashboard over every metric of the registry; targets are drawn as thresholds.

    python tools/grafana_dashboard.py

In Grafana: Dashboards, New, Import; it asks for the Prometheus data source.
"""

import json
from pathlib import Path

from sic_kernels.runtime.advice import RULES
from sic_kernels.runtime.metrics import REGISTRY

PATH = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "sic_kernels.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, ACROSS = 8, 7, 3

# Row -> the beginnings of its metrics' names; the last row takes the others.
ROWS = {
    "Slices": ("sic_slice_",),
    "Replay": ("sic_cursor_", "sic_graph_", "sic_mem_pool_"),
    "Coded caches and the block index": ("sic_delta_", "sic_hash_", "sic_index_"),
    "Roll-out": ("sic_rollout_", "sic_redundancy_", "sic_context_", "sic_gate_"),
    "Tokens": ("",),
}


def dashboard():
    """The dashboard as Grafana's JSON model."""
    left = list(REGISTRY._sorted())
    panels, y = [], 0
    for title, beginnings in ROWS.items():
        mine = [m for m in left if m.name.startswith(beginnings)]
        left = [m for m in left if m not in mine]
        place = {"x": 0, "y": y, "w": WIDTH * ACROSS, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        )
        for n, metric in enumerate(mine):
            place = {"x": n % ACROSS * WIDTH, "y": y + 1 + n // ACROSS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **panel(metric)})
        y += 1 + -(-len(mine) // ACROSS) * HEIGHT
    return {
        "title": "sic_kernels", "uid": "sic-kernels", "tags": ["sic_kernels"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-2h", "to": "now"}, "timezone": "browser",
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            {
                "name": "instance", "label": "Instance", "type": "query", "datasource": SOURCE, "multi": True,
                "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2,
                "query": {"query": "label_values(sic_slice_hit_ratio, instance)", "refId": "instance"},
            },
        ]},
        "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


def panel(metric):
    """One metric over time: its parts are summed over the instances and then divided, as ratios cannot be added."""
    by = f" by ({metric.label})" if metric.label else ""
    parts = [
        f'sum{by}(rate({metric.name}_{part}_total{{instance=~"$instance"}}[$__rate_interval]))' if metric.kind == "counter"
        else f'sum{by}({metric.name}_{part}{{instance=~"$instance"}})'
        for part in ("numerator", "denominator")
    ]  # fmt: skip
    unit = "s" if metric.name.endswith("_seconds") else "percentunit"
    target = {
        "refId": "A", "datasource": SOURCE, "expr": " / ".join(parts),
        "legendFormat": f"{{{{{metric.label}}}}}" if metric.label else metric.name,
    }  # fmt: skip
    return {
        "type": "timeseries", "title": metric.name, "datasource": SOURCE, "targets": [target],
        "description": f"{metric.about} {metric.numerator} / {metric.denominator}",
        "fieldConfig": {"defaults": {"unit": unit, **limits(metric)}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": bool(metric.label)},
                    "tooltip": {"mode": "multi", "sort": "none"}},
    }  # fmt: skip


def limits(metric):
    """Green where the target is met, red where not."""
    rule = next((r for r in RULES if r.metric == metric.name and not r.label), None)
    if rule is None:
        return {}
    steps = [{"color": "red" if rule.low is not None else "green", "value": None}]
    steps += [{"color": "green", "value": rule.low}] * (rule.low is not None)
    steps += [{"color": "red", "value": rule.high}] * (rule.high is not None)
    return {
        "thresholds": {"mode": "absolute", "steps": steps}, "custom": {"thresholdsStyle": {"mode": "line+area"}},
    }  # fmt: skip


def text():
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text())
