"""The state of a run at one moment: what `flowgrpo-ray status` shows, and what its gauges are made of.

The driver makes a `RunStatus` about once a second. Plain data: it travels as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("starting", "sampling", "learning", "syncing", "evaluating", "checkpointing", "rebuilding", "stopping",
          "ended")
STAGES = ("encoding", "sampling", "scoring", "learning")
REASONS = ("actors", "learner", "rollout", "reward", "sync", "evaluation", "checkpoint")
CONTROL_NAMESPACE = "flowgrpo"  # of Ray, for the control actors of all runs of a cluster
CONTROL_PREFIX = "flowgrpo-control-"  # the rest of a control actor's name is the run id
_RECENT_STEPS = 10  # that the time left is estimated from


def seconds_left(step_seconds: Sequence[float], steps_left: int, elapsed: float = 0.0) -> float | None:
    """Estimate of the time left from the seconds of the steps so far; None before the first.

    Args:
        elapsed: seconds since the last of them was finished.
    """
    recent = step_seconds[-_RECENT_STEPS:]
    if not recent:
        return None
    return max(0.0, sum(recent) / len(recent) * steps_left - elapsed)


def duration(seconds: float) -> str:
    """For example `45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@dataclass(frozen=True)
class PoolStatus:
    """A pool of actors.

    Attributes:
        target: actors that the pool should have: `replicas`, or what `scale` asked for last.
        ready: actors that take work.
        starting: actors that are being placed, load a model or take new weights.
        busy: ready actors with a call in progress.
        draining: actors that finish their last call before they end.
        queued: tasks that wait for an actor.
        counts: events since this driver started: deaths, timeouts, failed_starts, taken_out, repeated.
        nodes: actors by the address of their node; actors not placed yet are left out.
    """

    target: int
    ready: int = 0
    starting: int = 0
    busy: int = 0
    draining: int = 0
    queued: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStatus:
    """A run, as its driver sees it.

    Attributes:
        run: `run.name`.
        run_id: identity of the run, kept over resumes.
        run_dir: URI of the run directory.
        phase: one of PHASES.
        step: finished steps; steps: steps in all.
        version: policy version that the rollout actors hold.
        images_per_s: of the last step, None before the first.
        seconds_left: estimate, None before the first step.
        waiting_for: what the driver waits for, in words.
        waiting_s: seconds waited since the start, by reason (one of REASONS).
        queue: groups by stage (one of STAGES).
        checkpoint_step: newest checkpoint, None without one.
        checkpoint_time: when it was committed, seconds since the epoch.
        checkpoint_bytes: its size.
        object_store_bytes: trajectories of the step that the driver holds in the object store.
        pools: by name (rollout or colocated, learner, reward.<name>).
        time: when this was taken, seconds since the epoch.
        started: when this driver started, seconds since the epoch.
    """

    run: str
    run_id: str
    run_dir: str
    phase: str
    step: int
    steps: int
    version: int
    images_per_s: float | None = None
    seconds_left: float | None = None
    waiting_for: str = ""
    waiting_s: Mapping[str, float] = field(default_factory=dict)
    queue: Mapping[str, int] = field(default_factory=dict)
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    checkpoint_bytes: int | None = None
    object_store_bytes: int = 0
    pools: Mapping[str, PoolStatus] = field(default_factory=dict)
    time: float = 0.0
    started: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RunStatus:
        """The inverse of `to_json`."""
        pools = {name: PoolStatus(**pool) for name, pool in tree.get("pools", {}).items()}
        return cls(**{**tree, "pools": pools})
