"""Does it work at real size on this GPU, and how fast? Models of random weights, without Ray and without a download.

    python -m benchmarks.gpu_check --model sd35-medium|flux-dev|tiny [--device cuda|cpu] [--dtype bfloat16] [--size 512]
                                   [--small] [--ranks 2] [--json] [KEY=VALUE ...]

The settings are those of the model's configuration in configs/, with the batch cut down to two groups of two shards. In
order: build the model on the device; attach LoRA; write an adapter and read its digest back; sample and decode; one update
with the window's |log ratio| against the `auto` tolerance; export, and the digest after a sync; the adapter as a file.
Each stage gives its seconds and its peak GPU memory. Exit code 1: a check failed. 2: it could not run.

`--ranks N` checks instead that N ranks (one GPU each; with `--device cpu` processes over gloo) give the gradients of one,
for `train.sharding` none and full.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.baseline import RUN_ID, training_request
from benchmarks.gpu_models import SPECS, build_policy, perturbed, random_conditioning, spec_of, weight_bytes
from benchmarks.learner import random_scores
from benchmarks.measure import DEMO, ROOT, device_of, machine, parser, print_machine, print_table, run_main
from flowgrpo_ray import device as devices
from flowgrpo_ray.config import Config, load
from flowgrpo_ray.errors import ConfigError, FlowGrpoError
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.plan import StepPlan, micro_steps, plan_step
from flowgrpo_ray.policies import load_policy, lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.prompts import PromptRecord
from flowgrpo_ray.sampling.sampler import Sampler
from flowgrpo_ray.trajectory import Arrays, Trajectory

GIB = 2**30
MODELS = (*SPECS, "tiny")
RECORDS = [PromptRecord(f'the word "{word}"') for word in ("CAT", "OWL", "FOX")]
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def configuration(model: str, *, dtype: str, size: int | None, small: bool, overrides: Sequence[str], ranks: int = 1) -> Config:
    """The model's recipe, cut down: 2 groups of 2 shards in one update (with ranks: 3 groups of 1, so that one rank fills up).

    The real tolerance of the on-policy check is reported, not enforced: one that fails should not end the rest.
    """
    if model not in MODELS:
        raise ConfigError(f"no model is named {model!r}; the choices are {', '.join(MODELS)}")
    file = DEMO if model == "tiny" else ROOT / "configs" / spec_of(model).config_file
    edge = size or (64 if small else 512)
    base = {"model.dtype": dtype, "train.updates_per_step": 1, "train.ratio_tolerance": 1e9, "data.eval_prompts": None}
    if model != "tiny":
        base |= {"sampling.height": edge, "sampling.width": edge}
    if small:
        base |= {"sampling.micro_batch": 2, "lora.rank": 4, "lora.alpha": 8}
    tree = load(file, base | dict(_pairs(overrides)) | {"sampling.group_size": 2 ** 16 * 3 * 5 * 7, "train.micro_batch": None})
    shards, groups = (1, 3) if ranks > 1 else (2, 2)
    config = tree.model_dump(mode="json")
    config["sampling"] |= {"group_size": shards * max(2, tree.sampling.micro_batch), "groups_per_step": groups}
    return type(tree).model_validate(config)
