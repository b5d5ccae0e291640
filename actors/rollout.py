"""The rollout actor: a thin shell over `Sampler`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from actors.process import Process, Shown
from flowgrpo_ray import startup
from flowgrpo_ray.config.load import from_tree
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays, EncodeMeta, SampleMeta, SampleRequest, SyncReply, Trajectory
from flowgrpo_ray.policies import load_policy

if TYPE_CHECKING:
    from flowgrpo_ray.sampling.sampler import Sampler


class SamplingMethods(Shown):
    """What a rollout actor and a colocated actor have in common; `self.sampler` is the actor's."""

    role = "samples"
    sampler: Sampler

    def load_adapter(self, slot: str, version: int, arrays: Arrays) -> SyncReply:
        """Bind an adapter and answer with the proof (invariant: a weight sync is proven)."""
        self.shows(f"takes version {version}")
        return self.sampler.slots.load(slot, version, arrays)

    def encode(self, records: list[PromptRecord]) -> tuple[EncodeMeta | Arrays, ...]:
        """Metadata, and the conditioning of each prompt: 1 + k returns, so that each goes its own way."""
        from flowgrpo_ray import device as devices

        self.shows("encodes prompts")
        with devices.Stopwatch(self.sampler.policy.device) as watch:
            conditionings = self.sampler.encode_all(records)
        sizes = tuple(sum(array.nbytes for array in arrays.values()) for arrays in conditionings)
        return EncodeMeta(watch.seconds, sizes), *conditionings

    def sample(
        self, request: SampleRequest, negative: Arrays | None, *conditionings: Arrays
    ) -> tuple[SampleMeta, np.ndarray, Trajectory]:
        """One shard: metadata, images and trajectory as three returns, so that each goes its own way."""
        from flowgrpo_ray import device as devices

        self.shows(f"samples at version {request.version}{' of the EMA' if request.slot == 'ema' else ''}")
        devices.reset_peak_memory(self.sampler.policy.device)  # the learner may share the process: a peak is a call's
        return self.sampler.sample(request, negative, *conditionings)

    def ready(self) -> Process:
        """Answers once the constructor is through."""
        return Process.here()


class RolloutActor(SamplingMethods):
    """Samples with its own copy of the model. Refuses requests for weights that it does not hold."""

    def __init__(self, config_tree: dict, on_gpu: bool, nice: int = 0) -> None:
        config = from_tree(config_tree)
        with startup.loading():
            from flowgrpo_ray import device as devices
            from flowgrpo_ray.policies import lora
            from flowgrpo_ray.sampling.sampler import Sampler

            devices.lower_priority(nice)
            device = devices.configure_process(on_gpu=on_gpu, cpu_threads=config.model.cpu_threads)
            policy = load_policy(config.model, device=device)
            lora.attach(policy, config.lora, config.train.seed)
            self.sampler = Sampler(policy, config)
