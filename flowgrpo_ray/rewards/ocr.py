"""ocr: is the text that the prompt asks for, in double quotes, readable in the image? Read by PaddleOCR on the CPU."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowgrpo_ray.rewards import ocr_models
from flowgrpo_ray.rewards.base import Option, Reward, RewardError, check_batch

EXAMPLE = 'a cafe with a sign that says "OPEN"'

Line = tuple[str, float]  # text, confidence in [0, 1]


def target_text(prompt: str) -> str | None:
    """The text between the first pair of double quotes, or None where there is no pair."""
    parts = prompt.split('"')
    return parts[1] if len(parts) >= 3 else None


def normalized(text: str, rule: str) -> str:
    """What is compared. `reference`: lower case without spaces. `alnum`: NFKC, upper case, only A-Z and 0-9."""
    if rule == "reference":
        return text.replace(" ", "").lower()
    return re.sub("[^A-Z0-9]", "", unicodedata.normalize("NFKC", text).upper())


def text_score(read: str, target: str, rule: str) -> tuple[float, float]:
    """(score, exact) of a text read against the text asked for; both in [0, 1].

    With L = len(target) and d the edit distance, both after `normalized`: score = 1 - min(d, L) / L. Under `reference`
    a target that is contained in what was read scores 1. exact = 1 where the two are equal.

    Raises:
        RewardError: nothing is left of the target after `normalized`.
    """
    from rapidfuzz.distance import Levenshtein

    read, wanted = normalized(read, rule), normalized(target, rule)
    if not wanted:
        raise RewardError(f"nothing is left of the target {target!r} under normalize: {rule}")
    exact = float(read == wanted)
    if rule == "reference" and wanted in read:
        return 1.0, exact
    return 1.0 - min(Levenshtein.distance(read, wanted), len(wanted)) / len(wanted), exact


class OcrReward(Reward):
    """1 - edit distance / length between the text read in the image and the quoted text of the prompt.

    `mode: full` finds the lines of text, reads each, and joins them in reading order; an image without text reads as
    "", which scores 0. `mode: recognition` takes the whole image for one line: right for small images of a single word,
    and faster. A failure of OCR raises; it is never a 0.

    A result does not depend on what else is in the batch. Full mode reads images one by one. In recognition mode the
    shape of the batch (n, H, W) can move the confidences in the last bits, as in any batched network: score shards of
    a fixed size.
    """

    name: ClassVar[str] = "ocr"
    range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    packages: ClassVar[tuple[str, ...]] = ("paddleocr", "onnxruntime", "rapidocr", "rapidfuzz")
    description: ClassVar[str] = "Readable text: 1 - edit distance / length to the prompt's quoted text (PaddleOCR)"
    options: ClassVar[dict[str, Option]] = {
        "mode": Option("full", "full: find the lines, then read them; recognition: the image is one line",
                       choices=("full", "recognition")),
        "normalize": Option("reference", "reference: lower case, no spaces, containing the target is enough; alnum: "
                            "NFKC, upper case, only A-Z and 0-9 count", choices=("reference", "alnum")),
        "threads": Option(1, "CPU threads of onnxruntime", kind=int, minimum=1),
        "batch_size": Option(None, "Images per forward pass of the recogniser; default is the batch that is scored. In "
                             "full mode: lines of one image per pass, default 6", kind=int, minimum=1),
        "width": Option(None, "Recognition mode: width in pixels that images are scaled to at height 48; default keeps "
                        "their shape", kind=int, minimum=16),
        "det_model_dir": Option(None, "Full mode: PaddleOCR detection model (inference.onnx and inference.yml)"),
        "rec_model_dir": Option(None, "PaddleOCR recognition model (inference.onnx and inference.yml)"),
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        s = self.settings
        paddleocr = ocr_models.import_paddleocr()
        recognition = Path(s["rec_model_dir"] or ocr_models.model_dir(ocr_models.RECOGNITION))
        common = {
            "device": "cpu",
            "engine": "onnxruntime",
            "engine_config": {
                "intra_op_num_threads": s["threads"], "inter_op_num_threads": 1, "log_severity_level": 3},
        }
        self._full = s["mode"] == "full"
        if self._full:
            detection = Path(s["det_model_dir"] or ocr_models.model_dir(ocr_models.DETECTION))
            self._model = paddleocr.PaddleOCR(
                text_detection_model_name=ocr_models.model_name(detection),
                text_detection_model_dir=str(detection),
                text_recognition_model_name=ocr_models.model_name(recognition),
                text_recognition_model_dir=str(recognition),
                text_recognition_batch_size=s["batch_size"],
                text_det_limit_side_len=64,
                text_det_limit_type="min",
                text_rec_score_thresh=0.0,
                use_doc_orientation_classify=False,
                use_doc_unwarping=False,
                use_textline_orientation=False,
                **common,
            )
        else:
            self._model = paddleocr.TextRecognition(
                model_name=ocr_models.model_name(recognition),
                model_dir=str(recognition),
                input_shape=(3, 48, s["width"]) if s["width"] else None,
                **common,
            )

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """See `Reward.conflicts`."""
        wrong = {"full": "width", "recognition": "det_model_dir"}[settings["mode"]]
        if settings[wrong] is None:
            return []
        other = "recognition" if settings["mode"] == "full" else "full"
        return [f"option {wrong} means nothing with mode: {settings['mode']}; leave it out, or use mode: {other}"]

    @classmethod
    def check_prompt(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> str | None:
        """See `Reward.check_prompt`."""
        target = target_text(prompt)
        if target is None:
            curly = " (typographic quotes do not count)" if re.search("[“”„«»]", prompt) else ""
            return f'ocr needs the text to be read in double quotes{curly}, for example: {EXAMPLE}'
        rule = options.get("normalize", cls.options["normalize"].default)
        if not normalized(target, rule):
            return f"ocr has nothing to compare: {target!r} is empty under normalize: {rule}; an example is: {EXAMPLE}"
        return None

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        *,
        group_ids: Sequence[int] | None = None,
    ) -> dict[str, np.ndarray]:
        """`ocr`: the score; monitor `ocr_exact`: 1 where the text is read exactly. See `Reward.score`."""
        check_batch(images, prompts, metadata)
        rule = self.settings["normalize"]
        for prompt, extra in zip(prompts, metadata, strict=True):
            if problem := self.check_prompt(prompt, extra, normalize=rule):
                raise RewardError(f"prompt {prompt!r}: {problem}")
        texts = ["".join(text for text, _ in lines) for lines in self.read(images)]
        scores = [text_score(text, target_text(prompt), rule) for text, prompt in zip(texts, prompts, strict=True)]
        columns = np.asarray(scores, np.float32).reshape(len(scores), 2)
        return {self.name: columns[:, 0].copy(), "ocr_exact": columns[:, 1].copy()}

    def read(self, images: np.ndarray) -> list[list[Line]]:
        """The lines of text in each image (uint8 [n, H, W, 3], RGB), in reading order; in recognition mode exactly one.

        Raises:
            RewardError: PaddleOCR answered for another number of images. Its own exceptions pass through.
        """
        pictures = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]  # Paddle takes arrays in BGR
        if self._full:
            results = self._model.predict(pictures)
            lines = [list(zip(result["rec_texts"], result["rec_scores"], strict=True)) for result in results]
        else:
            results = self._model.predict(pictures, batch_size=self.settings["batch_size"] or max(len(pictures), 1))
            lines = [[(result["rec_text"], result["rec_score"])] for result in results]
        if len(lines) != len(pictures):
            raise RewardError(f"PaddleOCR read {len(lines)} of {len(pictures)} images")
        return lines
