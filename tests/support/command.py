"""The `flowgrpo-ray` command, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from typer.testing import CliRunner, Result

from flowgrpo_ray.cli.main import app

SMALL = {
    "model": {"path": "builtin:tiny", "max_sequence_length": 1, "use_t5": False},
    "lora": {"rank": 4},
    "data": {"train_prompts": "builtin:tiny/train.txt", "eval_prompts": "builtin:tiny/heldout.txt"},
    "sampling": {"noise_level": 0.8, "num_steps": 4, "height": 32, "width": 64, "group_size": 4, "groups_per_step": 2,
                 "micro_batch": 4, "window": {"size": 2, "range": [0, 3]}},
    "rewards": {"jpeg_compressibility": {}},
    "train": {"learning_rate": 1e-3, "ema": {"every_updates": 1}},
    "eval": {"num_prompts": 6, "num_steps": 4},
    "checkpoint": {"every_steps": 1},
    "pools": {"rollout": {"num_cpus": 0.1}, "learner": {"num_cpus": 0.1},
              "reward": {"jpeg_compressibility": {"num_cpus": 0.1}}},
}


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "small.yaml"
    run = {"name": "small", "dir": str(folder / "runs"), "steps": 2}
    path.write_text(yaml.safe_dump({**SMALL, "run": run, **changes}))
    return path


def cli(*args: object, code: int = 0, input: str | None = None) -> Result:
    """Run a command in this process and check its exit code."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="flowgrpo-ray", input=input)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def start(folder: Path, *args: object, **environment: str) -> subprocess.Popen:
    """A command in a process of its own, as from a new account: nothing cached, and no Ray settings but those given."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    home, ray_folder = folder / "home", Path(f"/tmp/fgc{os.getpid()}{len(list(folder.iterdir()))}")
    if not home.exists():
        home.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "flowgrpo_ray.cli", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=folder, env={**clean, "HOME": str(home), "RAY_TMPDIR": str(ray_folder), **environment},
        start_new_session=True)
