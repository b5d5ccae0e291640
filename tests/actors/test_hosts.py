"""A run on machines with addresses of their own: one is killed, another joins, a pool grows."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml
from clusters import ray_environment
from hosts import Host, Hosts, hosts, namespaces, processes, why_not
from runs import SMALL, assert_same_bits, run

from flowgrpo_ray.config import load
from flowgrpo_ray.learning.state import read_learner_state
from flowgrpo_ray.run_dir.checkpoint import latest, open_checkpoint
from flowgrpo_ray.run_dir.metrics import Row, read_metrics

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

STEPS = 20
SIZE = {"type": "jpeg_incompressibility", "weight": -0.5}
BOTH = {"jpeg_compressibility": {}, "size": SIZE}
# CPUs leave one place for each actor, so that `size` is on a machine that also samples.
POOLS = {
    "autoscaling": True,  # a place that is missing is waited for
    "learner": {"num_cpus": 1, "label_selector": {"pool": "learner"}},
    "rollout": {"num_cpus": 2, "replicas": 2, "label_selector": {"pool": "rollout"}},
    "reward": {
        "jpeg_compressibility": {"num_cpus": 1, "label_selector": {"pool": "reward-cpu"}},
        "size": {"num_cpus": 1, "label_selector": {"scores": "yes"}},
    },
}
MACHINES = {
    "learner": (1, {"pool": "learner"}),
    "rollout-1": (2, {"pool": "rollout"}),
    "rollout-2": (3, {"pool": "rollout", "scores": "yes"}),
    "reward": (1, {"pool": "reward-cpu"}),
}


def write_config(path: Path, run_dir: Path, pools: dict) -> Path:
    tree = {
        **SMALL,
        "run": {"name": path.stem, "dir": str(run_dir), "steps": STEPS},
        "rewards": BOTH,
        "pools": pools,
        "logging": {"tensorboard": False, "flush_every_steps": 1},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def wait_for_step(job: subprocess.Popen, run_dir: Path, step: int) -> None:
    """Until the metrics of a step are written."""
    while not any(row["step"] >= step for row in rows_of(run_dir)):
        assert job.poll() is None, "the job has ended"
        time.sleep(0.2)


def rows_of(run_dir: Path) -> list[Row]:
    return read_metrics(str(run_dir)) if (run_dir / "metrics").is_dir() else []


def submit(made: Hosts, client: Host, head: Host, config: Path, log: Path) -> subprocess.Popen:
    command = [
        "ray",
        "job",
        "submit",
        "--address",
        head.dashboard,
        "--working-dir",
        str(config.parent),
        "--",
        "flowgrpo-ray",
        "train",
        config.name,
    ]
    with log.open("w") as file:
        return made.popen(client, command, stdout=file, stderr=subprocess.STDOUT)


def pools_of(made: Hosts, head: Host) -> dict:
    """The pools of the run, from the control actor on the head."""
    done = made.run(head, ["flowgrpo-ray", "status", "hosts", "--json", "--address", head.gcs])
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)["pools"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapter_survives_a_killed_machine_a_new_one_and_more_rewards(tmp_path, ray_cluster):
    alone = run(
        load(write_config(tmp_path / "alone" / "alone.yaml", tmp_path / "runs", SMALL["pools"]))
    )
    config = write_config(tmp_path / "job" / "hosts.yaml", tmp_path / "runs", POOLS)
    run_dir, log = tmp_path / "runs" / "hosts", tmp_path / "log"
    with hosts(ray_environment()) as made:
        head = made.start_head()
        _, _, lost, _ = made.start_workers(head, MACHINES)
        client = made.add("client")
        job = submit(made, client, head, config, log)
        wait_for_step(job, run_dir, 2)
        made.kill(lost)
        (new,) = made.start_workers(head, {"rollout-3": (4, {"pool": "rollout", "scores": "yes"})})
        scaled = made.run(
            client, ["flowgrpo-ray", "scale", "hosts", "reward.size=2", "--address", head.dashboard]
        )
        assert scaled.returncode == 0, (scaled.stdout, scaled.stderr)
        while (pool := pools_of(made, head)["reward.size"])["ready"] < 2:
            assert job.poll() is None, (pool, log.read_text())
        assert pool["target"] == 2 and pool["nodes"] == {new.address: 2}
        assert job.wait() == 0, log.read_text()
    rows = read_metrics(str(run_dir))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for pool in ("rollout", "reward.size"):
        assert sum(row[f"actor_deaths/{pool}"] for row in rows) >= 1, (
            "an actor of it was on the machine that was killed"
        )
    assert_same_bits(
        alone.adapter,
        read_learner_state(open_checkpoint(latest(str(run_dir)).uri).uri)[0]["adapter"],
    )


def test_nothing_of_the_machines_is_left_when_a_test_on_them_fails():
    with pytest.raises(ZeroDivisionError), hosts(ray_environment()) as made:
        one, other = made.add("one"), made.add("other")
        made.popen(one, ["sh", "-c", "setsid sleep 600 & exec sleep 600"])
        made.popen(other, ["sleep", "600"])
        while len(running := processes(one.namespace) + processes(other.namespace)) < 3:
            time.sleep(0.01)
        _ = 1 / 0
    assert not [name for name in namespaces() if name.startswith(made.prefix)]
    # Whoever inherits a dead process may let it lie.
    assert not [
        pid
        for pid in running
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
    assert not one.folder.parent.exists()


def test_machines_reach_each_other_at_their_addresses_alone():
    ask = "import socket, sys; socket.create_connection((sys.argv[1], 6379), timeout=2).close()"
    serve = "import socket; server = socket.create_server(('0.0.0.0', 6379)); print(flush=True); server.accept()"
    with hosts(ray_environment()) as made:
        one, other = made.add("one"), made.add("other")
        server = made.popen(one, ["python3", "-c", serve], stdout=subprocess.PIPE)
        server.stdout.readline()
        assert made.run(other, ["python3", "-c", ask, "127.0.0.1"]).returncode == 1, (
            "its own loopback"
        )
        assert made.run(other, ["python3", "-c", ask, one.address]).returncode == 0
