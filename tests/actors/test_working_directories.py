"""Actors on other nodes, and jobs, work in folders of their own: paths still mean what they mean to the command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from clusters import Nodes, cluster, free_port
from runs import SMALL

from flowgrpo_ray import tiny
from flowgrpo_ray.config import load
from flowgrpo_ray.run_dir.checkpoint import latest

FLOWGRPO = [sys.executable, "-m", "flowgrpo_ray.cli", "train"]
ROOT = str(Path(__file__).resolve().parents[2])


def inputs(folder: Path) -> None:
    """A configuration all of whose paths are relative, and what they name."""
    shutil.copytree(tiny.model_dir(), folder / "model")
    (folder / "words.txt").write_text("".join(f'the word "{word}"\n' for word in ("RAY", "SUN", "SEA", "OAK", "FOX")))
    tree = {**SMALL, "data": {"train_prompts": "words.txt"}, "run": {"name": "r", "steps": 1, "dir": "runs"},
            "model": {**SMALL["model"], "path": "./model"}}
    (folder / "small.yaml").write_text(yaml.safe_dump(tree))


def train(nodes: Nodes, folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run([*FLOWGRPO, "small.yaml", "--address", nodes.address, *overrides], capture_output=True, text=True,
                          timeout=240, cwd=folder, env=nodes.environment() | {"PYTHONPATH": ROOT})


@pytest.mark.slow
def test_relative_paths_with_the_learner_on_another_node(tmp_path):
    inputs(tmp_path)
    with cluster(num_cpus=0) as nodes:
        nodes.add(num_cpus=2)
        done = train(nodes, tmp_path)
        assert done.returncode == 0, (done.stdout, done.stderr)
        saved = load(tmp_path / "runs/r/config.yaml")
        assert (saved.run.dir, saved.model.path, saved.data.train_prompts) == (
            f"{tmp_path}/runs", f"{tmp_path}/model", f"{tmp_path}/words.txt")
        assert latest(str(tmp_path / "runs/r")).step == 1
        assert not [name for name in os.listdir(tmp_path / "runs/r") if name.startswith(".")]
        # The working directory of a process stands for a disk of a node: one path, two folders.
        done = train(nodes, tmp_path, "run.dir=/proc/self/cwd/own")
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert re.search(r"run.dir: /proc/self/cwd/own/r is a local folder, and the learner rank 0 on node [\d.]+ does not see "
                         r"there what the driver wrote.*s3://BUCKET", done.stderr)
        assert not (tmp_path / "own/r").exists()


@pytest.mark.slow
def test_submitted_jobs(tmp_path):
    """A submission with the default run.dir is rejected; with a place outside the job's folder it runs, and resumes from the
    folder of a second submission, whose path is another."""
    folder, runs = tmp_path / "job", tmp_path / "volume"
    folder.mkdir()
    inputs(folder)
    nodes = Nodes()
    port = free_port()

    def submit(*overrides: str) -> tuple[int, str]:
        command = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", f"http://127.0.0.1:{port}",
                   "--working-dir", str(folder), "--", *FLOWGRPO, "small.yaml", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280,
                              env=nodes.environment() | {"PYTHONPATH": ROOT})
        return done.returncode, done.stdout + done.stderr

    try:
        nodes.start_head(2, dashboard_port=port)
        code, text = submit()
        assert code != 0 and "exit code 2" in text and "the working directory of this Ray job" in text, text
        code, text = submit(f"run.dir={runs}")
        assert code == 0 and latest(str(runs / "r")).step == 1, text
        first = load(runs / "r/config.yaml").data.train_prompts
        (folder / "notes.txt").write_text("another package")
        code, text = submit(f"run.dir={runs}", "run.steps=2")
        assert code == 0 and "from step 1" in text and latest(str(runs / "r")).step == 2, text
        assert load(runs / "r/config.yaml").data.train_prompts != first
        (folder / "words.txt").write_text('the word "RAY"\n')
        code, text = submit(f"run.dir={runs}", "run.steps=3")
        assert code != 0 and "other contents of" in text and "data.train_prompts" in text, text
    finally:
        nodes.stop()
