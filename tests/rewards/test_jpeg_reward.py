import io

import numpy as np
import pytest
from PIL import Image

from flowgrpo_ray import rewards


def test_score_is_minus_kilobytes_over_500():
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    images[0] = 128
    result = rewards.get("jpeg_compressibility").score(images, ["a"] * 3, [{}] * 3)
    scores = rewards.validated(result, 3, "jpeg_compressibility")["jpeg_compressibility"]
    assert result["jpeg_compressibility"].dtype == np.float32
    for image, score in zip(images, scores, strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95)
        assert score == pytest.approx(-len(file.getvalue()) / 500_000, rel=1e-6)
    assert scores[1] < scores[0] < 0


def test_an_empty_batch_scores_nothing():
    result = rewards.get("jpeg_compressibility").score(np.zeros((0, 8, 8, 3), np.uint8), [], [])
    assert result["jpeg_compressibility"].shape == (0,)
