"""The configuration: one typed tree over YAML, every field documented, every mistake named before an actor starts.

Every field has a mark (`sections.mark_of`) that says what it decides. What decides the result lives outside `pools`, and a
checkpoint that was made with other values of it is resumed only if `run.accept_changes` names them (see `resume`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from flowgrpo_ray.config import yaml12
from flowgrpo_ray.config.paths import make_absolute
from flowgrpo_ray.config.schema import (
    INPUT,
    RESULT,
    AdvantageConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    LoraSection,
    LossConfig,
    ModelConfig,
    PoolConfig,
    PoolsConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    Section,
    TrainConfig,
    mark_of,
    marks_of,
)
from flowgrpo_ray.config.settings import Setting, flat
from flowgrpo_ray.errors import ConfigError, counted, nearest
from flowgrpo_ray.rewards import known_rewards

REWARD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class Config(Section):
    """The whole configuration. `load` reads it; every section is documented by `flowgrpo-ray config`."""

    run: RunConfig = Field(default_factory=RunConfig, description="Name, place and length of the run")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The frozen base model")
    lora: LoraSection = Field(default_factory=LoraSection, description="The adapter, the only part that is trained")
    data: DataConfig = Field(default_factory=DataConfig, description="Prompts")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How training images are sampled")
    rewards: dict[str, RewardConfig] = Field(default_factory=dict, description="Rewards by name")
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="Scores to advantages")
    loss: LossConfig = Field(default_factory=LossConfig, description="PPO clip and KL")
    train: TrainConfig = Field(default_factory=TrainConfig, description="Optimizer, updates, sharding")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation by ODE at fixed seeds")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Durable state")
    pools: PoolsConfig = Field(default_factory=PoolsConfig, description="Actors and their resources")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="What is recorded and shown")

    @field_validator("rewards")
    @classmethod
    def _rewards_exist(cls, rewards: dict[str, RewardConfig]) -> dict[str, RewardConfig]:
        for name, reward in rewards.items():
            if not REWARD_NAME.fullmatch(name):
                raise ValueError(f"the name {name!r} must consist of letters, digits, _ and -, and start with a letter")
            if reward.python and reward.type:
                raise ValueError(f"{name} has both type and python; give one of them")
            if reward.python is not None and ":" not in reward.python:
                raise ValueError(f"{name}.python is {reward.python!r}, which is not of the form module:function or "
                                 "module:Class")
            if reward.python is None and (kind := reward.type or name) not in known_rewards():
                raise ValueError(f"no reward is named {kind!r}{nearest(kind, known_rewards())} (for your own: "
                                 f"`{name}: {{python: module:function}}`)")
            if reward.every_steps > 1 and reward.weight:
                raise ValueError(f"{name}.every_steps is {reward.every_steps}, and its weight is {reward.weight:g}: only a "
                                 "monitor (weight 0) can leave steps out")
            path = reward.environment.py_executable
            if path is not None and not os.path.isabs(path):
                raise ValueError(f"{name}.environment.py_executable {path!r} is not an absolute path (it must be right in "
                                 "any folder, on every node), for example /envs/reward/bin/python")
            if reward.environment.pip is not None and reward.environment.py_executable is not None:
                raise ValueError(f"{name}.environment has both pip and py_executable; give one of them")
        if not any(reward.weight for reward in rewards.values()):
            raise ValueError("at least one reward needs a weight other than 0, for example "
                             "`rewards: {ocr: {weight: 1.0}}`")
        return rewards

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        problems = [*self._sampling_problems(), *self._pool_problems()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _sampling_problems(self) -> list[str]:
        s, t, problems = self.sampling, self.train, []
        if s.group_size < 2:
            problems.append(f"sampling.group_size is {s.group_size}: an advantage is relative to its group, so it "
                            "needs at least 2 samples; use 2")
        for key, value in (("sampling.micro_batch", s.micro_batch), ("train.micro_batch", t.micro_batch)):
            if value and s.group_size >= 2 and s.group_size % value:
                problems.append(f"{key} is {value}, which does not divide sampling.group_size {s.group_size}; "
                                f"its divisors are {', '.join(map(str, divisors(s.group_size)))}")
        for section, batch, micro_batch in (("sampling", s.batch_groups, s.micro_batch),
                                            ("train", self.train_batch_groups, self.train_micro_batch)):
            if batch > 1 and micro_batch != s.group_size:
                problems.append(f"{section}.batch_groups is {batch}, so a micro-batch holds whole groups: set "
                                f"{section}.micro_batch to sampling.group_size ({s.group_size}), or "
                                f"{section}.batch_groups to 1")
        rows, train_rows = s.micro_batch * s.batch_groups, self.train_micro_batch * self.train_batch_groups
        if rows != train_rows and t.ratio_tolerance == "auto":
            problems.append(f"training micro-batches have {counted(train_rows, 'row')} "
                            f"(train.micro_batch {self.train_micro_batch} x train.batch_groups "
                            f"{self.train_batch_groups}), those of sampling {rows}: bits depend on batch "
                            "shape, so set train.ratio_tolerance to a number, for example "
                            f"{self.loss.clip_low / 4:g}")
        if s.groups_per_step % t.updates_per_step:
            problems.append(f"train.updates_per_step is {t.updates_per_step}, which does not divide "
                            f"sampling.groups_per_step {s.groups_per_step}; its divisors are "
                            f"{', '.join(map(str, divisors(s.groups_per_step)))}")
        first, end = self.window_range
        last_noisy = s.num_steps - 1 if s.kernel == "cps" else s.num_steps
        if first >= end:
            problems.append(f"sampling.window.range {[first, end]} is empty: it is [first, last + 1), for example [0, "
                            f"{last_noisy}]")
        elif not 0 <= first < end <= s.num_steps:
            problems.append(f"sampling.window.range {[first, end]} leaves the schedule of {counted(s.num_steps, 'step')}; the "
                            f"widest range is [0, {last_noisy}]")
        elif end > last_noisy:
            problems.append(f"sampling.window.range {[first, end]} contains step {s.num_steps - 1}, at which "
                            f"{s.kernel} adds no noise (its log-prob does not exist); end it at {last_noisy}")
        elif self.window_size > end - first:
            problems.append(f"sampling.window.size is {s.window.size}, but sampling.window.range {[first, end]} holds "
                            f"{counted(end - first, 'step')}; the largest size is {end - first}")
        if s.max_staleness:
            problems.append(f"sampling.max_staleness is {s.max_staleness}: sampling ahead of the learner is not built "
                            "yet; use 0")
        if s.kernel == "cps" and s.noise_level > 1:
            problems.append(f"sampling.noise_level is {s.noise_level:g}: cps takes it as an angle in units of a right "
                            "angle; the largest is 1")
        if self.advantage.combine == "gdpo" and (self.advantage.baseline, self.advantage.std) != ("group", "group"):
            problems.append("advantage.combine gdpo normalises every reward in its group; it needs "
                            "advantage.baseline: group and advantage.std: group")
        if self.eval.weights == "ema" and not t.ema.enabled:
            problems.append("eval.weights is ema, and train.ema.enabled is false: there are no EMA weights; use policy")
        if self.loss.ratio_norm and s.log_prob != "gaussian":
            problems.append("loss.ratio_norm needs sampling.log_prob: gaussian, whose ratio it normalises")
        return problems

    def _pool_problems(self) -> list[str]:
        problems = []
        for name in self.pools.reward:
            if name not in self.rewards:
                problems.append(f"pools.reward.{name} has no reward: the rewards are "
                                f"{', '.join(self.rewards) or 'none'}{nearest(name, self.rewards)}")
        if self.pools.placement == "colocated" and self.train.sharding in ("full", "hybrid"):
            problems.append(f"train.sharding {self.train.sharding} cannot sample on the learner's shards; use "
                            "train.sharding: none (or auto) with pools.placement: colocated, or placement: split")
        if self.train.sharding == "hybrid":
            size, ranks = self.train.shard_size, self.pools.learner.replicas
            if size is None or ranks % size:
                problems.append(f"train.sharding hybrid needs train.shard_size, a divisor of pools.learner.replicas "
                                f"({ranks}): {', '.join(map(str, divisors(ranks)))}")
        given, apart = self.pools.learner.collective_timeout_s, self._ranks_apart_s
        if given is not None and given < apart:
            problems.append(f"pools.learner.collective_timeout_s is {given:g}: colocated ranks may be two sampling calls "
                            f"apart, 2 x pools.rollout.timeout_s = {apart:g}; use at least {apart:g}, leave it out, or "
                            "lower pools.rollout.timeout_s")
        return problems

    @property
    def _ranks_apart_s(self) -> float:
        """How long a learner rank may have to wait for another that does as it should: a colocated one may still have
        two sampling calls to make, one that runs and one that is queued."""
        p = self.pools
        return 2 * p.rollout.timeout_s if p.placement == "colocated" and p.learner.replicas > 1 else 0.0

    @property
    def collective_timeout_s(self) -> float:
        """Deadline of a collective of the learner ranks."""
        given = self.pools.learner.collective_timeout_s
        return given if given is not None else 120.0 + self._ranks_apart_s

    @property
    def window_range(self) -> tuple[int, int]:
        """[first, end) of the steps that a window may hold."""
        return self.sampling.window.range or (0, self.sampling.num_steps - 1)

    @property
    def window_size(self) -> int:
        """Trained steps per sample (w)."""
        first, end = self.window_range
        return self.sampling.window.size or end - first

    @property
    def train_micro_batch(self) -> int:
        return self.train.micro_batch or self.sampling.micro_batch

    @property
    def train_batch_groups(self) -> int:
        return self.train.batch_groups or self.sampling.batch_groups

    def ratio_tolerance(self, exact: bool) -> float:
        """Largest |log ratio| that the first update may have; `exact`: sampler and learner compute in float32 on CPU."""
        if self.train.ratio_tolerance != "auto":
            return self.train.ratio_tolerance
        return 0.0 if exact else self.loss.clip_low / 4

    def reward_pool(self, name: str) -> PoolConfig:
        """Resources of one reward's actors (defaults where the configuration names none)."""
        return self.pools.reward.get(name) or PoolConfig()

    def settings(self) -> dict[str, Setting]:
        """Every setting by its dotted key, with its mark."""
        return flat(Config, self.model_dump(mode="json"))

    def result_hash(self, identities: Mapping[str, Any] | None = None) -> str:
        """sha256 over all that decides the result: settings marked so, and of inputs their contents (see `inputs.identify`)
        if `identities` has them by key, else their names."""
        identities = identities or {}
        decisive = {key: identities.get(key, setting.value) for key, setting in self.settings().items()
                    if setting.mark == RESULT and not (key == "model.revision" and "model.path" in identities)}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def load(path: str | Path | None = None, overrides: list[str] | dict[str, Any] | None = None, *,
         for_job: bool = False) -> Config:
    """Read a YAML 1.2 file in UTF-8, apply dotted overrides (`"sampling.group_size=8"`), and check the result.

    Args:
        path: a file or anything else that can be read like one, such as /dev/stdin; `-` is the standard input.
        overrides: applied in order; `rewards.NAME=null` drops a reward of the file.

    Relative paths are of the working directory, and are absolute in what is returned (see `paths`); `for_job`: but for
    `run.dir`, as in the Ray job that the configuration is submitted to.

    Raises:
        ConfigError: names every wrong key or value and the nearest right one.
    """
    tree: Any = {} if path is None else _read_file(path)
    if isinstance(overrides, dict):
        pairs = list(overrides.items())
    else:
        pairs = [split_override(text) for text in overrides or []]
    for key, value in pairs:
        _lay_over(tree, key, value)
    config = from_tree(tree)
    make_absolute(config, for_job)
    return config


def _read_file(path: str | Path) -> dict[str, Any]:
    """The tree of a configuration file; raises ConfigError."""
    file = Path(path)
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read()
        elif file.is_dir():
            raise ConfigError(f"{path} is a folder; give the YAML file")
        elif not file.exists():
            siblings = [str(p) for p in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
            raise ConfigError(f"no configuration file at {path}{nearest(str(path), siblings)}")
        else:
            data = file.read_bytes()
        if not data:
            raise ConfigError(f"{'the standard input' if str(path) == '-' else path} is empty; it must hold a configuration "
                              "in YAML")
        tree = yaml12.parse(data.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: it must be encoded in UTF-8 ({error})") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; a configuration is a mapping of sections")
    return tree or {}


def from_tree(tree: dict[str, Any]) -> Config:
    """Check a plain tree (as read from YAML) and return the typed one; raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def split_override(
    text: str, what: str = "override", form: str = "section.key=value, for example sampling.group_size=8",
) -> tuple[str, Any]:
    """Key and value, read as YAML, of `key=value`; raises ConfigError, which calls it `what` and says what its form is."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{what} {text!r} is not of the form {form}")
    try:
        return key.strip(), yaml12.parse(value)
    except ValueError as error:
        raise ConfigError(f"{what} {text!r}: the value is not valid YAML: {error}") from None


def _lay_over(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    if parents == ["rewards"] and value is None:
        _drop_reward(tree, leaf)
        return
    for parent in parents:
        child = tree.setdefault(parent, {})
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {parent} is a value, not a section")
        tree = child
    tree[leaf] = value


def _drop_reward(tree: dict[str, Any], name: str) -> None:
    """Take a reward out of the tree, with its pool."""
    rewards, pools = tree.get("rewards"), tree.get("pools")
    if not isinstance(rewards, dict) or name not in rewards:
        raise ConfigError(f"override rewards.{name}=null: there is no reward {name!r} to drop"
                          f"{nearest(name, rewards if isinstance(rewards, dict) else ())}")
    del rewards[name]
    if isinstance(pools, dict) and isinstance(pools.get("reward"), dict):
        pools["reward"].pop(name, None)


def _explain(problem: Mapping[str, Any]) -> str:
    loc = [str(part) for part in problem["loc"]]
    if problem["type"] != "extra_forbidden" and (loc[-1:] == ["constrained-float"] or loc[-1:] == ["literal['auto']"]):
        loc.pop()  # which member of `number or word` it was measured against; not a key
    key = ".".join(loc)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{nearest(loc[-1], _keys_at(loc[:-1]), '.'.join(loc[:-1]))}"
    if problem["type"] == "value_error":
        text = str(problem["ctx"]["error"])
        return f"{key}: {text}" if key else text
    return f"{key}: {problem['msg']} (it is {problem['input']!r})"


def _keys_at(path: list[str]) -> list[str]:
    """Names of the fields of the section at a path."""
    model: Any = Config
    parts = iter(path)
    for part in parts:
        field = model.model_fields.get(part)
        if field is None:
            return sorted(model.model_fields)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if model is None:
            return []
        if getattr(field.annotation, "__origin__", None) is dict:
            next(parts, None)  # its key is a name of the user's, and what follows is in the section below it
    return sorted(model.model_fields)


def to_yaml(config: Config, *, documented: bool = False) -> str:
    """The resolved tree as YAML; `documented` puts each field's description beside it as a comment."""
    if not documented:
        return yaml12.dump(config.model_dump(mode="json"))
    lines = ["# [evaluation], [infrastructure]: may change when a run resumes. Everything else decides the result: name it in",
             "# run.accept_changes to change it. [input]: compared by contents, not by name."]
    _document(config, 0, lines)
    return "\n".join(lines) + "\n"


def _document(section: Section, depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if depth == 0 and lines:
            lines.append("")
        mark = value.mark if isinstance(value, Section) else mark_of(type(section), name)
        shown = ([mark] if mark != section.mark else []) + [INPUT] * (INPUT in marks_of(type(section), name))
        lines.append(f"{pad}# {field.description}" + (f" [{', '.join(shown)}]" if shown else ""))
        if isinstance(value, Section):
            lines.append(f"{pad}{name}:")
            _document(value, depth + 1, lines)
        elif isinstance(value, dict) and value and all(isinstance(v, Section) for v in value.values()):
            lines.append(f"{pad}{name}:")
            for key, child in value.items():
                lines.append(f"{pad}  {key}:")
                _document(child, depth + 2, lines)
        else:
            plain = json.loads(json.dumps(value, default=list))
            text = yaml12.dump(plain, default_flow_style=True, width=10**6)
            lines.append(f"{pad}{name}: {text.removesuffix('...' + chr(10)).strip()}")
