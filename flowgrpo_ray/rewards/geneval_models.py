"""The models of a local geneval: a detector of COCO's objects from transformers, and colours by CLIP without training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from flowgrpo_ray.errors import nearest
from flowgrpo_ray.rewards.base import RewardError
from flowgrpo_ray.rewards.clip_models import (
    Clip,
    check_texts,
    device_and_dtype,
    import_transformers,
    load_model,
    load_tokens,
    published_preprocessing,
    refuse_keys,
    unreachable,
)
from flowgrpo_ray.rewards.geneval_rules import COLOURS, CONFIDENCE, MOST_OBJECTS, Detection

# What detectors call the classes that GenEval's prompts name otherwise, after COCO and after PASCAL VOC.
OTHER_NAMES = {
    "computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard", "motorcycle": "motorbike",
    "airplane": "aeroplane", "couch": "sofa", "potted plant": "pottedplant", "dining table": "diningtable",
    "tv": "tvmonitor", "hair drier": "hair dryer", "donut": "doughnut",
}
COLOUR_TEXTS = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
GREY = 0x99  # what the background of an object is painted with


def name_of(wanted: str, labels: frozenset[str], own: Mapping[str, str]) -> str:
    """The detector's name of a prompt's class; `own` are names that the configuration gives.

    Raises:
        RewardError: the detector has no such class; the nearest is named.
    """
    for name in (own.get(wanted), wanted, OTHER_NAMES.get(wanted)):
        if name in labels:
            return name
    raise RewardError(f"reward geneval: the detector knows no class {wanted!r}{nearest(wanted, sorted(labels))}; "
                      "option class_names gives the name that it has for it")


class TransformersDetector:
    """An object detector (DETR, RT-DETR, YOLOS, ...) or an instance segmenter (Mask2Former) of transformers.

    Args:
        source: folder or hub name.
        batch_size: images per forward pass.

    Attributes:
        labels: names of the classes that it knows.

    Raises:
        RewardError: it cannot be loaded, is of neither kind, or weights are missing.
    """

    def __init__(self, source: str, revision: str | None = None, *, batch_size: int = 4) -> None:
        transformers = import_transformers("geneval")
        import torch

        try:
            config = transformers.AutoConfig.from_pretrained(source, revision=revision)
            self._processor = transformers.AutoImageProcessor.from_pretrained(source, revision=revision, **_by_pillow())
        except Exception as error:
            raise unreachable("geneval", "detector", source, "a detector of transformers", error) from error
        kinds = {"boxes": transformers.AutoModelForObjectDetection, "masks": transformers.AutoModelForUniversalSegmentation}
        kind = next((k for k, auto in kinds.items() if type(config) in auto._model_mapping), None)
        if kind is None:
            raise RewardError(f"reward geneval: option detector: {source!r} is a {config.model_type}, which transformers has "
                              "neither for object detection nor for instance segmentation")
        self._masks = kind == "masks"
        try:
            model, info = kinds[kind].from_pretrained(source, revision=revision, dtype=torch.float32, output_loading_info=True)
        except ImportError as error:  # Mask2Former wants scipy, some backbones timm
            named = re.search(r"requires the (\S+) library", str(error))
            how = f"pip install {named.group(1)}" if named else str(error).strip()
            raise RewardError(f"reward geneval: the detector {source!r} needs a further package: {how}") from error
        except Exception as error:
            raise unreachable("geneval", "detector", source, f"a {config.model_type}", error) from error
        refuse_keys("geneval", "detector", source, info["missing_keys"], (), map(str, info["mismatched_keys"]))
        self._device, _ = device_and_dtype()
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._names = {int(i): str(name) for i, name in config.id2label.items()}
        self._batch_size = batch_size
        self.labels = frozenset(name for name in self._names.values() if name != "N/A")

    def detect(self, images: np.ndarray) -> list[list[Detection]]:
        """The objects in each image, uint8 [n, H, W, 3] in RGB, of a confidence of `CONFIDENCE` or more; none is an answer too.

        Raises:
            RewardError: what the network gives is not finite.
        """
        import torch
        from PIL import Image

        found: list[list[Detection]] = []
        for start in range(0, len(images), self._batch_size):
            batch = images[start : start + self._batch_size]
            inputs = self._processor(images=[Image.fromarray(image) for image in batch], return_tensors="pt")
            inputs = {key: inputs[key].to(self._device) for key in ("pixel_values", "pixel_mask") if key in inputs}
            with torch.inference_mode():
                outputs = self._model(**inputs)
                for key in ("logits", "pred_boxes", "class_queries_logits", "masks_queries_logits"):
                    if not torch.isfinite(outputs.get(key, torch.zeros(()))).all():
                        raise RewardError(f"reward geneval: the detector's {key} are not finite, so it has seen nothing")
                found += self._from_masks(outputs, batch) if self._masks else self._from_boxes(outputs, batch)
        return found

    def _from_boxes(self, outputs: Any, batch: np.ndarray) -> list[list[Detection]]:
        import torch

        sizes = torch.tensor([image.shape[:2] for image in batch], device=self._device)
        results = self._processor.post_process_object_detection(outputs, threshold=CONFIDENCE, target_sizes=sizes)
        return [[Detection(self._names[int(label)], float(score), tuple(box))
                 for label, score, box in zip(r["labels"].tolist(), r["scores"].tolist(), r["boxes"].tolist(), strict=True)]
                for r in results]

    def _from_masks(self, outputs: Any, batch: np.ndarray) -> list[list[Detection]]:
        """Instances of Mask2Former (arXiv 2112.01527): per query and class, class probability times the mean probability of
        the mask's pixels; of all those pairs as many as there are queries."""
        from torch.nn.functional import interpolate

        out: list[list[Detection]] = []
        for logits, masks in zip(outputs.class_queries_logits.float(), outputs.masks_queries_logits.float(), strict=True):
            probabilities = logits.softmax(-1)[:, :-1]  # the last class is "no object"
            best, index = probabilities.flatten().topk(len(logits))
            sure = best >= CONFIDENCE  # the product below is smaller still
            best, index = best[sure], index[sure]
            if not len(best):  # interpolate takes no empty batch
                out.append([])
                continue
            masks = interpolate(masks[index // probabilities.shape[1]][None], size=(384, 384), mode="bilinear")[0]
            inside = masks > 0
            area = inside.flatten(1).sum(1)
            scores = best * (masks.sigmoid() * inside).flatten(1).sum(1) / area.clamp(min=1)
            full = interpolate(inside[None].float(), size=batch.shape[1:3], mode="nearest")[0].bool().cpu().numpy()
            labels = (index % probabilities.shape[1]).tolist()
            out.append([Detection(self._names[label], score, _box(mask), mask)
                        for label, score, mask in zip(labels, scores.tolist(), full, strict=True)
                        if score >= CONFIDENCE and mask.any()])
        return out


class ColourClassifier:
    """Names an object's colour: the one of `COLOURS` whose texts are nearest to the object's image, by CLIP.

    Raises:
        RewardError: the model cannot be loaded.
    """

    def __init__(self, source: str) -> None:
        model = load_model("geneval", source, None)
        preprocess = published_preprocessing("geneval", "clip", source, None, model.config.vision_config.image_size)
        tokens = load_tokens("geneval", "clip", source, None, model.config)
        self._clip = Clip(model, preprocess, tokens, dtype="auto", batch_size=MOST_OBJECTS)
        self.notes = self._clip.notes
        check_texts("geneval", "clip", source, self._clip)
        self._texts: dict[str, np.ndarray] = {}

    def colours(self, image: np.ndarray, name: str, objects: Sequence[Detection]) -> list[str]:
        """The colour of each object of class `name` in an image, uint8 [H, W, 3]."""
        crops = [object_image(image, found) for found in objects]
        if not crops:
            return []
        likeness = self._clip.images(crops) @ self._of_class(name).T
        if not np.isfinite(likeness).all():
            raise RewardError(f"reward geneval: the embedding of a {name} is not finite, so its colour is not known")
        return [COLOURS[i] for i in likeness.argmax(axis=1)]

    def _of_class(self, name: str) -> np.ndarray:
        """The mean embedding of each colour's texts, scaled to length 1: float64 [colours, width]."""
        if name not in self._texts:
            rows = [self._clip.texts([text.format(colour=colour, name=name) for text in COLOUR_TEXTS]).mean(axis=0)
                    for colour in COLOURS]
            self._texts[name] = np.stack([row / np.linalg.norm(row) for row in rows])
        return self._texts[name]


def _by_pillow() -> dict[str, Any]:
    """What makes transformers take Pillow's image processor, also where torchvision is installed: scores must not depend on
    that. Before it had two backends, Pillow's was the one that is not fast."""
    return {"backend": "pil"} if find_spec("transformers.image_processing_backends") else {"use_fast": False}


def object_image(image: np.ndarray, found: Detection) -> np.ndarray:
    """The object alone: what lies outside its mask painted grey, cut to its box; uint8 [h, w, 3], at least 1 x 1."""
    height, width = image.shape[:2]
    if found.mask is not None:
        image = np.where(found.mask[..., None], image, np.uint8(GREY))
    left, top = (int(np.clip(np.floor(v), 0, most - 1)) for v, most in zip(found.box[:2], (width, height), strict=True))
    right, bottom = (int(np.clip(np.ceil(v), least + 1, most))
                     for v, least, most in zip(found.box[2:], (left, top), (width, height), strict=True))
    return np.ascontiguousarray(image[top:bottom, left:right])


def _box(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a mask, right and bottom outside it; zeros where it is empty."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not rows.size:
        return 0.0, 0.0, 0.0, 0.0
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
