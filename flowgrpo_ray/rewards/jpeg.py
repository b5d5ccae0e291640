"""jpeg_compressibility and jpeg_incompressibility: the size of an image as a file, rewards of DDPO (arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from flowgrpo_ray.rewards.base import GroupIds, Metadata, Reward, Scores, SelfTest, check_batch


class JpegCompressibility(Reward):
    """-(size of the image as a JPEG of quality 95, in kB of 1000 bytes) / 500."""

    name: ClassVar[str] = "jpeg_compressibility"
    range: tuple[float, float] = (-float("inf"), 0.0)
    packages: ClassVar[tuple[str, ...]] = ("pillow",)
    licence: ClassVar[str] = "no weights"
    batch_invariant: ClassVar[bool] = True
    description: ClassVar[str] = "Size as a JPEG (quality 95): -kB / 500; flat images score near 0"

    _sign: ClassVar[int] = -1

    def self_test_case(self) -> SelfTest:
        """A flat image is smaller than a noisy one."""
        flat = np.full((32, 32, 3), 128, np.uint8)
        noisy = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
        return SelfTest(np.stack([flat, noisy][:: -self._sign]), ("", ""))

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """See `Reward.score`; the prompt plays no part."""
        from PIL import Image

        check_batch(images, prompts, metadata)
        scores = []
        for image in images:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, format="JPEG", quality=95)
            scores.append(self._sign * buffer.tell() / 1000 / 500)
        return {self.name: np.asarray(scores, np.float32)}


class JpegIncompressibility(JpegCompressibility):
    """(Size of the image as a JPEG of quality 95, in kB of 1000 bytes) / 500."""

    name: ClassVar[str] = "jpeg_incompressibility"
    range: tuple[float, float] = (0.0, float("inf"))
    description: ClassVar[str] = "Size as a JPEG (quality 95): kB / 500; busy images score high"
    _sign: ClassVar[int] = 1
