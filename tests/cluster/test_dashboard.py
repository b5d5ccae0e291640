"""What Ray's dashboard shows of a run: its name, its directory, and how far it is. However it was started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
import yaml
from clusters import Nodes, free_port, running
from runs import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Dashboard:
    """The answers that the pages of Ray's dashboard are made of."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> object:
        return requests.get(f"{self.url}{path}", timeout=30).json()

    def job(self, run: str) -> dict:
        (job,) = [job for job in self.get("/api/jobs/") if (job["metadata"] or {}).get("run") == run]
        return job

    def actors(self) -> list[dict]:
        return list(self.get("/logical/actors")["data"]["actors"].values())

    def titles(self) -> list[str]:
        """Of the processes that the page of the cluster lists."""
        nodes = self.get("/nodes?view=summary")["data"]["summary"]
        details = [self.get(f"/nodes/{node['raylet']['nodeId']}")["data"]["detail"] for node in nodes]
        return [worker["cmdline"][0] for detail in details for worker in detail["workers"]]

    def step(self, run: str) -> int:
        """By the title of the run's control actor; -1 before there is one."""
        found = [re.match(rf"ray::{run} step (\d+)/5000 [a-z]+$", title) for title in self.titles()]
        return max((int(match[1]) for match in found if match), default=-1)


def until(what: str, come: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not come():
        assert time.monotonic() < end, what
        time.sleep(0.5)


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory) -> Iterator[tuple[Dashboard, Path, str]]:
    """Two runs that train until they are ended: `connected`, a driver by itself, and `submitted`, by `ray job submit`."""
    folder, nodes, port = tmp_path_factory.mktemp("dashboard"), Nodes(), free_port()
    for name in ("connected", "submitted"):
        run = {"name": name, "dir": str(folder / "runs"), "steps": 5000}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**SMALL, "run": run}))
    with ExitStack() as stack:
        stack.callback(nodes.stop)
        nodes.start_head(2, port)
        environment, shown = nodes.environment(), Dashboard(port)
        train = [sys.executable, "-m", "flowgrpo_ray.cli", "train"]
        stack.enter_context(running([*train, str(folder / "connected.yaml"), "--address", nodes.address],
                                    folder / "connected.log", env=environment))
        metadata = json.dumps({"run": "submitted", "run_dir": str(folder / "runs/submitted")})
        subprocess.run([str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", shown.url, "--no-wait",
                        "--submission-id", "plain", "--metadata-json", metadata, "--", *train, str(folder / "submitted.yaml")],
                       env=environment, cwd=folder, check=True, capture_output=True, timeout=60)
        yield shown, folder / "runs"


@pytest.mark.parametrize("run", ["connected", "submitted"])
def test_a_run_shows_its_name_its_directory_and_its_step(dashboard, run):
    shown, runs = dashboard
    until("a step", lambda: shown.step(run) >= 1)
    seen = shown.step(run)
    until("the next step", lambda: shown.step(run) > seen)
    job = shown.job(run)
    assert job["status"] == "RUNNING" and job["type"] == ("DRIVER" if run == "connected" else "SUBMISSION")
    assert (job["metadata"]["run"], job["metadata"]["run_dir"]) == (run, str(runs / run))
    actors = [actor for actor in shown.actors() if actor["jobId"] == job["job_id"] and actor["state"] == "ALIVE"]
    wanted = {f"{run}/{place}-0" for place in ("rollout", "learner", "reward.jpeg_compressibility")}
    assert wanted <= {actor["name"] for actor in actors}
    (control,) = [actor for actor in actors if actor["name"].startswith("flowgrpo-control-")]
    assert control["reprName"] == f"{run} in {runs / run}"


def test_the_log_of_a_submitted_job_tells_the_step(dashboard):
    shown, _ = dashboard
    until("a step in the log", lambda: re.search(r" step +\d+/5000 ", shown.get("/api/jobs/plain/logs")["logs"]) is not None)
