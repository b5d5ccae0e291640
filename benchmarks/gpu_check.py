"""Does it work at real size on this GPU, and how fast? Models of random weights, without Ray and without a download.

    python -m benchmarks.gpu_check --model sd35-medium|flux-dev|tiny [--device cuda|cpu] [--dtype bfloat16] [--size 512]
                                   [--micro-batch M] [--small] [--ranks 2] [--json] [KEY=VALUE ...]

The settings are those of the model's configuration in configs/, with the batch cut down to two groups of two shards.
In order: build the model on the device; attach LoRA; write an adapter and read its digest back; sample and decode; one
update with the window's |log ratio| against the `auto` tolerance; export, and the digest after a sync; the adapter as a
file. Each stage gives its seconds and its peak GPU memory. Exit code 1: a check failed. 2: it could not run.

`--ranks N` checks instead that N ranks (one GPU each; with `--device cpu` processes over gloo) give the gradients of
one, for `train.sharding` none and full.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.baseline import RUN_ID, Work
from benchmarks.gpu_models import SPECS, build_policy, perturbed, random_conditioning, spec_of, weight_bytes
from benchmarks.learner import random_scores
from benchmarks.measure import DEMO, ROOT, device_of, machine, parser, print_machine, print_table, run_main
from flowgrpo_ray import device as devices
from flowgrpo_ray.config import Config, load
from flowgrpo_ray.data.plan import StepPlan, micro_steps, plan_step
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.errors import ConfigError, FlowGrpoError
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import load_policy, lora
from flowgrpo_ray.policies.base import Policy, decode_batch
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.sampling.requests import sample_request
from flowgrpo_ray.sampling.sampler import Sampler

GIB = 2**30
MODELS = (*SPECS, "tiny")
RECORDS = [PromptRecord(f'the word "{word}"') for word in ("CAT", "OWL", "FOX")]
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def configuration(
    model: str, *, dtype: str, size: int | None = None, micro_batch: int | None = None, small: bool = False,
    overrides: Sequence[str] = (), groups: int = 2, shards: int = 2,
) -> Config:
    """The model's recipe with a batch of `groups` x `shards` shards in one update.

    The tolerance of the on-policy check is lifted: the real one is reported, and a failure should not end the rest.

    Raises:
        ConfigError: no such model, or an override that does not fit.
    """
    if model not in MODELS:
        raise ConfigError(f"no model is named {model!r}; the choices are {', '.join(MODELS)}")
    file = DEMO if model == "tiny" else ROOT / "configs" / spec_of(model).config_file
    m = micro_batch or (2 if small else load(file).sampling.micro_batch)
    settings: dict[str, Any] = {
        "model.dtype": dtype, "data.eval_prompts": None, "sampling.micro_batch": m,
        "sampling.group_size": max(2, shards * m), "sampling.groups_per_step": groups, "train.updates_per_step": 1,
        "train.micro_batch": None, "train.ratio_tolerance": 1e9}
    if model != "tiny":
        edge = size or (64 if small else 512)
        settings |= {"sampling.height": edge, "sampling.width": edge}
    if small:
        settings |= {"lora.rank": 4, "lora.alpha": 8}
    return load(file, [*(f"{key}={json.dumps(value)}" for key, value in settings.items()), *overrides])


def tolerance(config: Config, device: torch.device) -> float:
    """What `train.ratio_tolerance: auto` is for these settings on this device."""
    return 0.0 if device.type == "cpu" and config.model.dtype == "float32" else config.loss.clip_low / 4


def build(model: str, config: Config, device: torch.device, small: bool) -> Policy:
    if model == "tiny":
        return load_policy(config.model, device=device)
    return build_policy(model, device=device, dtype=getattr(torch, config.model.dtype), small=small)


def conditioning(policy: Policy, config: Config, number: int, small: bool) -> Arrays:
    """Of the prompt `number` (-1: the negative prompt)."""
    if policy.pipeline.text_encoder is not None:
        text = config.data.negative_prompt if number < 0 else RECORDS[number].prompt
        return policy.encode([PromptRecord(text)])
    return random_conditioning(policy, seed=number + 1, small=small)


def sample(policy: Policy, config: Config, plan: StepPlan, small: bool, watch: Any = None) -> tuple[Work, np.ndarray]:
    """Sample every shard of a step under the adapter in the model; the trajectories, and the images of the last shard.

    The first shard is sampled twice, the first time untimed: kernels are chosen and memory is taken then.
    """
    sampler = Sampler(policy, config)
    sampler.slots.adopt("policy", plan.version)
    cfg = policy.uses_cfg(config.sampling.guidance_scale)
    negative = conditioning(policy, config, -1, small) if cfg else None
    work = Work({g.group: conditioning(policy, config, g.prompt, small) for g in plan.groups},
                {g.group: negative for g in plan.groups})
    sampler.sample(sample_request(config, RUN_ID, plan, plan.shards[0]), *work.sampling(plan.shards[0]))
    if watch is not None:
        watch.start_again()
    for shard in plan.shards:
        request = sample_request(config, RUN_ID, plan, shard)
        _, images, work.trajectories[shard] = sampler.sample(request, *work.sampling(shard))
    return work, images


def items(plan: StepPlan, work: Work, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Any, ...]]:
    """Arguments of every `Learner.accumulate` of one rank."""
    for row in micro_steps(plan.train_micro_batches(0), world_size):
        yield row[rank], *work.arguments(plan, row[rank].shard)


class RecordingLearner(Learner):
    """Keeps every sample's log ratio of the update, by window step."""

    log_ratios: list[list[torch.Tensor]]

    def _begin_update(self) -> None:
        super()._begin_update()
        self.log_ratios = [[] for _ in range(self.config.window_size)]
        add_step = self._sums.add_step

        def record(j: int, log_ratio: torch.Tensor, *rest: Any) -> None:
            self.log_ratios[j].append(log_ratio)
            add_step(j, log_ratio, *rest)

        self._sums.add_step = record


class Stages:
    """Seconds and peak memory by stage; running out of GPU memory becomes an error that says where and what helps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: dict[str, dict[str, float]] = {}

    @contextmanager
    def stage(self, name: str, hint: str) -> Iterator[Stages]:
        try:
            self.start_again()
            yield self
            self._watch.__exit__()
        except torch.OutOfMemoryError as error:
            raise FlowGrpoError(
                f"out of GPU memory in stage {name!r}, at a peak of {self._peak_gib():.1f} GiB. {hint} "
                f"({str(error).splitlines()[0]})") from None
        self.done[name] = {"seconds": self._watch.seconds, "peak_gib": self._peak_gib()}

    def _peak_gib(self) -> float:
        return devices.peak_memory_bytes(self.device) / GIB

    def start_again(self) -> None:
        """The stage's clock and peak start here."""
        devices.synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._watch = devices.Stopwatch(self.device)
        self._watch.__enter__()


def quantiles(log_ratios: Sequence[Sequence[torch.Tensor]]) -> list[dict[str, float]]:
    """|log ratio| of the samples at every window step."""
    out = []
    for step in log_ratios:
        values = torch.cat(list(step)).abs().double().cpu()
        out.append({name: float(torch.quantile(values, q)) for name, q in QUANTILES.items()} | {"samples": len(values)})
    return out


def run_update(learner: RecordingLearner, plan: StepPlan, work: Work, config: Config, watch: Stages
               ) -> tuple[dict[str, float], list[dict[str, float]]]:
    """One update, after one untimed shard; its metrics, and the distribution of its log ratios."""
    scores = random_scores(config, plan)
    learner.begin_step(plan)
    learner.add_scores(scores)
    learner.accumulate(*next(items(plan, work)))
    watch.start_again()
    learner.begin_step(plan)
    learner.add_scores(scores)
    for arguments in items(plan, work):
        learner.accumulate(*arguments)
    found = learner.log_ratios
    return learner.apply(), quantiles(found)


def run(model: str, config: Config, device: torch.device, *, small: bool) -> dict[str, Any]:
    """All stages on one device."""
    stages, checks = Stages(device), []
    m, edge = config.sampling.micro_batch, (config.sampling.height, config.sampling.width)

    def check(name: str, ok: bool, text: str) -> None:
        checks.append({"name": name, "ok": bool(ok), "found": text})

    with stages.stage("build", "The base model itself does not fit: take a larger GPU."):
        policy = build(model, config, device, small)
    weights = weight_bytes(policy)
    if device.type == "cuda":
        peak = stages.done["build"]["peak_gib"] * GIB
        check("the weights exist once", peak <= 1.05 * weights + GIB,
              f"peak {peak / GIB:.2f} GiB, weights {weights / GIB:.2f}")
    with stages.stage("attach LoRA", "Take a smaller lora.rank."):
        settings = lora.attach(policy, config.lora, config.train.seed)
        count = sum(p.numel() for p in lora.parameters(policy).values())
    with stages.stage("write and read back", "Take a smaller lora.rank."):
        adapter = perturbed(lora.read_state(policy))
        bound, changed = lora.write_state(policy, adapter)
        digest, back = lora.digest(adapter), lora.digest(lora.read_state(policy))
    check("the adapter reads back as written", (bound, changed, back) == (len(adapter), len(adapter), digest),
          f"{bound} of {len(adapter)} tensors bound, {changed} changed, digest {back[:12]} of {digest[:12]}")

    plan = plan_step(config, RECORDS, 0)
    images = config.sampling.group_size * len(plan.groups)
    with stages.stage("sample", f"A shard is {m} images of {edge[0]} x {edge[1]} px: lower --micro-batch.") as watch:
        work, decoded = sample(policy, config, plan, small, watch)
    stages.done["sample"]["images_per_s"] = images / stages.done["sample"]["seconds"]
    finite = all(np.isfinite(part.log_probs).all() and np.isfinite(part.latents).all()
                 for part in work.trajectories.values())
    check("samples are finite, and the images no blanks", finite and decoded.std() > 0,
          f"standard deviation {decoded.std():.1f}")

    with stages.stage("decode", "Lower sampling.decode_batch.") as watch:
        latents = torch.randn(m, *policy.latent_shape(*edge), generator=torch.Generator().manual_seed(0)).to(device)
        policy.decode(latents, *edge, config.sampling.decode_batch)  # kernels are chosen here
        watch.start_again()
        policy.decode(latents, *edge, config.sampling.decode_batch)
    stages.done["decode"]["images_per_s"] = m / stages.done["decode"]["seconds"]

    hint = (f"A shard is {m} images of {edge[0]} x {edge[1]} px: lower --micro-batch, or add "
            "train.activation_checkpointing=true.")
    with stages.stage("update", hint) as watch:
        learner = RecordingLearner(policy, config, run_id=RUN_ID)
        learner.export(0)
        metrics, ratios = run_update(learner, plan, work, config, watch)
    stages.done["update"]["samples_per_s"] = images / stages.done["update"]["seconds"]
    largest, limit = metrics["first_update_log_ratio_max"], tolerance(config, device)
    check("the on-policy ratio is 1", largest <= limit,
          f"largest |log ratio| {largest:.3g}, auto tolerance {limit:.3g}")
    check("the update is finite and not empty", math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0,
          f"gradient norm {metrics['grad_norm']:.3g}, {metrics['grad_rms_over_adam_eps']:.3g} x AdamW's eps, "
          f"loss scale {metrics['loss_scale']:g}")

    with stages.stage("export", "Take a smaller lora.rank."):
        info, exported, _ = learner.export(1)
    with stages.stage("sync", "Take a smaller lora.rank."):
        slots = AdapterSlots(policy)
        reply = slots.load("policy", 1, exported)
    check("a sync is proven", (reply.digest, reply.bound) == (info.digest, info.tensors) and info.changed > 0,
          f"digest {reply.digest[:12]} of {info.digest[:12]}, {info.changed} of {info.tensors} tensors changed")
    with stages.stage("adapter file", ""), tempfile.TemporaryDirectory() as folder:
        lora.save_adapter(folder, exported, settings, policy)
        loaded, read = lora.load_adapter(folder)
    check("the adapter's file gives it back", lora.digest(loaded) == info.digest
          and (read.rank, read.alpha) == (settings.rank, settings.alpha), f"r {read.rank}, alpha {read.alpha:g}")
    return {
        "weights_gib": weights / GIB, "lora_parameters": count, "micro_batch": m, "height": edge[0], "width": edge[1],
        "images": images, "window": config.window_size, "guidance": config.sampling.guidance_scale,
        "dtype": config.model.dtype, "activation_checkpointing": config.train.activation_checkpointing,
        "beta": config.loss.beta, "decode_batch": config.sampling.decode_batch or decode_batch(*edge),
        "loss_scale": metrics["loss_scale"],
        "stages": stages.done, "log_ratio_by_window_step": ratios, "tolerance": limit, "checks": checks,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line asks for."""
    words = [word for word in options.words if "=" not in word]
    if words:
        raise ConfigError(f"{words[0]!r} is not of the form section.key=value; the model is chosen with --model")
    batch = {"groups": 3, "shards": 1} if options.ranks > 1 else {}
    config = configuration(options.model, dtype=options.dtype, size=options.size, micro_batch=options.micro_batch,
                           small=options.small, overrides=options.words, **batch)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        raise ConfigError(f"--device cuda with --ranks {options.ranks}: torch {torch.__version__} sees "
                          f"{torch.cuda.device_count()} GPUs; --device cpu --small tries it out on a CPU")
    device = device_of(options.device, config)
    found = {"benchmark": "gpu_check", "model": options.model, "small": options.small, "ranks": options.ranks,
             "machine": machine(device)}
    if options.ranks > 1:
        from benchmarks.gpu_ranks import compare

        found |= compare(options.model, config, device, small=options.small, world_size=options.ranks)
    else:
        found |= run(options.model, config, device, small=options.small)
    return found | {"ok": all(check["ok"] for check in found["checks"])}


def show(result: Mapping[str, Any]) -> None:
    print_machine(result["machine"])
    if result["ranks"] == 1:
        print(f"{result['model']}{' (small)' if result['small'] else ''} in {result['dtype']}: weights "
              f"{result['weights_gib']:.2f} GiB, LoRA {result['lora_parameters']:,} parameters; {result['images']} "
              f"images of {result['height']} x {result['width']} px in shards of {result['micro_batch']}, decoded "
              f"{result['decode_batch']} at a time, window {result['window']}, guidance {result['guidance']:g}, "
              f"KL weight {result['beta']:g}, activation checkpointing {'on' if result['activation_checkpointing'] else 'off'}")
        rows = [[name, f"{s['seconds']:.2f}", f"{s['peak_gib']:.2f}",
                 next((f"{value:.2f} {key}" for key, value in s.items() if key.endswith("_per_s")), "")]
                for name, s in result["stages"].items()]
        print_table(["stage", "seconds", "peak GiB", ""], rows)
        print_table(["|log ratio| at window step", *QUANTILES],
                    [[str(j), *(f"{row[q]:.2e}" for q in QUANTILES)]
                     for j, row in enumerate(result["log_ratio_by_window_step"])])
    for check in result["checks"]:
        print(f"{'ok    ' if check['ok'] else 'FAILED'}  {check['name']}: {check['found']}")


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__, config=None)
    p.add_argument("--model", choices=MODELS, default="sd35-medium")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument("--size", type=int, help="edge of the images in pixels; default 512, with --small 64")
    p.add_argument("--micro-batch", type=int, help="images a shard; default the recipe's, with --small 2")
    p.add_argument("--small", action="store_true", help="shrink the model, to try this out on a CPU")
    p.add_argument("--ranks", type=int, default=1, help="above 1: compare the gradients of that many ranks with one")
    return run_main(measure, p, show, argv)


if __name__ == "__main__":
    raise SystemExit(main())
