"""A plain Euler loop over a policy, and its conditioning: shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo_ray.policies.base import Conditioning, Policy
from flowgrpo_ray.prompts import PromptRecord
from flowgrpo_ray.trajectory import from_wire

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
