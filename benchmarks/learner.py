"""The learner against a bare PyTorch loop: one step's updates on the same model, adapter, shapes and samples.

    python -m benchmarks.learner [CONFIG] [KEY=VALUE ...] [--repeats 5] [--json]

Ours is `Learner` as a learner actor runs it: shards from the wire, advantages, diagnostics, the on-policy check, one
division, clipping, AdamW and EMA. The bare loop has ready tensors and nothing but what the result needs: the stock
transformer with peft's LoRA, the log-prob of Flow-GRPO's SDE, the clipped loss, gradient clipping, AdamW. Both end at
the same weights, which is checked. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.baseline import RUN_ID, Work
from benchmarks.measure import (
    configuration,
    device_of,
    machine,
    parser,
    print_machine,
    print_table,
    run_main,
    shown,
    speed_ratio,
    spread,
    take_turns,
)
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import StepPlan, micro_steps, plan_step, training_negative
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays, GroupScores, from_wire
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.learning.advantages import step_advantages
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import load_policy, lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.lora import LoraSettings
from flowgrpo_ray.policies.source import find
from flowgrpo_ray.preflight import check
from flowgrpo_ray.sampling.requests import sample_request
from flowgrpo_ray.sampling.sampler import Sampler


def check_supported(config: Config) -> None:
    """The bare loop is written for one recipe.

    Raises:
        ConfigError: names what it has no words for.
    """
    family = find(config.model).family
    if family != "sd3":
        raise ConfigError(f"the bare loop is written for SD3, and model.path {config.model.path!r} is {family}")
    wanted = {
        "sampling.kernel": (config.sampling.kernel, "flow_sde"),
        "sampling.log_prob": (config.sampling.log_prob, "gaussian"),
        "loss.beta": (config.loss.beta, 0.0), "loss.ratio_norm": (config.loss.ratio_norm, False),
        "train.activation_checkpointing": (config.train.activation_checkpointing, False),
    }
    wrong = [f"{key} is {value!r}; the bare loop needs {need!r}"
             for key, (value, need) in wanted.items() if value != need]
    if (config.train_micro_batch, config.train_batch_groups) != (
            config.sampling.micro_batch, config.sampling.batch_groups):
        wrong.append("train.micro_batch and train.batch_groups must be those of sampling")
    if wrong:
        raise ConfigError("\n".join(wrong))


def sample(config: Config, policy: Policy, plan: StepPlan) -> Work:
    """Conditionings and trajectories of a step."""
    sampler, out = Sampler(policy, config), Work()
    sampler.slots.load("policy", plan.version, lora.read_state(policy))
    for group in plan.groups:
        out.negatives[group.group] = None
        if policy.uses_cfg(config.sampling.guidance_scale):
            text = training_negative(config, group.record)
            out.negatives[group.group] = sampler.encode(PromptRecord(prompt=text))
        out.conditionings[group.group] = sampler.encode(group.record)
    for shard in plan.shards:
        out.trajectories[shard] = sampler.sample(sample_request(config, RUN_ID, plan, shard), *out.sampling(shard))[2]
    return out


def random_scores(config: Config, plan: StepPlan) -> dict[int, GroupScores]:
    """Scores from a fixed seed: what they mean does not change what an update costs."""
    rng, size = np.random.default_rng(0), config.sampling.group_size
    return {group.group: GroupScores({name: rng.random(size) for name in config.rewards}, np.ones(size, dtype=bool))
            for group in plan.groups}


def run_learner(learner: Learner, plan: StepPlan, work: Work, scores: dict[int, GroupScores]) -> None:
    """All updates of the step, as the driver issues them."""
    learner.begin_step(plan)
    learner.add_scores(scores)
    for update in range(len(plan.updates)):
        for (item,) in micro_steps(plan.train_micro_batches(update), 1):
            learner.accumulate(item, *work.arguments(plan, item.shard))
        learner.apply()


class BareLoop:
    """Flow-GRPO's update written down without a library."""

    def __init__(self, config: Config, settings: LoraSettings, start: Arrays, device: torch.device) -> None:
        from diffusers import SD3Transformer2DModel
        from peft import LoraConfig

        self.config, self.device = config, device
        self.dtype = getattr(torch, config.model.dtype)
        source = find(config.model)
        self.model = SD3Transformer2DModel.from_pretrained(
            source.location, subfolder="transformer", revision=config.model.revision, variant=config.model.variant,
            torch_dtype=self.dtype).eval().requires_grad_(False).to(device)
        targets = sorted({key.removeprefix("transformer.").split(".lora_")[0] for key in start})
        self.model.add_adapter(LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets))
        named = dict(self.model.named_parameters())
        self.weights = {key: named[key.removeprefix("transformer.").replace(".weight", ".default.weight")]
                        for key in start}
        for weight in self.weights.values():
            weight.data = weight.data.float()
        t = config.train
        self.optimizer = torch.optim.AdamW(list(self.weights.values()), lr=t.learning_rate, betas=t.betas,
                                           eps=t.adam_eps, weight_decay=t.weight_decay)
        self.load(start)

    @torch.no_grad()
    def load(self, arrays: Arrays) -> None:
        for key, weight in self.weights.items():
            weight.copy_(torch.from_numpy(arrays[key]))

    def prepare(self, plan: StepPlan, work: Work, advantages: Mapping[int, np.ndarray]) -> None:
        """Put every shard on the device beforehand, so that the loop has nothing to do but train."""
        self.updates = []
        for update in range(len(plan.updates)):
            shards = []
            for shard in plan.train_micro_batches(update):
                negative, *conditionings = work.sampling(shard)
                part, m = work.trajectories[shard], len(shard.samples)
                rows = conditionings if negative is None else [negative] * len(conditionings) + conditionings
                text = {key: torch.cat([from_wire(row[key], self.device).repeat_interleave(m, 0) for row in rows])
                        for key in conditionings[0]}
                advantage = torch.from_numpy(np.concatenate(
                    [advantages[group][list(shard.samples)] for group in shard.groups])).float().to(self.device)
                shards.append((from_wire(part.latents, self.device), from_wire(part.log_probs, self.device),
                               part.sigmas.tolist(), part.window[0], advantage, text))
            self.updates.append(shards)

    def velocity(self, x: torch.Tensor, sigma: float, text: Mapping[str, torch.Tensor]) -> torch.Tensor:
        guidance = self.config.sampling.guidance_scale
        inputs = torch.cat([x, x]) if guidance > 1 else x
        v = self.model(
            hidden_states=inputs.to(self.dtype),
            timestep=torch.full((len(inputs),), sigma * 1000.0, device=self.device),
            encoder_hidden_states=text["prompt_embeds"], pooled_projections=text["pooled"], return_dict=False,
        )[0].float()
        if guidance > 1:
            u, c = v.chunk(2)
            v = u + guidance * (c - u)
        return v

    def run(self) -> None:
        """All updates of the step."""
        c, a = self.config, self.config.sampling.noise_level
        for shards in self.updates:
            total = sum(len(shard[4]) for shard in shards) * c.window_size
            for latents, old, sigmas, first, advantages, text in shards:
                for j in range(c.window_size):
                    sigma, following = sigmas[first + j], sigmas[first + j + 1]
                    dt = following - sigma
                    rate = a * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
                    std = rate * math.sqrt(-dt)
                    x, v = latents[j], self.velocity(latents[j], sigma, text)
                    mean = x * (1 + rate**2 * dt / (2 * sigma)) + v * (1 + rate**2 * (1 - sigma) / (2 * sigma)) * dt
                    density = -((latents[j + 1] - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
                    ratio = torch.exp(density.flatten(1).mean(1) - old[:, j])
                    clipped = ratio.clamp(1 - c.loss.clip_low, 1 + c.loss.clip_high)
                    loss = torch.maximum(-advantages * ratio, -advantages * clipped).sum() / total
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(list(self.weights.values()), c.train.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> Arrays:
        return {key: weight.detach().cpu().numpy().copy() for key, weight in self.weights.items()}


def distance(one: Arrays, other: Arrays, start: Arrays) -> float:
    """How far two adapters are apart, in units of how far they moved from the start (root of the sums of squares)."""
    apart = sum(float(np.square(one[key] - other[key], dtype=np.float64).sum()) for key in one)
    moved = sum(float(np.square(other[key] - start[key], dtype=np.float64).sum()) for key in one)
    return math.sqrt(apart / moved)


def measure(config: Config, *, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """Times of one step's updates on both sides."""
    check_supported(config)
    records = check(config).train
    where = device_of(device, config)
    found = machine(where)
    policy = load_policy(config.model, device=where)
    settings = lora.attach(policy, config.lora, config.train.seed)
    rng = np.random.default_rng(0)  # B is 0 at first, and half of the gradients with it
    start = {key: value + rng.normal(0, 0.01, value.shape).astype(np.float32)
             for key, value in lora.read_state(policy).items()}
    lora.write_state(policy, start)
    plan = plan_step(config, records, 0)
    work, scores = sample(config, policy, plan), random_scores(config, plan)
    learner = Learner(policy, config, run_id=RUN_ID)
    bare = BareLoop(config, settings, start, where)
    bare.prepare(plan, work, step_advantages(
        config, scores, prompts={group.group: group.prompt for group in plan.groups}, history=None, step=0))

    def reset() -> None:
        lora.write_state(policy, start)
        bare.load(start)

    def ours() -> None:
        run_learner(learner, plan, work, scores)

    ours()
    bare.run()
    apart = distance(learner.adapter(), bare.state(), start)
    times = take_turns({"ours": ours, "bare": bare.run}, repeats, where, between=reset)
    wall = {name: [t.wall for t in timings] for name, timings in times.items()}
    cpu = {name: [t.cpu for t in timings] for name, timings in times.items()}
    samples = config.sampling.group_size * config.sampling.groups_per_step
    return {
        "benchmark": "learner", "machine": found, "model": config.model.path, "target": 0.95,
        "updates": len(plan.updates), "shards": len(plan.training),
        "micro_batch": config.train_micro_batch,
        "window": config.window_size, "samples": samples, "distance_of_results": apart,
        "seconds": {name: spread(values) for name, values in wall.items()},
        "ratio": speed_ratio(wall["bare"], wall["ours"]), "ratio_cpu": speed_ratio(cpu["bare"], cpu["ours"]),
    }


def show(result: Mapping[str, Any]) -> None:
    print_machine(result["machine"])
    print(f"{result['model']}: {result['updates']} updates of together {result['samples']} samples x "
          f"{result['window']} window steps in {result['shards']} shards of {result['micro_batch']}")
    print_table(["side", "seconds a step"], [[name, shown(value)] for name, value in result["seconds"].items()])
    print(f"ratio (target {result['target']:g}): {shown(result['ratio'])}, of CPU time {shown(result['ratio_cpu'])}; "
          f"results differ by {result['distance_of_results']:.1e} of the distance moved")


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")

    def work(options: argparse.Namespace) -> dict[str, Any]:
        return measure(configuration(options.words), repeats=options.repeats, device=options.device)

    return run_main(work, p, show, argv)


if __name__ == "__main__":
    raise SystemExit(main())
