"""Commands around a cluster; each is a few lines here, and its work is done in `flowgrpo_ray.cluster`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArg = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML configuration file, or - for standard input")]
OverridesArg = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values laid over it, e.g. train.seed=7")]
ServerOption = Annotated[str | None, typer.Option(
    "--address", metavar="URL",
    help="The cluster's dashboard, http://HOST:8265; default is RAY_API_SERVER_ADDRESS or RAY_ADDRESS")]
TokenOption = Annotated[str | None, typer.Option(
    metavar="FILE", help="File with the cluster's token; default is RAY_AUTH_TOKEN, else Ray's own file")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog="Example: flowgrpo-ray submit configs/sd35_medium_ocr.yaml run.dir=s3://bucket/runs "
                       "--address http://localhost:8265")(submit)
    app.command(epilog="Example: flowgrpo-ray manifest my.yaml --overlay gpu-8 | kubectl apply -f -")(manifest)
    app.command(epilog="Example: flowgrpo-ray fetch configs/sd35_medium_ocr.yaml")(fetch)


def submit(
    config: ConfigArg, overrides: OverridesArg = None, address: ServerOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the run is submitted")] = False,
    working_dir: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Send a whole folder too, but for what .gitignore and .rayignore name and for weights")] = None,
    image_code: Annotated[bool, typer.Option(
        "--image-code", help="Run the code of the cluster's image, not that of this checkout")] = False,
    token_file: TokenOption = None,
) -> None:
    """Train on a Ray cluster, as a job of it.

    Checks the configuration here, uploads the files that it names, your own rewards and the code of this checkout, follows
    the log and exits with the run's exit code. Ctrl-C leaves the run to itself.
    """
    from flowgrpo_ray.cli.main import prepare_command
    from flowgrpo_ray.cluster import job_server
    from flowgrpo_ray.cluster import submit as submission

    def say(text: str) -> None:
        typer.echo(text, err=True)

    server = job_server.find(address, token_file)
    settings = submission.load_for_job(config, overrides, working_dir)
    prepare_command(settings, err=True)
    ready = submission.prepare(settings, working_dir=working_dir, image_code=image_code)
    job_id = submission.submit(ready, server, say)
    if detach:
        say(f"submitted {job_id} to {server.url}\n{submission.how_to(server, job_id)}")
        typer.echo(job_id)
        return
    say(f"submitted {job_id} to {server.url}; Ctrl-C leaves it running")
    raise typer.Exit(submission.follow_run(server, job_id, lambda text: typer.echo(text, nl=False), say))


def manifest(
    config: ConfigArg, overrides: OverridesArg = None,
    overlay: Annotated[str, typer.Option(metavar="NAME", help="cpu-demo, gpu-1, gpu-8 or gpu-64: whose pods")] = "gpu-8",
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Instead of flowgrpo-ray:VERSION")] = None,
    run_dir: Annotated[str | None, typer.Option(
        metavar="URI|PATH", help="Instead of run.dir: s3://..., gs://..., or a path below /data, the pods' volume")] = None,
) -> None:
    """Print a configuration as a RayJob for KubeRay.

    Worker groups hold the pools of the configuration, which travels in a ConfigMap with its prompt files (up to 1 MB). Notes go
    to standard error.
    """
    from flowgrpo_ray.cluster.manifest import build
    from flowgrpo_ray.config import load

    made = build(load(config, overrides), overlay, image=image, run_dir=run_dir)
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(made.to_yaml(), nl=False)


def fetch(
    config: ConfigArg, overrides: OverridesArg = None,
    only: Annotated[str, typer.Option(metavar="WHAT", help="model, rewards or all")] = "all",
) -> None:
    """Download the models of a configuration.

    They go to the Hugging Face Hub's cache (HF_HOME). Of several processes with one cache, one downloads and
    the others wait for it. Afterwards everything loads with HF_HUB_OFFLINE=1.
    """
    from flowgrpo_ray.cli.main import prepare_command
    from flowgrpo_ray.cluster import fetch as fetching
    from flowgrpo_ray.config import load
    from flowgrpo_ray.errors import ConfigError, nearest

    choices = ("model", "rewards", "all")
    if only not in choices:
        raise ConfigError(f"--only {only}: there is no such part{nearest(only, choices)}")
    settings = load(config, overrides)
    prepare_command(settings, err=True)
    for line in fetching.fetch(settings, only):
        typer.echo(line)
