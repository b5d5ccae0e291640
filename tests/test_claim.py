"""Two drivers on one run: refused on one machine, the older one stops where they are on two."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import small_config

from flowgrpo_ray import claim
from flowgrpo_ray.errors import CheckpointError, ConfigError, FlowGrpoError
from flowgrpo_ray.recorder import Recorder


@pytest.fixture
def other_process():
    """A living process that is not this one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def held_by(run_dir: str, pid: int) -> None:
    """Rewrite the claim of a run as if a process had made it."""
    import psutil

    uri = f"{run_dir}/{claim.FILE}"
    with open(uri) as file:
        tree = json.load(file)
    tree |= {"pid": pid, "started": psutil.Process(pid).create_time()}
    with open(uri, "w") as file:
        json.dump(tree, file)


def test_a_second_driver_is_refused_while_the_first_lives(tmp_path, other_process):
    config = small_config(tmp_path, "shared")
    first = Recorder(config)
    first.open()
    held_by(first.run_dir, other_process.pid)
    with pytest.raises(CheckpointError, match=f"written by process {other_process.pid}.*another run.name"):
        Recorder(config)
    other_process.kill()
    other_process.wait()
    Recorder(config)  # a dead driver holds nothing


def test_a_later_process_with_the_same_number_holds_nothing(tmp_path, other_process):
    config = small_config(tmp_path, "reused")
    recorder = Recorder(config)
    recorder.open()
    held_by(recorder.run_dir, other_process.pid)
    uri = f"{recorder.run_dir}/{claim.FILE}"
    with open(uri) as file:
        tree = json.load(file)
    with open(uri, "w") as file:
        json.dump(tree | {"started": tree["started"] - 100}, file)
    Recorder(config)


def test_the_older_driver_stops_at_its_next_write(tmp_path):
    config = small_config(tmp_path, "taken")
    older, newer = Recorder(config), Recorder(config)
    older.open()
    older.row({"step": 1, "loss": 1.0})
    newer.open()
    with pytest.raises(CheckpointError, match="taken over by process"):
        older.flush()
    newer.row({"step": 1, "loss": 2.0})
    newer.close()
    assert not (tmp_path / "taken" / claim.FILE).exists()
    rows = Recorder(config)  # readable, and only the newer one's
    from flowgrpo_ray.metrics import read_metrics

    assert [row["loss"] for row in read_metrics(rows.run_dir)] == [2.0]


def test_a_run_folder_in_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = small_config(tmp_path, "x", overrides={"run.dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="cannot be a folder: .*file is a file"):
        Recorder(config)


def test_damaged_rows_are_named_before_the_run(tmp_path):
    config = small_config(tmp_path, "damaged")
    recorder = Recorder(config)
    recorder.open()
    recorder.row({"step": 1, "loss": 1.0})
    recorder.close()
    part = next((tmp_path / "damaged" / "metrics").iterdir())
    part.write_text("{")
    with pytest.raises(FlowGrpoError, match=f"{part.name}, line 1 is damaged"):
        Recorder(config)
