"""Sums over a learner update that become its metrics, reduced over ranks at once."""

from __future__ import annotations

import math

import torch

from flowgrpo_ray.learning.parallel import reduce_max, reduce_sum

_PER_STEP = ("log_ratio_sq", "excess", "excess_sq", "clip_low", "clip_high", "policy_loss", "kl")
_PER_SAMPLE = ("valid", "masked", "nonzero", "abs_advantage")


class Diagnostics:
    """float64 sums on the device, not synchronised before `reduce`; without samples of weight 0 and masked ones."""

    def __init__(self, window_size: int, device: torch.device) -> None:
        self._steps = torch.zeros(window_size, len(_PER_STEP), dtype=torch.float64, device=device)
        self._samples = torch.zeros(len(_PER_SAMPLE), dtype=torch.float64, device=device)
        self._gate = torch.zeros((), dtype=torch.float64, device=device)

    def add_samples(self, valid: torch.Tensor, advantages: torch.Tensor, weight: float) -> None:
        valid, advantages = valid.double(), advantages.double()
        self._samples += weight * torch.stack([
            valid.sum(), (1 - valid).sum(), ((advantages != 0) * valid).sum(), (advantages.abs() * valid).sum()])

    def add_step(
        self, j: int, log_ratio: torch.Tensor, policy_loss: torch.Tensor, kl: torch.Tensor, valid: torch.Tensor,
        weight: float, gate: torch.Tensor, clip_low: float, clip_high: float,
    ) -> None:
        """One window step of one shard; `gate` is the shard's largest |new - old| log-prob (0 after the first update).

        `log_ratio`, `policy_loss`, `kl`: float32 [m]; `valid`: bool [m].
        """
        # As ratio - 1: ratios differ from 1, and clip ranges from 0, by less than float32 resolves near 1.
        excess = torch.expm1(log_ratio)
        low, high = excess < -clip_low, excess > clip_high
        log_ratio, excess = log_ratio.double(), excess.double()
        columns = torch.stack([log_ratio.square(), excess, excess.square(), low.double(), high.double(),
                               policy_loss.double(), kl.double()], dim=1)
        self._steps[j] += weight * torch.where(valid[:, None], columns, torch.zeros_like(columns)).sum(0)
        gate = torch.where(gate.isfinite(), gate, torch.full_like(gate, math.inf)).double()
        self._gate = torch.maximum(self._gate, gate)

    def reduce(self, world_size: int) -> dict[str, float]:
        """Metrics of the update, equal on every rank."""
        packed = reduce_sum(torch.cat([self._samples, self._steps.flatten()]), world_size).cpu()
        gate = float(reduce_max(self._gate, world_size))
        samples = dict(zip(_PER_SAMPLE, packed[: len(_PER_SAMPLE)].tolist(), strict=True))
        steps = packed[len(_PER_SAMPLE) :].view(self._steps.shape)
        count = max(samples["valid"], 1.0)
        mean = dict(zip(_PER_STEP, (steps.mean(0) / count).tolist(), strict=True))
        metrics = {
            "valid_samples": samples["valid"], "masked_samples": samples["masked"],
            "nonzero_advantages": samples["nonzero"], "abs_advantage_mean": samples["abs_advantage"] / count,
            "policy_loss": mean["policy_loss"], "kl": mean["kl"], "approx_kl": 0.5 * mean["log_ratio_sq"],
            "clip_fraction_low": mean["clip_low"], "clip_fraction_high": mean["clip_high"],
            "clip_fraction": mean["clip_low"] + mean["clip_high"], "first_update_log_ratio_max": gate,
        }
        for j, row in enumerate(steps.tolist()):
            step = dict(zip(_PER_STEP, row, strict=True))
            excess = step["excess"] / count
            metrics[f"ratio_mean/{j}"] = 1.0 + excess
            metrics[f"ratio_std/{j}"] = math.sqrt(max(step["excess_sq"] / count - excess**2, 0.0))
        return metrics
