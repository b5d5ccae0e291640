"""What leaves the driver for Prometheus: every metric of the table, as `flowgrpo_<name>{run, run_id, …}`.

A row is exported when it is recorded, the run's status about once a second. Counters start at 0 with every driver and count
from there: what a run did before it was resumed was counted by the driver of then, so that sums of `increase()` over both
are the run's totals. All series that can be foreseen start as 0, since `rate()` does not see the step from nothing to 1.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from flowgrpo_ray.config import Config
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.run_dir.metrics import METRICS, Metric, Row, find, named
from flowgrpo_ray.views.status import PHASES, REASONS, STAGES, PoolStatus, RunStatus

CAUSES = {"died": "deaths", "timeout": "timeouts", "taken_out": "taken_out", "failed_start": "failed_starts"}
Labels = Mapping[str, str]
_Key = tuple[str, tuple[str, ...]]


class Sink(Protocol):
    """Where metrics go. Neither method waits for anything."""

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """A gauge's value."""

    def add(self, metric: Metric, labels: Labels, amount: float) -> None:
        """Raise a counter by `amount`; 0 makes the series known."""


class PrometheusServer:
    """Serves metrics as text on a port of this machine, at all its addresses; `/metrics` or any other path.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Gauge | Counter] = {}
        try:
            self._server, self._thread = start_http_server(port, registry=self._registry)
        except OSError as error:
            raise ConfigError(f"logging.prometheus_port is {port}, and port {port} of this machine cannot be used "
                              f"({error.strerror}); choose another port") from None

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        self._series(metric, labels).set(value)

    def add(self, metric: Metric, labels: Labels, amount: float) -> None:
        self._series(metric, labels).inc(amount)

    def _series(self, metric: Metric, labels: Labels) -> Any:  # a Gauge or a Counter, as the metric says
        found = self._metrics.get(metric.name)
        if found is None:
            kind = Gauge if metric.kind == "gauge" else Counter
            found = self._metrics[metric.name] = kind(
                metric.prometheus, metric.help, list(labels), registry=self._registry)
        return found.labels(**labels)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def served(port: int | None) -> Iterator[list[Sink]]:
    """The server of `logging.prometheus_port`, if it is set, for as long as the block lasts."""
    if port is None:
        yield []
        return
    server = PrometheusServer(port)
    try:
        yield [server]
    finally:
        server.close()


def _key(metric: Metric, labels: Labels) -> _Key:
    return metric.name, tuple(labels.values())


class Exporter:
    """Gives rows and states of one run to the sinks.

    Args:
        step: committed steps so far.
        clock: seconds since the epoch.
    """

    def __init__(
        self, config: Config, run_id: str, sinks: Sequence[Sink], *, step: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sinks, self._clock, self._step = list(sinks), clock, step
        self._run = {"run": config.run.name, "run_id": run_id}
        self._totals: dict[_Key, float] = {}
        self._seed(config)
        exact = config.pools.learner.num_gpus == 0 and config.model.dtype == "float32"
        self._set("ratio_tolerance", config.ratio_tolerance(exact))
        self._set("steps", config.run.steps)
        self._set("step", step)
        self._set("checkpoint_interval", config.checkpoint.every_steps)
        self._set("checkpoint_step", step)
        self._set("last_step_timestamp", clock())

    def _seed(self, config: Config) -> None:
        rollout = "colocated" if config.pools.placement == "colocated" else "rollout"
        values = {"pool": [rollout, "learner", *(f"reward.{name}" for name in config.rewards)],
                  "reward": list(config.rewards), "cause": list(CAUSES), "reason": list(REASONS)}
        for metric in METRICS:
            if metric.kind == "counter":
                for labels in itertools.product(*(values[label] for label in metric.labels)):
                    self._add(metric, dict(zip(metric.labels, labels, strict=True)), 0)
        for phase in PHASES:
            self._set("phase", 0, phase=phase)
        for stage in STAGES:
            self._set("queue_groups", 0, stage=stage)

    def go_on_from(self, row: Row) -> None:
        """Training begins. The counters of the row that the run resumes after are counted; a new run's is empty."""
        self._set("last_step_timestamp", self._clock())
        for key, value in row.items():
            if key != "step" and find(key)[0].kind == "counter":
                self._totals[_key(*find(key))] = value

    def row(self, row: Row) -> None:
        """Export a recorded row. A row of a step that was not finished ("stopped") holds counters alone."""
        for key, value in row.items():
            if key == "step":
                continue
            metric, labels = find(key)
            if metric.kind == "counter":
                self._raise_to(metric, labels, value)
            elif key != "stopped":
                self._give(metric, labels, value)
        if "stopped" in row or row["step"] <= self._step:
            return
        self._add(named("steps_committed"), {}, row["step"] - self._step)
        self._step = int(row["step"])
        self._set("step", self._step)
        self._set("last_step_timestamp", self._clock())
        for name, key in (("images_made", "images"), ("images_without_score", "masked_samples"),
                          ("sync_seconds", "time_sync")):
            self._add(named(name), {}, row.get(key, 0.0))

    def status(self, status: RunStatus) -> None:
        """Export the state of the run; called about once a second."""
        for phase in {*PHASES, status.phase}:
            self._set("phase", float(phase == status.phase), phase=phase)
        self._set("policy_version", status.version)
        for stage in {*STAGES, *status.queue}:
            self._set("queue_groups", status.queue.get(stage, 0), stage=stage)
        for reason, seconds in status.waiting_s.items():
            self._raise_to(named("waiting_seconds"), {"reason": reason}, seconds)
        if status.seconds_left is not None:
            self._set("seconds_left", status.seconds_left)
        if status.checkpoint_step is not None:
            self._set("checkpoint_step", status.checkpoint_step)
        if status.checkpoint_time is not None:
            self._set("checkpoint_age", max(0.0, self._clock() - status.checkpoint_time))
        if status.checkpoint_bytes is not None:
            self._set("checkpoint_bytes", status.checkpoint_bytes)
        self._set("object_store_held", status.object_store_bytes)
        for name, pool in status.pools.items():
            self._pool(name, pool)

    def _pool(self, name: str, pool: PoolStatus) -> None:
        for state in ("target", "ready", "starting", "busy", "draining"):
            self._set(f"pool_{state}", getattr(pool, state), pool=name)
        self._set("pool_queue", pool.queued, pool=name)
        for cause, event in CAUSES.items():
            self._raise_to(named("actors_replaced"), {"pool": name, "cause": cause}, pool.counts.get(event, 0))

    def sync_failed(self) -> None:
        """The proof of a weight sync failed: the run ends."""
        self._add(named("sync_failures"), {}, 1)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._give(named(name), labels, value)

    def _give(self, metric: Metric, labels: Labels, value: float) -> None:
        for sink in self._sinks:
            sink.set(metric, {**self._run, **labels}, float(value))

    def _raise_to(self, metric: Metric, labels: Labels, total: float) -> None:
        """Counters of rows and states are totals; sinks take what was added."""
        key = _key(metric, labels)
        added = total - self._totals.get(key, 0.0)
        if added > 0:
            self._totals[key] = total
            self._add(metric, labels, added)

    def _add(self, metric: Metric, labels: Labels, amount: float) -> None:
        if math.isfinite(amount):
            for sink in self._sinks:
                sink.add(metric, {**self._run, **labels}, float(amount))
