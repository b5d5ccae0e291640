"""The bytes that manifests size the object store by."""

from __future__ import annotations

from manifests import ROOT

from flowgrpo_ray.cluster.sizes import LEAST, object_store, step_bytes
from flowgrpo_ray.config import load


def test_published_recipe_at_512_pixels() -> None:
    sizes = step_bytes(load(ROOT / "configs" / "sd35_medium_ocr.yaml"))
    samples = 48 * 24
    assert sizes.images == samples * 512 * 512 * 3
    latents = samples * 10 * 16 * 64 * 64 * 4  # nine trained steps have ten latents
    assert latents < sizes.trajectories < 1.1 * latents
    assert object_store(sizes.total, 1) == 31 * LEAST


def test_store_holds_each_part_twice_and_never_less_than_a_unit() -> None:
    assert object_store(0, 1) == LEAST
    assert object_store(10 * LEAST, 4) == 5 * LEAST
    assert object_store(10 * LEAST + 1, 4) == 6 * LEAST
