"""aesthetic: how much people like an image, as LAION's predictor on CLIP embeddings has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from flowgrpo_ray.rewards.base import GroupIds, Metadata, Option, RewardError, Scores, SelfTest, check_batch
from flowgrpo_ray.rewards.clip_models import VIT_L, Clip, ClipReward, load_state_dict, local_file, model_options, refuse_keys

PUBLISHED = "https://github.com/christophschuhmann/improved-aesthetic-predictor (sac+logos+ava1-l14-linearMSE.pth)"

# Position in the published stack (dropouts, which do nothing here, are those left out), and width that comes out.
_LAYERS = {0: 1024, 2: 128, 4: 64, 6: 16, 7: 1}


class Aesthetic(ClipReward):
    """LAION's improved aesthetic predictor: a stack of linear layers (1024, 128, 64, 16, 1) on the CLIP ViT-L/14 embedding
    of the image, scaled to length 1. The score estimates the mean rating of people, from 1 to 10, and is used as it is:
    most images score 4 to 7, so beside rewards in 0..1 it needs a small weight, or `advantage.combine: gdpo`.

    There is no activation between the layers, so the stack is one affine map; it is put together in float64. `head` is the
    published file (a local .pth or .safetensors, or OWNER/REPO/FILE on the hub; the default is a copy on the hub).
    """

    name: ClassVar[str] = "aesthetic"
    range: tuple[float, float] = (-float("inf"), float("inf"))  # an affine map: nothing keeps it in 1 to 10
    licence: ClassVar[str] = "Apache-2.0 (predictor), MIT (OpenAI CLIP)"
    description: ClassVar[str] = "Mean rating that people would give the image (LAION predictor on CLIP), about 1 to 10"
    options: ClassVar[dict[str, Option]] = model_options(VIT_L, None) | {
        "head": Option("trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth",
                       "The predictor's weights: a .pth or .safetensors file, or OWNER/REPO/FILE on the hub", path=True)}
    reads_text: ClassVar[bool] = False

    def _load(self) -> Clip:
        head = self.settings["head"]
        try:  # before the model, which takes longer
            weights = load_state_dict(self.name, "head", local_file(self.name, "head", head))
        except RewardError as error:
            raise RewardError(f"{error}; the published file is at {PUBLISHED}") from error
        clip = super()._load()
        self._weight, self._bias = _affine(weights, clip.width, head)
        return clip

    def self_test_case(self) -> SelfTest:
        """Plain and busy images: people's order of these is not known, but all ratings lie between 0 and 10."""
        ramp = np.linspace(0, 255, 64).astype(np.uint8)
        images = np.stack([np.broadcast_to(ramp[:, None, None], (64, 64, 3)),
                             np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)])
        return SelfTest(images, ("", ""), ordered=False, range=(0.0, 10.0))

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """See `Reward.score`; the prompt plays no part."""
        check_batch(images, prompts, metadata)
        scores = np.einsum("nd,d->n", self.clip.images(images), self._weight) + self._bias
        return {self.name: scores.astype(np.float32)}


def _affine(weights: dict[str, Any], width: int, source: str) -> tuple[np.ndarray, float]:
    """(weight float64 [width], bias) of the whole stack; RewardError where its layers are not the published ones."""
    shapes: dict[str, tuple[int, ...]] = {}
    size = width
    for layer, out in _LAYERS.items():
        shapes |= {f"layers.{layer}.weight": (out, size), f"layers.{layer}.bias": (out,)}
        size = out
    missing, unexpected = shapes.keys() - weights.keys(), weights.keys() - shapes.keys()
    refuse_keys("aesthetic", "head", source, missing, unexpected)
    taken = weights["layers.0.weight"].shape[-1]
    if taken != width:
        raise RewardError(f"reward aesthetic: option head: {source!r} takes embeddings of {taken} numbers, and the CLIP "
                          f"model of option model gives {width}; they do not belong together")
    refuse_keys("aesthetic", "head", source, (), (), [
        f"{key} {list(weights[key].shape)} instead of {list(shape)}" for key, shape in shapes.items()
        if tuple(weights[key].shape) != shape])
    weight, bias = np.eye(width), np.zeros(width)
    for layer in _LAYERS:
        matrix, offset = (weights[f"layers.{layer}.{kind}"].double().numpy() for kind in ("weight", "bias"))
        weight, bias = matrix @ weight, matrix @ bias + offset
    return weight[0], float(bias[0])
