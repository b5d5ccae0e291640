"""Runs and commands on a cluster of `clusters.Nodes`, each in a process of its own as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from clusters import Nodes
from runs import SMALL

from flowgrpo_ray.learning.state import read_learner_state
from flowgrpo_ray.run_dir.checkpoint import latest, open_checkpoint

STEP = re.compile(r"step +(\d+)/\d+.* images/s")


def flowgrpo_ray(nodes: Nodes, folder: Path, *args: object, **options: object) -> subprocess.Popen:
    """A command that would find this cluster by itself."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "flowgrpo_ray.cli", *map(str, args)], cwd=folder,
                            text=True, env=nodes.environment(), **pipes)


def output(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    """What a command prints until it ends with this exit code."""
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, (out, err)
    return out, err


class Training:
    """`flowgrpo-ray train` of `runs.SMALL`, in `<folder>/runs/<name>`; what it prints goes into a file.

    Attributes:
        run_dir: of the run.
    """

    def __init__(self, nodes: Nodes, folder: Path, name: str, *overrides: str) -> None:
        folder.mkdir(exist_ok=True)
        self.run_dir, config = folder / "runs" / name, folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**SMALL, "run": {"name": name, "dir": str(folder / "runs")}}))
        self._log = folder / f"{name}.log"
        with self._log.open("w") as file:
            self.process = flowgrpo_ray(nodes, folder, "train", config, *overrides, "--address", nodes.address,
                                        stdout=file, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def step(self) -> int:
        """The last finished step."""
        return max(map(int, STEP.findall(self.log)), default=0)

    def until(self, come: Callable[[], bool]) -> None:
        """Wait for something that is seen while the run lives."""
        deadline = time.monotonic() + 240
        while not come():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.2)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step)

    def ended(self, code: int = 0) -> str:
        """What the run has printed, when it has ended with this exit code."""
        assert self.process.wait(timeout=280) == code, self.log
        return self.log

    def adapter(self) -> dict[str, np.ndarray]:
        """Of the newest checkpoint."""
        return read_learner_state(open_checkpoint(latest(str(self.run_dir)).uri).uri)[0]["adapter"]
