"""The log of a job whose nodes are lost: lines a person reads, from the first to the one that says what ended it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import requests
import yaml
from cluster_runs import STEP
from clusters import Nodes, free_port
from runs import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
FOREIGN = re.compile(r"\x1b|state-dump|NodeManager|RpcError|RPC|grpc|StatusCode|rpc_code|Traceback|ray::|OwnerDied")
LEARNER, LOST, KEPT = "127.0.0.2", "127.0.0.3", "127.0.0.4"  # the nodes that are added, in this order

NODES = f"nodes: reward.jpeg_compressibility {LEARNER} x1; rollout {LOST} x1, {KEPT} x1; learner {LEARNER} x1"


class Job:
    """A run that `ray job submit` starts."""

    def __init__(self, head: Nodes, config: Path, *overrides: str) -> None:
        self._url, name = f"http://127.0.0.1:{head.port}", config.stem
        command = ["ray", "job", "submit", "--address", self._url, "--submission-id", name, "--no-wait", "--",
                   sys.executable, "-m", "flowgrpo_ray.cli", "train", str(config), *overrides]
        subprocess.run(command, env=head.environment(), check=True, timeout=120, capture_output=True)
        self._job = f"{self._url}/api/jobs/{name}"

    @property
    def log(self) -> str:
        return requests.get(f"{self._job}/logs", timeout=20).json()["logs"]

    @property
    def state(self) -> str:
        return requests.get(self._job, timeout=20).json()["status"]

    def until(self, come: Callable[[], bool], states: tuple[str, ...] = ("PENDING", "RUNNING")) -> None:
        deadline = time.monotonic() + 200
        while not come():
            assert self.state in states and time.monotonic() < deadline, self.log
            time.sleep(0.5)

    def until_step(self, step: int) -> None:
        self.until(lambda: max(map(int, STEP.findall(self.log)), default=0) >= step)


@pytest.fixture
def head() -> Iterator[Nodes]:
    nodes = Nodes()
    nodes.port = free_port()
    try:
        nodes.start_head(0, dashboard_port=nodes.port)
        yield nodes
    finally:
        nodes.stop()


def test_nodes_are_lost_and_the_log_stays_readable(head, tmp_path):
    """A raylet of a rollout actor is killed, which the run survives, then the one of the learner, which it does not."""
    learner = head.add(2, pool="learner")
    lost, _ = head.add(1, pool="rollout"), head.add(1, pool="rollout")
    config = tmp_path / "logged.yaml"
    pools = {"learner": {"num_cpus": 0.5, "label_selector": {"pool": "learner"}},
             "rollout": {"num_cpus": 1, "replicas": 2, "label_selector": {"pool": "rollout"}},
             "reward": {"jpeg_compressibility": {"num_cpus": 0.5, "label_selector": {"pool": "learner"}}}}
    run = {"name": "logged", "dir": str(tmp_path / "runs"), "steps": 5000}
    config.write_text(yaml.safe_dump({**SMALL, "run": run, "pools": pools}))
    job = Job(head, config)
    job.until_step(2)
    head.kill_raylet(lost)
    job.until(lambda: "actor_deaths" in job.log or "died" in job.log)
    job.until_step(max(map(int, STEP.findall(job.log))) + 3)
    head.kill_raylet(learner)
    job.until(lambda: job.state == "FAILED", states=("RUNNING", "FAILED"))
    log = job.log
    lines = log[log.index("run logged: 5000 steps") - len("2026-12-03 02:54:07  "):].splitlines()  # Ray's own come before
    assert not [line for line in lines if not LINE.match(line)]
    assert not FOREIGN.findall(log)
    starts = [next(number for number, line in enumerate(lines) if said in line)
              for said in ("run logged:", "(commit ", f"Ray {ray.__version__} at ", NODES, " images/s ")]
    assert starts == sorted(starts), log
    assert re.search(rf"WARNING pool rollout: actor \d died .*node {LOST} ", log), log
    why = rf"node {LEARNER} has (been dead|not answered) since \d\d:\d\d:\d\d"
    assert re.search(rf"step +\d+/5000  error: .* on learner rank 0 failed: {why}", lines[-1]), lines[-1]
