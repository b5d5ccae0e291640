"""Sampling requests: on Ray actors and in a single process they are the same, so the images are too."""

from __future__ import annotations

from collections.abc import Sequence

from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import EvalMicroBatch, MicroBatch, StepPlan
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import SampleRequest


def sample_request(config: Config, run_id: str, plan: StepPlan, shard: MicroBatch) -> SampleRequest:
    """The request of a training shard; it goes with the conditionings of `shard.groups`, in that order."""
    s, seed, group = config.sampling, config.train.seed, plan.groups[shard.group]
    return SampleRequest(
        run_id=run_id, slot="policy", version=group.version,
        noise_keys=tuple((seed, plan.step, number, sample) for number, sample in shard.rows), stream="train",
        index=tuple(shard.groups.index(number) for number, _ in shard.rows), height=group.height,
        width=group.width, num_steps=s.num_steps, guidance_scale=s.guidance_scale, window=group.window,
        shared_initial_noise=s.shared_initial_noise)


def evaluation_request(
    config: Config, records: Sequence[PromptRecord], shard: EvalMicroBatch, *, run_id: str, slot: str, version: int,
    png: int = 0,
) -> SampleRequest:
    """The request of an evaluation shard: ODE throughout, at seeds that depend on prompt and image index alone.

    `png` = how many of the shard's first images are wanted as PNG bytes too.
    """
    prompts = shard.prompts
    return SampleRequest(
        run_id=run_id, slot=slot, version=version,
        noise_keys=evaluation_keys(config, records, shard), stream="eval",
        index=tuple(prompts.index(p) for p, _ in shard.items), height=shard.height, width=shard.width,
        num_steps=config.eval.num_steps, guidance_scale=evaluation_guidance(config), window=(0, 0),
        png=tuple(range(png)))


def evaluation_keys(
    config: Config, records: Sequence[PromptRecord], shard: EvalMicroBatch,
) -> tuple[tuple[int, int, int, int], ...]:
    """(seed, step, group, sample) of the noise of every image of a shard; `SampleRequest.noise_keys`."""
    return tuple((_seed(config, records[p]), 0, p, image) for p, image in shard.items)


def evaluation_guidance(config: Config) -> float:
    """`eval.guidance_scale`, or the one of sampling."""
    own = config.eval.guidance_scale
    return config.sampling.guidance_scale if own is None else own


def evaluation_negative(config: Config, shard: EvalMicroBatch) -> str | None:
    """The negative prompt of a shard, or None where there is no CFG pass."""
    if evaluation_guidance(config) <= 1:
        return None
    return config.data.negative_prompt if shard.negative is None else shard.negative


def _seed(config: Config, record: PromptRecord) -> int:
    return config.eval.seed if record.seed is None else record.seed
