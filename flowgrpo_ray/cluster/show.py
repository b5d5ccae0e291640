"""The state of runs as text for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flowgrpo_ray.views.status import PoolStatus, RunStatus, duration

OLD_S = 5.0  # from which the age of a status is worth a word


def status_text(status: RunStatus, age_s: float = 0.0) -> str:
    """The state of a run in some lines.

    Args:
        age_s: seconds since the driver has told it.
    """
    step = f"step {status.step} of {status.steps} done, policy version {status.version}"
    rate = f"{status.images_per_s:.1f} images/s" if status.images_per_s is not None else "no step finished yet"
    if status.seconds_left is not None and status.phase != "ended":
        rate += f", about {duration(status.seconds_left)} left"
    lines = [("run", f"{status.run} (run id {status.run_id}), since {duration(status.time - status.started)}"),
             ("directory", status.run_dir), ("phase", f"{status.phase}; {step}"), ("rate", rate),
             ("waits for", status.waiting_for or "nothing"),
             ("waited", ", ".join(f"{name} {duration(seconds)}" for name, seconds in sorted(
                 status.waiting_s.items(), key=lambda item: -item[1])) or "not yet"),
             ("queue", ", ".join(f"{stage} {groups}" for stage, groups in status.queue.items()) + " (groups)"
              if status.queue else "empty"),
             ("checkpoint", _checkpoint(status))]
    if age_s > OLD_S:
        lines.insert(0, ("note", f"the driver told this {duration(age_s)} ago; it is busy, or hangs"))
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in lines), "", *_pools(status)])


def _checkpoint(status: RunStatus) -> str:
    if status.checkpoint_step is None:
        return "none yet"
    when = f", {duration(status.time - status.checkpoint_time)} ago" if status.checkpoint_time is not None else ""
    size = f", {status.checkpoint_bytes / 1e6:.1f} MB" if status.checkpoint_bytes is not None else ""
    return f"step {status.checkpoint_step}{when}{size}"


def _pools(status: RunStatus) -> list[str]:
    rows: list[tuple[str, ...]] = [("pool", "target", "ready", "starting", "draining", "busy", "queued", "deaths", "nodes")]
    rows += [(name, *_pool(pool)) for name, pool in status.pools.items()]
    return table(rows)


def _pool(pool: PoolStatus) -> tuple[str, ...]:
    nodes = ", ".join(f"{node} ({count})" if count > 1 else node for node, count in pool.nodes.items())
    busy = f"{pool.busy / pool.ready:.0%}" if pool.ready else "-"
    return (*map(str, (pool.target, pool.ready, pool.starting, pool.draining)), busy, str(pool.queued),
            str(pool.counts.get("deaths", 0)), nodes or "-")


def runs_text(runs: Sequence[RunStatus]) -> str:
    """A line for each run."""
    if not runs:
        return "no run answers here"
    rows = [("run", "run id", "step", "phase", "age", "directory")]
    rows += [(run.run, run.run_id, f"{run.step}/{run.steps}", run.phase, duration(time.time() - run.started), run.run_dir)
             for run in runs]
    return "\n".join(table(rows))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
