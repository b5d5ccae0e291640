"""Sigma tables, from the pipeline's own scheduler, called as the stock pipelines call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler

from flowgrpo_ray.errors import ConfigError, counted


def sigma_table(
    scheduler: Any,
    num_steps: int,
    image_seq_len: int | None = None,
    sigmas: Sequence[float] | Literal["linear"] | None = None,
) -> np.ndarray:
    """The noise levels of a schedule of `num_steps` steps.

    SD3 pipelines leave the spacing to the scheduler (`sigmas` None) and need `image_seq_len` with a scheduler that
    shifts by resolution; FLUX pipelines pass linspace(1, 1/n, n) (`sigmas` "linear") and always an image_seq_len.

    Args:
        scheduler: FlowMatchEulerDiscreteScheduler; it is copied, its state stays as it is.
        num_steps: n, denoising steps.
        image_seq_len: image tokens of the transformer; sets the shift mu where use_dynamic_shifting is on.
        sigmas: values before the shift [n], "linear", or None for the scheduler's own.

    Returns:
        float32 [n + 1], falling, the last one 0.

    Raises:
        ConfigError: a scheduler that these kernels do not describe, or no image_seq_len where one is needed.
    """
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ConfigError(f"the pipeline's scheduler is a {type(scheduler).__name__}; flow matching needs a "
                          "FlowMatchEulerDiscreteScheduler")
    for option in ("stochastic_sampling", "invert_sigmas"):
        if scheduler.config.get(option):
            raise ConfigError(f"the pipeline's scheduler has {option} on, which changes the step that is trained; set "
                              f"{option} to false in scheduler/scheduler_config.json")
    if num_steps < 1:
        raise ConfigError(f"a schedule of {counted(num_steps, 'step')}; use 1 or more")
    fresh = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    fresh.set_shift(scheduler.shift)  # set_shift on the live object does not reach its config
    options: dict[str, Any] = {}
    if scheduler.config.use_dynamic_shifting:
        if image_seq_len is None:
            raise ConfigError("the scheduler shifts by resolution (use_dynamic_shifting), so it needs image_seq_len")
        options["mu"] = resolution_shift(scheduler.config, image_seq_len)
    if isinstance(sigmas, str):
        if sigmas != "linear":
            raise ConfigError(f"sigmas {sigmas!r}; did you mean 'linear'?")
        sigmas = np.linspace(1.0, 1 / num_steps, num_steps).tolist()
    if sigmas is None:
        fresh.set_timesteps(num_steps, device="cpu", **options)
    else:
        if len(sigmas) != num_steps:
            raise ConfigError(f"{counted(len(sigmas), 'sigma')} for {counted(num_steps, 'step')}; there must be one per step")
        fresh.set_timesteps(sigmas=sigmas, device="cpu", **options)
    return fresh.sigmas.numpy().astype(np.float32, copy=True)


def resolution_shift(config: Any, image_seq_len: int) -> float:
    """mu: linear in the number of image tokens, base_shift at base_image_seq_len, max_shift at max_image_seq_len."""
    low, high = config["base_image_seq_len"], config["max_image_seq_len"]
    slope = (config["max_shift"] - config["base_shift"]) / (high - low)
    return image_seq_len * slope + (config["base_shift"] - slope * low)
