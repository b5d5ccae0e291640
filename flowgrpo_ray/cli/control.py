"""Commands to living runs: `runs`, `status`, `scale`, `checkpoint`, `stop`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from flowgrpo_ray import signals
from flowgrpo_ray.cli.cluster import TokenOption

RunArg = Annotated[str, typer.Argument(metavar="RUN", help="Name, run id or run directory of a living run")]
ClusterOption = Annotated[str | None, typer.Option(
    metavar="ADDRESS", help="http://HOST:8265 (the dashboard, from anywhere), or HOST:6379 on a node of the cluster; default "
    "is RAY_ADDRESS, else the Ray on this machine")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog="Example: flowgrpo-ray runs --address http://localhost:8265")(runs)
    app.command(epilog="Example: flowgrpo-ray status first --watch")(status)
    app.command(epilog="Example: flowgrpo-ray scale first rollout=8 reward.ocr=4")(scale)
    app.command(epilog="Example: flowgrpo-ray checkpoint first")(checkpoint)
    app.command(epilog="Example: flowgrpo-ray stop first")(stop)


def runs(address: ClusterOption = None, as_json: JsonOption = False, token_file: TokenOption = None) -> None:
    """List the living runs of a cluster."""
    from flowgrpo_ray.cluster import commands

    _carry_out(["runs", *(["--json"] if as_json else [])], None, address, token_file,
               lambda: commands.runs(address, typer.echo, as_json=as_json))


def status(
    run: RunArg, address: ClusterOption = None, as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds until the run ends")] = False,
    token_file: TokenOption = None,
) -> None:
    """Show what a run is doing, once or until it ends.

    Step, rate, time left, what it waits for, queue, newest checkpoint; of each pool the actors by state and by node.
    """
    from flowgrpo_ray.cluster import commands

    options = [name for name, given in (("--json", as_json), ("--watch", watch)) if given]
    _carry_out(["status", *options], run, address, token_file,
               lambda: commands.status(address, run, typer.echo, as_json=as_json, watch=watch))


def scale(
    run: RunArg,
    targets: Annotated[list[str], typer.Argument(metavar="POOL=NUMBER", help="For example rollout=8 reward.ocr=4")],
    address: ClusterOption = None, token_file: TokenOption = None,
) -> None:
    """Give pools of a run other numbers of actors.

    What comes out of the run does not change.
    """
    from flowgrpo_ray.cluster import commands

    commands.parse_targets(targets)
    _carry_out(["scale"], run, address, token_file, lambda: commands.scale(address, run, targets, typer.echo), targets)


def checkpoint(run: RunArg, address: ClusterOption = None, token_file: TokenOption = None) -> None:
    """Write a checkpoint after the step in progress.

    Waits for it, and prints where it is. If the last finished step has one already, says so at once.
    """
    from flowgrpo_ray.cluster import commands

    _carry_out(["checkpoint"], run, address, token_file, lambda: commands.checkpoint(address, run, typer.echo))


def stop(
    run: RunArg, address: ClusterOption = None,
    now: Annotated[bool, typer.Option(
        "--now", help="Do not finish the step in progress: checkpoint of the last finished one, within run.grace_s")] = False,
    token_file: TokenOption = None,
) -> None:
    """Stop a run with a checkpoint, and wait for its end.

    The run finishes the step in progress first, and ends with exit code 0, so that no job system starts it again. The command
    that started it resumes it.
    """
    from flowgrpo_ray.cluster import commands

    _carry_out(["stop", *(["--now"] if now else [])], run, address, token_file,
               lambda: commands.stop(address, run, typer.echo, now=now))


def _carry_out(
    args: list[str], run: str | None, address: str | None, token_file: str | None, here: Callable[[], int],
    rest: list[str] | None = None,
) -> None:
    """Carry a command out from here, or as a job of the cluster if its dashboard is given, and exit with its code."""
    from flowgrpo_ray.cluster import by_job
    from flowgrpo_ray.cluster.reach import full_name

    signals.install()
    by_job.mark_lines()
    if (url := by_job.dashboard(address)) is None:
        raise typer.Exit(here())
    name = full_name(run) if run is not None else None
    args = [*args, "--", *([name] if name else []), *(rest or [])]
    raise typer.Exit(by_job.run(url, token_file, args, name, typer.echo, lambda text: typer.echo(text, err=True)))
