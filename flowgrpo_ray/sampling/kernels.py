"""Transition kernels x_i -> x_{i+1} of flow-matching models, one class each.

Notation: sigma = sigmas[i], sigma' = sigmas[i + 1], Delta = sigma' - sigma < 0, x the sample at sigma, v the predicted
velocity, a = noise_level, eps ~ N(0, I). The model's estimates of the two ends of the path are x0 = x - sigma v (data)
and x1 = x + (1 - sigma) v (noise).

Each kernel is a Gaussian x' = mean + std eps whose mean is the Euler step of the ODE plus a pull along x1:

    mean = (x + v Delta) + c x1

so a kernel is given by three numbers per step: c, std and rate_std. The papers' forms, quoted in each class, are the
same polynomial in x and v with its terms collected otherwise; in this form a = 0 (c = 0) is the Euler step bit for bit.

One function serves sampling (draws x'), training (is given x') and evaluation (a = 0). All of it is float32, and
equal inputs give equal bits whether gradients are recorded or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from flowgrpo_ray.errors import ConfigError, counted, nearest

LOG_PROBS = ("gaussian", "unscaled")


class Coefficients(NamedTuple):
    """What defines one step of a kernel: `pull` is c, the factor of x1 in the mean."""

    pull: float
    std: float
    rate_std: float


@dataclass(frozen=True)
class Transition:
    """The distribution of x_{i+1} given x_i.

    Attributes:
        mean: float32 [batch, ...], differentiable with respect to the velocity.
        std: float32, 0-dim; standard deviation of the step's noise.
        rate_std: float32, 0-dim; the noise per square root of time, std / sqrt(-Delta), in the SDE kernels; std in cps.
        delta: Delta = sigma' - sigma, negative.
    """

    mean: torch.Tensor
    std: torch.Tensor
    rate_std: torch.Tensor
    delta: float
    deterministic: bool
    unscaled: bool = False

    def sample(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """x' = mean + std * noise; noise float32 like mean (on any device), unused where the step is deterministic."""
        if self.deterministic:
            return self.mean
        if noise is None or noise.shape != self.mean.shape:
            raise ValueError(f"noise has to have the shape {tuple(self.mean.shape)} of the mean, not "
                             f"{None if noise is None else tuple(noise.shape)}")
        return self.mean + self.std * noise.to(self.mean)

    def log_prob(self, x_next: torch.Tensor) -> torch.Tensor:
        """Mean over all non-batch dimensions of the elementwise log-density of `x_next`, which is detached.

        gaussian: -(x' - mean)^2 / (2 std^2) - ln std - ln(2 pi) / 2; unscaled: -(x' - mean)^2, not a density, as in the
        published cps recipes. float32 [batch].

        Raises:
            ConfigError: the step is deterministic, so it cannot lie in the trained window.
        """
        if self.deterministic:
            raise ConfigError("this step adds no noise, so it has no log-prob: it cannot be in sampling.window")
        squared = (x_next.detach().to(self.mean) - self.mean).square()
        if self.unscaled:
            return -squared.flatten(1).mean(1)
        density = -squared / (2 * self.std.square()) - (self.std.log() + 0.5 * math.log(2 * math.pi))
        return density.flatten(1).mean(1)


class Kernel:
    """Base of the kernels. `noise_level` is a; `log_prob` is "gaussian" or "unscaled"."""

    name: ClassVar[str]

    def __init__(self, noise_level: float = 0.0, log_prob: str = "gaussian") -> None:
        if not (math.isfinite(noise_level) and noise_level >= 0):
            raise ConfigError(f"noise_level {noise_level} of kernel {self.name}: it must be a number of at least 0")
        if log_prob not in LOG_PROBS:
            raise ConfigError(f"no log_prob is named {log_prob!r}{nearest(log_prob, LOG_PROBS)}")
        self.noise_level = float(noise_level)
        self.unscaled = log_prob == "unscaled"

    def coefficients(self, sigmas: Sequence[float], index: int) -> Coefficients:
        """c, std and rate_std of step `index`, for a > 0. `sigmas` are Python floats."""
        raise NotImplementedError

    def transition(
        self, x: torch.Tensor, velocity: torch.Tensor, sigmas: torch.Tensor | np.ndarray | Sequence[float], index: int
    ) -> Transition:
        """The distribution of x_{index + 1}.

        Args:
            x: [batch, ...], the sample at sigmas[index]; taken to float32.
            velocity: like x, the model's velocity; taken to float32.
            sigmas: float32 [n + 1], falling from at most 1 to 0.
            index: the step i, 0 <= i < n.

        Raises:
            IndexError: no such step. ValueError: shapes differ, or sigma does not fall at this step.
        """
        table = [float(sigma) for sigma in np.asarray(sigmas.tolist() if hasattr(sigmas, "tolist") else sigmas, np.float32)]
        if not 0 <= index < len(table) - 1:
            raise IndexError(f"step {index} of a schedule of {counted(len(table) - 1, 'step')}")
        if x.shape != velocity.shape:
            raise ValueError(f"x has the shape {tuple(x.shape)}, velocity {tuple(velocity.shape)}")
        sigma, delta = table[index], table[index + 1] - table[index]
        if not delta < 0:
            raise ValueError(f"sigma has to fall at every step; step {index} goes from {sigma} to {table[index + 1]}")
        # Scalars are worked out in double precision on the host, rounded once: no device has to be waited for.
        c = self.coefficients(table, index) if self.noise_level else Coefficients(0.0, 0.0, 0.0)
        x, velocity = x.float(), velocity.float()
        mean = x + velocity * delta
        if c.pull:
            mean = mean + c.pull * (x + (1 - sigma) * velocity)
        std, rate_std = (torch.full((), value, dtype=torch.float32, device=x.device) for value in (c.std, c.rate_std))
        return Transition(mean, std, rate_std, delta, deterministic=c.std == 0, unscaled=self.unscaled)


class FlowSDE(Kernel):
    """Flow-GRPO's SDE (arXiv 2505.05470).

    s = a sqrt(sigma / (1 - sigma~)), with sigma~ = sigmas[1] where sigma = 1 (the rate is infinite there), else sigma;
    mean = x (1 + s^2 Delta / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) Delta;
    rate_std = s, std = s sqrt(-Delta).
    """

    name = "flow_sde"

    def coefficients(self, sigmas: Sequence[float], index: int) -> Coefficients:
        sigma, delta = sigmas[index], sigmas[index + 1] - sigmas[index]
        finite = sigmas[1] if sigma == 1 else sigma
        s = self.noise_level * math.sqrt(sigma / (1 - finite))
        return Coefficients(s * s * delta / (2 * sigma), s * math.sqrt(-delta), s)


class CPS(Kernel):
    """Coefficient-preserving sampling (arXiv 2509.05952); a in [0, 1].

    s = sigma' sin(a pi / 2);
    mean = (1 - sigma') x0 + sqrt(sigma'^2 - s^2) x1;
    rate_std = std = s. The last step (sigma' = 0) adds no noise.
    """

    name = "cps"

    def __init__(self, noise_level: float = 0.0, log_prob: str = "gaussian") -> None:
        super().__init__(noise_level, log_prob)
        if noise_level > 1:
            raise ConfigError(f"noise_level {noise_level} of kernel cps: it is an angle in units of a right angle, at "
                              "most 1; use 1")

    def coefficients(self, sigmas: Sequence[float], index: int) -> Coefficients:
        following = sigmas[index + 1]
        s = following * math.sin(self.noise_level * math.pi / 2)
        # sqrt(sigma'^2 - s^2) = sigma' cos(a pi / 2); the pull is what the mean loses of x1: that root less sigma'.
        return Coefficients(following * (math.cos(self.noise_level * math.pi / 2) - 1), s, s)


class DanceSDE(Kernel):
    """DanceGRPO's SDE with a constant noise rate (arXiv 2505.07818).

    mean = x + (v + a^2 / 2 (x - (1 - sigma) x0) / sigma^2) Delta;
    rate_std = a, std = a sqrt(-Delta).
    """

    name = "dance_sde"

    def coefficients(self, sigmas: Sequence[float], index: int) -> Coefficients:
        sigma, delta, a = sigmas[index], sigmas[index + 1] - sigmas[index], self.noise_level
        # x - (1 - sigma) x0 = sigma x1
        return Coefficients(a * a * delta / (2 * sigma), a * math.sqrt(-delta), a)


class ODE(Kernel):
    """The Euler step x' = x + v Delta, without noise whatever the noise level."""

    name = "ode"

    def coefficients(self, sigmas: Sequence[float], index: int) -> Coefficients:
        return Coefficients(0.0, 0.0, 0.0)


KERNELS: dict[str, type[Kernel]] = {kernel.name: kernel for kernel in (FlowSDE, CPS, DanceSDE, ODE)}


def get_kernel(name: str, noise_level: float = 0.0, log_prob: str = "gaussian") -> Kernel:
    """A kernel by name: flow_sde, cps, dance_sde or ode.

    Raises:
        ConfigError: no such kernel or log_prob (names the nearest), or a noise level out of range.
    """
    if name not in KERNELS:
        raise ConfigError(f"no kernel is named {name!r}{nearest(name, KERNELS)}")
    return KERNELS[name](noise_level, log_prob)
