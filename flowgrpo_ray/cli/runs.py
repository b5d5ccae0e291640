"""Commands on finished runs and on data: `doctor`, `compare`, `prompts`."""

from __future__ import annotations

from typing import Annotated

import typer

_COLORS = {"ok": "green", "look": "yellow", "bad": "red", "none": "white"}
RunArg = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Run directory: a path, or an s3:// or gs:// URI")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog="Example: flowgrpo-ray doctor runs/first")(doctor)
    app.command(epilog="Example: flowgrpo-ray compare runs/first runs/second --out compare.html")(compare)
    app.command(epilog="Example: flowgrpo-ray prompts flow_grpo/dataset/geneval --out prompts/")(prompts)


def doctor(run_dir: RunArg) -> None:
    """Diagnose a run: why is its curve flat?

    Prints a number, a verdict (ok, look, bad) and a sentence of advice for each check. Reads the run directory only, and the
    exit code is 0 whatever it finds.
    """
    from flowgrpo_ray.cli import offline
    from flowgrpo_ray.views.doctor import diagnosis, examine

    findings = examine(offline.check_run_dir(run_dir))
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        mark = "-" if finding.verdict == "none" else finding.verdict
        typer.secho(f"{mark:<4}", fg=_COLORS[finding.verdict], bold=finding.verdict == "bad", nl=False)
        typer.echo(f"  {finding.check:<{width}}  {finding.number}")
        typer.echo(f"      {'':<{width}}  {finding.advice}")
    typer.echo(diagnosis(findings))


def compare(
    a: RunArg, b: RunArg,
    out: Annotated[str, typer.Option(metavar="FILE", help="HTML file to write")] = "compare.html",
) -> None:
    """Compare two runs in one HTML file.

    It shows what differs in the configuration, rewards against images and against time, and images of equal seeds side by
    side.
    """
    from flowgrpo_ray import storage
    from flowgrpo_ray.cli import offline
    from flowgrpo_ray.views.compare import render

    page = render(offline.check_run_dir(a), offline.check_run_dir(b))
    typer.echo(storage.display(storage.write_bytes(out, page.encode())))


def prompts(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="dataset/ of a local copy of flow_grpo, or a folder in it")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder that the prompt files go into")] = "prompts",
) -> None:
    """Convert prompt files of flow_grpo.

    Reads the dataset folder of a local copy of the reference implementation (github.com/yifan123/flow_grpo); nothing is
    downloaded. Prompts that are left out are counted, with the reason.
    """
    from flowgrpo_ray.data.reference_prompts import convert

    for line in convert(folder, out):
        typer.echo(line)
