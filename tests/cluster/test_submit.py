"""Runs submitted to a real head: their log, their exit code, a lost connection, Ctrl-C, `ray job stop`."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
import yaml
from clusters import Nodes, free_port
from command import SMALL
from cut_proxy import CutProxy

from flowgrpo_ray.provenance import commit
from flowgrpo_ray.run_dir.checkpoint import latest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"eval": {"at_start": False, "at_end": False}, "logging": {"tensorboard": False}}
STEP = re.compile(r"step +(\d+)/\d+.* images/s")


@pytest.fixture(scope="module")
def head():
    """A head without CPUs, as KubeRay's are, and a node for the actors that unpacks what is uploaded for itself."""
    nodes = Nodes()
    nodes.port = free_port()
    try:
        nodes.start_head(0, dashboard_port=nodes.port)
        nodes.add(6)
        yield nodes
    finally:
        nodes.stop()


def write(folder: Path, name: str, **changes: object) -> None:
    run = {"name": name, "dir": str(folder / "runs"), "steps": 2}
    (folder / "small.yaml").write_text(yaml.safe_dump({**SMALL, **QUICK, "run": run, **changes}))


class Submit:
    """The command in a process of its own; `out` and `err` are what it has printed."""

    def __init__(self, head: Nodes, folder: Path, *args: str, port: int | None = None, **environment: str) -> None:
        command = [sys.executable, "-m", "flowgrpo_ray.cli", "submit", "small.yaml",
                   "--address", f"http://127.0.0.1:{port or head.port}", *args]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
            env=head.environment() | {"PYTHONPATH": str(ROOT)} | environment)
        self.out, self.err = "", ""
        self._threads = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("out", "err")]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str) -> None:
        for line in getattr(self.process, f"std{name}"):
            setattr(self, name, getattr(self, name) + line)

    def wait(self) -> int:
        code = self.process.wait(300)
        for thread in self._threads:
            thread.join(30)
        return code

    def until(self, come: Callable[[], bool]) -> None:
        """Wait for something that is printed."""
        deadline = time.monotonic() + 120
        while not come():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.out, self.err)
            time.sleep(0.1)

    @property
    def steps(self) -> list[int]:
        return [int(step) for step in STEP.findall(self.out)]


def job_of(head: Nodes, text: str, **headers: str) -> dict:
    job_id = re.search(r"submitted (\S+) to", text)[1]
    return requests.get(f"http://127.0.0.1:{head.port}/api/jobs/{job_id}", timeout=20, headers=headers).json()


def test_a_run_with_prompts_and_a_reward_of_ones_own(head, tmp_path):
    (tmp_path / "words.txt").write_text("".join(f'the word "{word}"\n' for word in ("RAY", "SUN", "SEA", "OAK", "FOX")))
    (tmp_path / "mine.py").write_text("def brightness(images, prompts, metadata):\n"
                                      "    from mean_of import mean\n    return [mean(image) for image in images]\n")
    (tmp_path / "mean_of.py").write_text("def mean(image):\n    return float(image.mean())\n")
    write(tmp_path, "whole", data={"train_prompts": "words.txt"}, rewards={"mine": {"python": "mine:brightness"}},
          pools={"rollout": {"num_cpus": 0.1}, "learner": {"num_cpus": 0.1}, "reward": {"mine": {"num_cpus": 0.1}}})
    done = Submit(head, tmp_path)
    assert done.wait() == 0, (done.out, done.err)
    assert done.steps == [1, 2] and "has succeeded" in done.err
    assert latest(str(tmp_path / "runs/whole")).step == 2
    job = job_of(head, done.err)
    assert job["metadata"] == {"run": "whole", "run_dir": str(tmp_path / "runs/whole"), "commit": commit()["id"],
                               "dirty": str(commit()["dirty"]).lower()}
    assert re.fullmatch(r"whole-\d{8}-\d{6}", job["submission_id"])
    assert commit()["id"] in (tmp_path / "runs/whole/run.json").read_text(), "the code is that of this checkout"


def test_the_exit_code_is_the_run_s(head, tmp_path):
    write(tmp_path, "none")
    done = Submit(head, tmp_path, "run.resume=must")
    assert done.wait() == 2, (done.out, done.err)
    assert "run.resume is must" in done.out and "has failed with exit code 2" in done.err


def test_a_lost_connection_ctrl_c_a_run_in_use_and_a_stop(head, tmp_path):
    write(tmp_path, "long", checkpoint={"every_steps": 0})
    with CutProxy(head.port) as proxy:
        long = Submit(head, tmp_path, "run.steps=5000", port=proxy.port)
        long.until(lambda: 2 in long.steps)
        proxy.cut()
        long.until(lambda: "the run goes on" in long.err)
        proxy.open()
        long.until(lambda: f"connected to http://127.0.0.1:{proxy.port} again" in long.err)
        seen = len(long.steps)
        long.until(lambda: len(long.steps) >= seen + 2)
        os.kill(long.process.pid, signal.SIGINT)
        assert long.wait() == 130, (long.out, long.err)
    steps = long.steps
    assert steps == list(range(1, len(steps) + 1)), "every line once"
    stop = re.search(r"stop: +(ray job stop .*)", long.err)[1]
    assert re.search(r"follow: ray job logs --follow --address http://127.0.0.1:\d+ long-", long.err)

    second = Submit(head, tmp_path)
    assert second.wait() == 2 and "is in use by the job long-" in second.err and "package" in second.err
    plain = ["ray", "job", "submit", "--address", f"http://127.0.0.1:{head.port}", "--", sys.executable, "-m",
             "flowgrpo_ray.cli", "train", str(tmp_path / "small.yaml"), "run.name=long"]
    third = subprocess.run(plain, env=head.environment(), capture_output=True, text=True, timeout=120)
    assert third.returncode != 0 and "runs/long is being written by process" in third.stdout, third.stdout

    stop = shlex.split(stop.replace(str(proxy.port), str(head.port)))
    subprocess.run(stop, env=head.environment(), check=True, timeout=120, capture_output=True)
    assert job_of(head, long.err)["status"] == "STOPPED"
    assert latest(str(tmp_path / "runs/long")).step >= steps[-1] - 1, "SIGTERM left time for a checkpoint"


def test_the_command_of_the_readme(head, tmp_path):
    """`ray job submit` as written there, but for the place of the head, the model and the bucket."""
    block = re.search(r"^( +ray job submit(?:.*\\\n)*.*)$", (ROOT / "README.md").read_text(), re.M)[1]
    command = shlex.split(block.replace("\\\n", " "))
    changes = {"http://HEAD:8265": f"http://127.0.0.1:{head.port}", "configs/sd35_medium_ocr.yaml": "configs/tiny_ocr.yaml",
               "run.dir=s3://bucket/runs": f"run.dir={tmp_path}"}
    assert changes.keys() <= set(command)
    small = ["run.name=plain", "run.steps=1", "eval.at_start=false", "eval.at_end=false"]
    done = subprocess.run([*(changes.get(word, word) for word in command), *small], cwd=ROOT, env=head.environment(),
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert latest(str(tmp_path / "plain")).step == 1


def test_a_head_that_wants_a_token(tmp_path):
    token = "0123456789abcdef0123456789abcdef"
    (tmp_path / "token").write_text(token + "\n")
    write(tmp_path, "secret")
    nodes = Nodes(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    nodes.port = free_port()
    no_token = {"RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}
    try:
        nodes.start_head(6, dashboard_port=nodes.port)
        done = Submit(nodes, tmp_path, **no_token)
        assert done.wait() == 1 and "HTTP 401" in done.err and "kubectl get secret" in done.err, done.err
        done = Submit(nodes, tmp_path, "--token-file", "token", "run.steps=1", **no_token)
        assert done.wait() == 0, (done.out, done.err)
        job = job_of(nodes, done.err, Authorization=f"Bearer {token}")
        assert token not in json.dumps(job) + done.out + done.err
        assert token not in "".join(path.read_text() for path in (tmp_path / "runs").rglob("*.json"))
    finally:
        nodes.stop()
