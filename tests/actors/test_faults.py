"""What goes wrong in an actor, and what the run does: an error is not a score, a sync is proven, nothing waits for ever."""

from __future__ import annotations

import re
from pathlib import Path

import faulty
import numpy as np
import pytest
from runs import assert_same_bits, run, small_config

from flowgrpo_ray.errors import CheckpointError, ConfigError, FlowGrpoError, RatioError, ResourceError, SyncError
from flowgrpo_ray.run_dir.checkpoint import latest
from flowgrpo_ray.run_dir.metrics import read_metrics
from flowgrpo_ray.run_dir.sample_table import read_samples
from flowgrpo_ray.views.exporter import Exporter

pytestmark = pytest.mark.usefixtures("ray_cluster")

REWARD = "jpeg_compressibility"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def sound(ray_cluster, folder):
    return run(small_config(folder, "sound", steps=2))


@pytest.fixture
def fault_dir(tmp_path, monkeypatch):
    return tmp_path


def reward_overrides(fault: str, fault_dir, **more) -> dict:
    env = {"FAULT": fault, "FAULT_DIR": str(fault_dir)}
    # Long enough for a starved machine where nothing hangs.
    timeout = 10.0 if fault == "hang" else 60.0
    return {f"pools.reward.{REWARD}.env": env, f"rewards.{REWARD}.timeout_s": timeout, **more}


@pytest.mark.parametrize("fault", ["raise", "nan", "short", pytest.param("hang", marks=pytest.mark.slow), "die"])
def test_a_failing_image_is_masked_and_counted(fault, folder, fault_dir):
    finished = run(small_config(folder, f"reward-{fault}", steps=1, overrides=reward_overrides(fault, fault_dir)),
                   reward_class=faulty.FaultyReward)
    row = finished.rows[0]
    assert row["masked_samples"] == 1
    assert row["valid_samples"] == 15
    assert row[f"scoring_retries/{REWARD}"] == 1
    assert row[f"scoring_failures/{REWARD}"] == 1
    assert row[f"timeouts/reward.{REWARD}"] == (2 if fault == "hang" else 0)
    assert row[f"actor_deaths/reward.{REWARD}"] in ({4, 5, 6} if fault == "die" else {0})
    table = read_samples(finished.run_dir).to_pydict()
    masked = [i for i, valid in enumerate(table["valid"]) if not valid]
    assert len(masked) == 1
    assert table["advantage"][masked[0]] == 0
    assert table[f"reward:{REWARD}"][masked[0]] is None, "an error is not a score, and no score is not 0"


def test_a_flaky_reward_masks_nothing(folder, fault_dir, sound):
    finished = run(small_config(folder, "reward-flaky", steps=1, overrides=reward_overrides("flaky", fault_dir)),
                   reward_class=faulty.FaultyReward)
    row = finished.rows[0]
    assert row["masked_samples"] == 0
    assert row[f"scoring_retries/{REWARD}"] == 1
    assert row[f"scoring_failures/{REWARD}"] == 0
    assert row[f"reward_mean/{REWARD}"] == sound.rows[0][f"reward_mean/{REWARD}"]


def test_drop_group_takes_the_group(folder, fault_dir):
    overrides = reward_overrides("raise", fault_dir, **{f"rewards.{REWARD}.on_failure": "drop_group"})
    finished = run(small_config(folder, "reward-drop", steps=1, overrides=overrides), reward_class=faulty.FaultyReward)
    assert finished.rows[0]["dropped_groups"] == 1
    assert finished.rows[0]["masked_samples"] == 4


def test_fail_stops_the_run(folder, fault_dir):
    overrides = reward_overrides("raise", fault_dir, **{f"rewards.{REWARD}.on_failure": "fail"})
    with pytest.raises(FlowGrpoError, match="beyond me.*on_failure is fail"):
        run(small_config(folder, "reward-fail", steps=1, overrides=overrides), reward_class=faulty.FaultyReward)
    (row,) = read_metrics(str(folder / "reward-fail"))
    assert (row["step"], row["stopped"], row[f"scoring_retries/{REWARD}"], row[f"scoring_failures/{REWARD}"]) == (1, 1, 1, 1)
    assert not any(key.startswith("reward_mean/") for key in row), "no step, no numbers of one"
    # The same folder again, as it holds no step: another policy, another learning rate, then one more step with a monitor.
    overrides |= {f"rewards.{REWARD}.on_failure": "mask", "train.learning_rate": 1e-4}
    finished = run(small_config(folder, "reward-fail", steps=1, overrides=overrides), reward_class=faulty.FaultyReward)
    assert len(finished.rows) == 1 and "stopped" not in finished.rows[0] and finished.rows[0]["masked_samples"] == 1
    overrides |= {"rewards.bright": {"python": "own_rewards:brightness", "weight": 0},
                  "pools.reward.bright": {"num_cpus": 0.1}}
    finished = run(small_config(folder, "reward-fail", steps=2, overrides=overrides))
    assert len(finished.rows) == 2 and "reward_mean/bright" in finished.rows[1]


@pytest.mark.parametrize(("actor", "message"), [
    (faulty.BindsNothing, "read back as|tensors changed"),
    (faulty.BindsOneTensorLess, "bound 61 tensors of 62"),
    (faulty.WrongDigest, "read back as"),
    (faulty.WrongVersion, "answered for policy version 0"),
    (faulty.ForgetsVersion, "names policy version 0, and this actor holds version 7"),
])
def test_a_sync_that_is_not_proven_stops_the_run(actor, message, folder, monkeypatch):
    counted = []
    monkeypatch.setattr(Exporter, "sync_failed", lambda exporter: counted.append(exporter))
    with pytest.raises(SyncError, match=message):
        run(small_config(folder, f"sync-{actor.__name__}", steps=2), rollout_class=actor)
    assert len(counted) == 1


@pytest.mark.parametrize("actor", [faulty.OtherConditioning, faulty.StrayWeight])
def test_the_on_policy_gate_refuses_the_update(actor, folder):
    with pytest.raises(RatioError, match="on-policy check"):
        run(small_config(folder, f"gate-{actor.__name__}", steps=1), rollout_class=actor)


def test_recompute_goes_on_where_the_gate_would_stop(folder):
    finished = run(small_config(folder, "recompute", steps=1, overrides={"train.on_ratio_mismatch": "recompute"}),
                   rollout_class=faulty.OtherConditioning)
    assert finished.rows[0]["first_update_log_ratio_max"] > 0
    assert finished.rows[0]["updates"] == 2


@pytest.mark.parametrize(("actor", "counter"), [
    pytest.param(faulty.HangsOnce, "timeouts", marks=pytest.mark.slow), (faulty.OutOfMemoryOnce, None)])
def test_a_rollout_call_that_fails_once_changes_nothing(actor, counter, folder, fault_dir, sound):
    finished = run(small_config(folder, f"rollout-{actor.__name__}", steps=2, overrides={
        "pools.rollout.timeout_s": 20.0, "pools.rollout.env": {"FAULT_DIR": str(fault_dir)}}), rollout_class=actor)
    assert_same_bits(sound.adapter, finished.adapter)
    if counter:
        assert finished.rows[-1][f"{counter}/rollout"] == 1


def test_one_of_four_rollout_actors_is_sick_and_the_adapter_is_the_same(folder, fault_dir, sound):
    overrides = {"pools.rollout.replicas": 4, "pools.rollout.env": {"FAULT_DIR": str(fault_dir)}}
    finished = run(small_config(folder, "one-is-sick", steps=2, overrides=overrides), rollout_class=faulty.SickOnce)
    assert_same_bits(sound.adapter, finished.adapter)
    row = finished.rows[-1]
    assert row["calls_repeated/rollout"] >= 1 and row["actor_deaths/rollout"] == row["timeouts/rollout"] == 0
    assert row["actors_taken_out/rollout"] <= 1  # how many calls it fails first, and by whom they are done, is timing


def test_a_rollout_that_always_fails_ends_the_run(folder):
    with pytest.raises(FlowGrpoError, match="failed 3 times: MemoryError"):
        run(small_config(folder, "rollout-always", steps=1), rollout_class=faulty.AlwaysRaises)


@pytest.mark.parametrize(("actor", "message"), [
    (faulty.LearnerDies, "learner rank 1 failed"),
    pytest.param(faulty.LearnerHangs, "no answer within 20 s.*learner rank", marks=pytest.mark.slow)])
def test_a_lost_learner_rank_ends_the_run(actor, message, folder):
    overrides = {"pools.learner.replicas": 2, "pools.learner.timeout_s": 20.0, "pools.learner.collective_timeout_s": 60.0}
    with pytest.raises(FlowGrpoError, match=message):
        run(small_config(folder, f"learner-{actor.__name__}", steps=1, overrides=overrides), learner_class=actor)


def test_a_bug_in_a_learner_is_a_line_and_its_traceback_a_file(folder):
    with pytest.raises(FlowGrpoError) as caught:
        run(small_config(folder, "bug", steps=1), learner_class=faulty.LearnerHasABug)
    path = folder / "bug" / "traceback.txt"
    assert re.fullmatch(r"apply on learner rank 0 failed: ZeroDivisionError: division by zero "
                        rf"\(\S*/tests/support/faulty\.py, line \d+\)\. Its traceback is in {path}", str(caught.value))
    text = path.read_text()
    assert 'return {"loss": 1 / self.learner.rank}' in text and "bug/learner-0" in text and "\x1b" not in text


def test_a_bug_at_the_start_of_a_learner_is_a_line_and_its_traceback_in_the_log(folder, caplog):
    with pytest.raises(FlowGrpoError) as caught:
        run(small_config(folder, "early", steps=1), learner_class=faulty.LearnerHasABugAtItsStart)
    assert re.fullmatch(r"learner rank 0 could not start: .*OddError: an odd one \(\S*/tests/support/faulty\.py, line \d+\)",
                        str(caught.value))
    assert "raise OddError(threading.Lock())" in caplog.text and not (folder / "early").exists()


def test_an_actor_that_cannot_start_says_why(folder):
    rewards = {"wrong": {"python": "upside_down:UpsideDown"}}
    message = "pool reward.wrong: actor 0 could not start: reward upside_down fails its self-test"
    with pytest.raises(FlowGrpoError, match=message) as caught:
        overrides = {"rewards": rewards, "pools.reward": {"wrong": {"num_cpus": 0.1}}}
        run(small_config(folder, "broken", steps=1, overrides=overrides))
    assert "Traceback" not in str(caught.value)
    assert not (folder / "broken").exists(), "a run that could not start leaves no folder behind"


def test_too_few_resources_are_named(folder):
    with pytest.raises(ResourceError, match="CPU: asked 64.2, free 16 of 16"):
        run(small_config(folder, "greedy", steps=1, overrides={"pools.rollout.replicas": 2, "pools.rollout.num_cpus": 32}))


def test_a_folder_with_another_run_is_refused(folder, sound):
    with pytest.raises(FlowGrpoError, match=r"(?s)made with other settings.*train.learning_rate"):
        run(small_config(folder, "sound", steps=3, overrides={"train.learning_rate": 5e-4}))
    with pytest.raises(FlowGrpoError, match="run.resume is never"):
        run(small_config(folder, "sound", steps=3, overrides={"run.resume": "never"}))


def test_a_damaged_checkpoint_is_not_written_over(folder):
    """Starting over would lose the run: the damage is named, and the rows stay."""
    finished = run(small_config(folder, "damaged", steps=1))
    adapter = Path(latest(finished.run_dir).uri) / "ema" / "pytorch_lora_weights.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"ema/pytorch_lora_weights.safetensors"):
        run(small_config(folder, "damaged", steps=2))
    assert [row["step"] for row in read_metrics(finished.run_dir)] == [1]


def test_prompts_that_cannot_be_scored_are_named_before_any_actor(folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('the word "CAT"\na cat without words\n')
    with pytest.raises(ConfigError, match=r"(?s)line 2.*a cat without words"):
        run(small_config(folder, "unscorable", overrides={"rewards": {"ocr": {}}, "pools.reward": {},
                                                          "data.train_prompts": str(prompts)}))


def test_all_actors_ended(ray_cluster):
    import time

    deadline = time.monotonic() + 60
    while ray_cluster.available_resources().get("CPU", 0) < 16 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert np.isclose(ray_cluster.available_resources()["CPU"], 16)
