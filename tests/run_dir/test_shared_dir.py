"""The proof that a run directory is one place on two nodes; here the other node is another path, or other credentials."""

from __future__ import annotations

import pytest

from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.run_dir import shared_dir

pytest_plugins = ["s3_server"]
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


def test_an_object_store_passes_and_is_left_as_it_was(s3_run_dir):
    prove(s3_run_dir, s3_run_dir)
    assert shared_dir.storage.list_dir(s3_run_dir) == []


def test_credentials_that_only_the_driver_has_are_found_out(s3_run_dir, monkeypatch):
    token = shared_dir.leave_token(s3_run_dir)

    def denied(uri):
        raise OSError("AWS Error ACCESS_DENIED during HeadObject operation")

    monkeypatch.setattr(shared_dir.storage, "size", denied)
    problem = shared_dir.answer(s3_run_dir, token, RANK)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="learner rank 0 on node n cannot read there: AWS Error ACCESS_DENIED.*a Secret") as e:
        shared_dir.check_answers(s3_run_dir, token, {RANK: problem}, {RANK: "n"})
    assert "local folder" not in str(e.value) and "endpoint" not in str(e.value)
    assert shared_dir.storage.list_dir(s3_run_dir) == []
