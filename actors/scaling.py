"""Pools that follow a command while the run goes on: what may be asked for, and what it means for the others.

The number of rollout and reward actors decides when work is done, and by whom; never what comes out (`plan` says what is
done together, whoever does it).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import ray
from ray.experimental import get_local_object_locations

from actors.fitting import lacking
from actors.placement import named_pools
from actors.pool import ActorPool
from flowgrpo_ray.config import Config
from flowgrpo_ray.config.schema import PoolConfig
from flowgrpo_ray.errors import ConfigError, counted, nearest

MAX_ACTORS = 1024  # of a pool: what is above is a slip of the finger, and each is an actor that Ray has to keep

Key = TypeVar("Key", bound=Hashable)


def asks(pool: PoolConfig) -> str:
    """What one actor of a pool asks of the cluster, in words."""
    labels = f", labels {dict(pool.label_selector)}" if pool.label_selector else ""
    gpus = f", GPU {pool.num_gpus:g}" if pool.num_gpus else ""
    return f"CPU {pool.num_cpus:g}{gpus}{labels}"


def scale(config: Config, pools: Sequence[ActorPool], targets: Mapping[str, int]) -> str:
    """Check all targets, then resize each pool (`ActorPool.resize`); returns what is done, in words.

    Raises:
        ConfigError: a target is not possible; then no pool is changed.
    """
    by_name = {pool.name: pool for pool in pools if pool.name != "colocated"}
    problems = [text for name, target in targets.items() if (text := _problem(config, by_name, name, target))]
    if not targets:
        problems = [f"name a pool and how many actors it shall have, for example {next(iter(by_name), 'rollout')}=2"]
    if problems:
        raise ConfigError("; ".join(problems))
    said, new, free = [], [], ray.available_resources()  # before the new actors take their part of it
    for name, target in targets.items():
        pool = by_name[name]
        before, up = pool.target, pool.alive
        pool.resize(target)
        said.append(f"{name}: {before} -> {counted(target, 'actor')}" if target != before else
                    f"{name}: {counted(target, 'actor')} already")
        new += [named_pools(config)[name]] * max(0, target - max(up, before))
    make_room(pools)
    return "; ".join(said) + _short(new, free)


def _problem(config: Config, by_name: Mapping[str, ActorPool], name: str, target: object) -> str | None:
    """Why a pool cannot have so many actors, or None."""
    colocated = config.pools.placement == "colocated"
    if name == "learner" or colocated and name in ("rollout", "colocated"):
        which = ("the number of learner ranks" if name == "learner" else
                 "rollout actors are the learner ranks under placement colocated, and their number")
        return (f"{name}: {which} decides how sums are rounded, and stays as it is while a run goes on; stop the run and start "
                f"the same command with pools.learner.replicas={target}: it resumes from the newest checkpoint")
    if name not in by_name:
        meant = f"; did you mean reward.{name}?" if f"reward.{name}" in by_name else nearest(name, by_name)
        return f"there is no pool {name!r}{meant}"
    if isinstance(target, bool) or not isinstance(target, int):
        return f"{name}: the number of actors must be an integer, got {target!r}"
    if target < 1:
        return f"{name}: a pool must have at least 1 actor, got {target}; `stop` ends the run"
    if target > MAX_ACTORS:
        return f"{name}: a pool can have at most {MAX_ACTORS} actors, got {target}"
    return None


def _short(new: Sequence[PoolConfig], free: Mapping[str, float]) -> str:
    """What to add if `free` resources cannot hold the new actors."""
    need = {"CPU": sum(pool.num_cpus for pool in new), "GPU": sum(pool.num_gpus for pool in new)}
    short = [f"{kind}: asked {amount:g}, free {free.get(kind, 0.0):g}" for kind, amount in lacking(need, free).items()]
    if not short:
        return ""
    return f". Not all of the new ones fit now ({'; '.join(short)}): the others start when the cluster has room for them"


def make_room(pools: Iterable[ActorPool]) -> None:
    """Let new actors stand back while another pool has none that could work: the room that one has left is for the next."""
    pools = list(pools)
    needy = [pool for pool in pools if pool.needs_room]
    for pool in pools:
        pool.hold_newcomers(any(other is not pool for other in needy))


def emptied(pools: Iterable[ActorPool]) -> set[str]:
    """Ids of nodes that the run has left by shrinking: nothing shall be kept there, or they are never idle."""
    pools = list(pools)
    used = {member.node_id for pool in pools for member in pool.members}
    nodes = set().union(*(pool.left for pool in pools)) - used
    for pool in pools:
        pool.left.clear()
    return nodes


def kept_on(nodes: set[str], refs: Mapping[Key, ray.ObjectRef]) -> list[Key]:
    """Keys of objects of the driver that lie on one of these nodes."""
    found = get_local_object_locations(list(refs.values())) if nodes and refs else {}
    return [key for key, ref in refs.items() if nodes & set(found.get(ref, {}).get("node_ids", ()))]
