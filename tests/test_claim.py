"""Two drivers on one run: refused on one machine, the older one stops where they are on two."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import small_config

from flowgrpo_ray import claim
from flowgrpo_ray.errors import CheckpointError, ConfigError, FlowGrpoError
from flowgrpo_ray.metrics import read_metrics
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


def test_of_two_that_start_together_one_is_refused(tmp_path, other_process):
    """The claim is made before the actors start, and a run that could not start leaves nothing behind."""
    config = small_config(tmp_path, "twin")
    first = Recorder(config)
    held_by(first.run_dir, other_process.pid)
    with pytest.raises(CheckpointError, match=f"written by process {other_process.pid}"):
        Recorder(config)
    other_process.kill()
    other_process.wait()
    second = Recorder(config)
    with pytest.raises(CheckpointError, match="taken over by process"):
        first.open()
    second.close()
    assert not (tmp_path / "twin").exists()


def test_the_older_driver_stops_at_its_next_write(tmp_path):
    config = small_config(tmp_path, "taken")
    older = Recorder(config)
    older.open()
    older.row({"step": 1, "loss": 1.0})
    newer = Recorder(config)
    newer.open()
    with pytest.raises(CheckpointError, match="taken over by process"):
        older.flush()
    newer.row({"step": 1, "loss": 2.0})
    newer.close()
    assert not (tmp_path / "taken" / claim.FILE).exists()
    assert [row["loss"] for row in read_metrics(newer.run_dir)] == [2.0]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    config = small_config(tmp_path, "x", overrides={"run.dir": "/proc/x"})
    with pytest.raises(ConfigError, match="run.dir: /proc/x/x cannot be written"):
        Recorder(config)


def test_a_run_that_ended_before_its_first_row_blocks_no_name(tmp_path):
    first = Recorder(small_config(tmp_path, "early"))
    first.open()
    first.close()
    Recorder(small_config(tmp_path, "early", overrides={"train.seed": 7})).close()


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
