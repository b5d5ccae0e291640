"""A plain Euler loop over a policy and the sampler's own, and their conditioning: shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo_ray.config import load
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import SampleRequest, from_wire
from flowgrpo_ray.policies.base import Conditioning, Policy
from flowgrpo_ray.sampling.sampler import Sampler, step_noise

PROMPTS = ["a red cat", "blue dog 7"]
HEIGHT, WIDTH = 32, 48


def conditioning(
    policy: Policy, prompts: Sequence[str] = PROMPTS, negatives: Sequence[str] | None = None, size=(HEIGHT, WIDTH)
) -> Conditioning:
    def encode(texts):
        return {k: from_wire(v) for k, v in policy.encode([PromptRecord(text) for text in texts]).items()}

    return Conditioning(encode(prompts), None if negatives is None else encode(negatives), *size)


def noise(policy: Policy, batch: int = 2, seed: int = 0, size=(HEIGHT, WIDTH)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *policy.latent_shape(*size), generator=generator)


@torch.no_grad()
def euler(policy: Policy, x: torch.Tensor, given: Conditioning, guidance: float, num_steps: int = 4) -> torch.Tensor:
    """Final latents: x' = x + v (sigma' - sigma) down the policy's own sigma table."""
    sigmas = torch.from_numpy(policy.sigmas(num_steps, given.height, given.width))
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = x + policy.velocity(x, float(sigma), given, guidance) * (following - sigma)
    return x


def sampled(
    policy: Policy, guidance: float, negative: str | None = None, prompts: Sequence[str] = PROMPTS, size=(HEIGHT, WIDTH),
    num_steps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(initial latents, final latents) of the sampler without a window: one prompt per encode, as in a run."""
    sampler = Sampler(policy, load(None, {"rewards": {"jpeg_compressibility": {}}}))
    request = SampleRequest(
        run_id="stock", slot="policy", version=0, noise_keys=tuple((3, 0, i, 0) for i in range(len(prompts))), stream="eval",
        index=tuple(range(len(prompts))), height=size[0], width=size[1], num_steps=num_steps, guidance_scale=guidance,
        window=(0, 0))
    encoded = None if negative is None else sampler.encode(PromptRecord(negative))
    x, trajectory = sampler.denoise(request, "", encoded, *(sampler.encode(PromptRecord(prompt)) for prompt in prompts))
    assert trajectory.latents.size == 0 and trajectory.log_probs.size == 0
    return step_noise(request, -1, policy.latent_shape(*size)), x
