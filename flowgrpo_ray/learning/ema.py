"""Exponential moving average of the LoRA weights, counted in optimizer updates."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Ema:
    """shadow <- d shadow + (1 - d) theta, with d = min((1 + s) / (10 + s), decay).

    s is the 0-based index of the optimizer update just done; the average moves when (s + 1) % every_updates == 0. The
    horizon is counted in updates, so micro-batches and devices do not change it.

    Args:
        parameters: the live parameters by name; kept by reference and read at each update.
        decay: the largest d, in [0, 1).
        every_updates: optimizer updates between two updates of the average.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], decay: float = 0.9, every_updates: int = 8) -> None:
        if not 0 <= decay < 1 or every_updates < 1:
            raise ValueError(f"decay {decay} must lie in [0, 1), every_updates {every_updates} must be at least 1")
        self.parameters = dict(parameters)
        self.decay = decay
        self.every_updates = every_updates
        self.shadow = {name: value.detach().float().clone() for name, value in self.parameters.items()}

    def decay_at(self, update_index: int) -> float:
        """d after update s = `update_index`: warms up from 0.1, so the first weights are soon forgotten."""
        return min((1 + update_index) / (10 + update_index), self.decay)

    @torch.no_grad()
    def update(self, update_index: int) -> bool:
        """Call once after each optimizer update, with its 0-based index in the run; True if the average moved."""
        if (update_index + 1) % self.every_updates:
            return False
        d = self.decay_at(update_index)
        for name, value in self.parameters.items():
            self.shadow[name].mul_(d).add_(value.detach().float(), alpha=1 - d)
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The average, float32 copies by parameter name."""
        return {name: value.clone() for name, value in self.shadow.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over an average; raises ValueError unless names and shapes are those of the parameters."""
        if state.keys() != self.shadow.keys():
            strange = sorted(state.keys() ^ self.shadow.keys())
            raise ValueError(f"the EMA state does not fit the parameters: {strange[0]} is on one side only "
                             f"({len(strange)} such names)")
        for name, value in state.items():
            if value.shape != self.shadow[name].shape:
                raise ValueError(f"the EMA of {name} has the shape {tuple(value.shape)}, the parameter "
                                 f"{tuple(self.shadow[name].shape)}")
            self.shadow[name].copy_(value)
