"""What is wrong is said, with exit code 2, before anything is uploaded."""

from __future__ import annotations

import platform

import pytest
import ray
from command import cli, write_config
from played_job_server import Job, PlayedServer

ASKED_FIRST = {"/api/version", "/api/v0/cluster_metadata", "/api/jobs/"}


def submit(played: PlayedServer, folder, *overrides: str):
    config = write_config(folder)
    return cli("submit", config, *overrides, "--address", played.url, code=2).stderr


@pytest.mark.parametrize(("overrides", "message"), [
    (["run.dir=runs"], "run.dir is 'runs', a path in the working directory of this Ray job"),
    (["sampling.group_siz=4"], "did you mean sampling.group_size?"),
    (["data.train_prompts=builtin:tiny/trian.txt"], "did you mean train.txt?"),
    (["rewards.mine={python: nowhere:score}"], "the module nowhere cannot be imported"),
    (["rewards.jpeg_compressibility.options={q: 1}"], "rewards.jpeg_compressibility.options"),
    (["--working-dir", "/nowhere"], "--working-dir /nowhere is not a folder")])
def test_a_wrong_configuration_is_found_without_the_cluster(tmp_path, overrides, message):
    with PlayedServer(ray.__version__, platform.python_version()) as played:
        assert message in submit(played, tmp_path, *overrides)
        assert played.asked == []


def test_another_version_and_a_run_in_use_are_found_before_the_upload(tmp_path):
    with PlayedServer("2.51.0", platform.python_version()) as played:
        assert "runs Ray 2.51.0" in submit(played, tmp_path)
        assert set(played.asked) <= ASKED_FIRST
    with PlayedServer(ray.__version__, platform.python_version()) as played:
        played.jobs["small-1"] = Job(metadata={"run_dir": str(tmp_path / "runs/small")})
        assert "is in use by the job small-1, which is running" in submit(played, tmp_path)
        assert set(played.asked) <= ASKED_FIRST


def test_an_address_that_is_none(tmp_path):
    assert "give --address http://head:8265" in cli("submit", write_config(tmp_path), "--address", "head:6379", code=2).stderr
