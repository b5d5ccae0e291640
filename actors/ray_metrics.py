"""Metrics through `ray.util.metrics`: the agent of the driver's node exports them as `ray_flowgrpo_<name>`, counters with
`_total`, and `http://HEAD:8265/api/prometheus/sd` lists the agents. Ray adds labels of its own (WorkerId, NodeAddress)."""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge

from flowgrpo_ray.run_dir.metrics import Metric
from flowgrpo_ray.views.exporter import Labels


class RayMetrics:
    """A sink of `Exporter` in a connected driver. Recording is a call into Ray's C++ library and takes microseconds."""

    def __init__(self) -> None:
        self._metrics: dict[str, Gauge | Counter] = {}

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        self._of(metric, labels).set(value, tags=dict(labels))

    def add(self, metric: Metric, labels: Labels, amount: float) -> None:
        counter = self._of(metric, labels)
        if amount:
            counter.inc(amount, tags=dict(labels))
        else:
            counter._record(0.0, tags=dict(labels))  # `inc` takes no 0, which makes the series known

    def _of(self, metric: Metric, labels: Labels) -> Any:  # a Gauge or a Counter, as the metric says
        found = self._metrics.get(metric.name)
        if found is None:
            kind = Gauge if metric.kind == "gauge" else Counter
            found = self._metrics[metric.name] = kind(metric.prometheus, metric.help, tuple(labels))
        return found
