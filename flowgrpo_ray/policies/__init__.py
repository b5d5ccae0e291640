"""Policies: stock diffusers pipelines behind one contract, one family per file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from flowgrpo_ray.config import ModelConfig
from flowgrpo_ray.policies.source import check_model, find

if TYPE_CHECKING:
    from flowgrpo_ray.policies.base import Policy


def load_policy(
    model: ModelConfig, *, device: torch.device | str = "cpu", parts: Literal["all", "learner"] = "all"
) -> Policy:
    """Load the base model that the configuration names, as a policy of its family; see `Policy.load`.

    Raises:
        ConfigError: the model cannot be reached or read, or is of an unknown family.
    """
    family = find(model).family
    if family == "sd3":
        from flowgrpo_ray.policies.sd3 import SD3Policy as policy_class
    else:
        from flowgrpo_ray.policies.flux import FluxPolicy as policy_class
    return policy_class.load(model, device=device, parts=parts)


__all__ = ["check_model", "load_policy"]
