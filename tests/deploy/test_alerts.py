"""Every alert, firing for the run "bad" and silent for the run "good", by Prometheus's own promtool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.alerts import ALERTS

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/rules.yaml"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")


def ours(name: str, values: str, run: str = "bad", **labels: str) -> dict[str, str]:
    """A series of the driver; Ray's own labels stand for all those that alerts must not depend on."""
    pairs = {"run": run, "run_id": f"id-{run}", "WorkerId": "01", **labels}
    return {"series": f"ray_flowgrpo_{name}{{{','.join(f'{k}={v!r}' for k, v in pairs.items())}}}", "values": values}


def cause(values: str, run: str, worker: str = "01") -> dict[str, str]:
    return ours("actors_replaced_total", values, run, pool="rollout", cause="died", WorkerId=worker)


NODE = {"SessionName": "session_1", "NodeAddress": "10.0.0.7"}
BAD = {"run": "bad", "run_id": "id-bad"}

# name: (minute, series, labels of the alert, its description as far as it is a template)
CASES = {
    "FlowGrpoNoStep": (
        30,  # a minute a step, five times as long without one; "slow" has steps of an hour, "starts" has not begun
        [series for run, stamp, step in (("bad", "600x60", "60x60"), ("good", "0+60x60", "60x60"),
                                         ("slow", "600x60", "3600x60"), ("starts", "600x60", "60x60"))
         for series in (ours("last_step_timestamp", stamp, run), ours("time_step", step, run),
                        ours("phase", "1x60" if run == "starts" else "0x60", run, phase="starting"))],
        BAD, "The last step was committed 20m 0s ago, more than five times the median step."),
    "FlowGrpoSyncFailed": (
        10, [ours("sync_failures_total", "0x5 1x60"), ours("sync_failures_total", "0x60", "good"),
             ours("sync_failures_total", "1x60", "good", WorkerId="02")], BAD, None),
    "FlowGrpoImagesWithoutScore": (
        60, [ours("images_without_score_total", "0+6x60"), ours("images_made_total", "0+100x60"),
             ours("images_without_score_total", "0+4x60", "good"), ours("images_made_total", "0+100x60", "good")],
        BAD, "6% of the images of the last hour have no score."),
    "FlowGrpoActorDeaths": (
        12, [cause("0x4 2x20", "bad"), cause("0x5 2x20", "bad", "02"), cause("0x4 3x20", "good")],
        {**BAD, "pool": "rollout"}, None),
    "FlowGrpoRebuild": (
        20, [ours("phase", "0x5 1x30", phase="rebuilding"), ours("phase", "0x12 1x30", "good", phase="rebuilding")], BAD, None),
    "FlowGrpoPoolShort": (
        30, [ours("pool_target", "4x60", pool="rollout"), ours("pool_ready", "4x5 2x60", pool="rollout"),
             ours("pool_target", "4x60", "good", pool="rollout"), ours("pool_ready", "4x5 2x10 4x60", "good", pool="rollout")],
        {**BAD, "pool": "rollout"}, "2 actors are missing for more than 15 minutes."),
    "FlowGrpoSpilling": (
        10, [{"series": f'ray_object_store_memory{{Location="{place}",SessionName="session_1",NodeAddress="{node}"}}',
              "values": values} for place, node, values in (
                  ("SPILLED", "10.0.0.7", "0x2 1048576x20"), ("SPILLED", "10.0.0.8", "0x30"),
                  ("MMAP_SHM", "10.0.0.8", "9x30"))],
        NODE, "1MiB of objects are on disk because the object store is full."),
    "FlowGrpoCheckpointOld": (
        40, [series for run, saved, interval in (("bad", "0x60", 10), ("good", "0x20 10x60", 10), ("never", "0x60", 0))
             for series in (ours("step", "0+1x60", run), ours("checkpoint_step", saved, run),
                            ours("checkpoint_interval", f"{interval}x60", run))],
        BAD, "40 steps would be lost, more than 3 times checkpoint.every_steps."),
    "FlowGrpoLearnerIdle": (
        90, [ours("busy_share", "0.25x120", role="learner"), ours("busy_share", "0.75x120", "good", role="learner"),
             ours("busy_share", "0.25x120", "both", role="learner"), ours("pool_target", "1x120", "both", pool="colocated")],
        BAD, "It was idle for 75% of the last half hour."),
    "FlowGrpoZeroSpread": (
        60, [ours("zero_std_group_fraction", "0.9x120"), ours("zero_std_group_fraction", "0.5x120", "good")],
        BAD, "In 90% of the groups all images have one score: nothing is learned from them."),
    "FlowGrpoLogRatio": (
        5, [series for run, largest, tolerance in (("bad", 0.0003, 0.0005), ("good", 0.0002, 0.0005), ("exact", 0, 0))
            for series in (ours("first_update_log_ratio_max", f"0 {largest}x9", run),
                           ours("ratio_tolerance", f"{tolerance}x9", run))],
        BAD, "The first update's largest |log ratio| is 0.0003, more than half of what is tolerated."),
    "FlowGrpoDiskFull": (
        10, [{"series": f'ray_node_disk_utilization_percentage{{SessionName="session_1",ip="{ip}"}}', "values": values}
             for ip, values in (("10.0.0.7", "86x20"), ("10.0.0.8", "84x20"))],
        {"SessionName": "session_1", "ip": "10.0.0.7"},
        "86 % is used; above 95 % Ray stores no more objects on the node."),
}


@needs_promtool
def test_the_rules_are_prometheus_rules():
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(ALERTS)} rules found" in done.stdout, done.stdout + done.stderr


def promtool(folder: Path, cases: list[str]) -> subprocess.CompletedProcess:
    alerts = {alert.name: alert for alert in ALERTS}
    tests = []
    for name in cases:
        minute, series, labels, description = CASES[name]
        alert = alerts[name]
        annotations = {"summary": alert.summary, "description": description or alert.description, "runbook": alert.runbook}
        for label, value in labels.items():
            annotations["summary"] = annotations["summary"].replace(f"{{{{ $labels.{label} }}}}", value)
        fires = [{"exp_labels": {"severity": alert.severity, **labels}, "exp_annotations": annotations}]
        tests.append({"interval": "1m", "input_series": series,
                      "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": fires},
                                          {"eval_time": "0m", "alertname": name, "exp_alerts": []}]})
    path = folder / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    return subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_and_is_silent(alert, tmp_path):
    done = promtool(tmp_path, [alert.name])
    assert done.returncode == 0, done.stdout + done.stderr
