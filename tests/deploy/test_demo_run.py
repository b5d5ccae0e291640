"""cpu-demo's manifest, run: a Ray node per pod, the entrypoint as written, the laptop's adapter."""

from __future__ import annotations

import json
import math
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import ray_environment
from hosts import Host, Hosts, hosts, label_text, why_not
from manifests import ROOT, needs_kubectl, of_kind, rendered
from runs import assert_same_bits

from flowgrpo_ray.cluster.versions import RAY_VERSION
from flowgrpo_ray.learning.state import read_learner_state
from flowgrpo_ray.run_dir.checkpoint import latest, open_checkpoint
from flowgrpo_ray.run_dir.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_kubectl]

# The demo, shortened: the pools, the model and all that decides bits is the laptop's.
SHORTER = {
    "run": {"steps": 3},
    "checkpoint": {"every_steps": 0},
    "eval": {"num_prompts": 4, "every_steps": 0},
}
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
# In place of KubeRay's operator: posts the entrypoint with the cluster's token, and asks on.
CLIENT = """
import json, os, sys, time, urllib.error, urllib.request
address, entrypoint = sys.argv[1:]
headers = {"Content-Type": "application/json"}
if "RAY_AUTH_TOKEN" in os.environ:
    headers["Authorization"] = "Bearer " + os.environ["RAY_AUTH_TOKEN"]
def ask(path, data=None):
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(address + path, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
try:
    name = ask("/api/jobs/", {"entrypoint": entrypoint})["submission_id"]
except urllib.error.HTTPError as error:
    sys.exit(f"HTTP {error.code}")
while (job := ask("/api/jobs/" + name))["status"] in ("PENDING", "RUNNING"):
    time.sleep(1)
print(json.dumps({"status": job["status"], "log": ask(f"/api/jobs/{name}/logs")["logs"]}))
"""


def amount(text: str) -> float:
    """A quantity of Kubernetes: 500m, 2, 3Gi."""
    if text.endswith("m"):
        return float(text[:-1]) / 1000
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * UNITS.get(unit, 1)


def ray_start(group: Mapping[str, Any], volumes: Path) -> list[str]:
    """What KubeRay makes of a group: limits (or `resources`), labels and rayStartParams."""
    container = group["template"]["spec"]["containers"][0]
    limits = container["resources"]["limits"]
    given = group.get("resources", {})
    cpus = amount(given.get("CPU", limits["cpu"]))
    args = ["--num-cpus", str(math.ceil(cpus)), "--memory", str(int(amount(limits["memory"])))]
    if labels := group.get("labels"):
        args += ["--labels", label_text(labels)]
    for key, value in group.get("rayStartParams", {}).items():
        args += [f"--{key}", mounted(value, container, volumes)]
    return args


def mounted(value: str, container: Mapping[str, Any], volumes: Path) -> str:
    """A path on a volume of a container, as a path of this machine; anything else as it is."""
    for mount in container["volumeMounts"]:
        path = mount["mountPath"]
        if value == path or value.startswith(f"{path}/"):
            return str(volumes / mount["name"]) + value.removeprefix(path)
    return value


def variables(group: Mapping[str, Any], volumes: Path) -> dict[str, str]:
    container = group["template"]["spec"]["containers"][0]
    return {
        entry["name"]: mounted(entry["value"], container, volumes)
        for entry in container["env"]
        if "value" in entry
    }


def start_pods(made: Hosts, cluster: Mapping[str, Any], volumes: Path, token: str) -> Host:
    """One machine per pod at its least number of replicas; the head's."""
    group = cluster["headGroupSpec"]
    for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]:
        (volumes / mount["name"]).mkdir(parents=True, exist_ok=True)
    secret = {"RAY_AUTH_MODE": cluster["authOptions"]["mode"], "RAY_AUTH_TOKEN": token}
    (head,) = made.start(
        {"head": ["--head", "--dashboard-host", "0.0.0.0", *ray_start(group, volumes)]},
        {**variables(group, volumes), **secret},
    )
    for group in cluster["workerGroupSpecs"]:
        pods = {
            f"{group['groupName']}-{i}": ["--address", head.gcs, *ray_start(group, volumes)]
            for i in range(group["minReplicas"])
        }
        if pods:
            made.start(pods, {**variables(group, volumes), **secret})
    return head


def adapter(run_dir: Path) -> dict[str, Any]:
    return read_learner_state(open_checkpoint(latest(str(run_dir)).uri).uri)[0]["adapter"]


def laptop(folder: Path, config: Path) -> Path:
    """The same configuration by the command, on a Ray of its own; the run directory."""
    command = [
        sys.executable,
        "-m",
        "flowgrpo_ray.cli",
        "train",
        str(config),
        "run.name=laptop",
        f"run.dir={folder}",
    ]
    with tempfile.TemporaryDirectory(prefix="fgl", dir="/tmp") as short:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            env=ray_environment(RAY_TMPDIR=short),
        )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return folder / "laptop"


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_entrypoint_of_the_cpu_demo_on_its_pods_makes_the_adapter_of_the_laptop(tmp_path):
    job = of_kind(rendered("cpu-demo", (), tmp_path), "RayJob")[0]
    image, volumes = (
        tmp_path / "image",
        tmp_path / "volumes",
    )  # its working directory, and what is mounted
    config = image / job["metadata"]["annotations"]["flowgrpo-ray/config"]
    tree = yaml.safe_load((ROOT / "configs" / config.name).read_text())
    config.parent.mkdir(parents=True)
    config.write_text(
        yaml.safe_dump(
            {key: {**tree.get(key, {}), **SHORTER.get(key, {})} for key in tree | SHORTER}
        )
    )
    cluster, token = job["spec"]["rayClusterSpec"], secrets.token_hex(16)
    assert cluster["rayVersion"] == RAY_VERSION
    with hosts(ray_environment(), working_dir=image) as made:
        head = start_pods(made, cluster, volumes, token)
        client = made.add("operator")
        command = [sys.executable, "-c", CLIENT, head.dashboard, job["spec"]["entrypoint"]]
        assert "HTTP 401" in made.run(client, command).stderr, "without the token"
        done = made.run(client, ["env", f"RAY_AUTH_TOKEN={token}", *command], timeout_s=600)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["status"] == "SUCCEEDED", answer["log"]
    run_dir = volumes / "data" / "runs" / "cpu-demo"
    assert [row["step"] for row in read_metrics(str(run_dir))] == [0, 1, 2, 3]
    assert_same_bits(adapter(laptop(tmp_path / "laptop", config)), adapter(run_dir))
