"""jpeg_compressibility: small files are good. The reward of DDPO (arXiv 2305.13301) that needs no model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flowgrpo_ray.rewards.base import Reward, check_batch


class JpegCompressibility(Reward):
    """-(size of the image as a JPEG of quality 95, in kB of 1000 bytes) / 500."""

    name: ClassVar[str] = "jpeg_compressibility"
    range: ClassVar[tuple[float, float]] = (-float("inf"), 0.0)
    packages: ClassVar[tuple[str, ...]] = ("pillow",)
    description: ClassVar[str] = "Size as a JPEG (quality 95): -kB / 500; flat pictures score near 0"

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        *,
        group_ids: Sequence[int] | None = None,
    ) -> dict[str, np.ndarray]:
        """See `Reward.score`; the prompt plays no part."""
        from PIL import Image

        check_batch(images, prompts, metadata)
        scores = []
        for image in images:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, format="JPEG", quality=95)
            scores.append(-buffer.tell() / 1000 / 500)
        return {self.name: np.asarray(scores, np.float32)}
