"""Flow-GRPO in one file and one process: what a run on Ray computes, top to bottom, bit for bit on a CPU.

    python examples/flow_grpo_one_file.py configs/tiny_ocr.yaml --steps 3 --out adapter/ train.seed=7

Networks, transition kernels and noise come from the package; sampling, scoring, advantages, loss, update and EMA
are written out below, in the order in which they happen. It trains configurations with group-relative advantages
(`advantage.std: group`) and the plain clipped loss. For speed, other options, deaths and resumes there is
`flowgrpo-ray train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flowgrpo_ray.config import Config, load
from flowgrpo_ray.data.plan import (
    GroupPlan,
    MicroBatch,
    StepPlan,
    noise_seed,
    plan_step,
    training_negative,
)
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import from_wire, to_wire
from flowgrpo_ray.device import configure_process
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.policies import load_policy, lora
from flowgrpo_ray.policies.base import Conditioning, Policy
from flowgrpo_ray.rewards import Reward, get, validated
from flowgrpo_ray.sampling.kernels import Kernel, Transition, get_kernel
from flowgrpo_ray.sampling.noise import draw

Key = tuple[int, int]  # (group, sample)


@dataclass
class Sample:
    """One image's window: latents float32 [w + 1, *shape] and the log-probs [w] under the sampling policy."""

    latents: torch.Tensor
    log_probs: torch.Tensor


# Sample ---------------------------------------------------------------------------------------------------------------


def negative_of(policy: Policy, config: Config, record: PromptRecord) -> str | None:
    """The negative prompt for classifier-free guidance; None without it, or in a family that has none."""
    return training_negative(config, record) if policy.uses_cfg(config.sampling.guidance_scale) else None


def conditioning_of(
    policy: Policy, config: Config, plan: StepPlan, batch: MicroBatch, encoded: Mapping[str, dict]
) -> Conditioning:
    """The encoded prompt of every row, and the negative prompt for classifier-free guidance."""

    def rows(prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        names = encoded[prompts[0]]
        return {name: torch.cat([from_wire(encoded[prompt][name]) for prompt in prompts]).to(policy.device)
                for name in names}

    records = [plan.groups[group].record for group, _ in batch.rows]
    first = plan.groups[batch.group]
    negative = negative_of(policy, config, first.record)
    return Conditioning(rows([record.prompt for record in records]),
                        None if negative is None else rows([negative] * len(records)), first.height, first.width)


def encode(policy: Policy, config: Config, plan: StepPlan) -> dict[str, dict]:
    """Each prompt of the step, and each negative prompt, in a forward of its own."""
    texts: dict[str, PromptRecord] = {}
    for group in plan.groups:
        texts[group.record.prompt] = group.record
        if (negative := negative_of(policy, config, group.record)) is not None:
            texts[negative] = PromptRecord(prompt=negative)
    return {text: policy.encode([record]) for text, record in texts.items()}


def transition_at(
    policy: Policy, kernel: Kernel, config: Config, x: torch.Tensor, sigmas: torch.Tensor, i: int,
    conditioning: Conditioning,
) -> tuple[torch.Tensor, Transition]:
    """The velocity at x, and the distribution of the next latent: the same in sampling and in training."""
    velocity = policy.velocity(x, float(sigmas[i]), conditioning, config.sampling.guidance_scale)
    return velocity, kernel.transition(x, velocity, sigmas, i)


@torch.no_grad()
def sample(
    policy: Policy, kernel: Kernel, config: Config, plan: StepPlan, batch: MicroBatch, conditioning: Conditioning
) -> tuple[np.ndarray, dict[Key, Sample]]:
    """Images uint8 [m, H, W, 3] and the trajectories: SDE steps inside the group's window, ODE steps outside."""
    s, group = config.sampling, plan.groups[batch.group]
    shape = policy.latent_shape(group.height, group.width)
    sigmas = sigmas_of(policy, config, group)
    ode = get_kernel("ode", noise_level=0.0)

    def noise(i: int) -> torch.Tensor:
        shared = s.shared_initial_noise and i == -1
        seeds = [noise_seed(config.train.seed, plan.step, number, -1 if shared else member, "train", i)
                 for number, member in batch.rows]
        return draw(seeds, shape).to(policy.device)

    start, size = group.window
    x = noise(-1)
    latents, log_probs = [x] if start == 0 else [], []
    for i in range(s.num_steps):
        inside = start <= i < start + size
        _, step = transition_at(policy, kernel if inside else ode, config, x, sigmas, i, conditioning)
        if inside:
            x = step.sample(noise(i))
            log_probs.append(step.log_prob(x))
        else:
            x = step.mean
        if start <= i + 1 <= start + size:
            latents.append(x)
    images = policy.decode(x, group.height, group.width, s.decode_batch)
    samples = {row: Sample(torch.stack([x[place] for x in latents]), torch.stack([p[place] for p in log_probs]))
               for place, row in enumerate(batch.rows)}
    return images, samples


def sigmas_of(policy: Policy, config: Config, group: GroupPlan) -> torch.Tensor:
    """The noise levels from 1 to 0, float32 [num_steps + 1]."""
    return torch.from_numpy(policy.sigmas(config.sampling.num_steps, group.height, group.width))


# Score ----------------------------------------------------------------------------------------------------------------


def score(
    config: Config, plan: StepPlan, batch: MicroBatch, images: np.ndarray, rewards: Mapping[str, Reward]
) -> dict[Key, float]:
    """The weighted sum of all rewards, by (group, sample)."""
    records = [plan.groups[group].record for group, _ in batch.rows]
    total = np.zeros(len(images))
    for name in sorted(rewards):
        answer = rewards[name].score(images, [r.prompt for r in records], [r.reward_metadata for r in records])
        values = validated(answer, len(images), rewards[name].name)
        total += config.rewards[name].weight * values[rewards[name].name]  # other keys are monitors
    return dict(zip(batch.rows, total.tolist(), strict=True))


def advantages_of(config: Config, plan: StepPlan, scores: Mapping[Key, float]) -> dict[Key, float]:
    """A = (r - mean) / (std + eps) within each group, population std, in float64; 0 in a group without spread."""
    a, out = config.advantage, {}
    for group in plan.groups:
        keys = [(group.group, member) for member in range(config.sampling.group_size)]
        r = np.array([scores[key] for key in keys])
        if np.ptp(r) <= 1e-12 * np.abs(r).max():
            out |= dict.fromkeys(keys, 0.0)
            continue
        relative = (r - r.mean()) / (r.std() + a.eps)
        out |= dict(zip(keys, np.clip(relative, -a.clip_max, a.clip_max).tolist(), strict=True))
    return out


# Learn ----------------------------------------------------------------------------------------------------------------


def loss_at(
    policy: Policy, kernel: Kernel, config: Config, sigmas: torch.Tensor, i: int, j: int,
    conditioning: Conditioning, samples: Sequence[Sample], advantages: torch.Tensor,
) -> torch.Tensor:
    """PPO's clipped loss plus beta KL, summed over the micro-batch; step j of the window is denoising step i."""
    c = config.loss
    x = torch.stack([sample.latents[j] for sample in samples])
    x_next = torch.stack([sample.latents[j + 1] for sample in samples])
    old = torch.stack([sample.log_probs[j] for sample in samples])
    _, step = transition_at(policy, kernel, config, x, sigmas, i, conditioning)
    # ratio - 1, since clip ranges go down to 1e-6, which a float32 near 1 does not resolve
    excess = torch.expm1(step.log_prob(x_next) - old)
    clipped = excess.clamp(-c.clip_low, c.clip_high)
    loss = torch.maximum(-advantages * excess, -advantages * clipped) - advantages
    if c.beta > 0:
        with torch.no_grad(), lora.disabled(policy):
            _, reference = transition_at(policy, kernel, config, x, sigmas, i, conditioning)
        difference = (step.mean - reference.mean).square().flatten(1).mean(1)
        loss = loss + c.beta * (difference / (2 * step.rate_std.square()))
    return loss.sum()


class Trainer:
    """The policy, its optimizer, and the EMA of its LoRA weights."""

    def __init__(self, config: Config, rewards: Mapping[str, Reward]) -> None:
        t = config.train
        self.config, self.rewards = config, rewards
        device = configure_process(on_gpu=torch.cuda.is_available(), cpu_threads=config.model.cpu_threads)
        self.policy = load_policy(config.model, device=device)
        self.settings = lora.attach(self.policy, config.lora, t.seed)
        s = config.sampling
        self.kernel = get_kernel(s.kernel, noise_level=s.noise_level, log_prob=s.log_prob)
        self.parameters = lora.parameters(self.policy)
        self.optimizer = torch.optim.AdamW(list(self.parameters.values()), lr=t.learning_rate, betas=t.betas,
                                           eps=t.adam_eps, weight_decay=t.weight_decay)
        self.ema = {key: p.detach().float().clone() for key, p in self.parameters.items()}
        self.updates = 0

    def step(self, records: Sequence[PromptRecord], step: int) -> float:
        """One training step; returns the mean reward."""
        plan = plan_step(self.config, records, step)
        encoded = encode(self.policy, self.config, plan)
        samples: dict[Key, Sample] = {}
        scores: dict[Key, float] = {}
        for batch in plan.shards:
            conditioning = conditioning_of(self.policy, self.config, plan, batch, encoded)
            images, sampled = sample(self.policy, self.kernel, self.config, plan, batch, conditioning)
            samples |= sampled
            scores |= score(self.config, plan, batch, images, self.rewards)
        advantages = advantages_of(self.config, plan, scores)
        for update in range(len(plan.updates)):
            self.update(plan, plan.train_micro_batches(update), encoded, samples, advantages)
        return float(np.mean(list(scores.values())))

    def update(
        self, plan: StepPlan, batches: Sequence[MicroBatch], encoded: Mapping[str, dict],
        samples: Mapping[Key, Sample], advantages: Mapping[Key, float],
    ) -> None:
        """Sum the gradients of all micro-batches and window steps, divide once, clip, step, average."""
        config, t = self.config, self.config.train
        count = 0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            conditioning = conditioning_of(self.policy, config, plan, batch, encoded)
            group = plan.groups[batch.group]
            sigmas = sigmas_of(self.policy, config, group)
            a = torch.tensor([advantages[row] for row in batch.rows], dtype=torch.float64).float().to(self.policy.device)
            start, size = group.window
            for j in range(size):
                loss_at(self.policy, self.kernel, config, sigmas, start + j, j, conditioning,
                        [samples[row] for row in batch.rows], a).backward()
            count += len(batch.rows) * size
        if config.loss.beta == 0 and not any(advantages[row] for batch in batches for row in batch.rows):
            return  # nothing to learn from
        for p in self.parameters.values():
            p.grad.div_(count)
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), t.max_grad_norm)
        if not norm.isfinite():
            return
        self.optimizer.step()
        if t.ema.enabled and (self.updates + 1) % t.ema.every_updates == 0:
            d = min((1 + self.updates) / (10 + self.updates), t.ema.decay)
            for key, p in self.parameters.items():
                self.ema[key].mul_(d).add_(p.detach().float(), alpha=1 - d)
        self.updates += 1

    def adapter(self) -> dict[str, np.ndarray]:
        """The LoRA weights, float32, by their key in diffusers' format."""
        return {key: to_wire(p).copy() for key, p in self.parameters.items()}

    def ema_adapter(self) -> dict[str, np.ndarray]:
        """The averaged weights; the adapter itself if EMA is off."""
        return {key: to_wire(value).copy() for key, value in self.ema.items()} if self.config.train.ema.enabled \
            else self.adapter()


def unsupported(config: Config) -> Iterator[str]:
    """Settings of a configuration that this file does not implement."""
    a, c = config.advantage, config.loss
    wanted = {
        "advantage.std": (a.std, "group"), "advantage.combine": (a.combine, "sum"),
        "advantage.baseline": (a.baseline, "group"), "advantage.control": (a.control, "none"),
        "loss.ratio_norm": (c.ratio_norm, False), "model.dtype": (config.model.dtype, "float32"),
        "train.on_ratio_mismatch": (config.train.on_ratio_mismatch, "stop"),
    }
    if c.beta > 0:
        wanted["loss.kl"] = (c.kl, "per_time")
    return (f"{key}: {value}" for key, (value, only) in wanted.items() if value != only)


def main() -> None:
    from flowgrpo_ray.preflight import check

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, help="training steps (default: run.steps)")
    parser.add_argument("--out", help="folder for the adapter, in diffusers' format")
    args = parser.parse_args()
    try:
        config = load(args.config, args.overrides)
        if missing := list(unsupported(config)):
            parser.error(f"{', '.join(missing)}: not in this file; use flowgrpo-ray train")
        records = check(config).train
        rewards = {name: get(reward.spec(name), **reward.options) for name, reward in config.rewards.items()}
    except FlowGrpoError as error:
        parser.error(str(error))
    trainer = Trainer(config, rewards)
    for step in range(args.steps or config.run.steps):
        print(f"step {step + 1}  reward {trainer.step(records, step):.4f}", flush=True)
    if args.out:
        lora.save_adapter(args.out, trainer.adapter(), trainer.settings, trainer.policy)


if __name__ == "__main__":
    main()
