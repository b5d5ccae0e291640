"""Why the cluster cannot hold a run's actors: what they ask for against its nodes, and who holds the rest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.names import PREFIX
from flowgrpo_ray.config.schema import PoolConfig

_SHOWN = 8  # nodes or runs that a message lists
_SET = re.compile(r"in\((.*)\)")


@dataclass(frozen=True)
class Node:
    """A living node: its address, labels, and resources (CPU and GPU) in all and free now."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.address}: " + ", ".join(self._amount(kind) for kind in ("CPU", "GPU"))

    def _amount(self, kind: str) -> str:
        free, total = self.free.get(kind, 0.0), self.total.get(kind, 0.0)
        return f"{kind} {total:g}" if free >= total else f"{kind} {free:g} free of {total:g}"

    def has(self, selector: Mapping[str, str]) -> bool:
        """Whether the node's labels meet a label selector of Ray: `x`, `!x`, `in(x,y)` or `!in(x,y)` for each key."""
        return all(_meets(wanted, self.labels.get(key)) for key, wanted in selector.items())

    def share(self, pool: PoolConfig) -> float:
        """The smallest of what the node has over what an actor of the pool asks for; 1 or more: it fits on the empty node."""
        asked = {"CPU": pool.num_cpus, "GPU": pool.num_gpus}
        return min((self.total.get(kind, 0.0) / amount for kind, amount in asked.items() if amount), default=1.0)


def _meets(wanted: str, label: str | None) -> bool:
    if wanted.startswith("!"):
        return not _meets(wanted[1:], label)
    if found := _SET.fullmatch(wanted):
        return label in [value.strip() for value in found[1].split(",")]
    return label == wanted


def lacking(need: Mapping[str, float], free: Mapping[str, float]) -> dict[str, float]:
    """Of resources that are needed, those of which less is free."""
    return {kind: amount for kind, amount in need.items() if amount > free.get(kind, 0.0) + 1e-6}


def impossible(pools: Mapping[str, PoolConfig], nodes: Sequence[Node]) -> str:
    """What an actor asks for that no node has, even if nothing else ran; an empty string if each fits on some node."""
    for name, pool in pools.items():
        labelled = [node for node in nodes if node.has(pool.label_selector)]
        if not labelled:
            wanted = ", ".join(f"{key}={value}" for key, value in pool.label_selector.items())
            labels = [", ".join(f"{key}={node.labels[key]}" for key in pool.label_selector if key in node.labels)
                      or "none of these" for node in nodes]
            return (f"no node has the labels {wanted} (pools.{name}.label_selector); their labels are "
                    f"{_listed(f'{node.address}: {label}' for node, label in zip(nodes, labels, strict=True))}")
        nearest = max(labelled, key=lambda node: node.share(pool))
        if nearest.share(pool) < 1 - 1e-6:
            return (f"an actor of pools.{name} asks for CPU {pool.num_cpus:g}, GPU {pool.num_gpus:g}, and no node "
                    f"{'with its labels ' if pool.label_selector else ''}has that; the nearest is {nearest}")
    return ""


def scattered(pools: Iterable[PoolConfig], nodes: Sequence[Node]) -> str:
    """The message if there is enough in all, and each actor fits on some node, but not all of them together."""
    selectors = [dict(pool.label_selector) for pool in pools if pool.label_selector]
    labels = f", with pools.*.label_selector {', '.join(map(str, selectors))}" if selectors else ""
    return f"the cluster has enough in all, but its nodes do not fit all actors{labels} ({_listed(map(str, nodes))})"


def holders(named_actors: Iterable[Mapping[str, str]]) -> str:
    """Which runs hold actors, from `ray.util.list_named_actors(all_namespaces=True)`; an empty string if none does."""
    runs: dict[str, tuple[str, Counter[str]]] = {}
    for actor in named_actors:
        run, slash, place = actor["name"].partition("/")
        if slash and actor["namespace"].startswith(PREFIX):
            runs.setdefault(actor["namespace"], (run, Counter()))[1][place.rpartition("-")[0]] += 1
    return _listed(f"run {run} ({', '.join(f'{pool} {count}' for pool, count in sorted(pools.items()))})"
                   for run, pools in runs.values())


def _listed(items: Iterable[str]) -> str:
    items = list(items)
    return "; ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
