"""A run that is interrupted leaves a checkpoint of its last finished step, and resumes as if it had never stopped."""

from __future__ import annotations

import pytest
import ray
from runs import Watcher, assert_same_bits, run, small_config

from actors.last_step import LastStep
from actors.learner import LearnerGroup
from flowgrpo_ray.errors import CheckpointError, FlowGrpoError
from flowgrpo_ray.run_dir.checkpoint import FileEntry, latest
from flowgrpo_ray.run_dir.metrics import deterministic

ENTRY = FileEntry("adapter", 3, "sha256")
OVERRIDES = {"checkpoint.every_steps": 0, "advantage.baseline": "history"}


class Learners:
    """Stands where the learner group stands; says how the checkpoint was asked for."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.asked, self._error = [], error

    def call(self, method, uri, timeout_s):
        self.asked.append((method, uri, timeout_s))
        if self._error:
            raise self._error
        return [[ENTRY]]

    def save_finished(self, uri, step, timeout_s):
        self.asked.append(("save_finished", uri, step, timeout_s))
        return self.call("", uri, timeout_s)[0]


class Recorder:
    committed = ()

    def checkpoint_uri(self, step):
        return f"step_{step}"

    def commit(self, step, entries, totals):
        self.committed = (step, entries, totals)


def ended(last: LastStep, error: BaseException | None = None) -> tuple[Learners, Recorder, list[str]]:
    learners, recorder, said = Learners(error), Recorder(), []
    last.save_after_signal(learners, recorder, said.append)
    return learners, recorder, said


def test_between_steps_the_state_itself_is_saved_and_within_one_the_copy():
    last = LastStep(4, grace_s=9.0)
    assert last.begin() is False, "nothing is lost of what was resumed from"
    last.finish(5, {"time_total": 1.0})
    learners, recorder, said = ended(last)
    assert learners.asked == [("save", "step_5", 9.0)] and recorder.committed == (5, [ENTRY], {"time_total": 1.0})
    assert "checkpoint of step 5" in said[-1]
    assert last.begin() is False
    last.finish(6, {})
    assert last.begin() is True
    learners, recorder, _ = ended(last)
    assert learners.asked[0] == ("save_finished", "step_6", 6, 9.0) and recorder.committed[0] == 6
    assert ended(last)[2] == [], "all is saved"


@pytest.mark.parametrize(("grace", "error"), [
    (0.0, None), (9.0, CheckpointError("no state")), (9.0, ray.exceptions.ActorDiedError()), (9.0, FlowGrpoError("late"))])
def test_what_cannot_be_saved_is_said_to_be_lost(grace, error):
    last = LastStep(4, grace)
    last.finish(5, {})
    last.finish(6, {})
    assert last.begin() is (grace > 0)
    _, recorder, said = ended(last, error)
    assert "steps 5 to 6 are lost" in said[-1] and recorder.committed == ()


def test_a_second_signal_ends_the_saving():
    last = LastStep(0, 9.0)
    last.finish(1, {})
    said = []
    with pytest.raises(KeyboardInterrupt):
        last.save_after_signal(Learners(KeyboardInterrupt()), Recorder(), said.append)
    assert "step 1 is lost" in said[-1]


# Real runs ------------------------------------------------------------------------------------------------------------

class InterruptedUpdate(LearnerGroup):
    """Ctrl-C comes when the first of two updates of the third step has been applied."""

    updates = 0

    def reap(self, ref):
        what = self.pending[ref]
        value = super().reap(ref)
        if what == "apply on learner rank 0":
            self.updates += 1
            if self.updates == 5:
                raise KeyboardInterrupt
        return value


class InterruptedRow(Watcher):
    """Ctrl-C comes when the second step has just been recorded."""

    def row(self, row):
        super().row(row)
        if row["step"] == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def folder(ray_cluster, tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def assert_resumes_as_if_never_stopped(folder, name: str, through, watcher: Watcher, **classes: type) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(small_config(folder, name, overrides=through.overrides), watcher, **classes)
    assert latest(str(folder / name)).step == 2 and "wrote the checkpoint of step 2" in watcher.said[-1]
    resumed = run(small_config(folder, name, overrides=through.overrides))
    assert_same_bits(through.adapter, resumed.adapter)
    assert_same_bits(through.ema, resumed.ema)
    assert_same_bits(through.optimizer, resumed.optimizer)
    assert [deterministic(row) for row in through.rows] == [deterministic(row) for row in resumed.rows]


def test_one_rank(folder):
    through = run(small_config(folder, "through", overrides=OVERRIDES))
    through.overrides = OVERRIDES
    assert_resumes_as_if_never_stopped(folder, "update", through, Watcher(), group_class=InterruptedUpdate)
    assert_resumes_as_if_never_stopped(folder, "row", through, InterruptedRow())


@pytest.mark.slow
def test_two_ranks_that_sample_too(folder):
    overrides = OVERRIDES | {"pools.learner.replicas": 2, "pools.placement": "colocated"}
    through = run(small_config(folder, "through-2", overrides=overrides))
    through.overrides = overrides
    assert_resumes_as_if_never_stopped(folder, "update-2", through, Watcher(), group_class=InterruptedUpdate)
