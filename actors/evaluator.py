"""An evaluation by itself: the controller's sampling and scoring half, without learners."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from actors.controller import Controller, Observer
from actors.names import ActorNames
from actors.rollout import RolloutActor
from actors.sync import Published
from flowgrpo_ray.config.load import Config, from_tree
from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.preflight import Inputs, scope_of
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.run_dir.sample_table import GridImage, png_grid
from flowgrpo_ray.views.status import PoolStatus

if TYPE_CHECKING:
    from flowgrpo_ray.policies.lora import LoraSettings


def evaluation_config(config: Config, settings: LoraSettings | None) -> Config:
    """The configuration of an evaluation: rollout actors and rewards alone, LoRA layers of the shape of the adapter.

    Under colocated placement the rollout actors take the place and the resources of the learner ranks.

    Rewards that score whole groups take no part.

    Raises:
        ConfigError: the configuration names no evaluation prompts, or no reward that scores images one by one.
    """
    if not config.data.eval_prompts:
        raise ConfigError("data.eval_prompts is not set: name the prompt file to evaluate on, for example "
                          "data.eval_prompts=prompts/test.txt")
    tree = config.model_dump(mode="json")
    of_groups = [name for name, reward in config.rewards.items() if scope_of(name, reward) == "group"]
    if len(of_groups) == len(config.rewards) > 0:
        raise ConfigError(f"rewards: {', '.join(of_groups)} score whole groups; an evaluation needs a reward that scores "
                          "images one by one")
    for name in of_groups:
        del tree["rewards"][name]
        tree["pools"]["reward"].pop(name, None)
    pools = tree["pools"]
    if pools["placement"] == "colocated":
        shared = ("replicas", "num_cpus", "num_gpus", "label_selector", "env", "nice")
        pools["rollout"] |= {key: pools["learner"][key] for key in shared}
    pools["placement"] = "split"
    pools["learner"] |= {"replicas": 1, "num_cpus": 0, "num_gpus": 0}
    tree["data"]["train_prompts"] = config.data.eval_prompts
    tree["train"] |= {"sharding": "none", "shard_size": None, "ema": {"enabled": False}}
    tree["eval"]["weights"] = "policy"
    tree["lora"]["init_from"] = None
    if settings is not None:
        tree["lora"] |= {"rank": settings.rank, "alpha": settings.alpha, "targets": list(settings.targets)}
    return from_tree(tree)


class EvaluationActor(RolloutActor):
    """A rollout actor that also tells which adapter it was born with: the identity, that is the base model."""

    def initial_adapter(self) -> tuple[tuple[str, int], Arrays]:
        """(digest, number of tensors), and the adapter: two returns, so that the driver reads the first alone."""
        from flowgrpo_ray.policies import lora

        state = lora.read_state(self.sampler.policy)
        return (lora.digest(state), len(state)), state


class NoLearners:
    """Stands where the learner group stands in a training run."""

    world_size = 0

    def __init__(self, config: Config, run_id: str, names: ActorNames, actor_class: type) -> None:
        self.pending: dict[ray.ObjectRef, str] = {}

    def start(self, timeout_s: float) -> None: ...

    def check_deadline(self) -> None: ...

    def activity(self) -> list[str]:
        return []

    def status(self) -> PoolStatus:
        return PoolStatus(0)

    def shutdown(self) -> None: ...


class Results:
    """Stands where the recorder of a run directory stands: keeps the grid, writes nothing."""

    resume_from = run_dir = None
    start_step = 0
    last_row: Row = {}

    def __init__(self) -> None:
        self.run_id = self.start_id = uuid.uuid4().hex[:12]
        self.grid_png: bytes | None = None

    def open(self) -> None:
        """Nothing is written."""

    def grid(self, weights: str, step: int, images: Sequence[GridImage]) -> None:
        self.grid_png = png_grid(images) if images else None


class Evaluator(Controller):
    """Evaluates one adapter, or the base, on rollout and reward actors.

    Args:
        config: of `evaluation_config`.
        adapter: LoRA weights by key; None = the base model.
    """

    rollout_class = EvaluationActor
    group_class = NoLearners
    reachable = False

    def __init__(self, config: Config, inputs: Inputs, observer: Observer, adapter: Arrays | None) -> None:
        self.results = Results()
        super().__init__(config, inputs, self.results, observer)  # type: ignore[arg-type]
        self._adapter = adapter

    def result(self) -> Row:
        """Publish the adapter with the proof that every sync needs, and evaluate it; returns the row."""
        if self._adapter is not None:
            from flowgrpo_ray.policies import lora

            digest, tensors = lora.digest(self._adapter), len(self._adapter)
            arrays: Any = ray.put(self._adapter)
        else:
            first = self.rollouts.members[0].handle.initial_adapter.options(num_returns=2)
            described, arrays = first.remote()
            digest, tensors = ray.get(described, timeout=self.config.pools.rollout.timeout_s)
        self.published = {"policy": Published("policy", 0, digest, tensors, -1, arrays)}
        self.rollouts.prepare_again(lambda handle: self._load(handle, "policy"))
        self._drive("weight sync", lambda: self.rollouts.all_ready)
        return self.evaluate(0)
