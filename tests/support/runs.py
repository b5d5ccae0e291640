"""Small training runs on real actors, for tests."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from actors.controller import Controller
from actors.run import train
from flowgrpo_ray.config import Config, load
from flowgrpo_ray.learning.state import read_learner_state
from flowgrpo_ray.run_dir.checkpoint import latest, open_checkpoint
from flowgrpo_ray.run_dir.metrics import Row, read_metrics
from flowgrpo_ray.views.status import PoolStatus

SMALL = {
    "model": {"path": "builtin:tiny", "max_sequence_length": 1, "use_t5": False},
    "lora": {"rank": 4},
    "data": {"train_prompts": "builtin:tiny/train.txt", "eval_prompts": "builtin:tiny/heldout.txt"},
    "sampling": {"noise_level": 0.8, "num_steps": 4, "guidance_scale": 1.0, "height": 32, "width": 64, "group_size": 4,
                 "groups_per_step": 4, "micro_batch": 2, "window": {"size": 2, "range": [0, 3]}},
    "rewards": {"jpeg_compressibility": {}},
    "train": {"learning_rate": 1e-3, "updates_per_step": 2, "ema": {"every_updates": 1}},
    "loss": {"clip_low": 2e-3, "clip_high": 2e-3},
    "eval": {"num_prompts": 4, "num_steps": 4, "at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 0},
    "pools": {"rollout": {"num_cpus": 0.1}, "learner": {"num_cpus": 0.1},
              "reward": {"jpeg_compressibility": {"num_cpus": 0.1}}},
    "logging": {"tensorboard": False},
}


def small_config(folder: Path | str, name: str, steps: int = 3, overrides: dict | None = None) -> Config:
    """A run of a few seconds on the tiny model."""
    base = json.loads(json.dumps(SMALL))
    base["run"] = {"name": name, "dir": str(folder), "steps": steps}
    path = Path(folder) / f"{name}.yaml"
    path.write_text(json.dumps(base))
    return load(path, overrides)


@dataclass
class Watcher:
    """An observer that keeps what it is told; tests hang their interference on `activity`."""

    controller: Controller | None = None
    rows: list[Row] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def activity(self, doing: dict[str, list[str]]) -> None: ...

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def resumes(self, step: int) -> None:
        self.said.append(f"resuming from step {step}")

    def say(self, text: str) -> None:
        self.said.append(text)


class Killer(Watcher):
    """Kills one rollout and one reward actor with SIGKILL while they work on the second step."""

    def __init__(self):
        super().__init__()
        self.left = {"rollout", "reward.jpeg_compressibility"}

    def activity(self, doing):
        for pool in self.controller.pools:
            for member, what in zip(pool.members, doing.get(pool.name, []), strict=False):
                if pool.name in self.left and "step 2" in what:
                    self.left.discard(pool.name)
                    os.kill(member.pid, signal.SIGKILL)
                    break


class Script(Watcher):
    """Interferes with a run as a generator says, which goes on whenever the driver has handled its events.

    Rollout actors of class `ordered.Gated` wait for `go`, so that nothing depends on how fast anything is.
    """

    def __init__(self, script: Callable[[Script], Iterator[None]], folder: Path) -> None:
        super().__init__()
        self._script, self._folder, self.answers = script(self), folder, []

    def activity(self, doing: dict[str, list[str]]) -> None:
        next(self._script, None)

    def scale(self, **targets: int) -> None:
        self.answers.append(self.controller.scale({name.replace("__", "."): n for name, n in targets.items()}))

    def status(self, pool: str) -> PoolStatus:
        return next(each.status() for each in self.controller.pools if each.name == pool)

    def samples(self, version: int) -> int:
        """Actors that have been given samples of a version."""
        return len(list(self._folder.glob(f"samples-{version}-*")))

    def go(self, *versions: int) -> None:
        for version in versions:
            (self._folder / f"go-{version}").touch()


@dataclass
class Finished:
    """What a run left behind."""

    run_dir: str
    rows: list[Row]
    adapter: dict[str, np.ndarray]
    ema: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]


def run(config: Config, watcher: Watcher | None = None, **classes: type) -> Finished:
    """Train on the connected Ray; `classes` replace the controller's actor classes."""
    watcher = watcher or Watcher()

    class Watched(Controller):
        def _start(self) -> None:
            watcher.controller = self
            for name, value in classes.items():
                setattr(self, name, value)
            super()._start()

    run_dir = train(config, watcher, controller_class=Watched)
    tensors, _ = read_learner_state(open_checkpoint(latest(run_dir).uri).uri)
    return Finished(run_dir, read_metrics(run_dir), tensors["adapter"], tensors["ema"], tensors["optimizer"])


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Equal keys, shapes, dtypes and bytes."""
    assert a.keys() == b.keys()
    different = [key for key in a if a[key].dtype != b[key].dtype or a[key].tobytes() != b[key].tobytes()]
    assert not different, f"{len(different)} of {len(a)} tensors differ, for example {different[0]}"
