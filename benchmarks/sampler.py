"""The sampler against the stock pipeline: the same model, prompt, steps, batch and initial noise, by ODE.

    python -m benchmarks.sampler [CONFIG] [KEY=VALUE ...] [--guidance 1 3] [--batch 8] [--repeats 15] [--json]

Ours is `Sampler.denoise` and `Policy.decode`, as a rollout actor runs them for every shard: sigma table, conditioning
from the wire, noise from its seeds, images to uint8. The stock side is the pipeline's `__call__` with encoded prompts
and ready latents, on the very same modules. A third figure is ours with the configuration's SDE window, which the stock
cannot do.
A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.baseline import RUN_ID
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
from flowgrpo_ray.config.load import Config, from_tree
from flowgrpo_ray.data.plan import plan_step, training_negative
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays, SampleRequest, from_wire
from flowgrpo_ray.policies import load_policy, lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.preflight import check
from flowgrpo_ray.sampling.requests import sample_request
from flowgrpo_ray.sampling.sampler import Sampler, step_noise


class Stock:
    """The pipeline's `__call__` for one request."""

    def __init__(self, policy: Policy, request: SampleRequest, negative: Arrays | None, conditioning: Arrays) -> None:
        self._pipeline = policy.pipeline
        self._pipeline.set_progress_bar_config(disable=True)
        m = request.size
        embeds, pooled = (self._batch(policy, conditioning[name], m) for name in ("prompt_embeds", "pooled"))
        shape = policy.latent_shape(request.height, request.width)
        self._arguments: dict[str, Any] = dict(
            prompt_embeds=embeds, pooled_prompt_embeds=pooled, height=request.height, width=request.width,
            num_inference_steps=request.num_steps, guidance_scale=request.guidance_scale, output_type="np",
            latents=step_noise(request, -1, shape).to(policy.device, policy.dtype))
        if negative is not None:
            self._arguments |= dict(
                negative_prompt_embeds=self._batch(policy, negative["prompt_embeds"], m),
                negative_pooled_prompt_embeds=self._batch(policy, negative["pooled"], m))

    @staticmethod
    def _batch(policy: Policy, array: np.ndarray, m: int) -> torch.Tensor:
        return torch.cat([from_wire(array, policy.device)] * m)

    def __call__(self) -> np.ndarray:
        """Images float32 [m, H, W, 3] in [0, 1]."""
        return self._pipeline(**self._arguments).images


def run_case(sampler: Sampler, config: Config, records: Sequence[PromptRecord], guidance: float, repeats: int
             ) -> dict[str, Any]:
    """One guidance scale; see the module's text."""
    policy = sampler.policy
    config = config.model_copy(deep=True)
    config.sampling.guidance_scale = guidance
    plan = plan_step(config, records, 0)
    group, sde = plan.groups[0], sample_request(config, RUN_ID, plan, plan.shards[0])
    ode = replace(sde, window=(0, 0))
    conditioning = sampler.encode(group.record)
    negative = None
    if policy.uses_cfg(guidance):
        negative = sampler.encode(PromptRecord(prompt=training_negative(config, group.record)))
    digest = sampler.slots.bind("policy", 0)
    stock = Stock(policy, ode, negative, conditioning)

    def ours(request: SampleRequest) -> np.ndarray:
        x, _ = sampler.denoise(request, digest, negative, conditioning)
        return policy.decode(x, request.height, request.width)

    difference = float(np.abs(ours(ode) / np.float32(255) - stock()).max())
    sides = {"ours": lambda: ours(ode), "stock": stock, "ours_sde": lambda: ours(sde)}
    found = take_turns(sides, repeats, policy.device)
    wall = {name: [t.wall for t in timings] for name, timings in found.items()}
    cpu = {name: [t.cpu for t in timings] for name, timings in found.items()}
    return {
        "guidance": guidance, "cfg": negative is not None, "batch": ode.size, "steps": ode.num_steps,
        "height": ode.height, "width": ode.width, "largest_difference": difference,
        "seconds": {name: spread(values) for name, values in wall.items()},
        "images_per_s": {name: ode.size / spread(values)["median"] for name, values in wall.items()},
        "ratio": speed_ratio(wall["stock"], wall["ours"]), "ratio_cpu": speed_ratio(cpu["stock"], cpu["ours"]),
        "ratio_sde": speed_ratio(wall["stock"], wall["ours_sde"]),
    }


def measure(config: Config, *, guidance: Sequence[float], repeats: int, batch: int | None = None, device: str = "cpu"
            ) -> dict[str, Any]:
    """All guidance scales; `batch` in place of the configuration's micro-batch."""
    if batch is not None:
        tree = config.model_dump(mode="json")
        tree["sampling"] |= {"micro_batch": batch, "group_size": max(2, batch)}
        tree["train"]["micro_batch"] = None
        config = from_tree(tree)
    records = check(config).train
    where = device_of(device, config)
    policy = load_policy(config.model, device=where)
    lora.attach(policy, config.lora, config.train.seed)
    found = machine(where)
    sampler = Sampler(policy, config)
    sampler.slots.load("policy", 0, lora.read_state(policy))
    cases = [run_case(sampler, config, records, scale, repeats) for scale in guidance]
    return {"benchmark": "sampler", "machine": found, "model": config.model.path, "target": 1.0, "cases": cases}


def show(result: dict[str, Any]) -> None:
    print_machine(result["machine"])
    rows = []
    for case in result["cases"]:
        rate = case["images_per_s"]
        rows.append([f"guidance {case['guidance']:g}{' (CFG)' if case['cfg'] else ''}", f"{case['batch']}",
                     f"{rate['ours']:.2f}", f"{rate['stock']:.2f}", shown(case["ratio"]), shown(case["ratio_cpu"]),
                     f"{rate['ours_sde']:.2f}", f"{case['largest_difference']:.1e}"])
    print(f"{result['model']}, {result['cases'][0]['steps']} steps, "
          f"{result['cases'][0]['height']} x {result['cases'][0]['width']} px")
    print_table(["case", "batch", "ours images/s", "stock images/s", f"ratio (target {result['target']:g})",
                 "ratio of CPU time", "ours with SDE window", "largest difference"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--guidance", type=float, nargs="+", default=[1.0, 3.0], help="guidance scales to measure")
    p.add_argument("--batch", type=int, help="images a call; default sampling.micro_batch")
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")

    def work(options: argparse.Namespace) -> dict[str, Any]:
        return measure(configuration(options.words), guidance=options.guidance, repeats=options.repeats,
                       batch=options.batch, device=options.device)

    return run_main(work, p, show, argv)


if __name__ == "__main__":
    raise SystemExit(main())
