"""The diagnosis of constructed runs: each fault is found, by its own check, and a healthy run has none."""

import json

import pytest
from command import cli
from plain_images import png

from flowgrpo_ray import storage
from flowgrpo_ray.run_dir import metrics
from flowgrpo_ray.run_dir import sample_table as samples
from flowgrpo_ray.views.doctor import diagnosis, examine

HEALTHY = {
    "reward_std/ocr": 0.33, "reward_group_std/ocr": 0.3, "zero_std_group_fraction": 0.1, "masked_samples": 0.0,
    "valid_samples": 96.0, "dropped_groups": 0.0, "approx_kl": 1.5e-7, "clip_fraction": 0.01, "grad_norm": 0.004,
    "adapter_bytes": 1015808.0, "grad_rms_over_adam_eps": 800.0, "adapter_norm": 11.3, "adapter_delta_norm": 0.5,
    "first_update_log_ratio_max": 0.0, "skipped_updates": 0.0, "idle_updates": 0.0, "scoring_failures/ocr": 0.0,
    "timeouts/rollout": 0.0, "actor_deaths/rollout": 0.0, "images": 96.0,
}
CONFIG = {"rewards": {"ocr": {"weight": 1.0}}, "loss": {"clip_low": 2e-3, "clip_high": 2e-3},
          "train": {"updates_per_step": 3, "adam_eps": 1e-8}, "eval": {"weights": "policy"}}


def write_run(folder, *, rise=0.4, changes=None, config=None, last="blue", steps=20):
    """A run of `steps` steps; `changes` replace values in every row."""
    run_dir = str(folder)
    writer = metrics.MetricsWriter(run_dir)
    evaluation = {"eval/policy/ocr": 0.46, "eval_std/policy/ocr": 0.34, "eval_images/policy": 220.0}
    writer.append({"step": 0} | evaluation)
    for step in range(1, steps + 1):
        row = HEALTHY | {"step": step, "updates": 3.0 * step, "reward_mean/ocr": 0.45 + rise * step / steps} | (changes or {})
        writer.append(row | (evaluation | {"eval/policy/ocr": 0.46 + rise} if step == steps else {}))
    writer.flush()
    for step, color in ((0, "red"), (steps, last)):
        samples.write_grid(run_dir, "policy", step, samples.png_grid([samples.GridImage(png(color), "a", 1)]))
    storage.write_bytes(storage.join(run_dir, "config.yaml"), json.dumps(CONFIG | (config or {})).encode())
    storage.write_bytes(storage.join(run_dir, "run.json"), b'{"run_id": "x"}')
    return run_dir


def verdicts(folder, **run):
    return {finding.check: finding.verdict for finding in examine(write_run(folder, **run))}


def test_a_healthy_run(tmp_path):
    findings = examine(write_run(tmp_path))
    assert {finding.check: finding.verdict for finding in findings if finding.verdict != "ok"} == {}
    assert diagnosis(findings) == "Nothing stands out."
    assert [finding.check for finding in findings] == [
        "Reward ocr", "Samples without a score", "Errors", "Updates", "On-policy check", "Spread of ocr",
        "Groups without spread", "|Δ log p| against the clip", "Clipped ratios", "Gradient RMS against AdamW's eps", "Adapter",
        "Images against the base"]


@pytest.mark.parametrize(("run", "bad", "first"), [
    pytest.param({"rise": 0.0, "last": "red",
                  "changes": {"reward_std/ocr": 0.0, "reward_group_std/ocr": 0.0, "zero_std_group_fraction": 1.0,
                              "approx_kl": 0.0, "clip_fraction": 0.0, "grad_norm": 0.0, "grad_rms_over_adam_eps": 0.0,
                              "adapter_delta_norm": 0.0, "idle_updates": 60.0, "updates": 0.0}},
                 {"Updates", "Spread of ocr", "Groups without spread", "|Δ log p| against the clip",
                  "Gradient RMS against AdamW's eps", "Adapter", "Images against the base"}, "Spread of ocr",
                 id="constant reward"),
    pytest.param({"rise": 0.0, "last": "red", "changes": {"approx_kl": 6e-16, "clip_fraction": 0.0,
                                                           "adapter_delta_norm": 3.6e-7}},
                 {"|Δ log p| against the clip", "Adapter", "Images against the base"}, "|Δ log p| against the clip",
                 id="learning rate of nearly 0"),
    pytest.param({"rise": 0.0, "config": {"loss": {"clip_low": 1e-8, "clip_high": 1e-8}},
                  "changes": {"clip_fraction": 0.66}},
                 {"|Δ log p| against the clip", "Clipped ratios"}, "|Δ log p| against the clip", id="clip far too small"),
    pytest.param({"rise": 0.0, "changes": {"masked_samples": 90.0, "valid_samples": 6.0, "scoring_failures/ocr": 1800.0}},
                 {"Samples without a score"}, "Samples without a score", id="mostly masked"),
    pytest.param({"rise": 0.0, "config": {"train": {"updates_per_step": 3, "adam_eps": 1e-4}},
                  "changes": {"grad_rms_over_adam_eps": 0.08}},
                 {"Gradient RMS against AdamW's eps"}, "Gradient RMS against AdamW's eps", id="gradient below eps"),
    pytest.param({"rise": 0.0, "changes": {"skipped_updates": 30.0, "updates": 30.0}}, {"Updates"}, "Updates", id="overflow"),
    pytest.param({"rise": -0.3}, {"Reward ocr"}, "Reward ocr", id="falling"),
])
def test_a_fault_is_found(tmp_path, run, bad, first):
    findings = examine(write_run(tmp_path, **run))
    assert {finding.check for finding in findings if finding.verdict == "bad"} == bad
    assert diagnosis(findings) == f"Start with: {first}"
    assert all(finding.advice.endswith(".") and finding.number for finding in findings)


def test_a_flat_curve_alone_is_a_symptom(tmp_path):
    assert verdicts(tmp_path, rise=0.0)["Reward ocr"] == "look"


def test_the_gradient_is_derived_where_a_run_has_no_metric_of_it(tmp_path):
    run_dir = write_run(tmp_path)
    rows = [{key: value for key, value in row.items() if key != "grad_rms_over_adam_eps"}
            for row in metrics.read_metrics(run_dir)]
    (tmp_path / "metrics").rename(tmp_path / "before")
    writer = metrics.MetricsWriter(run_dir)
    for row in rows:
        writer.append(row)
    writer.flush()
    (finding,) = [finding for finding in examine(run_dir) if finding.check.startswith("Gradient")]
    assert finding.verdict == "ok" and finding.number.startswith("794 × eps")  # 0.004 / sqrt(253952) / 1e-8


def test_one_update_per_step_has_no_ratio_to_clip(tmp_path):
    found = verdicts(tmp_path, config={"train": {"updates_per_step": 1}}, changes={"approx_kl": 0.0, "clip_fraction": 0.0})
    assert found["|Δ log p| against the clip"] == found["Clipped ratios"] == "none"


def test_several_rewards(tmp_path):
    rewards = {"ocr": {"weight": 1.0}, "dark": {"weight": 1.0}}
    dark = {"reward_mean/dark": 0.5, "reward_std/dark": 0.02, "reward_group_std/dark": 0.017}
    gdpo = {"rewards": rewards, "advantage": {"combine": "gdpo"}}
    assert verdicts(tmp_path / "a", config=gdpo, changes=dark)["Spread of dark"] == "look"
    rewards = {"ocr": {"weight": 1.0}, "dark": {"weight": 0.1}}
    found = {f.check: f for f in examine(write_run(tmp_path / "b", config={"rewards": rewards}, changes=dark))}
    assert found["Spread of dark"].verdict == "look" and "hardly any say" in found["Spread of dark"].advice
    assert found["Spread of ocr"].verdict == "ok"


def test_runs_without_rows_or_grids(tmp_path):
    storage.write_bytes(str(tmp_path / "a/run.json"), b"{}")
    assert [finding.check for finding in examine(str(tmp_path / "a"))] == ["Training steps"]
    run_dir = write_run(tmp_path / "b")
    for grid in (tmp_path / "b/samples/grids").iterdir():
        grid.unlink()
    assert {finding.check for finding in examine(run_dir) if finding.verdict == "none"} == {"Images against the base"}


def test_the_command_ends_with_0_whatever_it_finds(tmp_path):
    run_dir = write_run(tmp_path / "run", rise=0.0, changes={"masked_samples": 90.0, "valid_samples": 6.0})
    text = cli("doctor", run_dir).output
    assert text.splitlines()[-1] == "Start with: Samples without a score" and "bad   Samples without a score" in text
    assert "no run directory at" in cli("doctor", tmp_path / "nothing", code=2).stderr
