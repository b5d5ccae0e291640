"""A real Prometheus watches a real run: every panel has data, and what the run leaves behind is what it should be."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from clusters import Nodes, free_port, running
from runs import SMALL
from test_monitoring import OURS, PANELS, substituted

from deploy.dashboards import RAY_METRICS
from flowgrpo_ray.run_dir.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"),
]


def until(what: str, missing: Callable[[], object], log: Path, *processes: subprocess.Popen, seconds: float = 150) -> None:
    """Wait until nothing is missing, as long as the processes run."""
    end, left = time.monotonic() + seconds, missing()
    while left:
        assert time.monotonic() < end, f"{what}: still missing: {left}"
        assert all(process.poll() is None for process in processes), log.read_text()
        time.sleep(1)
        left = missing()


class Prometheus:
    """Scrapes every second what Ray's service discovery lists (`job="ray"`), and our own port (`job="port"`)."""

    def __init__(self, stack: ExitStack, folder: Path, dashboard: int, port: int) -> None:
        rename = {"source_labels": ["__name__"], "regex": "(flowgrpo_.+)", "target_label": "__name__",
                  "replacement": "ray_$1"}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "deploy/prometheus/rules.yaml")],
            "scrape_configs": [
                {"job_name": "ray", "http_sd_configs": [{"url": f"http://127.0.0.1:{dashboard}/api/prometheus/sd",
                                                         "refresh_interval": "1s"}]},
                {"job_name": "port", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
                 "metric_relabel_configs": [rename]}]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self._url, log = f"http://{address}", folder / "prometheus.log"
        process = stack.enter_context(running(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"], log))
        until("Prometheus", lambda: not self._ready(), log, process)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=30):
                return True
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> object:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict]:
        return self.get("query", query=expr)["result"]

    def names(self, job: str) -> set[str]:
        return set(self.get("label/__name__/values", **{"match[]": f'{{job="{job}"}}'}))


@dataclass
class Watched:
    """Prometheus, and a run that trains until it is ended."""

    prometheus: Prometheus
    run: subprocess.Popen
    log: Path

    def until(self, what: str, missing: Callable[[], object]) -> None:
        until(what, missing, self.log, self.run)


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    nodes, dashboard, port = Nodes(), free_port(), free_port()
    settings = {**SMALL, "run": {"name": "watched", "dir": str(folder), "steps": 5000}, "loss": {**SMALL["loss"], "beta": 0.01},
                "eval": {**SMALL["eval"], "at_start": True}, "checkpoint": {"every_steps": 2, "keep": 2},
                "logging": {**SMALL["logging"], "prometheus_port": port}}
    (folder / "watched.yaml").write_text(yaml.safe_dump(settings))
    with ExitStack() as stack:
        stack.callback(nodes.stop)
        nodes.start_head(2, dashboard)
        prometheus = Prometheus(stack, folder, dashboard, port)
        command = [sys.executable, "-m", "flowgrpo_ray.cli", "train", str(folder / "watched.yaml"), "--address", nodes.address]
        log = folder / "run.log"
        run = stack.enter_context(running(command, log, env=nodes.environment()))
        yield Watched(prometheus, run, log)


def test_every_panel_has_data(watched):
    """From Ray's agents; and from our own port, where a panel shows nothing of Ray's."""
    queries = {}
    for panel, job in itertools.product(PANELS, ("ray", "port")):
        for query in panel.queries:
            names = set(re.findall(r"\b(ray_\w+){", query.expr))
            if not panel.gpu and (job == "ray" or names <= OURS.keys()):
                expr = re.sub(r"\b(ray_\w+){", rf'\1{{job="{job}",', substituted(query.expr))
                queries[f"{panel.title} from {job}: {query.expr}"] = expr

    def missing() -> list[str]:
        for title, expr in list(queries.items()):
            if watched.prometheus.query(expr):
                del queries[title]
        return list(queries)

    watched.until("panels", missing)


def test_names_are_those_that_expressions_use(watched):
    prometheus = watched.prometheus
    known = {f"ray_{metric.prometheus}" + ("_total" if metric.kind == "counter" else "") for metric in METRICS}
    for job in ("ray", "port"):
        names = {name for name in prometheus.names(job) if name.startswith("ray_flowgrpo_") and not name.endswith("_created")}
        assert names <= known, names - known
        assert {name for name, metric in OURS.items() if metric.kind == "counter"} <= names, "counters start as 0"
    assert set(RAY_METRICS) <= prometheus.names("ray")
    (series,) = prometheus.query('ray_flowgrpo_reward_mean{job="port"}')
    assert set(series["metric"]) == {"__name__", "job", "instance", "run", "run_id", "reward"}
    assert series["metric"]["run"] == "watched"
    own = {"run", "run_id", "pool"}
    for series in prometheus.query('ray_flowgrpo_pool_ready{job="ray"}'):
        rays = {label for label in series["metric"] if label[0].isupper() or label.startswith("otel")}
        assert set(series["metric"]) - rays == {"__name__", "job", "instance", *own}, "no actor, node or process of ours"


def test_alerts_are_evaluated_and_counters_outlive_the_run(watched):
    prometheus, run = watched.prometheus, watched.run
    groups = prometheus.get("rules")["groups"]
    assert all(rule["health"] == "ok" for rule in groups[0]["rules"]), groups
    steps = 'sum by (run, run_id) (increase(ray_flowgrpo_steps_committed_total{job="ray"}[10m]))'
    watched.until("a committed step", lambda: not any(float(series["value"][1]) >= 1 for series in prometheus.query(steps)))
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=120) == 143
    gauge, counter = 'ray_flowgrpo_step{job="ray"}', 'ray_flowgrpo_steps_committed_total{job="ray"}'
    until("the end of the gauge", lambda: prometheus.query(gauge), watched.log)
    assert float(prometheus.query(counter)[0]["value"][1]) >= 1
