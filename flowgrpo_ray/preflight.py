"""Checks that need files but no actors: prompts, rewards, model. All that is wrong is found before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo_ray.config import Config
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies import check_model
from flowgrpo_ray.prompts import PromptRecord, load_prompts
from flowgrpo_ray.rewards.base import option_problems, reward_class

SHOWN = 5  # bad prompts that an error lists


@dataclass(frozen=True)
class Inputs:
    """What a run reads: training and evaluation prompts."""

    train: list[PromptRecord]
    eval: list[PromptRecord]


def check(config: Config) -> Inputs:
    """Read the prompts and check them, the rewards' options and the model's reachability.

    Raises:
        ConfigError: names every input that is wrong and the nearest right one.
    """
    if not config.rewards:
        raise ConfigError("rewards is empty: name at least one, for example `rewards: {ocr: {weight: 1.0}}`")
    problems = [f"rewards.{name}.options: {text}" for name, reward in config.rewards.items()
                for text in option_problems(name, reward.options)]
    if problems:
        raise ConfigError("\n".join(problems))
    check_model(config.model)
    train = load_prompts(config.data.train_prompts)
    evaluation = load_prompts(config.data.eval_prompts) if config.data.eval_prompts else []
    _check_prompts(config, "data.train_prompts", config.data.train_prompts, train)
    if evaluation:
        _check_prompts(config, "data.eval_prompts", config.data.eval_prompts, evaluation)
    return Inputs(train, evaluation)


def _check_prompts(config: Config, key: str, uri: str, records: list[PromptRecord]) -> None:
    for name, reward in config.rewards.items():
        cls = reward_class(name)
        bad = [(record, why) for record in records
               if (why := cls.check_prompt(record.prompt, record.metadata, **reward.options))]
        if bad:
            lines = [f"  line {record.line}: {record.prompt!r}: {why}" for record, why in bad[:SHOWN]]
            rest = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            raise ConfigError(f"{key}: {len(bad)} of {len(records)} prompts in {uri} cannot be scored by reward {name}:\n"
                              + "\n".join(lines) + rest)
    sizes = {(r.height or config.sampling.height, r.width or config.sampling.width) for r in records}
    odd = [size for size in sizes if size[0] % 8 or size[1] % 8]
    if odd:
        height, width = odd[0]
        raise ConfigError(f"{key}: image size {height}x{width} is not a multiple of 8; the nearest right one is "
                          f"{max(8, round(height / 8) * 8)}x{max(8, round(width / 8) * 8)}")
