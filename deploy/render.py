"""Write the dashboards and alert rules from their tables.

    python -m deploy.render            write the files
    python -m deploy.render --check    exit with 1 if a file is not what the tables give
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from deploy.alerts import ALERTS
from deploy.dashboards import DASHBOARDS, Dashboard, Panel, Query, Variable

HERE = Path(__file__).parent
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHT = {"timeseries": 8, "table": 8, "stat": 4}
_NOTE = "# Made by python -m deploy.render from deploy/alerts.py: change that.\n"


def rules() -> dict[str, Any]:
    """The alerts as a Prometheus rule file."""
    return {"groups": [{"name": "flowgrpo", "rules": [
        {"alert": alert.name, "expr": alert.expr, "for": alert.lasts, "labels": {"severity": alert.severity},
         "annotations": {"summary": alert.summary, "description": alert.description, "runbook": alert.runbook}}
        for alert in ALERTS]}]}


def prometheus_rule() -> dict[str, Any]:
    """The same as an object for prometheus-operator."""
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
            "metadata": {"name": "flowgrpo", "labels": {"app.kubernetes.io/part-of": "flowgrpo-ray"}}, "spec": rules()}


def dashboard(table: Dashboard) -> dict[str, Any]:
    """A dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in table.rows:
        panels.append({"type": "row", "title": row.title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y, x, tallest = y + 1, 0, 0
        for panel in row.panels:
            height = _HEIGHT[panel.kind]
            if x + panel.width > 24:
                y, x, tallest = y + tallest, 0, 0
            panels.append(_panel(panel) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": height}})
            x, tallest = x + panel.width, max(tallest, height)
        y += tallest
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "uid": table.uid, "title": table.title, "description": table.description, "tags": ["flowgrpo", "ray"],
        "schemaVersion": 39, "version": 1, "editable": True, "graphTooltip": 1, "refresh": "30s", "timezone": "",
        "time": {"from": "now-6h", "to": "now"}, "annotations": {"list": []}, "links": [],
        "templating": {"list": [
            {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "hide": 0},
            *map(_variable, table.variables)]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any]
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 30 if panel.stacked else 5, "showPoints": "never", "spanNulls": True,
                              "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"}}
        options = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                   "tooltip": {"mode": "multi", "sort": "desc"}}
    elif panel.kind == "stat":
        named = "name" if "{{phase}}" in panel.queries[0].legend else "value"
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "textMode": named,
                   "colorMode": "none", "graphMode": "none"}
    else:
        options = {"showHeader": True}
    made = {"type": panel.kind, "title": panel.title, "description": panel.description, "datasource": _SOURCE,
            "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
            "targets": [_target(query, chr(ord("A") + place), panel.kind) for place, query in enumerate(panel.queries)]}
    if panel.kind == "table":
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": {"Time": True}}}]
    return made


def _target(query: Query, ref: str, kind: str) -> dict[str, Any]:
    target = {"datasource": _SOURCE, "refId": ref, "expr": query.expr, "legendFormat": query.legend,
              "instant": kind != "timeseries", "range": kind == "timeseries"}
    return target | ({"format": "table"} if kind == "table" else {})


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {"name": variable.name, "label": variable.name.replace("_", " "), "type": "query", "datasource": _SOURCE,
            "query": {"query": query, "refId": "A"}, "definition": query, "multi": True, "includeAll": True,
            "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}, "refresh": 2, "sort": 1, "hide": 0}


def files() -> dict[Path, str]:
    """What the tables give: text by path."""
    made = {HERE / "grafana" / f"{name}.json": json.dumps(dashboard(table), indent=1) + "\n"
            for name, table in DASHBOARDS.items()}
    for path, tree in ((HERE / "prometheus" / "rules.yaml", rules()),
                       (HERE / "kuberay" / "components" / "monitoring" / "prometheusrule.yaml", prometheus_rule())):
        made[path] = _NOTE + yaml.safe_dump(tree, sort_keys=False, width=110)
    return made


def stale(made: dict[Path, str]) -> list[Path]:
    """Files that are missing, or are not what they should be."""
    return [path for path, text in made.items() if not path.is_file() or path.read_text() != text]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.render", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args(None if arguments is None else list(arguments)).check
    made = files()
    old = stale(made)
    if check and old:
        names = ", ".join(str(path.relative_to(HERE.parent)) for path in old)
        print(f"out of date: {names}; run python -m deploy.render", file=sys.stderr)
        return 1
    if not check:
        for path in old:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
