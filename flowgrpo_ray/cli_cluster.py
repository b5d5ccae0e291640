"""Commands around a cluster; each is a few lines here, and its work is done in `flowgrpo_ray.cluster`."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigArg = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML configuration file, or - for standard input")]
OverridesArg = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values laid over it, e.g. train.seed=7")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog="Example: flowgrpo-ray manifest my.yaml --overlay gpu-8 | kubectl apply -f -")(manifest)


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
