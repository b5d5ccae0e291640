"""Checks that need files but no actors: prompts, rewards, model. All that is wrong is found before anything starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flowgrpo_ray import storage
from flowgrpo_ray.config import Config
from flowgrpo_ray.config.schema import RewardConfig
from flowgrpo_ray.data.prompts import PromptRecord, load_prompts
from flowgrpo_ray.errors import ConfigError, Problems, counted
from flowgrpo_ray.policies import check_adapter, check_model
from flowgrpo_ray.policies.prompt_lengths import Span, check_lengths
from flowgrpo_ray.policies.source import (
    CFG_FAMILIES,
    ModelSource,
    check_size,
    component_config,
    uses_cfg,
    vae_scale_factor,
)
from flowgrpo_ray.policies.text import PromptReader
from flowgrpo_ray.rewards import Reward, option_problems, reward_class
from flowgrpo_ray.rewards.base import prompt_problem, settings_of
from flowgrpo_ray.rewards.registry import video_problem
from flowgrpo_ray.sampling.requests import evaluation_guidance

log = logging.getLogger(__name__)

SHOWN = 5  # bad prompts that an error lists
ROUNDING = {"bfloat16": 1e-6, "float16": 2e-7}  # of a log ratio, without a CFG pass, at 512 and 1024 px
LARGEST_WEIGHT = 1e6  # a larger one leaves nothing of the other scores in a float32 sum


@dataclass(frozen=True)
class Inputs:
    """What a run reads: training and evaluation prompts, and the family of its model."""

    train: list[PromptRecord]
    eval: list[PromptRecord]
    family: str


def check(config: Config, elsewhere: Collection[str] = ()) -> Inputs:
    """Read the prompts and check them, the rewards' options and the model's reachability.

    Args:
        elsewhere: keys of inputs that are only where the run will be (`model.path`, `data.train_prompts`); what depends on
            them is not checked, and without the model the family is an empty string.

    Raises:
        ConfigError: names every input that is wrong and the nearest right one.
    """
    _check_rewards(config)  # first: prompts are checked for the rewards
    problems, d = Problems(), config.data
    source = reader = rule = None
    if "model.path" not in elsewhere:
        with problems.collected():
            source = check_model(config.model)
            rule, reader = _size_rule(source, config), PromptReader(source, config.model)
            if config.lora.targets is not None or config.lora.init_from is not None and "lora.init_from" not in elsewhere:
                check_adapter(source, config.model, config.lora)
    train: list[PromptRecord] = []
    if "data.train_prompts" not in elsewhere:
        with problems.collected():
            train = _prompts(config, "data.train_prompts", d.train_prompts, rule, reader)
    evaluation = train if d.eval_prompts == d.train_prompts else []
    if d.eval_prompts and d.eval_prompts != d.train_prompts and "data.eval_prompts" not in elsewhere:
        with problems.collected():
            evaluation = _prompts(config, "data.eval_prompts", d.eval_prompts, rule, reader)
    problems.raise_found()
    if source is None:
        return Inputs(train, evaluation, "")
    _warn_of_rounding(source, config)
    _tell_of_ignored_negatives(config, source.family, train if evaluation is train else train + evaluation)
    return Inputs(train, evaluation, source.family)


def _check_rewards(config: Config) -> None:
    """Raise ConfigError for rewards whose weights, options or pools cannot be used; log what is odd."""
    if not config.rewards:
        raise ConfigError("rewards is empty: name at least one, for example `rewards: {ocr: {weight: 1.0}}`")
    problems = Problems()
    for name, reward in config.rewards.items():
        with problems.collected():
            if not abs(reward.weight) <= LARGEST_WEIGHT:
                raise ConfigError(f"rewards.{name}.weight is {reward.weight:g}; use a magnitude of at most "
                                  f"{LARGEST_WEIGHT:g}")
            wrong = option_problems(reward.spec(name), reward.options) if known_class(name, reward) else []
            if texts := [f"rewards.{name}.options: {text}" for text in wrong] or _misfits(name, reward, config):
                raise ConfigError("\n".join(texts))
    problems.raise_found()
    for name, reward in config.rewards.items():
        if reward.every_steps > config.run.steps and not config.data.eval_prompts:
            log.warning("rewards.%s.every_steps is %d, and the run has %s and no evaluation: it is never asked", name,
                        reward.every_steps, counted(config.run.steps, "step"))


def _tell_of_ignored_negatives(config: Config, family: str, records: list[PromptRecord]) -> None:
    scales = {config.sampling.guidance_scale, evaluation_guidance(config)}
    own = sum(record.negative_prompt is not None for record in records)
    given = ["data.negative_prompt"] * bool(config.data.negative_prompt)
    given += [f"the negative_prompt of {counted(own, 'record')}"] * bool(own)
    if given and not any(uses_cfg(family, scale) for scale in scales):
        why = ("guidance_scale is not above 1" if family in CFG_FAMILIES else
               f"a model of the family {family} takes guidance as an input")
        log.warning("%s: ignored, as %s: there is no CFG pass", " and ".join(given), why)


def _warn_of_rounding(source: ModelSource, config: Config) -> None:
    """Log a warning if the base rounds more than the clip range lets pass, from a step's second update on."""
    limit = ROUNDING.get(config.model.dtype, 0.0)
    if uses_cfg(source.family, config.sampling.guidance_scale):
        limit *= 10  # the difference of two velocities, times the guidance
    clip = min(config.loss.clip_low, config.loss.clip_high)
    if clip < limit and config.train.updates_per_step > 1:
        log.warning("the clip range %g is less than what %s rounds at these settings, about %g: after a step's first update "
                    "it clips noise. Use train.updates_per_step: 1%s (docs/numerics.md)", clip, config.model.dtype, limit,
                    " or model.dtype: float16" if config.model.dtype == "bfloat16" else "")


def known_class(name: str, reward: RewardConfig) -> type[Reward] | None:
    """The reward's class; None for custom code that exists only in the environment that its actors run in."""
    try:
        return reward_class(reward.spec(name))
    except ConfigError as error:
        if reward.python and (reward.environment.py_executable or reward.environment.pip):
            return None
        raise ConfigError(f"rewards.{name}: {error}") from error


def scope_of(name: str, reward: RewardConfig) -> str:
    """What a reward scores at once, "sample" or "group"; where its class is not known here, "sample", and its actor checks."""
    cls = known_class(name, reward)
    return "sample" if cls is None else cls.scope


def _misfits(name: str, reward: RewardConfig, config: Config) -> list[str]:
    """What of a reward's options, right in themselves, does not go with the rest of the configuration."""
    cls = known_class(name, reward)
    problems: list[str] = []
    if cls is None:
        return problems
    if problem := video_problem(cls, "training samples"):
        problems.append(f"rewards.{name}: {problem}")
    if cls.device == "cpu" and (gpus := config.reward_pool(name).num_gpus):
        problems.append(f"pools.reward.{name}.num_gpus is {gpus:g}, and reward {cls.name} works on the CPU; use 0")
    settings, size = settings_of(cls, reward.options), config.sampling.group_size
    if (wait := cls.longest_wait(settings)) >= reward.timeout_s:
        problems.append(f"rewards.{name}.timeout_s is {reward.timeout_s:g}, and one request to the reward's server may take "
                        f"{wait:g} s (rewards.{name}.options.timeout_s, and the waits of its retries and backoff_s): the actor "
                        f"would be replaced before the reward can say what is wrong; use {math.floor(wait) + 1} or more")
    if cls.scope == "group" and (problem := cls.group_problem(settings, size)):
        problems.append(f"rewards.{name}.options: {problem} (sampling.group_size is {size})")
    if not problems:
        _warn_of_waits(name, reward, cls, config)
    return problems


def _warn_of_waits(name: str, reward: RewardConfig, cls: type[Reward], config: Config) -> None:
    """Log a warning where the requests of a call to a reward's own server may together outlast the call.

    It is no error, as it would be for one of them: a server answers most requests far sooner than it may, and how soon is not
    known here. Who sends 552 requests a group relies on that.
    """
    settings, sampling = settings_of(cls, reward.options), config.sampling
    images = sampling.group_size
    if cls.scope == "sample":
        images = max(sampling.micro_batch * sampling.batch_groups, (config.data.eval_prompts and config.eval.micro_batch) or 0)
    requests = cls.requests_in_turn(settings, images)
    if cls.longest_wait(settings) * requests >= reward.timeout_s:
        others = ", ".join(key for key in ("batch_size", "concurrency", "max_pairs") if key in cls.options)
        log.warning(
            "rewards.%s: a call for %d images sends %d requests one after another (those under way at once count as one), and "
            "has %g s for all of them (rewards.%s.timeout_s): %.2g s for each. If the server is slower calls fail: then raise "
            "timeout_s%s", name, images, requests, reward.timeout_s, name, reward.timeout_s / requests,
            f", or send fewer ({others} in rewards.{name}.options)" if others else "")


def _prompts(
    config: Config, key: str, uri: str, rule: tuple[int, int | None] | None, reader: PromptReader | None,
) -> list[PromptRecord]:
    """The records of a prompt file, checked; without `rule` and `reader` (the model is wrong) only for the rewards."""
    try:
        records = load_prompts(uri)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    _check_prompts(config, key, uri, records)
    if rule is None or reader is None:
        return records
    _check_sizes(config, key, records, rule)
    check_lengths(key, storage.display(uri), records, reader, _needed_spans(config),
                  reject=config.data.on_long_prompt == "error")
    return records


def _needed_spans(config: Config) -> dict[str, Span]:
    """By reward, the part of a prompt that the model must see."""
    def span_of(cls: type[Reward], options: dict[str, Any]) -> Span:
        return lambda record: cls.needed_span(record.prompt, record.reward_metadata, **options)

    classes = {name: known_class(name, reward) for name, reward in config.rewards.items()}
    return {name: span_of(cls, config.rewards[name].options) for name, cls in classes.items() if cls is not None}


def _check_prompts(config: Config, key: str, uri: str, records: list[PromptRecord]) -> None:
    for name, reward in config.rewards.items():
        cls = known_class(name, reward)
        if cls is None:
            continue
        bad = [(record, why) for record in records if (why := prompt_problem(name, cls, record, reward.options))]
        if bad:
            lines = [f"  line {record.line}: {record.prompt!r}: {why}" for record, why in bad[:SHOWN]]
            rest = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            raise ConfigError(f"{key}: {len(bad)} of {counted(len(records), 'prompt')} in {uri} cannot be scored by "
                              f"reward {name}:\n" + "\n".join(lines) + rest)


def _size_rule(source: ModelSource, config: Config) -> tuple[int, int | None]:
    """Pixels that both sides of an image are a multiple of, and the largest side (None: no limit)."""
    vae, transformer = (component_config(source, config.model, part) for part in ("vae", "transformer"))
    try:
        unit = vae_scale_factor(vae) * 2  # both families cut the latent into patches of 2
        return unit, unit * transformer["pos_embed_max_size"] if source.family == "sd3" else None
    except (KeyError, TypeError) as error:
        raise ConfigError(f"model.path {config.model.path!r}: the configuration of its vae or transformer lacks {error}"
                          ) from None


def _check_sizes(config: Config, key: str, records: list[PromptRecord], rule: tuple[int, int | None]) -> None:
    for size in sorted({(r.height or config.sampling.height, r.width or config.sampling.width) for r in records}):
        try:
            check_size(*size, *rule)
        except ConfigError as error:
            raise ConfigError(f"sampling.height and sampling.width (or the records of {key}): {error}") from None
