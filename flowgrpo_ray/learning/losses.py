"""The clipped policy loss, RatioNorm, and the KL to the reference. Everything is per sample: [batch] in, [batch] out.

The learner adds up the samples of an update and divides once, so nothing here averages over the batch.
"""

from __future__ import annotations

from typing import Literal

import torch

from flowgrpo_ray.errors import ConfigError, nearest
from flowgrpo_ray.sampling.kernels import Transition

KL_KINDS = ("per_time", "per_step", "velocity")


def clipped_surrogate(
    log_prob_new: torch.Tensor,
    log_prob_old: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """PPO's loss max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_prob_new - log_prob_old).

    All tensors are float32 [batch]; only log_prob_new carries a gradient.
    """
    log_ratio = log_prob_new - log_prob_old.detach()
    advantages = advantages.detach().to(log_ratio)
    # Written with r - 1: the clip ranges go down to 1e-6, which r itself, near 1 in float32, resolves in steps of 1e-7.
    excess = torch.expm1(log_ratio)
    clipped = excess.clamp(-clip_low, clip_high)
    return torch.maximum(-advantages * excess, -advantages * clipped) - advantages


def ratio_norm_log_ratio(noise: torch.Tensor, mean_new: torch.Tensor, mean_old: torch.Tensor) -> torch.Tensor:
    """GRPO-Guard's normalised log ratio (arXiv 2510.22319), mean over the dimensions of eps (mean_new - mean_old).

    With the gaussian log-prob it equals (log p_new - log p_old + mean((mean_new - mean_old)^2) / (2 std^2)) std: no
    bias, and one scale at every step. It takes the place of log_prob_new - log_prob_old, and the loss is then divided
    by -Delta.

    Args:
        noise: eps, the noise of the sampled step. mean_new: carries the gradient. mean_old: the sampler's mean, which
            need not be stored: it is x' - std eps. float32 [batch, ...].

    Returns:
        float32 [batch].
    """
    return (noise.to(mean_new) * (mean_new - mean_old.detach())).flatten(1).mean(1)


def kl(
    kind: Literal["per_time", "per_step", "velocity"] | str,
    transition_new: Transition,
    transition_ref: Transition,
    velocity: torch.Tensor,
    velocity_ref: torch.Tensor,
) -> torch.Tensor:
    """KL of the policy's step to the reference's, per dimension (mean over all non-batch dimensions). float32 [batch].

    per_time: mean((mean - mean_ref)^2) / (2 rate_std^2), which the published betas are tuned for;
    per_step: mean((mean - mean_ref)^2) / (2 std^2), the exact KL of the two Gaussians;
    velocity: mean((v - v_ref)^2).
    The reference is detached.

    Raises:
        ConfigError: no such kind, or a step without noise (per_time and per_step).
    """
    if kind == "velocity":
        return (velocity.float() - velocity_ref.detach().float()).square().flatten(1).mean(1)
    if kind not in KL_KINDS:
        raise ConfigError(f"no KL is named {kind!r}{nearest(kind, KL_KINDS)}")
    if transition_new.deterministic:
        raise ConfigError(f"this step adds no noise, so its KL {kind} does not exist; it cannot be in sampling.window")
    scale = transition_new.rate_std if kind == "per_time" else transition_new.std
    return (transition_new.mean - transition_ref.mean.detach()).square().flatten(1).mean(1) / (2 * scale.square())
