"""The commands about rewards: which there are, and what they say of images on disk."""

from __future__ import annotations

import gc
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowgrpo_ray import signals
from flowgrpo_ray.errors import ConfigError, counted

if TYPE_CHECKING:
    from flowgrpo_ray.data.prompts import PromptRecord

OptionsOption = Annotated[list[str] | None, typer.Option(
    "--option", metavar="KEY=VALUE", help="An option of the reward, e.g. mode=recognition; repeat it for more")]


WITH_A_REWARD = ("rewards", "score", "serve-reward")  # commands that run a reward's code in their own process


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(epilog="Example: flowgrpo-ray rewards ocr")(rewards)
    app.command(epilog="Example: flowgrpo-ray score samples/ --reward ocr --prompts prompts.txt --out scores.parquet")(score)
    app.command(epilog="Example: flowgrpo-ray serve-reward ocr --option mode=recognition --port 8123")(serve_reward)


def rewards(name: Annotated[str | None, typer.Argument(
    metavar="NAME", help="Only this reward: a name, or module:function of your own")] = None) -> None:
    """List the rewards: range, device, needs, packages, options."""
    from flowgrpo_ray.rewards import known_rewards, reward_class

    for known in known_rewards() if name is None else [name]:
        try:
            cls = reward_class(known)
        except ConfigError as error:
            if name is not None:
                raise
            typer.secho(known, bold=True)  # one broken package must not hide the others
            typer.echo(f"  {error}")
            continue
        low, high = cls.range
        typer.secho(known, bold=True)
        typer.echo(f"  {cls.description}")
        needs = f"; needs {', '.join(cls.needs)}" if cls.needs else ""
        where = {"cpu": "on CPU", "any": "on a GPU where its pool has one"}[cls.device]
        typer.echo(f"  range {low:g} to {high:g}, scored per {cls.scope} {where}{needs}")
        licence = f"; licence: {cls.licence}" if cls.licence else ""
        typer.echo(f"  packages: {', '.join(cls.packages) or 'none'}{licence}")
        for key, option in cls.options.items():
            default = textwrap.shorten(str(option.default), 60, placeholder=" ...")  # a template has many lines
            typer.echo(f"  option {key} = {default}: {option.description}")


def score(
    images: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of images")],
    reward: Annotated[list[str], typer.Option(
        "--reward", metavar="NAME", help="A reward: a name, or module:function of your own; repeat it for more")],
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Prompt file: .txt, .jsonl or .parquet")] = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; repeat it for more")] = None,
    options: OptionsOption = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write a table too: .parquet, .csv or .jsonl")] = None,
    self_test: Annotated[bool, typer.Option(help="Score known images first")] = True,
) -> None:
    """Score the images of a folder.

    Images pair with prompts by names such as 03_01.png (prompt 3, image 1, as `flowgrpo-ray sample` writes them), else in the
    order of their names; one prompt goes with every image. With several rewards an option is written reward.key=value.
    """
    from flowgrpo_ray.cli.score import (
        batches_of,
        check_table,
        find_images,
        make_room,
        other_images,
        score_images,
        write_table,
    )
    from flowgrpo_ray.rewards import get, reward_class
    from flowgrpo_ray.rewards.base import self_tested

    if out is not None:
        check_table(out)
    given = options_by_reward(reward, options)
    files = find_images(images, given_prompts(prompt, prompts, "which prompts belong to the images?"))
    if unread := other_images(images):
        typer.echo(f"not read: {', '.join(unread)}; convert them to .png first", err=True)
    _check_prompts(given, [p.record for p in files])
    batches = {name: batches_of(reward_class(name), settings, files) for name, settings in given.items()}
    if out is not None:
        make_room(out)
    columns: dict[str, None] = {}
    for name, settings in given.items():
        scorer = get(name, **settings)
        if self_test:
            self_tested(scorer)
        score_images(scorer, short_name(name), batches[name],
                       {*columns, *map(short_name, given)} - {short_name(name)})
        for note in scorer.notes:
            typer.echo(f"{short_name(name)}: {note}", err=True)
        # The reward's own column is there even where it failed on every image.
        columns |= dict.fromkeys([short_name(name), *(key for file in files for key in file.scores)])
        del scorer
        gc.collect()  # its model has to be gone, cycles or not, before the next one is loaded
    keys = list(columns)
    width = max(len(file.path.name) for file in files)
    typer.echo("  ".join([f"{'image':<{width}}", *(f"{key:>{max(len(key), 9)}}" for key in keys)]))
    for file in files:
        cells = [f"{file.scores[key]:.4f}" if key in file.scores else "-" for key in keys]
        line = [f"{file.path.name:<{width}}", *(f"{c:>{max(len(k), 9)}}" for k, c in zip(keys, cells, strict=True))]
        typer.echo("  ".join(line) + (f"  {file.error}" if file.error else ""))
    for key in keys:
        values = [file.scores[key] for file in files if key in file.scores]
        mean = f"{sum(values) / len(values):.4f}" if values else "-"
        typer.echo(f"mean {key}: {mean} of {counted(len(values), 'image')}")
    if out is not None:
        write_table(out, files, keys)
        typer.echo(out)
    if failed := sum(file.error is not None for file in files):
        typer.echo(f"{failed} of {counted(len(files), 'image')} have no score", err=True)
        raise typer.Exit(1)


def serve_reward(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A reward: a name, or module:Class of your own")],
    host: Annotated[str, typer.Option(help="Address to listen on; there is no authentication: keep it private")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one")] = 8123,
    options: OptionsOption = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most images in one request")] = 256,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request, in MB")] = 256,
    self_test: Annotated[bool, typer.Option(help="Score known images first")] = True,
) -> None:
    """Serve a reward over HTTP, for `remote` rewards.

    JSON with PNG images, scored one request at a time; /health and /metrics say how it is. Ctrl-C or SIGTERM ends it.
    """
    import signal

    settings = options_by_reward([name], options)[name]
    from flowgrpo_ray.rewards.server import serve

    if serve(name, settings, host=host, port=port, max_batch=max_batch, max_body_mb=max_body_mb, self_test=self_test,
             say=lambda text: print(text, flush=True)) == signal.SIGINT:
        raise KeyboardInterrupt
    raise signals.Terminated


def options_by_reward(rewards: list[str], options: list[str] | None) -> dict[str, dict[str, Any]]:
    """Options of each reward from `key=value` (of a single reward) or `reward.key=value`; raises ConfigError, also
    where a reward scores videos."""
    from flowgrpo_ray.config.load import split_override
    from flowgrpo_ray.errors import nearest
    from flowgrpo_ray.rewards import option_problems, reward_class
    from flowgrpo_ray.rewards.registry import video_problem

    if again := [name for name in rewards if rewards.count(name) > 1]:
        raise ConfigError(f"--reward {again[0]} is there twice; once is enough")
    given: dict[str, dict[str, Any]] = {name: {} for name in rewards}
    names = [short_name(name) for name in given]
    if twice := [name for name in given if names.count(short_name(name)) > 1]:
        raise ConfigError(f"--reward {' and '.join(twice)} would both be named {short_name(twice[0])}; score them one by one")
    one = len(given) == 1
    form = "key=value, for example mode=recognition" if one else "reward.key=value, for example ocr.mode=recognition"
    for text in options or []:
        key, value = split_override(text, "--option", form)
        # A name may have dots itself (`package.module:function`), and may be the beginning of another.
        name = max((name for name in given if key.startswith(f"{name}.")), key=len, default=None)
        if name is not None:
            given[name][key.removeprefix(f"{name}.")] = value
        elif "." not in key and one:
            given[rewards[0]][key] = value
        else:
            raise ConfigError(f"--option {text}: with several rewards it is of the form reward.key=value"
                              f"{nearest(key.rpartition('.')[0] or key, given)}")
    problems = [problem for name, settings in given.items() for problem in option_problems(name, settings)]
    problems += [problem for name in given if (problem := video_problem(reward_class(name), "this command takes"))]
    if problems:
        raise ConfigError("\n".join(problems))
    return given


def short_name(name: str) -> str:
    """What the scores of a reward are called: its name, or the function of `module:function`."""
    return name.rpartition(":")[2]


def given_prompts(texts: list[str] | None, file: str | None, question: str) -> list[PromptRecord]:
    """Prompts of --prompt and --prompts; raises ConfigError where there are none, or a blank one."""
    from flowgrpo_ray.data.prompts import PromptRecord, load_prompts, text_problem

    if not texts and file is None:
        raise ConfigError(f"{question} Give --prompt TEXT (several times if you like) or --prompts FILE")
    if blank := [text for text in texts or [] if not text.strip()]:
        raise ConfigError(f"--prompt {blank[0]!r} is blank")
    for text in texts or []:
        if problem := text_problem(text):
            raise ConfigError(f"--prompt {text!r} {problem}")
    given = [PromptRecord(prompt=text, line=number) for number, text in enumerate(texts or [], 1)]
    return given + (load_prompts(file) if file is not None else [])


def _check_prompts(given: dict[str, dict[str, Any]], records: list[PromptRecord]) -> None:
    from flowgrpo_ray.rewards import reward_class
    from flowgrpo_ray.rewards.base import prompt_problem

    for name, settings in given.items():
        cls = reward_class(name)
        for record in records:
            if why := prompt_problem(name, cls, record, settings):
                raise ConfigError(f"prompt {record.prompt!r}: {why}")
