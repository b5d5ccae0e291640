"""Dashboards and alerts name what there is, and the files are what the tables give."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import render
from deploy.alerts import ALERTS
from deploy.dashboards import DASHBOARDS, PROMETHEUS_METRICS, RAY_GPU_METRICS, RAY_METRICS
from flowgrpo_ray.run_dir.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
OURS = {f"ray_{m.prometheus}" + ("_total" if m.kind == "counter" else ""): m for m in METRICS}
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$run_id": ".*", "$run": ".*", "$cluster": ".*"}
# Of @grafana/data's table of units; `none` shows the number as it is.
UNITS = {"none", "s", "bytes", "percent", "percentunit"}
PANELS = [panel for table in DASHBOARDS.values() for row in table.rows for panel in row.panels]
EXPRESSIONS = {**{f"{panel.title} {query.legend}": query.expr for panel in PANELS for query in panel.queries},
               **{alert.name: alert.expr for alert in ALERTS}}


def substituted(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
def test_an_expression_names_metrics_and_labels_that_exist(expr):
    names = re.findall(r"\b(?:ray_\w+|ALERTS)\b(?=[{)\[])", expr)
    assert names
    known = {*OURS, *RAY_METRICS, *RAY_GPU_METRICS, *PROMETHEUS_METRICS}
    assert set(names) <= known, f"no metric is named {set(names) - known}"
    ours = {OURS[name] for name in names if name in OURS}
    if ours:
        labels = {"run", "run_id", *(label for metric in ours for label in metric.labels)}
        used = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(",")}
        used |= set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', expr))
        assert used <= labels, f"labels of none of them: {used - labels}"


def test_every_counter_is_read_as_one():
    for title, expr in EXPRESSIONS.items():
        for name in set(re.findall(r"ray_flowgrpo_\w+", expr)):
            reads = OURS[name].kind == "counter"
            assert reads == bool(re.search(rf"(?:rate|increase)\({name}\b", expr)), title


def test_the_files_are_what_the_tables_give():
    done = subprocess.run([sys.executable, "-m", "deploy.render", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_out_of_date_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(render, "HERE", tmp_path / "deploy")
    assert render.main(["--check"]) == 1
    assert "deploy/grafana/fleet.json" in capsys.readouterr().err
    assert render.main([]) == 0 and render.main(["--check"]) == 0
    (tmp_path / "deploy/prometheus/rules.yaml").write_text("groups: []\n")
    assert render.main(["--check"]) == 1
    assert capsys.readouterr().err == "out of date: deploy/prometheus/rules.yaml; run python -m deploy.render\n"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_that_grafana_reads(name):
    board = json.loads((ROOT / f"deploy/grafana/{name}.json").read_text())
    assert board["uid"] and board["title"] and board["schemaVersion"] == 39
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not covered & cells, f"{panel['title']} lies on another panel"
        covered |= cells
        if panel["type"] == "row":
            assert panel["panels"] == [] and at["w"] == 24
            continue
        assert panel["type"] in ("timeseries", "stat", "table")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        assert all(target["expr"] and target["datasource"] == panel["datasource"] for target in panel["targets"])
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used <= {*variables, "__rate_interval", "__range"}
    assert all(variables[name]["multi"] and variables[name]["includeAll"] for name in ("run", "run_id", "cluster"))


def test_a_title_stands_once_in_a_row():
    for table in DASHBOARDS.values():
        for row in table.rows:
            titles = [panel.title for panel in row.panels]
            assert len(set(titles)) == len(titles)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_every_query_is_promql(tmp_path):
    rules = [{"record": f"panel:{number}", "expr": substituted(expr)} for number, expr in enumerate(EXPRESSIONS.values())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(tmp_path / "rules.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_page():
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/operations.md").read_text(), re.M)
    assert [alert.name for alert in ALERTS] == [name for name in headings if name.startswith("FlowGrpo")]


def test_the_wheel_leaves_the_tool_out():
    tomllib = pytest.importorskip("tomllib")
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert found == ["flowgrpo_ray*", "actors*"]
