"""Counter-based noise: a sample's noise depends on its own seed alone, not on its batch, its device or its actor."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def draw(seeds: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise, one generator per sample, as a stock pipeline draws it when given these generators.

    torch's CPU generator (a Mersenne Twister) keeps the low 32 bits of a seed only.

    Args:
        seeds: a seed of at most 63 bits per sample, from `plan.noise_seed`.
        shape: shape of one sample, without the batch axis.

    Returns:
        float32 [len(seeds), *shape] on the CPU: GPUs draw other numbers from the same seed.
    """
    out = torch.empty((len(seeds), *shape), dtype=torch.float32)
    for row, seed in zip(out, seeds, strict=True):
        row.copy_(torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32))
    return out
