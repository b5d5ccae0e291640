"""pickscore, clipscore and image_similarity: cosines between CLIP embeddings."""

from __future__ import annotations

import base64
import hashlib
import io
import urllib.parse
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowgrpo_ray.rewards.base import GroupIds, Metadata, Option, RewardError, Scores, SelfTest, check_batch, red_above_blue
from flowgrpo_ray.rewards.clip_models import VIT_H, VIT_L, ClipReward, cosine, model_options
from flowgrpo_ray.rewards.image_files import ImageError, read_rgb

LARGEST_LOGIT_SCALE = 100.0  # what CLIP's training clips exp(logit_scale) to, and what the published models have
CACHED_REFERENCES = 4096


class TextAlignment(ClipReward):
    """A factor times the cosine between the embeddings of image and prompt. A prompt of more tokens than the text tower
    holds (77 in the published models) is cut, as published."""

    needs: ClassVar[tuple[str, ...]] = ("prompt",)

    @property
    @abstractmethod
    def factor(self) -> float:
        """What the cosine is multiplied by."""

    def self_test_case(self) -> SelfTest:
        """A red image is more of a plain red image than a blue one."""
        return red_above_blue()

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """See `Reward.score`."""
        check_batch(images, prompts, metadata)
        cosines = cosine(self.clip.images(images), self.clip.texts(prompts))
        return {self.name: (self.factor * cosines).astype(np.float32)}


class PickScore(TextAlignment):
    """exp(logit_scale) · cosine(image, prompt) / 26, by PickScore v1 (arXiv 2305.01569), a CLIP-H that was trained on
    people's choices between two images. Good images score about 0.8 to 0.9. The division by 26 is Flow-GRPO's; the model
    card has the score without it."""

    name: ClassVar[str] = "pickscore"
    range: tuple[float, float] = (-LARGEST_LOGIT_SCALE / 26, LARGEST_LOGIT_SCALE / 26)
    licence: ClassVar[str] = "MIT (code, and the CLIP-H it starts from); the card of the weights names none"
    description: ClassVar[str] = "People's preference for an image of the prompt (PickScore v1): logit / 26"
    options: ClassVar[dict[str, Option]] = model_options("yuvalkirstain/PickScore_v1", VIT_H)

    @property
    def factor(self) -> float:
        """See `TextAlignment.factor`."""
        return self.clip.logit_scale / 26


class ClipScore(TextAlignment):
    """`logits_per_image` / 30, that is, exp(logit_scale) · cosine(image, prompt) / 30, by CLIP ViT-L/14 (arXiv 2103.00020):
    Flow-GRPO's clipscore, which is not the 2.5 · max(cosine, 0) of arXiv 2104.08718. Option `scale` is the 30."""

    name: ClassVar[str] = "clipscore"
    range: tuple[float, float] = (-LARGEST_LOGIT_SCALE / 30, LARGEST_LOGIT_SCALE / 30)
    licence: ClassVar[str] = "MIT (OpenAI CLIP)"
    description: ClassVar[str] = "Does the image show the prompt? CLIP's logit / 30"
    options: ClassVar[dict[str, Option]] = model_options(VIT_L, None) | {
        "scale": Option(30.0, "What the logit is divided by", kind=float, minimum=1e-3)}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        bound = LARGEST_LOGIT_SCALE / self.settings["scale"]
        self.range = (-bound, bound)

    @property
    def factor(self) -> float:
        """See `TextAlignment.factor`."""
        return self.clip.logit_scale / self.settings["scale"]


class ImageSimilarity(ClipReward):
    """Cosine between the CLIP embeddings of the image and of a reference image, `metadata["image"]`: a path, a file:// URI
    or a data: URI; for prompt files with an `image` column that is the condition image. For editing tasks."""

    name: ClassVar[str] = "image_similarity"
    range: tuple[float, float] = (-1.0, 1.0)
    needs: ClassVar[tuple[str, ...]] = ("image",)
    licence: ClassVar[str] = "MIT (OpenAI CLIP)"
    description: ClassVar[str] = "Cosine of the CLIP embeddings of the image and of its reference image"
    options: ClassVar[dict[str, Option]] = model_options(VIT_L, None)
    reads_text: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._embedded: dict[bytes, np.ndarray] = {}  # references by the digest of their URI, the least used first

    @classmethod
    def check_prompt(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> str | None:
        """See `Reward.check_prompt`."""
        example = 'for example "image": "references/cat.png"'
        uri = metadata.get("image")
        if not isinstance(uri, str) or not uri:
            return f"image_similarity needs a reference image in the prompt record, {example}"
        try:
            path = _path(uri)
        except ValueError as error:
            return f"image_similarity reads local images: {error}; {example}"
        if path is not None and not path.is_file():
            return f"image_similarity: there is no reference image {uri}; {example}"
        return None

    def self_test_case(self) -> SelfTest:
        """An image is more like itself than another one is."""
        from PIL import Image

        images = np.zeros((2, 64, 64, 3), np.uint8)
        images[0, :32, :, 0] = 255
        images[1, ..., 2] = np.arange(0, 256, 4)
        buffer = io.BytesIO()
        Image.fromarray(images[0]).save(buffer, format="PNG")
        reference = {"image": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"}
        return SelfTest(images, ("", ""), (reference,) * 2)

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """See `Reward.score`; the prompt plays no part. A reference is read and embedded once.

        Raises:
            RewardError: a reference is absent or no image; it is named.
        """
        check_batch(images, prompts, metadata)
        for prompt, extra in zip(prompts, metadata, strict=True):
            if problem := self.check_prompt(prompt, extra):
                raise RewardError(f"prompt {prompt!r}: {problem}")
        embedded = self.clip.images(images)
        references = [self._reference(extra["image"]) for extra in metadata]
        cosines = cosine(embedded, np.stack(references)) if references else np.zeros(0)
        return {self.name: cosines.astype(np.float32)}

    def _reference(self, uri: str) -> np.ndarray:
        key = hashlib.sha256(uri.encode("utf-8", "surrogatepass")).digest()  # a data: URI is itself as large as an image
        found = self._embedded.pop(key, None)
        if found is None:
            found = self.clip.images([_read_image(uri)])[0]
            if len(self._embedded) >= CACHED_REFERENCES:
                del self._embedded[next(iter(self._embedded))]
        self._embedded[key] = found
        return found


def _path(uri: str) -> Path | None:
    """The local file of a path or file:// URI; None for a data: URI. ValueError for anything else."""
    if uri.startswith("data:"):
        return None
    parts = urllib.parse.urlsplit(uri)
    if "://" not in uri:
        return Path(uri).expanduser()
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(f"{uri} is not one")
    return Path(urllib.parse.unquote(parts.path))


def _read_image(uri: str) -> np.ndarray:
    """uint8 [H, W, 3], RGB. Raises RewardError where it is no image, or would be read wrongly."""
    shown = uri if len(uri) < 100 else f"{uri[:97]}..."
    try:
        path = _path(uri)
        return read_rgb(path if path is not None else io.BytesIO(base64.b64decode(uri.partition("base64,")[2])))
    except ImageError as error:
        raise RewardError(f"reward image_similarity: the reference image {shown} {error}") from error
    except ValueError as error:
        raise RewardError(f"reward image_similarity: the reference image {shown} cannot be read: {error}") from error
