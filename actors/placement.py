"""Where actors go: Ray options from pool settings, the learners' placement group, and the check that all fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors import head
from actors.environments import runtime_env
from actors.fitting import Node, holders, impossible, lacking, scattered
from flowgrpo_ray import signals
from flowgrpo_ray.config import Config
from flowgrpo_ray.config.schema import EnvironmentConfig, PoolConfig
from flowgrpo_ray.errors import ResourceError, counted

log = logging.getLogger(__name__)

# How numeric libraries are told the number of their threads: OpenMP, and those whose own variable counts before it.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


CROWDED = 1.5  # CPUs asked for by core of this machine, above which a run is warned


def actor_options(
    pool: PoolConfig, name: str, group: PlacementGroup | None = None, bundle: int = 0, *,
    namespace: str | None = None, environment: EnvironmentConfig | None = None, start_timeout_s: float = 600.0,
    cpu_threads: int = 1,
) -> dict[str, Any]:
    """Ray options of one actor. Never restarted by Ray: a restarted actor would hold no adapter; the pool respawns.

    An actor without a GPU sees none: current Ray would show it every GPU of the node. `environment` is one of the actor's
    own, which Ray has `start_timeout_s` to make. Numeric libraries get `cpu_threads`: Ray would give them as many as the
    actor reserves CPUs, and bits depend on it.
    """
    env = _env(pool, cpu_threads)
    if environment is None or not (environment.py_executable or environment.pip):
        env = {key: value for key, value in env.items() if head.worker_env.get(key) != value}
    options: dict[str, Any] = {
        "num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus, "name": name, "namespace": namespace,
        "max_restarts": 0, "max_task_retries": 0,
        "runtime_env": runtime_env(environment, env, start_timeout_s),
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    elif pool.label_selector:
        options["label_selector"] = dict(pool.label_selector)
    return options


def _env(pool: PoolConfig, cpu_threads: int) -> dict[str, str]:
    """Environment variables of a pool's actors."""
    env = dict.fromkeys(THREADS, str(cpu_threads)) | pool.env
    if pool.num_gpus == 0:
        env.setdefault("CUDA_VISIBLE_DEVICES", "")
    return env


def shared_env(config: Config) -> dict[str, str]:
    """Environment variables that all actors of the run have in common."""
    first, *others = (_env(pool, config.model.cpu_threads) for pool in _pools(config))
    return {key: value for key, value in first.items() if all(env.get(key) == value for env in others)}


def named_pools(config: Config) -> dict[str, PoolConfig]:
    """All pools that have actors of their own."""
    rewards = {f"reward.{name}": config.reward_pool(name) for name in config.rewards}
    pools: dict[str, PoolConfig] = {"learner": config.pools.learner, **rewards}
    return {**pools, "rollout": config.pools.rollout} if config.pools.placement == "split" else pools


def _pools(config: Config) -> list[PoolConfig]:
    return list(named_pools(config).values())


def asked(config: Config) -> dict[str, float]:
    """Resources that all actors of the run reserve together."""
    pools = _pools(config)
    return {"CPU": sum(p.replicas * p.num_cpus for p in pools), "GPU": sum(p.replicas * p.num_gpus for p in pools)}


def crowding(config: Config, cores: int) -> str | None:
    """What to say if the actors of a run are many more than the cores of the machine that they all share, or None.

    A few more do no harm: in the demo two learners train while the reward waits, three actors on two cores.
    """
    need = asked(config)["CPU"]
    if need <= CROWDED * cores:
        return None
    pools = named_pools(config)
    counts = ", ".join(f"{name} {pool.replicas}" for name, pool in pools.items())
    actors = sum(pool.replicas for pool in pools.values())
    return (f"{counted(actors, 'actor')} ({counts}) ask for {need:g} CPUs, and this machine has {cores}: they slow each "
            "other down; lower pools.*.replicas, or pools.*.num_cpus of actors that mostly wait")


def check_resources(config: Config, watch: Callable[[str], object] = lambda waiting_for: None) -> None:
    """Compare what is asked with what the cluster has free, before any actor starts: in all, and node by node.

    What is asked is placed as a placement group for a moment: it shows whether every actor finds a node, and with
    `pools.autoscaling` an autoscaler adds nodes for what is pending, and for nothing else. `watch` is called while it waits.

    Raises:
        ResourceError: it does not fit (with `pools.autoscaling`: not within `pools.start_timeout_s`).
    """
    need, start = asked(config), time.monotonic()
    last_log, demand = start, None
    try:
        while True:
            signals.check()
            free, total = ray.available_resources(), ray.cluster_resources()
            if demand is not None and demand.wait(timeout_seconds=0):
                return
            # The pending group reserves nothing: what is free is free for it.
            text = "; ".join(f"{kind}: asked {amount:g}, free {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g}"
                             for kind, amount in lacking(need, free).items())
            if demand is None and (config.pools.autoscaling or not text):
                demand = _demand(config)
                if demand is None or demand.wait(timeout_seconds=1):
                    return
            text = _misfit(config, text)
            watch(f"resources: {text}")
            waited = time.monotonic() - start
            # Resources of actors that have just ended come back within moments: allow for that before giving up.
            if waited > (config.pools.start_timeout_s if config.pools.autoscaling else 10):
                hint = "" if config.pools.autoscaling else " (pools.autoscaling: true waits for a cluster that grows)"
                raise ResourceError(f"the cluster cannot hold the actors: {text}{hint}. Lower pools.*.replicas or num_cpus, "
                                    "or add nodes")
            if time.monotonic() - last_log >= 30:
                log.warning("waiting for resources for %.0f s: %s", waited, text)
                last_log = time.monotonic()
            time.sleep(0.5)
    finally:
        if demand is not None:
            remove_placement_group(demand)


def _nodes() -> list[Node]:
    free = ray._private.state.available_resources_per_node()  # Ray offers this nowhere else
    return [Node(n["NodeManagerAddress"], n["Resources"], free.get(n["NodeID"], {}), n.get("Labels") or {})
            for n in ray.nodes() if n["Alive"]]


def _misfit(config: Config, short: str) -> str:
    """Why the actors find no place; `short`: what the cluster as a whole has too little of, or an empty string."""
    nodes = _nodes()
    text = "; ".join(filter(None, (short, impossible(named_pools(config), nodes)))) or scattered(_pools(config), nodes)
    held = holders(ray.util.list_named_actors(all_namespaces=True))
    return f"{text}; in use by {held}" if held else text


def _demand(config: Config) -> PlacementGroup | None:
    """A placement group with a bundle for every actor that needs something."""
    pools = [pool for pool in _pools(config) if pool.num_cpus or pool.num_gpus for _ in range(pool.replicas)]
    bundles = [{kind: amount for kind, amount in (("CPU", p.num_cpus), ("GPU", p.num_gpus)) if amount} for p in pools]
    selectors = [dict(pool.label_selector) for pool in pools]
    return placement_group(bundles, **({"bundle_label_selector": selectors} if any(selectors) else {})) if bundles else None


def place_learners(config: Config) -> PlacementGroup:
    """One placement group for all learner ranks, packed.

    Raises:
        ResourceError: not placed within `pools.start_timeout_s`.
    """
    pool = config.pools.learner
    bundle = {"CPU": pool.num_cpus} | ({"GPU": pool.num_gpus} if pool.num_gpus else {})
    bundle = {kind: amount for kind, amount in bundle.items() if amount} or {"CPU": 0.001}
    selectors = {"bundle_label_selector": [dict(pool.label_selector)] * pool.replicas} if pool.label_selector else {}
    group = placement_group([bundle] * pool.replicas, strategy="PACK", **selectors)
    start = time.monotonic()
    while not group.wait(timeout_seconds=min(30.0, config.pools.start_timeout_s)):
        signals.check()
        waited = time.monotonic() - start
        log.warning("waiting for %d learner bundles of %s for %.0f s; free: %s", pool.replicas, bundle, waited,
                    ray.available_resources())
        if waited >= config.pools.start_timeout_s:
            remove_placement_group(group)
            raise ResourceError(f"{pool.replicas} learner bundles of {bundle} (labels {dict(pool.label_selector)}) were not "
                                f"placed within pools.start_timeout_s = {config.pools.start_timeout_s:g} s; the cluster has "
                                f"{ray.cluster_resources()}")
    return group
