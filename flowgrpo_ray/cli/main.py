"""The `flowgrpo-ray` command. Everything heavy (torch, Ray, rich) is imported by the command that needs it.

Exit codes: 0 done; 2 the command line, the configuration or another input must be changed (a resume with other settings,
and a run directory that is in use, too); 1 any other failure that is explained, such as a damaged checkpoint or a store that
cannot be reached; 130 after Ctrl-C and 143 after SIGTERM (actors are ended first in both).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from flowgrpo_ray import signals, waiting
from flowgrpo_ray.cli import cluster as cli_cluster
from flowgrpo_ray.cli import control as cli_control
from flowgrpo_ray.cli import rewards as cli_rewards
from flowgrpo_ray.cli import runs as cli_runs
from flowgrpo_ray.cli.cluster import ConfigArg, OverridesArg
from flowgrpo_ray.cli.rewards import given_prompts
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, counted
from flowgrpo_ray.views import log_lines

if TYPE_CHECKING:
    from rich.console import Console

    from flowgrpo_ray.config import Config

log = logging.getLogger(__name__)


class _Group(TyperGroup):
    """Turns failures that explain themselves into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        log_lines.end()
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            _fail(error, 2)
        except BrokenPipeError:
            raise  # the reader of a pipe has enough: typer ends quietly
        except (FlowGrpoError, OSError) as error:
            if isinstance(error, OSError) and logging.getLogger("flowgrpo_ray").level == logging.DEBUG:
                raise  # the operating system's errors say what failed, not where
            number = signals.received()  # what fails on the way out does not hide why the command ends
            _fail(error, 1 if number is None else 128 + number)
        except KeyboardInterrupt:
            typer.echo(log_lines.marked("interrupted"), err=True)
            raise typer.Exit(signals.INTERRUPTED) from None
        except SystemExit as stop:
            # While Ray connects, a handler of its own is in place: it exits with the bare number of the signal. And what our
            # handler raises while Ray waits comes out of it with code 1.
            if stop.code not in (signal.SIGTERM, signals.TERMINATED) and not signals.terminated():
                raise
            typer.echo(log_lines.marked("terminated"), err=True)
            raise typer.Exit(signals.TERMINATED) from None


def _fail(error: Exception, code: int) -> NoReturn:
    text = str(error) or type(error).__name__
    if log_lines.on():
        typer.echo(log_lines.marked(f"error: {text}"), err=True)
    else:
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(text, err=True)
    raise typer.Exit(code) from None


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Flow-GRPO for flow-matching image models, as actors and learners on Ray.",
    epilog="Example: flowgrpo-ray train configs/tiny_ocr.yaml")

OptionalConfigArg = Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML configuration file")]
AddressOption = Annotated[str | None, typer.Option(
    metavar="ADDRESS", help="Ray cluster to connect to; default is RAY_ADDRESS, else Ray is started on this machine")]
RunDirArg = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Run directory: a path, or an s3:// or gs:// URI")]
AdapterOption = Annotated[str | None, typer.Option(
    metavar="DIR", help="Folder of an adapter in diffusers format; without it the base model")]


# Training and evaluation ----------------------------------------------------------------------------------------------

@app.command(epilog="Example: flowgrpo-ray train configs/tiny_ocr.yaml run.name=first run.steps=30")
def train(config: ConfigArg, overrides: OverridesArg = None, address: AddressOption = None) -> None:
    """Train an adapter, or resume a run that was stopped.

    The same command resumes from the newest checkpoint of the run of that name.
    """
    from flowgrpo_ray import provenance, storage
    from flowgrpo_ray.cli import offline
    from flowgrpo_ray.config import load

    settings = load(config, [*offline.place_of(config), *(overrides or [])])
    console = prepare_command(settings)
    from flowgrpo_ray.run_dir.watch import monitor_hint
    from flowgrpo_ray.views.live import open_view, print_summary

    run_dir = storage.join(settings.run.dir, settings.run.name)
    view = open_view(settings, console)
    view.say(f"run {settings.run.name}: {counted(settings.run.steps, 'step')} of "
             f"{counted(settings.sampling.groups_per_step, 'group')} x "
             f"{counted(settings.sampling.group_size, 'image')}, in {storage.display(run_dir)}")
    if log_lines.on():
        view.say(provenance.code())
    if hint := monitor_hint(settings.model_dump(mode="json")):
        view.say(hint)
    stopped = ""
    try:
        with view:
            _ray_logs_join_ours()
            from actors.run import train as run_training

            run_training(settings, view, address)
    except signals.StopRequested as stop:
        stopped = str(stop)
    except BaseException:
        if view.rows and not signals.insisted():
            _report_of_failure(run_dir)
        raise
    from flowgrpo_ray.views.report import write_report

    if view.rows or not stopped:
        write_report(run_dir)
        print_summary(settings, run_dir, console)
    if stopped:
        view.say(stopped)


def _report_of_failure(run_dir: str) -> None:
    """Write the report of what there is; what ended the run must not be hidden by what goes wrong here."""
    from flowgrpo_ray import storage
    from flowgrpo_ray.views.report import write_report

    try:
        typer.echo(log_lines.marked(f"report of the steps done so far: {storage.display(write_report(run_dir))}"), err=True)
    except Exception as error:
        log.warning("the report could not be written: %s: %s", type(error).__name__, error)


@app.command("eval", epilog="Example: flowgrpo-ray eval runs/first/config.yaml --checkpoint latest --ema")
def evaluate(
    config: ConfigArg, overrides: OverridesArg = None, adapter: AdapterOption = None,
    checkpoint: Annotated[str | None, typer.Option(
        metavar="STEP|latest", help="Evaluate a checkpoint of the run that the configuration names")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="With --checkpoint: its EMA weights")] = False,
    address: AddressOption = None,
    grid: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a grid of the images as PNG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Evaluate the base model or an adapter on Ray actors.

    Prompts are those of data.eval_prompts; images and scores are those that an evaluation in training makes.
    """
    from flowgrpo_ray import storage
    from flowgrpo_ray.cli import offline
    from flowgrpo_ray.config import load

    if adapter is not None and checkpoint is not None:
        raise ConfigError("--adapter and --checkpoint both name what to evaluate; give one of them")
    if ema and checkpoint is None:
        raise ConfigError("--ema picks the EMA weights of a checkpoint: give --checkpoint STEP or --checkpoint latest")
    settings = load(config, [*offline.place_of(config), *(overrides or [])])
    info = None
    if checkpoint is not None:
        info = offline.find_checkpoint(storage.join(settings.run.dir, settings.run.name), checkpoint)
    console = prepare_command(settings, err=True)
    from flowgrpo_ray.policies.lora import load_adapter
    from flowgrpo_ray.views.live import PlainView

    found = None
    if adapter is not None or info is not None:
        with offline.adapter_folder(folder=adapter, of=info, ema=ema) as folder:
            found = load_adapter(folder)
    what = adapter or (f"{storage.display(info.uri)}{' (ema)' if ema else ''}" if info else "base model")
    _ray_logs_join_ours()
    from actors.run import evaluate as run_evaluation

    with PlainView(settings, console) as view:
        row, png = run_evaluation(settings, found, view, address)
    if grid is not None and png is not None:
        storage.write_bytes(str(grid), png)
    names = [key.removeprefix("eval/policy/") for key in row if key.startswith("eval/policy/")]
    images, masked = row["eval_images/policy"], row["eval_masked/policy"]
    scores = {name: {"mean": row[f"eval/policy/{name}"], "std": row[f"eval_std/policy/{name}"]} for name in names}
    if as_json:
        typer.echo(json.dumps({"weights": what, "prompts": settings.data.eval_prompts, "images": int(images),
                               "images_without_score": int(masked), "scores": scores}, indent=2))
        return
    typer.echo(f"{what} on {settings.data.eval_prompts}: {counted(int(images), 'image')}"
               + (f", and {masked:.0f} without a score" if masked else ""))
    width = max(map(len, [*names, "reward"]))
    typer.echo(f"{'reward':<{width}}  {'mean':>8}  {'std. error':>10}")
    for name, score in scores.items():
        typer.echo(f"{name:<{width}}  {score['mean']:>8.4f}  {score['std'] / max(images, 1) ** 0.5:>10.4f}")


# Without Ray ----------------------------------------------------------------------------------------------------------

@app.command(epilog="Example: flowgrpo-ray sample configs/tiny_ocr.yaml --prompt 'the word \"RAY\"' -n 4 "
                    "--adapter runs/first/checkpoints/step_30/adapter --out images")
def sample(
    config: OptionalConfigArg = None, overrides: OverridesArg = None,
    model: Annotated[str | None, typer.Option(
        metavar="PATH", help="Instead of CONFIG: folder or hub name of a diffusers pipeline")] = None,
    adapter: AdapterOption = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; repeat it for more")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Prompt file: .txt, .jsonl or .parquet")] = None,
    n: Annotated[int, typer.Option("-n", "--images", min=1, help="Images per prompt")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise, as eval.seed")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder that the images go into")] = Path("samples"),
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; default eval.num_steps")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; default is the evaluation's")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels; default sampling.height, or the model's own")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels; default sampling.width, or the model's own")] = None,
    kernel: Annotated[str | None, typer.Option(
        metavar="NAME", help="Sample with an SDE: flow_sde, cps or dance_sde; default is the ODE")] = None,
    noise_level: Annotated[float | None, typer.Option(help="With --kernel: a; default sampling.noise_level")] = None,
    floats: Annotated[bool, typer.Option("--float", help="Also write float32 [3, H, W] in [0, 1] as .npy")] = False,
) -> None:
    """Make images with the base model or an adapter, without Ray.

    Noise is that of an evaluation: image i of prompt p looks the same whatever else is asked for. Prints the paths.
    """
    from flowgrpo_ray.cli import offline

    config, overrides = _optional_config(config, overrides)
    if (config is None) == (model is None):
        raise ConfigError("give a configuration or --model PATH, one of the two: both say which model samples")
    if model is not None:
        overrides = [*overrides, f"model.path={json.dumps(model)}"]
    base = _load_or_default(config, overrides)
    if model is not None:
        height, width = offline.image_size(base.model, height, width)
    settings = offline.sampling_config(
        base, images=n, seed=seed, steps=steps, guidance=guidance, height=height,
        width=width, kernel=kernel, noise_level=noise_level)
    records = given_prompts(prompt, prompts, "what shall be sampled?")
    prepare_command(settings, err=True)
    with offline.adapter_folder(folder=adapter) if adapter is not None else nullcontext() as folder:
        for path in offline.sample(settings, records, out, adapter=folder, sde=kernel is not None, floats=floats):
            typer.echo(str(path))


@app.command(epilog="Example: flowgrpo-ray export runs/first --step latest --ema --out my-adapter")
def export(
    run_dir: RunDirArg,
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder that the adapter goes into")],
    step: Annotated[str, typer.Option(metavar="STEP|latest", help="Which checkpoint")] = "latest",
    ema: Annotated[bool, typer.Option("--ema", help="The EMA weights")] = False,
    format: Annotated[str, typer.Option(
        "--format", metavar="NAME", help="diffusers, comfyui or kohya: where the file says its alpha, "
        "and how it names layers")] = "diffusers",
    fold_alpha: Annotated[bool, typer.Option(
        "--fold-alpha", help="Multiply alpha / r into the weights: the right scale in every loader")] = False,
) -> None:
    """Write a checkpoint's adapter for diffusers, ComfyUI or kohya.

    Every byte of the checkpoint is verified first. For diffusers, prints the Python that loads the
    adapter.
    """
    from flowgrpo_ray import storage
    from flowgrpo_ray.cli import offline

    uri, found = offline.export(run_dir, step, ema=ema, out=out, format=format, fold_alpha=fold_alpha)
    typer.echo(f"{'EMA ' if ema else ''}adapter of step {found}: {storage.display(uri)}")
    if format == "diffusers":
        typer.echo("\n" + offline.loading_code(offline.run_config(run_dir), out))


@app.command(epilog="Example: flowgrpo-ray report runs/first")
def report(run_dir: RunDirArg) -> None:
    """Write report.html of a run, in progress or done."""
    from flowgrpo_ray import storage
    from flowgrpo_ray.cli import offline

    offline.check_run_dir(run_dir)
    _quiet("warning")
    from flowgrpo_ray.views.report import write_report

    typer.echo(storage.display(write_report(run_dir)))


# What there is --------------------------------------------------------------------------------------------------------

@app.command("config", epilog="Example: flowgrpo-ray config configs/tiny_ocr.yaml sampling.group_size=8")
def show_config(
    config: OptionalConfigArg = None, overrides: OverridesArg = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without comments")] = False,
) -> None:
    """Print a configuration in full, every field documented.

    Without CONFIG the defaults.
    """
    from flowgrpo_ray.config.load import to_yaml

    settings = _load_or_default(*_optional_config(config, overrides))
    typer.echo(to_yaml(settings, documented=not plain), nl=False)


@app.command(epilog="Example: flowgrpo-ray metrics > metrics.md")
def metrics() -> None:
    """Print the table of metrics as Markdown."""
    from flowgrpo_ray.run_dir.metrics import table

    typer.echo(table(), nl=False)


@app.command(epilog="Example: flowgrpo-ray version")
def version() -> None:
    """Print the version of this package and of what it uses."""
    from flowgrpo_ray.provenance import commit, versions

    for name, number in versions().items():
        typer.echo(f"{name} {number}")
    if found := commit():
        typer.echo(f"commit {found['id']}{', with changes' if found['dirty'] else ''}")


cli_rewards.add_to(app)
cli_runs.add_to(app)
cli_cluster.add_to(app)
cli_control.add_to(app)


# Helpers --------------------------------------------------------------------------------------------------------------

def _optional_config(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Where CONFIG may be left out, a first argument of the form key=value is an override."""
    given = list(overrides or [])
    if config is not None and "=" in config and not Path(config).exists():
        return None, [config, *given]
    return config, given


def _load_or_default(config: str | None, overrides: list[str]) -> Config:
    """A configuration; without a file the defaults, with the ocr reward, as none is optimised by default."""
    from flowgrpo_ray.config import load

    named = any(text.startswith("rewards") for text in overrides)
    return load(config, overrides if config is not None or named else ["rewards={ocr: {}}", *overrides])


def prepare_command(config: Config, *, err: bool = False) -> Console:
    """Console, logging and signals of a command that works for a while."""
    from flowgrpo_ray.views.live import RunConsole, set_up_logging

    console = RunConsole(stderr=err)
    waiting.set_limits(config)
    set_up_logging(config.logging.level, console)
    _quiet(config.logging.level)
    signals.install()
    return console


def _quiet(level: str) -> None:
    """Libraries and Ray speak up for warnings that a person can act on, and at level debug."""
    if level == "debug":
        return
    warnings.simplefilter("ignore")
    for key, value in {
        "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }.items():
        os.environ.setdefault(key, value)


def _ray_logs_join_ours() -> None:
    """Send Ray's own records through our handler instead of its own, which would write into the live view."""
    import ray  # noqa: F401  (installs its handler when it is imported)

    logger = logging.getLogger("ray")
    logger.handlers.clear()
    logger.propagate = True
    from actors.ray_messages import join_ours

    join_ours()
    # Token authentication is Ray's default and needs nothing done.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


def main() -> None:
    """Entry point of the `flowgrpo-ray` command."""
    try:
        app(prog_name="flowgrpo-ray")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if waiting.abandoned():
            _end_now(code)  # a library would wait at its exit for the call that has no answer
        if (head := sys.modules.get("actors.head")) is not None and head.gone():
            _end_now(code)  # Ray's library would abort at its exit, as its processes have ended before
        if sys.argv[1:2] in ([name] for name in cli_rewards.WITH_A_REWARD):
            _end_despite_threads(code)
        raise


def _end_despite_threads(code: int) -> None:
    """End the process where a reward has left threads that Python would wait for, maybe for ever; does nothing where none is.

    All that is ours is done by then: tables are written and closed, and the server has stopped. What is registered for the
    end of the process still runs.
    """
    if all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        return
    atexit._run_exitfuncs()
    _end_now(code)


def _end_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
