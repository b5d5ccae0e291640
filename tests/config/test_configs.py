"""Shipped configurations: they load, and their numbers are those of the recipes that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo_ray.config.load import Config, load, to_yaml
from flowgrpo_ray.preflight import check

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALL = sorted(path.name for path in CONFIGS.glob("*.yaml"))

# The published presets, in groups x group size; what an update sees is images / updates_per_step.
SD3 = {
    "sampling.kernel": "flow_sde", "sampling.noise_level": 0.7, "sampling.log_prob": "gaussian",
    "sampling.num_steps": 10, "sampling.guidance_scale": 4.5, "sampling.height": 512, "sampling.width": 512,
    "window": (0, 9, 9),
    "sampling.shared_initial_noise": False, "advantage.std": "global", "advantage.baseline": "group",
    "advantage.clip_max": 5.0, "advantage.eps": 1e-4, "loss.clip_low": 1e-4, "loss.clip_high": 1e-4, "loss.beta": 0.04,
    "loss.kl": "per_time", "loss.ratio_norm": False, "train.learning_rate": 3e-4, "train.updates_per_step": 2,
    "train.betas": (0.9, 0.999), "train.adam_eps": 1e-8, "train.weight_decay": 1e-4, "train.max_grad_norm": 1.0,
    "train.ema.enabled": True, "train.ema.decay": 0.9, "train.ema.every_updates": 8, "eval.num_steps": 40,
    "eval.guidance_scale": 4.5, "eval.every_steps": 60, "lora.rank": 32, "lora.alpha": 64, "rewards": {"ocr": 1.0},
    "model.path": "stabilityai/stable-diffusion-3.5-medium", "model.dtype": "bfloat16",
}
RECIPES = {
    "sd35_medium_ocr.yaml": SD3 | {"sampling.groups_per_step": 48, "sampling.group_size": 24, "images_per_update": 576},
    "sd35_medium_ocr_1gpu.yaml": SD3 | {
        "sampling.groups_per_step": 8, "sampling.group_size": 8, "images_per_update": 32},
    "flux_fast_ocr.yaml": {
        "sampling.kernel": "cps", "sampling.noise_level": 0.8, "sampling.log_prob": "unscaled", "sampling.num_steps": 6,
        "sampling.guidance_scale": 3.5, "sampling.height": 512, "sampling.width": 512, "window": (0, 3, 3),
        "sampling.groups_per_step": 48, "sampling.group_size": 24, "images_per_update": 576, "advantage.std": "global",
        "advantage.clip_max": 5.0, "loss.clip_low": 1e-5, "loss.clip_high": 1e-5, "loss.beta": 0.0,
        "train.learning_rate": 3e-4, "train.updates_per_step": 2, "train.ema.decay": 0.9, "train.ema.every_updates": 8,
        "train.max_grad_norm": 1.0, "train.weight_decay": 1e-4, "eval.num_steps": 28, "eval.guidance_scale": 3.5,
        "eval.every_steps": 30, "lora.rank": 64, "lora.alpha": 128, "rewards": {"ocr": 1.0},
        "model.path": "black-forest-labs/FLUX.1-dev", "model.dtype": "bfloat16",
    },
}


def effective(config: Config, key: str) -> object:
    if key == "window":
        return (*config.window_range, config.window_size)
    if key == "images_per_update":
        return config.sampling.groups_per_step * config.sampling.group_size // config.train.updates_per_step
    if key == "rewards":
        return {name: reward.weight for name, reward in config.rewards.items()}
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_the_list_is_complete():
    assert {*RECIPES, "tiny_ocr.yaml", "tiny_ocr_long.yaml", "tiny_three_rewards.yaml"} == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_it_loads_and_prints_as_a_configuration_that_loads(name, tmp_path):
    config = load(CONFIGS / name)
    for documented in (False, True):
        again = tmp_path / "again.yaml"
        again.write_text(to_yaml(config, documented=documented))
        assert load(again) == config


@pytest.mark.parametrize("name", RECIPES)
def test_the_numbers_are_the_published_ones(name):
    config = load(CONFIGS / name)
    assert {key: effective(config, key) for key in RECIPES[name]} == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_every_gpu_samples_and_learns(name):
    pools = load(CONFIGS / name).pools
    assert pools.placement == "colocated" and pools.learner.num_gpus == 1
    assert pools.learner.replicas == (1 if "1gpu" in name else 8)
    assert pools.reward["ocr"].num_gpus == 0


@pytest.mark.parametrize("name", ["tiny_ocr.yaml", "tiny_ocr_long.yaml"])
def test_a_demo_needs_nothing_but_the_package(name):
    config = load(CONFIGS / name)
    inputs = check(config)  # reads prompts, model index and reward options
    assert inputs.train and inputs.eval
    train = {record.prompt for record in inputs.train}
    assert not train & {record.prompt for record in inputs.eval}, "the evaluation is on words never trained on"
    pools = config.pools
    assert all(pool.num_gpus == 0 for pool in (pools.learner, pools.rollout, *pools.reward.values()))
    assert config.eval.every_steps and config.eval.at_start and config.eval.at_end
    assert config.train.ema.every_updates == 1


def test_the_long_demo_has_a_kl():
    loss = load(CONFIGS / "tiny_ocr_long.yaml").loss
    assert loss.beta > 0 and loss.kl == "per_step"
