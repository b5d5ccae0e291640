"""Policies: stock diffusers pipelines behind one contract, one family per file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from flowgrpo_ray.config.schema import LoraSection, ModelConfig
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies.source import ModelSource, check_model, component_config, find

if TYPE_CHECKING:
    import torch

    from flowgrpo_ray.policies.base import Policy


def load_policy(
    model: ModelConfig, *, device: torch.device | str = "cpu", parts: Literal["all", "learner"] = "all"
) -> Policy:
    """Load the base model that the configuration names, as a policy of its family; see `Policy.load`.

    Raises:
        ConfigError: the model cannot be reached or read, or is of an unknown family.
    """
    return policy_class(find(model).family).load(model, device=device, parts=parts)


def policy_class(family: str) -> type[Policy]:
    """The class of a family."""
    if family == "sd3":
        from flowgrpo_ray.policies.sd3 import SD3Policy

        return SD3Policy
    from flowgrpo_ray.policies.flux import FluxPolicy

    return FluxPolicy


def check_adapter(source: ModelSource, model: ModelConfig, section: LoraSection) -> None:
    """Put the adapter on the model's transformer, built without a weight, so that what does not fit is found early.

    Raises:
        ConfigError: as `lora.attach` does; a transformer whose configuration diffusers cannot build.
    """
    import diffusers
    from accelerate import init_empty_weights

    from flowgrpo_ray.policies import lora

    cls, name = policy_class(source.family), source.index["transformer"][1]
    config = component_config(source, model, "transformer")
    try:
        with init_empty_weights():
            transformer = getattr(diffusers, name).from_config(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"model.path {model.path!r}: its transformer ({name}) cannot be built: {error}") from error
    layout: Any = SimpleNamespace(modules={"transformer": transformer}, blocks=cls.blocks, default_rank=cls.default_rank,
                                  default_targets=cls.default_targets)
    lora.attach(layout, section, seed=0)


__all__ = ["check_adapter", "check_model", "load_policy"]
