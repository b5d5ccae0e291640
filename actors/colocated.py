"""The colocated actor: a sampler and a learner rank on the same transformer, taking turns."""

from __future__ import annotations

from actors.learner import LearnerActor
from actors.rollout import SamplingMethods
from flowgrpo_ray.data.plan import StepPlan
from flowgrpo_ray.data.trajectory import SyncReply
from flowgrpo_ray.run_dir.checkpoint import FileEntry


class ColocatedActor(SamplingMethods, LearnerActor):
    """No second copy and no weight transfer: the sampler uses the parameters that the learner trains in place."""

    role, parts = "samples and trains", "all"

    def setup(self, rank: int, world_size: int, address: tuple[str, int]) -> str:
        from flowgrpo_ray.policies.slots import AdapterSlots
        from flowgrpo_ray.sampling.sampler import Sampler

        sharding = super().setup(rank, world_size, address)
        policy = self.learner.policy
        self.sampler = Sampler(policy, self._config, AdapterSlots(policy))
        return sharding

    def adopt_adapter(self, version: int) -> SyncReply:
        """Name the trained parameters a version, with the same proof as a transfer would give."""
        return self.sampler.slots.adopt("policy", version)

    # The learner's parameters are the model's: they have to be back before it reads them, whatever an evaluation has bound.

    def begin_step(self, plan: StepPlan, keep: bool = False) -> None:
        self.sampler.slots.bind("policy", plan.version)
        super().begin_step(plan, keep)

    def save(self, step_uri: str) -> list[FileEntry]:
        self.sampler.slots.bind("policy", self.sampler.slots.version("policy"))
        return super().save(step_uri)
