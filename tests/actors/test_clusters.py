"""Which Ray a run uses, and what it does where that Ray has too little room, on clusters of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from clusters import Nodes, cluster
from runs import SMALL, run, small_config

from flowgrpo_ray.errors import ResourceError
from flowgrpo_ray.run_dir.metrics import read_metrics

GROWING = {"pools.autoscaling": True, "pools.rollout.num_cpus": 2, "pools.start_timeout_s": 120.0}


def command(nodes: Nodes, folder: Path, name: str, *args: str, **environment: str) -> None:
    """Train one step by the command, in an environment whose default Ray is that of `nodes`; it has to go well."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "run": {"name": name, "dir": str(folder), "steps": 1}}))
    done = subprocess.run(
        [sys.executable, "-m", "flowgrpo_ray.cli", "train", str(path), *args], capture_output=True, text=True, timeout=240,
        env={**nodes.environment(), **environment})
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert [row["step"] for row in read_metrics(str(folder / name))] == [1]


@pytest.mark.slow
def test_a_head_on_this_machine_is_left_alone_unless_it_is_named(tmp_path):
    with cluster(num_cpus=2) as nodes:
        command(nodes, tmp_path, "own")
        assert nodes.drivers() == 0 and nodes.alive(), "it has started a Ray of its own, and ended that alone"
        command(nodes, tmp_path, "environment", RAY_ADDRESS=nodes.address)
        assert nodes.drivers() == 1 and nodes.alive()
        command(nodes, tmp_path, "option", "--address", nodes.address, RAY_ADDRESS="127.0.0.1:1")
        assert nodes.drivers() == 2 and nodes.alive(), "the option goes before the environment"


@pytest.fixture
def small_cluster(monkeypatch):
    """A connected cluster of one CPU that can be given more nodes."""
    import ray

    with cluster(num_cpus=1) as nodes:
        monkeypatch.setenv("PYTHONPATH", nodes.environment()["PYTHONPATH"])
        ray.init(address=nodes.address, namespace=nodes.folder.name, log_to_driver=False)
        try:
            yield nodes
        finally:
            ray.shutdown()


@pytest.mark.slow
def test_a_growing_cluster_is_waited_for(small_cluster, tmp_path, monkeypatch):
    import ray

    free, seen = ray.available_resources, []

    def states() -> list[str]:
        return [group["state"] for group in ray.util.placement_group_table().values()]

    def grows() -> dict[str, float]:
        """By a node, once the run has found too little room twice, and has said what it needs."""
        if len(seen) == 2:
            assert states().count("PENDING") == 1, "an autoscaler has to be shown what is asked"
            small_cluster.add(num_cpus=3)
        seen.append(free())
        return seen[-1]

    shown = r"cannot hold the actors: CPU: asked 2.2, free 1 of 1; an actor of pools\.rollout asks for CPU 2"
    with pytest.raises(ResourceError, match=shown):
        run(small_config(tmp_path, "never", steps=1, overrides={**GROWING, "pools.start_timeout_s": 1.0}))
    assert states() == ["REMOVED"]
    assert not (tmp_path / "never").exists()

    monkeypatch.setattr(ray, "available_resources", grows)
    finished = run(small_config(tmp_path, "grown", steps=1, overrides=GROWING))
    assert [row["step"] for row in finished.rows] == [1]
    assert seen[1]["CPU"] == 1 and len(seen) > 2


@pytest.mark.slow
def test_enough_in_all_and_not_on_one_node_is_found_before_any_actor_starts(small_cluster, tmp_path):
    small_cluster.add(num_cpus=1)
    nodes = r"\([\d.]+: CPU 1, GPU 0; [\d.]+: CPU 1, GPU 0\)"
    with pytest.raises(ResourceError, match=r"pools\.rollout asks for CPU 1\.5, GPU 0, and no node has that; "
                                            r"the nearest is [\d.]+: CPU 1, GPU 0"):
        run(small_config(tmp_path, "wide", steps=1, overrides={"pools.rollout.num_cpus": 1.5}))
    thirds = {f"pools.{name}.num_cpus": 0.65 for name in ("rollout", "learner", "reward.jpeg_compressibility")}
    with pytest.raises(ResourceError, match=rf"enough in all, but its nodes do not fit all actors {nodes}"):
        run(small_config(tmp_path, "parts", steps=1, overrides=thirds))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.yaml", "wide.yaml"]
