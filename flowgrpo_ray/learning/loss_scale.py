"""The loss scale of a float16 base: without it the gradients that enter the model underflow.

The log-prob is a mean over all numbers of a latent (65,536 for SD3 at 512 px, four times as many at 1024), so the
gradient of the velocity is around 1e-6, and float16 has no numbers below 6e-8. The loss is multiplied by a power of two
before the backward pass, and the summed gradients are divided by it before they are clipped: both exact. The scale
starts at four times the size of the latent, and follows the gradients as in mixed-precision training (arXiv 1710.03740,
section 3.2): an update that overflowed is skipped and halves it, `GROWTH_UPDATES` good ones in a row double it.

The other dtypes have the exponents of float32 and keep a scale of 1, which changes no bit.
"""

from __future__ import annotations

import math

import torch

LARGEST = 2.0**26
GROWTH_UPDATES = 100  # an overflow costs an update, so the scale is rarely raised


class LossScale:
    """Equal on all ranks: it follows the norm of the reduced gradient.

    Args:
        dtype: of the frozen base.
        latent_size: numbers in one sample's latent, which the log-prob is the mean of.

    Attributes:
        value: what the loss is multiplied by; a power of two, always 1 unless the base is float16.
    """

    def __init__(self, dtype: torch.dtype, latent_size: int) -> None:
        self.active = dtype == torch.float16
        self.value = min(4 * 2.0 ** math.ceil(math.log2(latent_size)), LARGEST) if self.active else 1.0
        self._good = 0  # finite updates since the scale last changed

    def update(self, finite: bool) -> None:
        """Take note of an update: whether its gradient was finite."""
        if not self.active:
            return
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self._good == GROWTH_UPDATES:
            self.value, self._good = min(self.value * 2, LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"value": self.value, "good_updates": self._good}

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Undo of `state_dict`; None, of a checkpoint from before there was a scale, leaves the initial one."""
        if self.active and state is not None:
            self.value, self._good = float(state["value"]), int(state["good_updates"])
