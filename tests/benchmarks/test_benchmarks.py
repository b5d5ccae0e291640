"""The benchmarks run, and report what they say they report. How fast anything is, is not tested."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pipelines
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are run from the repository, not installed

from benchmarks import (  # noqa: E402
    baseline,
    data_parallel,
    gpu_check,
    learner,
    measure,
    reward_check,
    sampler,
    scoring,
    startup,
    submit,
    whole_step,
)
from flowgrpo_ray.data.plan import plan_step  # noqa: E402
from flowgrpo_ray.data.prompts import PromptRecord  # noqa: E402
from flowgrpo_ray.errors import ConfigError, FlowGrpoError  # noqa: E402

SMALL = {
    "model": {"path": "builtin:tiny", "max_sequence_length": 1, "use_t5": False},
    "lora": {"rank": 4},
    "data": {"train_prompts": "builtin:tiny/train.txt"},
    "sampling": {"noise_level": 0.8, "num_steps": 4, "height": 32, "width": 64, "group_size": 2, "groups_per_step": 2,
                 "micro_batch": 2, "window": {"size": 2, "range": [0, 3]}},
    "rewards": {"jpeg_compressibility": {}},
    "train": {"learning_rate": 1e-3, "updates_per_step": 2},
    "loss": {"clip_low": 2e-3, "clip_high": 2e-3},
    "pools": {"rollout": {"num_cpus": 0.1}, "learner": {"num_cpus": 0.1}},
    "logging": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    """A configuration file of the smallest size."""
    path = tmp_path_factory.mktemp("benchmarks") / "small.yaml"
    path.write_text(json.dumps(SMALL))
    return str(path)


def all_finite(tree: Any) -> bool:
    """Every number of a result."""
    if isinstance(tree, dict):
        return all(all_finite(value) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return all(all_finite(value) for value in tree)
    return not isinstance(tree, float) or math.isfinite(tree)


def report(main, capsys, *argv: str, code: int = 0) -> dict[str, Any]:
    """What `main --json` prints; the table is printed too, from the same numbers."""
    assert main([*argv, "--json"]) == code, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    assert all_finite(result) and result["machine"]["cores"] >= 1
    return result


def test_spread_and_ratio():
    assert measure.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.5, "high": 2.5, "n": 3}
    assert measure.spread([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0, "n": 1}
    ratio = measure.speed_ratio([2.0, 4.0, 6.0], [1.0, 4.0, 2.0])
    assert ratio == {"median": 2.0, "low": 1.5, "high": 2.5, "n": 3}


def test_sides_take_turns_and_change_places():
    calls: list[str] = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = measure.take_turns(sides, 2, torch.device("cpu"), between=lambda: calls.append("-"))
    assert "".join(calls) == "-b-a" + "-a-b" + "-b-a"
    assert {name: len(timings) for name, timings in found.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("argv", [["no.yaml"], ["a.yaml", "b.yaml"], ["sampling.nope=1"]])
def test_a_wrong_command_line_is_explained(argv, capsys):
    assert sampler.main(argv) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_sampler(capsys, config):
    result = report(sampler.main, capsys, config, "--repeats", "2", "--batch", "3")
    assert [case["guidance"] for case in result["cases"]] == [1.0, 3.0]
    assert [case["cfg"] for case in result["cases"]] == [False, True]
    for case in result["cases"]:
        assert case["batch"] == 3 and case["steps"] == 4
        assert case["images_per_s"].keys() == case["seconds"].keys() == {"ours", "stock", "ours_sde"}
        assert case["largest_difference"] <= 0.5 / 255 + 1e-5  # our images are rounded to bytes, the stock's are not
    sampler.show(result)
    assert "guidance 3 (CFG)" in capsys.readouterr().out


def test_sampler_of_flux(capsys, config, tmp_path):
    folder = tiny_pipelines.build("flux_dev", tmp_path / "flux")
    result = report(sampler.main, capsys, config, f"model.path={folder}", "--repeats", "1", "--guidance", "3.5")
    (case,) = result["cases"]
    assert not case["cfg"] and case["largest_difference"] <= 0.5 / 255 + 1e-5


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_learner(capsys, config, guidance):
    result = report(learner.main, capsys, config, f"sampling.guidance_scale={guidance}", "--repeats", "1")
    assert (result["updates"], result["shards"], result["samples"], result["window"]) == (2, 2, 4, 2)
    assert result["distance_of_results"] <= 1e-3  # both sides did the same work
    learner.show(result)
    assert "ratio (target 0.95)" in capsys.readouterr().out


def test_the_bare_loop_says_what_it_cannot_do(capsys, config):
    assert learner.main([config, "loss.beta=0.1", "sampling.kernel=cps"]) == 2
    error = capsys.readouterr().err
    assert "loss.beta is 0.1" in error and "sampling.kernel is 'cps'" in error


def test_baseline(capsys, config):
    result = report(baseline.main, capsys, config, "--steps", "2", "--warmup", "1")
    assert tuple(result["phases"]) == baseline.PHASES and result["images"] == 4
    total = sum(result["phases"][name]["cpu"]["median"] for name in baseline.PURE)
    assert result["pure_core_seconds"] == pytest.approx(total)
    baseline.show(result)
    assert "images/s" in capsys.readouterr().out


def test_data_parallel_processes_share_every_group():
    tiny = measure.configuration(["sampling.group_size=6", "sampling.groups_per_step=8", "train.updates_per_step=2",
                                  "sampling.micro_batch=6"])
    plan = plan_step(tiny, [PromptRecord(str(i)) for i in range(8)], 0)
    found = data_parallel.spread_over(plan, 6, 3)
    assert found.updates == plan.updates and [len(shard.groups) for shard in found.shards] == [2] * 12
    rows = [row for shard in found.shards for row in shard.rows]
    assert sorted(rows) == [(group, sample) for group in range(8) for sample in range(6)] and len(found.shards[0].rows) == 4
    assert {found.groups[group].window for group in (0, 1)} == {plan.groups[0].window}
    assert found.train_micro_batches(1) == list(found.shards[6:])
    with pytest.raises(ConfigError, match="4 processes cannot share groups of 6 samples"):
        data_parallel.spread_over(plan, 6, 4)
    scored = {shard: {"r": np.array([10.0 * group + sample for group, sample in shard.rows])} for shard in found.shards}
    assert baseline.by_group(tiny, scored)[5].rewards["r"].tolist() == [50.0, 51.0, 52.0, 53.0, 54.0, 55.0]


def test_a_process_is_known_by_its_title():
    titles = {"ray::RolloutActor": "RolloutActor", "ray::RewardActor.__init__()": "RewardActor", "ray::IDLE": "IDLE",
              "ray::my.run/rollout-0 samples at version 3": "RolloutActor", "ray::a/reward.ocr-1.2 scores ocr": "RewardActor",
              "ray::a/learner-0.1 trains": "LearnerActor", "/usr/lib/raylet/raylet": "raylet", "python": "python"}
    assert {title: whole_step.role_of(title) for title in titles} == titles


def test_whole_step(ray_cluster, capsys, config):
    variant = "pools.placement=colocated"
    result = report(whole_step.main, capsys, config, "--variant", variant, "--steps", "2", "--warmup", "1",
                    "--baseline-steps", "1", "--rounds", "1")
    assert [v["variant"] for v in result["variants"]] == ["as configured", variant]
    for v in result["variants"]:
        assert v["step_seconds"]["n"] == v["driver_cpu_seconds"]["n"] == 2 and v["images"] == 4
        assert v["busy_share"] == pytest.approx(
            v["pure_core_seconds"] / (result["machine"]["cores"] * v["step_seconds"]["median"]))
        assert v["speed_up"] == pytest.approx(v["baseline"]["step_seconds"]["median"] / v["step_seconds"]["median"])
        assert v["data_parallel_step_seconds"]["n"] == 2 and v["over_data_parallel"] == pytest.approx(
            v["data_parallel_step_seconds"]["median"] / v["step_seconds"]["median"])
        assert sum(v["cpu_seconds_by_part"].values()) == pytest.approx(
            sum(v["cpu_seconds_by_process"].values()) + v["driver_cpu_seconds"]["median"])
    roles = [set(v["cpu_seconds_by_process"]) for v in result["variants"]]
    assert {"RolloutActor", "LearnerActor"} <= roles[0] and {"ColocatedActor"} <= roles[1]
    whole_step.show(result)
    assert "plain loop s" in capsys.readouterr().out


@pytest.mark.parametrize("model", gpu_check.MODELS)
def test_gpu_check_small(model, capsys):
    result = report(gpu_check.main, capsys, "--model", model, "--device", "cpu", "--small")
    assert list(result["stages"]) == [
        "build", "attach LoRA", "write and read back", "sample", "decode", "update", "export", "sync", "adapter file"]
    assert result["stages"]["sample"]["images_per_s"] > 0 and len(result["checks"]) == 6
    assert len(result["log_ratio_by_window_step"]) == result["window"]
    assert result["loss_scale"] == 1
    assert all(row["samples"] == result["images"] for row in result["log_ratio_by_window_step"])
    gpu_check.show(result)
    assert "FAILED" not in capsys.readouterr().out




def test_gpu_check_fails_where_the_policies_differ(capsys, monkeypatch):
    """The learner's model is given other times than the sampler's."""
    from flowgrpo_ray.policies.sd3 import SD3Policy

    exact = SD3Policy.model_time
    monkeypatch.setattr(SD3Policy, "model_time", lambda self, sigma, batch: exact(
        self, sigma, batch) + (5.0 if torch.is_grad_enabled() else 0.0))
    result = report(gpu_check.main, capsys, "--model", "sd35-medium", "--device", "cpu", "--small", code=1)
    assert [check["name"] for check in result["checks"] if not check["ok"]] == ["the on-policy ratio is 1"]
    gpu_check.show(result)
    assert "FAILED  the on-policy ratio is 1" in capsys.readouterr().out


def test_out_of_memory_is_explained():
    stages = gpu_check.Stages(torch.device("cpu"))
    with pytest.raises(FlowGrpoError, match="stage 'sample'.*lower --micro-batch.*Tried to allocate"), \
            stages.stage("sample", "lower --micro-batch."):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_two_ranks(capsys):
    result = report(gpu_check.main, capsys, "--model", "sd35-medium", "--device", "cpu", "--small", "--ranks", "2",
                    "--dtype", "float32")
    assert list(result["cases"]) == ["none", "full"] and len(result["checks"]) == 2
    assert all(rank["largest"] <= 1e-5 for ranks in result["cases"].values() for rank in ranks)


@pytest.mark.timeout(240)
def test_scoring(config, capsys):
    result = report(scoring.main, capsys, config, "--replicas", "1", "2", "--shards", "3", "--rounds", "2", "--steps", "2",
                    "--warmup", "1")
    assert result["reward"] == "jpeg_compressibility"
    sides = result["throughput"]
    assert list(sides) == ["plain loop", "1 replicas", "2 replicas"] and sides["plain loop"]["ratio"] == 1
    assert all(side["images_per_s"]["n"] == 2 and side["images_per_s"]["median"] > 0 for side in sides.values())
    found = result["overlap"]
    assert found["scoring_s"]["n"] == found["added_s"]["n"] == 2 and found["scoring_s"]["median"] > 0
    assert found["added_s"]["low"] >= 0
    assert scoring.main([config, "--reward", "jpeg", "--steps", "1"]) == 2
    assert "has no such reward; the choices are jpeg_compressibility" in capsys.readouterr().err


def test_reward_check_compares_two_processes(capsys, monkeypatch):
    words = ("clipscore", "--random", "--small", "--images", "4", "--size", "32", "--device", "cpu")
    result = report(reward_check.main, capsys, *words)
    assert result["checks"] == {"the scores of both sides agree": True, "a score has the same bits alone and in a call": True}
    low, high = result["range_of_scores"]
    assert low < high and result["largest_difference"] == 0 and result["images_per_s"]["cpu"] > 0
    sides = iter([1.0, 1.0 + 0.03 * (high - low)])

    def shifted(see_gpu, *args):
        factor = next(sides)
        return {"scores": [low * factor, high * factor], "alone": [low * factor, 0.0], "seconds": 1.0, "gpu_problem": None,
                "batch_invariant": True, "notes": []}

    monkeypatch.setattr(reward_check, "elsewhere", shifted)
    result = report(reward_check.main, capsys, *words, "--tolerance", "0", code=1)
    assert not any(result["checks"].values())


@pytest.mark.parametrize(("words", "message"), [
    (["clipscor", "--random"], "did you mean clipscore"), (["jpeg_compressibility"], "works on the CPU"),
    (["aesthetic", "--random"], "--random makes the models of clipscore and pickscore, not of aesthetic"),
    (["clipscore", "--option", "model=/nope"], "without the GPU: reward clipscore: option model: '/nope' cannot be loaded"),
])
def test_reward_check_says_what_is_wrong(capsys, words, message):
    assert reward_check.main([*words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_startup_tells_when_each_phase_was_over(config, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    found = report(startup.main, capsys, config, "--rounds", "1")
    marks = found["marks"]
    assert list(marks) == ["imports", "checks", "Ray", "actors", "first image"]
    assert sorted(marks.values()) == list(marks.values()) and found["processes"] > 5
    assert {"LearnerActor", "RolloutActor", "RewardActor"} <= set(found["cpu_seconds"])


@pytest.mark.slow
def test_submit_tells_when_the_log_begins_and_what_was_uploaded(config, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    found = report(submit.main, capsys, config, "--rounds", "1")
    marks = found["marks"]
    assert {"submitted", "first line of the run's log", "first step"} <= set(marks)
    assert sorted(marks.values()) == list(marks.values())
    assert found["package"]["files"] > found["package_without_demo_model"]["files"] > 100
    assert 2**17 < found["package_without_demo_model"]["bytes"] < 2**20
