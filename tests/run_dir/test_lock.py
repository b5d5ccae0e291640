"""Two drivers on one run: refused on one machine; elsewhere exactly one goes on, in whatever order things happen."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections import Counter

import interleaving
import pytest
from runs import small_config

from flowgrpo_ray.errors import CheckpointError, ConfigError, FlowGrpoError, ResumeError
from flowgrpo_ray.run_dir import lock
from flowgrpo_ray.run_dir.metrics import read_metrics
from flowgrpo_ray.run_dir.recorder import Recorder


@pytest.fixture
def other_process():
    """A living process that is not this one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def held_by(run_dir: str, pid: int) -> None:
    """Rewrite the claim of a run as if a process had made it."""
    uri = f"{run_dir}/{lock.FILE}"
    with open(uri) as file:
        tree = json.load(file)
    tree |= {"pid": pid, "started": lock._started(pid)}
    with open(uri, "w") as file:
        json.dump(tree, file)


def test_a_second_driver_is_refused_while_the_first_lives(tmp_path, other_process):
    config = small_config(tmp_path, "shared")
    first = Recorder(config)
    first.open()
    held_by(first.run_dir, other_process.pid)
    with pytest.raises(ResumeError, match=f"written by process {other_process.pid}.*another run.name"):
        Recorder(config)
    other_process.kill()
    other_process.wait()
    Recorder(config)  # a dead driver holds nothing


def test_neither_host_name_nor_clock_makes_a_living_driver_look_dead(tmp_path, other_process, monkeypatch):
    config = small_config(tmp_path, "renamed")
    first = Recorder(config)
    held_by(first.run_dir, other_process.pid)
    monkeypatch.setattr("socket.gethostname", lambda: "renamed")
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 1e6)
    with pytest.raises(ResumeError, match=f"written by process {other_process.pid} of this machine"):
        Recorder(config)


@pytest.fixture
def elsewhere(monkeypatch):
    """Every claim is of another machine, and is watched for no longer than a look."""
    numbers = itertools.count()
    monkeypatch.setattr(lock, "machine", lambda: f"machine {next(numbers)}")
    monkeypatch.setattr(lock, "OBSERVED_S", 0)


def test_a_driver_elsewhere_that_shows_a_sign_of_life_keeps_the_run(tmp_path, elsewhere):
    config = small_config(tmp_path, "alive")
    older = Recorder(config)
    older.open()
    newer = Recorder(config)
    older._claim.beat(1)
    with pytest.raises(ResumeError, match="is being written by process .*, which is alive"):
        newer.open()
    newer.close()
    older.flush()
    older.close()
    assert not (tmp_path / "alive" / lock.FILE).exists() and not (tmp_path / "alive" / lock.BEAT_FILE).exists()


def test_a_run_that_went_on_while_the_newcomer_started_is_left_alone(tmp_path, elsewhere):
    config = small_config(tmp_path, "went-on")
    older = Recorder(config)
    older.open()
    newer = Recorder(config)
    older.commit(2, [], {})
    with pytest.raises(CheckpointError, match="went on to step 2 while this command started from step 0; start it again"):
        newer.open()
    newer.close()
    older.flush()


def test_a_claim_that_was_taken_away_is_made_again(tmp_path):
    recorder = Recorder(small_config(tmp_path, "removed"))
    recorder.open()
    (tmp_path / "removed" / lock.FILE).unlink()
    recorder._claim.beat(1)
    assert (tmp_path / "removed" / lock.FILE).exists()
    recorder.close()


def test_a_later_process_with_the_same_number_holds_nothing(tmp_path, other_process):
    config = small_config(tmp_path, "reused")
    recorder = Recorder(config)
    recorder.open()
    held_by(recorder.run_dir, other_process.pid)
    uri = f"{recorder.run_dir}/{lock.FILE}"
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
    with pytest.raises(ResumeError, match=f"written by process {other_process.pid}"):
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
    assert not (tmp_path / "taken" / lock.FILE).exists()
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


# Every order of the reads and writes of two drivers ------------------------------------------------------------------------

class Store:
    """An object store of one run: no locks, each access a step of its own."""

    def __init__(self, monkeypatch) -> None:
        self.files: dict[str, bytes] = {}
        monkeypatch.setattr(lock, "_read", self._read)
        monkeypatch.setattr(lock.storage, "write_bytes", self._write)
        monkeypatch.setattr(lock.storage, "delete_file", self._delete)
        monkeypatch.setattr(lock, "machine", lambda: f"machine {interleaving.name()}")
        monkeypatch.setattr(lock, "BEAT_S", 0)
        monkeypatch.setattr(lock, "OBSERVED_S", 0)

    def _read(self, uri: str) -> dict | None:
        interleaving.step()
        return json.loads(self.files[uri]) if uri in self.files else None

    def _write(self, uri: str, data: bytes) -> str:
        interleaving.step()
        self.files[uri] = data
        return uri

    def _delete(self, uri: str) -> None:
        interleaving.step()
        self.files.pop(uri, None)

    def driver(self, *, fails: bool = False, beats: bool = False, steps: int = 1):
        """What a driver does: claim the run, and if its actors come up confirm that, record itself, and check at every write.
        It returns its claim if it lives on."""
        def opened_by() -> str | None:
            found = self._read("s3://bucket/run/run.json")
            return found and found["driver"]

        def life() -> lock.Claim | None:
            held = lock.Claim("s3://bucket/run", opened_by)
            try:
                if fails:
                    raise CheckpointError("no actors")
                held.confirm()
                self._write("s3://bucket/run/run.json", json.dumps({"driver": held.id}).encode())
                for count in range(steps):
                    if beats:
                        held.beat(count)
                    held.check()
            except (CheckpointError, ResumeError):
                held.release()
                return None
            return held
        return life

    def survivors(self, outcomes: list) -> list[int]:
        """Which drivers still hold the run at their next write, and at the one after it."""
        alive = {index: found for index, found in enumerate(outcomes) if found is not None}
        assert all(isinstance(found, lock.Claim) for found in alive.values()), outcomes
        for index, held in [*alive.items()] * 2:
            checked = next(interleaving.interleavings(lambda held=held: [held.check]))
            if checked != [None]:
                alive.pop(index, None)
        return sorted(alive)


def test_of_two_new_drivers_exactly_one_lives_in_every_order(monkeypatch):
    store, seen = Store(monkeypatch), Counter()

    def afresh():
        store.files.clear()
        return [store.driver(), store.driver()]

    for outcomes in interleaving.interleavings(afresh):
        seen[tuple(store.survivors(outcomes))] += 1
    assert set(seen) == {(0,), (1,)} and seen.total() > 100, seen


def test_a_driver_that_fails_to_start_costs_the_other_nothing_in_any_order(monkeypatch):
    store, seen = Store(monkeypatch), Counter()

    def afresh():
        store.files.clear()
        return [store.driver(fails=True), store.driver()]

    for outcomes in interleaving.interleavings(afresh):
        seen[tuple(store.survivors(outcomes))] += 1
    assert set(seen) == {(1,)} and seen.total() > 100, seen


@pytest.mark.parametrize("fails", [False, True])
def test_of_a_holder_and_a_newcomer_exactly_one_lives_in_every_order(fails, monkeypatch):
    """The holder looks old, or dead, and is alive. Where the newcomer fails it is always the holder."""
    store, seen = Store(monkeypatch), Counter()
    holder: list[lock.Claim] = []

    def at_work():
        holder[0].beat(1)
        try:
            holder[0].check()
        except (CheckpointError, ResumeError):
            holder[0].release()
            return None
        return holder[0]

    def afresh():
        store.files.clear()
        holder[:] = next(interleaving.interleavings(lambda: [store.driver()]))
        return [at_work, store.driver(fails=fails)]

    for outcomes in interleaving.interleavings(afresh):
        seen[tuple(store.survivors(outcomes))] += 1
    assert set(seen) == ({(0,)} if fails else {(0,), (1,)}) and seen.total() > 100, seen
