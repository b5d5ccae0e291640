"""How a run ends that is told to end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from command import start, write_config

from flowgrpo_ray.run_dir import checkpoint


@pytest.fixture(scope="module", autouse=True)
def ray_folders():
    """Ray's folders of the processes that `start` starts: short paths, since Ray puts sockets into them."""
    yield
    for folder in Path("/tmp").glob(f"fgc{os.getpid()}*"):
        shutil.rmtree(folder, ignore_errors=True)


def test_signals_end_the_run_and_its_actors(tmp_path):
    """Ctrl-C gives 130, SIGTERM 143, the latter to the process or (as `timeout` and job systems do) to its group, which ends
    Ray's own processes with it; no process of any run is left. The last finished step is in a checkpoint, or is said to be
    lost."""
    ways = {"interrupt": (130, lambda pid: os.killpg(pid, signal.SIGINT)),  # as a terminal does
            "terminate": (143, lambda pid: os.kill(pid, signal.SIGTERM)),
            "terminate-group": (143, lambda pid: os.killpg(pid, signal.SIGTERM))}
    processes = {}
    for way in ways:
        (tmp_path / way).mkdir()
        if way == "interrupt":
            (tmp_path / way / "home").touch()  # nothing can be written into a home that is a file
        processes[way] = start(tmp_path / way, "train", write_config(tmp_path / way), "run.steps=1000", "run.grace_s=100",
                               "checkpoint.every_steps=0")
    for way, process in processes.items():
        for line in process.stdout:
            if "step    2/1000" in line and "images/s" in line:
                break
        ways[way][1](process.pid)
    for way, process in processes.items():
        folder = tmp_path / way
        out, err = process.communicate(timeout=120)
        assert process.returncode == ways[way][0], (way, err)
        run = f"{folder}/runs/small"
        assert "Traceback" not in err
        lost = None
        if way == "terminate-group":  # no time for a report, nor, as a rule, for a checkpoint
            lost = re.search(r"terminated, and Ray with it; the same command resumes[^(]*(\(steps 1 to \d+ are lost)?", err)[1]
        else:
            assert "wrote the checkpoint of step" in out and "a second signal ends at once" in out
            assert f"{run}/report.html" in err and Path(run, "report.html").exists()
        assert not Path(folder, "home/.ray").exists(), "a token of ours would be every later Ray's of this user"
        left = _with_home(folder)
        for _ in range(60):
            if not left:
                break
            time.sleep(0.5)
            left = _with_home(folder)
        assert not left
        newest = checkpoint.latest(str(folder / "runs/small"))
        assert (newest is None) == (lost is not None)
        assert newest is None or newest.step >= 2, "the same command resumes from here"


def test_ray_killed_is_named_and_a_closed_output_ends_nothing(tmp_path):
    """What kills the raylet (a person, the kernel for want of memory) does not end the command by an abort of Ray's library."""
    process = start(tmp_path, "train", write_config(tmp_path, eval={"at_start": False, "at_end": False}), "run.steps=1000")
    for line in process.stdout:
        if "step    2/1000" in line and "images/s" in line:
            break
    process.stdout.close()  # as `head` does
    metrics = tmp_path / "runs/small/metrics"
    written = len(list(metrics.iterdir()))
    for _ in range(240):
        if len(list(metrics.iterdir())) > written + 1:
            break
        time.sleep(0.5)
    else:
        raise AssertionError("the run has not gone on")
    raylet, = [child for child in psutil.Process(process.pid).children() if child.name() == "raylet"]
    raylet.kill()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 1, err
    assert "standard output was closed by its reader; the run continues without it" in err
    assert "error: Ray's process raylet" in err and "the same command resumes from the newest checkpoint" in err.lower()
    assert "Traceback" not in err


def _with_home(folder: Path) -> list[str]:
    """Command lines of the processes that were started with this folder as their home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(folder / "home") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:100])
        except psutil.Error:
            continue  # it ended, or is somebody else's
    return found
