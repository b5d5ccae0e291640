"""The update's loss written out from the papers, one sample set at a time, with torch's own distributions and autograd.

Shares no code with losses.py, kernels.py or the learner: only the networks and what the sampler stored. What follows
the network is float64: the papers' forms of the means cancel badly in float32 where sigma is small.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from reference import StepData
from torch import Tensor

from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import StepPlan
from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy

OldLogProbs = Mapping[tuple[int, int], Tensor]  # by (group, sampling shard): [m, w]


def advantages(data: StepData, group: int, reward: str = "jpeg_compressibility") -> Tensor:
    """(r - mean) / (population std + 1e-4) over the valid samples, 0 for the others, clipped to +-5."""
    scores = data.scores[group]
    valid = scores.rewards[reward][scores.valid]
    out = np.zeros(len(scores.valid))
    out[scores.valid] = (valid - valid.mean()) / (np.sqrt(((valid - valid.mean()) ** 2).mean()) + 1e-4)
    return torch.from_numpy(out.clip(-5, 5)).float()


def velocity(policy: Policy, x: Tensor, sigma: float, positive: dict, negative: dict | None, guidance: float) -> Tensor:
    """SD3's transformer at time 1000 sigma; v = u + w (c - u) from one forward over [negative, positive]."""
    parts = [positive] if negative is None else [negative, positive]

    def rows(name: str) -> Tensor:
        return torch.cat([torch.from_numpy(part[name].copy()).expand(len(x), *part[name].shape[1:]) for part in parts])

    v = policy.pipeline.transformer(
        hidden_states=torch.cat([x] * len(parts)), timestep=torch.full((len(parts) * len(x),), sigma) * 1000.0,
        encoder_hidden_states=rows("prompt_embeds"), pooled_projections=rows("pooled"), return_dict=False)[0]
    if negative is None:
        return v
    u, c = v.chunk(2)
    return u + guidance * (c - u)


def step(config: Config, x: Tensor, v: Tensor, sigmas: list[float], i: int) -> tuple[Tensor, float, float]:
    """(mean, std, rate_std) of the step from sigmas[i] to sigmas[i + 1], as the papers write them."""
    a, sigma, after = config.sampling.noise_level, sigmas[i], sigmas[i + 1]
    delta = after - sigma
    if config.sampling.kernel == "flow_sde":
        s = a * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
        mean = x * (1 + s**2 * delta / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * delta
        return mean, s * math.sqrt(-delta), s
    x0 = x - sigma * v
    if config.sampling.kernel == "cps":
        s = after * math.sin(a * math.pi / 2)
        return (1 - after) * x0 + math.sqrt(after**2 - s**2) * (x + (1 - sigma) * v), s, s
    mean = x + (v + 0.5 * a**2 * (x - (1 - sigma) * x0) / sigma**2) * delta
    return mean, a * math.sqrt(-delta), a


def log_prob(config: Config, x_next: Tensor, mean: Tensor, std: float) -> Tensor:
    if config.sampling.log_prob == "unscaled":
        return -((x_next - mean) ** 2).flatten(1).mean(1)
    return torch.distributions.Normal(mean, std).log_prob(x_next).flatten(1).mean(1)


def noise(key: tuple[int, int, int, int], step_index: int, shape: tuple[int, ...]) -> Tensor:
    """The counter-based noise of a sample, from its key."""
    seed, *place = key
    text = "/".join(map(str, (seed, *place, "train", step_index)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 2**63
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def walk(config: Config, policy: Policy, plan: StepPlan, data: StepData, update: int) -> Iterator[tuple]:
    """(group, shard, j, step index, x, x_next, velocity, sigmas, noise keys, old log-probs) of every window step of an
    update, a group at a time."""
    every = [part for parts in data.trajectories.values() for part in parts]
    for group in plan.updates[update]:
        start, size = plan.groups[group].window
        own = [(part, [i for i, key in enumerate(part.request.noise_keys) if key[2] == group]) for part in every]
        for shard, (part, rows) in enumerate((part, rows) for part, rows in own if rows):
            latents, sigmas = torch.from_numpy(part.latents[:, rows]), part.sigmas.tolist()
            keys, old = [part.request.noise_keys[row] for row in rows], torch.from_numpy(part.log_probs[rows])
            for j in range(size):
                v = velocity(policy, latents[j], sigmas[start + j], data.conditionings[group], data.negatives[group],
                             config.sampling.guidance_scale)
                yield (group, shard, j, start + j, latents[j].double(), latents[j + 1].double(), v.double(), sigmas, keys,
                       old[:, j])


@torch.no_grad()
def log_probs(config: Config, policy: Policy, plan: StepPlan, data: StepData, update: int) -> OldLogProbs:
    """Log-probs of the stored samples under the policy as it stands."""
    columns: dict[tuple[int, int], list[Tensor]] = {}
    for group, shard, _, i, x, x_next, v, sigmas, _, _ in walk(config, policy, plan, data, update):
        mean, std, _ = step(config, x, v, sigmas, i)
        columns.setdefault((group, shard), []).append(log_prob(config, x_next, mean, std))
    return {key: torch.stack(values, dim=1) for key, values in columns.items()}


def gradients(
    config: Config, policy: Policy, plan: StepPlan, data: StepData, update: int = 0, *, base: Policy | None = None,
    old: OldLogProbs | None = None, ratios: list[float] | None = None,
) -> Arrays:
    """Gradient of the update's loss, the mean over valid samples and window steps, by LoRA key.

    `base` is the model without adapter, for the KL. `old` takes the place of the sampler's log-probs. `ratios` gets
    those of all valid samples and window steps.
    """
    c, total, count = config.loss, torch.zeros(()), 0
    for group, shard, j, i, x, x_next, v, sigmas, keys, before in walk(config, policy, plan, data, update):
        mean, std, rate_std = step(config, x, v, sigmas, i)
        samples = [key[3] for key in keys]
        a = advantages(data, group)[samples]
        valid = torch.from_numpy(data.scores[group].valid[samples])
        before = before if old is None else old[group, shard][:, j]
        log_ratio, scale = log_prob(config, x_next, mean, std) - before, 1.0
        if c.ratio_norm:
            eps = torch.stack([noise(key, i, tuple(x.shape[1:])) for key in keys])
            log_ratio = (eps * (mean - (x_next - std * eps))).flatten(1).mean(1)
            scale = 1 / (sigmas[i] - sigmas[i + 1])
        if ratios is not None:
            ratios += (log_ratio.detach().exp()[valid]).tolist()
        ratio = torch.exp(log_ratio)
        loss = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - c.clip_low, 1 + c.clip_high)) * scale
        if c.beta:
            with torch.no_grad():
                v_ref = velocity(base, x.float(), sigmas[i], data.conditionings[group], data.negatives[group],
                                 config.sampling.guidance_scale).double()
            mean_ref, _, _ = step(config, x, v_ref, sigmas, i)
            gap = ((v - v_ref) ** 2) if c.kl == "velocity" else (mean - mean_ref) ** 2
            divisor = {"velocity": 1.0, "per_time": 2 * rate_std**2, "per_step": 2 * std**2}[c.kl]
            loss = loss + c.beta * gap.flatten(1).mean(1) / divisor
        total, count = total + loss[valid].sum(), count + int(valid.sum())
    parameters = lora.parameters(policy)
    found = torch.autograd.grad(total / count, list(parameters.values()), allow_unused=True)
    return {key: np.zeros(p.shape, np.float32) if g is None else g.numpy()
            for (key, p), g in zip(parameters.items(), found, strict=True)}


def assert_close(found: Arrays, expected: Arrays, limit: float = 2e-5) -> None:
    """Equal gradients, tensor by tensor; all but two tensors have one (the last block's text queries lead nowhere)."""
    assert found.keys() == expected.keys()
    assert sum(value.any() for value in expected.values()) == len(expected) - 2
    scale = max(float(np.linalg.norm(value)) for value in expected.values())
    for key, value in expected.items():
        assert np.linalg.norm(found[key] - value) <= limit * max(np.linalg.norm(value), 1e-2 * scale), key
