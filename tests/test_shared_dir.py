"""The proof that a run directory is one folder on two nodes; here the other node is another path."""

from __future__ import annotations

import pytest

from flowgrpo_ray import shared_dir
from flowgrpo_ray.errors import ConfigError

RANK = "learner rank 0"


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(shared_dir, "_WAIT_S", 0.0)


def prove(driver, learner) -> None:
    token = shared_dir.leave_token(str(driver))
    shared_dir.check_answers(str(driver), token, {RANK: shared_dir.answer(str(learner), token, RANK)}, {RANK: "10.0.0.7"})


def test_one_folder_passes_and_is_left_as_it_was(tmp_path):
    prove(tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_same_name_does_not(tmp_path):
    driver, learner = tmp_path / "a", tmp_path / "b"
    with pytest.raises(ConfigError, match="learner rank 0 on node 10.0.0.7 does not see there what the driver wrote.*s3://"):
        prove(driver, learner)
    assert list(driver.iterdir()) == [] and not learner.exists()


def test_a_folder_that_the_learner_only_reads_does_not(tmp_path, monkeypatch):
    token, write = shared_dir.leave_token(str(tmp_path)), shared_dir.storage.write_bytes

    def read_only(uri, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shared_dir.storage, "write_bytes", read_only)
    problem = shared_dir.answer(str(tmp_path), token, RANK)
    monkeypatch.setattr(shared_dir.storage, "write_bytes", write)
    with pytest.raises(ConfigError, match="rank 0 on node n cannot write there: Read-only file system"):
        shared_dir.check_answers(str(tmp_path), token, {RANK: problem}, {RANK: "n"})


def test_what_the_learner_writes_must_reach_the_driver(tmp_path):
    token = shared_dir.leave_token(str(tmp_path))
    with pytest.raises(ConfigError, match="writes there what the driver does not see"):
        shared_dir.check_answers(str(tmp_path), token, {RANK: None}, {RANK: "n"})
