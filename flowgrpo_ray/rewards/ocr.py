"""ocr and video_ocr: is the text that the prompt asks for, in double quotes, readable? Read by PaddleOCR."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from flowgrpo_ray.errors import FlowGrpoError, counted, described, first_line
from flowgrpo_ray.rewards import ocr_models
from flowgrpo_ray.rewards.base import (
    GroupIds,
    Metadata,
    Option,
    Reward,
    RewardError,
    Scores,
    SelfTest,
    check_batch,
    settings_of,
)
from flowgrpo_ray.rewards.ocr_text import (
    dropped_problem,
    is_blank,
    normalized,
    target_span,
    target_text,
    unreadable,
    unreadable_problem,
)
from flowgrpo_ray.rewards.reading_order import reading_order

EXAMPLE = 'a cafe with a sign that says "OPEN"'

Line = tuple[str, float]  # text, confidence in [0, 1]


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
    range: tuple[float, float] = (0.0, 1.0)
    device: ClassVar[Literal["cpu", "any"]] = "any"
    packages: ClassVar[tuple[str, ...]] = ("paddleocr", "onnxruntime", "rapidocr", "rapidfuzz")
    licence: ClassVar[str] = "Apache-2.0 (PaddleOCR and its models)"
    needs: ClassVar[tuple[str, ...]] = ("prompt",)
    description: ClassVar[str] = "Readable text: 1 - edit distance / length to the prompt's quoted text (PaddleOCR)"
    options: ClassVar[dict[str, Option]] = {
        "mode": Option("full", "full: find the lines, then read them; recognition: the image is one line",
                       choices=("full", "recognition")),
        "normalize": Option("reference", "reference: lower case, no spaces, containing the target is enough; alnum: "
                            "NFKC, upper case, only A-Z and 0-9 count; unicode: letters and digits of any script",
                            choices=("reference", "alnum", "unicode")),
        "engine": Option("onnxruntime", "What runs the models; paddle needs paddlepaddle and models in its format",
                         choices=("onnxruntime", "paddle")),
        "device": Option("auto", "auto: a GPU where the actor has one and the engine's build can use it",
                         choices=("auto", "cpu", "gpu")),
        "lang": Option(None, "Full mode: language of PaddleOCR's own models (fr, korean, ...), which it downloads; default is "
                       "the shipped model (Chinese, English and other Latin letters)"),
        "threads": Option(1, "CPU threads of onnxruntime", kind=int, minimum=1, maximum=256),
        "batch_size": Option(None, "Images per forward pass of the recogniser; default is the batch that is scored. In "
                             "full mode: lines of one image per pass, default 6", kind=int, minimum=1),
        "width": Option(None, "Recognition mode: width in pixels that images are scaled to at height 48; default keeps "
                        "their shape", kind=int, minimum=16, maximum=4096),
        "det_model_dir": Option(None, "Full mode: PaddleOCR detection model (inference.onnx and inference.yml)",
                                path=True),
        "rec_model_dir": Option(None, "PaddleOCR recognition model (inference.onnx and inference.yml)", path=True),
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        s = self.settings
        engine = s["engine"]
        paddleocr = ocr_models.import_paddleocr(engine)
        shipped = s["lang"] is None and engine == "onnxruntime"
        self._full = s["mode"] == "full"
        recognition = s["rec_model_dir"] or (ocr_models.model_dir(ocr_models.RECOGNITION) if shipped else None)
        detection = s["det_model_dir"] or (ocr_models.model_dir(ocr_models.DETECTION) if shipped and self._full else None)
        self._gpu_problem = "option device is cpu" if s["device"] == "cpu" else ocr_models.gpu_problem(
            engine, recognition and Path(recognition))
        if s["device"] == "gpu" and self._gpu_problem:
            raise RewardError(f"reward {self.name}: option device is gpu, and {self._gpu_problem}")
        common: dict[str, Any] = {"device": "cpu" if self._gpu_problem else "gpu", "engine": engine}
        if engine == "onnxruntime":
            common["engine_config"] = {
                "intra_op_num_threads": s["threads"], "inter_op_num_threads": 1, "log_severity_level": 3}
        else:
            common |= {"enable_mkldnn": False, "cpu_threads": s["threads"]}  # with mkldnn Paddle's detection fails on CPU
        try:
            self._model = self._load(paddleocr, detection, recognition, common)
        except Exception as error:  # PaddleOCR raises whatever its engines and hubs do, none of it with our options' names
            given = [f"{key}={s[key]!r}" for key in ("lang", "device", "det_model_dir", "rec_model_dir", "engine", "width")
                     if s[key] != self.options[key].default]
            what = f"option{'s' if len(given) > 1 else ''} {', '.join(given)}" if given else "PaddleOCR does not start"
            why = first_line(error) if isinstance(error, FlowGrpoError) else described(error)
            raise RewardError(f"reward {self.name}: {what}: {why}") from error
        self._characters = ocr_models.characters_of(self._model)

    def _load(
        self, paddleocr: Any, detection: str | Path | None, recognition: str | Path | None, common: dict[str, Any],
    ) -> Any:
        """PaddleOCR's pipeline (full mode) or its recogniser, with the models in these folders."""
        s, engine = self.settings, self.settings["engine"]
        if self._full:
            for part, folder in (("detection", detection), ("recognition", recognition)):
                if folder is not None:
                    common |= {f"text_{part}_model_name": ocr_models.model_name(Path(folder), engine),
                               f"text_{part}_model_dir": str(folder)}
            return paddleocr.PaddleOCR(
                lang=s["lang"],
                text_recognition_batch_size=s["batch_size"],
                text_det_limit_side_len=64,
                text_det_limit_type="min",
                text_rec_score_thresh=0.0,
                use_doc_orientation_classify=False,
                use_doc_unwarping=False,
                use_textline_orientation=False,
                **common,
            )
        assert recognition is not None
        return paddleocr.TextRecognition(
            model_name=ocr_models.model_name(Path(recognition), engine),
            model_dir=str(recognition),
            input_shape=(3, 48, s["width"]) if s["width"] else None,
            **common,
        )

    def gpu_problem(self) -> str | None:
        """See `Reward.gpu_problem`."""
        return self._gpu_problem

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """See `Reward.conflicts`."""
        mode = settings["mode"]
        foreign = {"full": ("width",), "recognition": ("det_model_dir", "lang")}[mode]
        wrong = [key for key in foreign if settings[key] is not None]
        other = "recognition" if mode == "full" else "full"
        problems = [f"option {key} means nothing with mode: {mode}; leave it out, or use mode: {other}" for key in wrong]
        if mode == "recognition" and settings["engine"] == "paddle" and settings["rec_model_dir"] is None:
            problems.append("the shipped model is for onnxruntime; with engine: paddle give rec_model_dir")
        return problems

    @classmethod
    def check_prompt(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> str | None:
        """See `Reward.check_prompt`."""
        settings = settings_of(cls, options)
        return cls._prompt_problem(prompt, settings, cls._characters_of(settings))

    @staticmethod
    def _characters_of(settings: Mapping[str, Any]) -> frozenset[str] | None:
        """What the recogniser can give; None if its model is not here: its actor checks then."""
        if settings["rec_model_dir"] is None and (settings["lang"] is not None or settings["engine"] != "onnxruntime"):
            return None  # one that PaddleOCR downloads
        try:
            return ocr_models.characters(settings["rec_model_dir"])
        except (RewardError, ImportError):
            return None

    @classmethod
    def _prompt_problem(cls, prompt: str, settings: Mapping[str, Any], characters: frozenset[str] | None) -> str | None:
        target, rule = target_text(prompt), settings["normalize"]
        if target is None:
            curly = " (typographic quotes do not count)" if re.search("[“”„«»]", prompt) else ""
            return f'ocr needs the text to be read in double quotes{curly}, for example: {EXAMPLE}'
        full = settings["mode"] == "full"
        if is_blank(target, rule):
            if problem := dropped_problem(target, characters, lang=settings["lang"], full=full):
                return f"ocr has nothing to compare: {problem}"
            return f"ocr has nothing to compare: {target!r} is empty under normalize: {rule}; an example is: {EXAMPLE}"
        if characters is not None and (missing := unreadable(target, rule, characters)):
            return unreadable_problem(missing, lang=settings["lang"], full=full)
        return None

    @classmethod
    def needed_span(cls, prompt: str, metadata: Mapping[str, Any], **options: Any) -> tuple[int, int] | None:
        """The quoted text. See `Reward.needed_span`."""
        return target_span(prompt)

    def self_test_case(self) -> SelfTest:
        """A word in large letters, and another word where that one is asked for."""
        from PIL import Image, ImageDraw, ImageFont

        images = []
        for word in ("OPEN", "WALK"):
            image = Image.new("RGB", (128, 48) if not self._full else (256, 128), "white")
            ImageDraw.Draw(image).text((image.width / 2, image.height / 2), word, "black", ImageFont.load_default(36),
                                         anchor="mm")
            images.append(np.asarray(image))
        return SelfTest(np.stack(images), ('"OPEN"', '"OPEN"'))

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """`ocr`: the score; monitor `ocr_exact`: 1 where the text is read exactly. See `Reward.score`."""
        check_batch(images, prompts, metadata)
        columns = self._scores(images, prompts)
        return {self.name: columns[:, 0].copy(), "ocr_exact": columns[:, 1].copy()}

    def _scores(self, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        """float32 [n, 2]: score and exact of every image."""
        rule, targets = self.settings["normalize"], []
        for prompt in prompts:
            if problem := self._prompt_problem(prompt, self.settings, self._characters):
                raise RewardError(f"prompt {prompt!r}: {problem}")
            target = target_text(prompt)
            assert target is not None  # else there is a problem
            targets.append(target)
        texts = ["".join(text for text, _ in lines) for lines in self.read(images)]
        scores = [text_score(text, target, rule) for text, target in zip(texts, targets, strict=True)]
        return np.asarray(scores, np.float32).reshape(len(scores), 2)

    def read(self, images: np.ndarray) -> list[list[Line]]:
        """The lines of text in each image (uint8 [n, H, W, 3], RGB), in reading order; in recognition mode exactly one.

        Raises:
            RewardError: PaddleOCR answered for another number of images. Its own exceptions pass through.
        """
        bgr = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]  # Paddle takes arrays in BGR
        if self._full:
            results = self._model.predict(bgr)
            lines = [[(result["rec_texts"][i], result["rec_scores"][i]) for i in reading_order(result["rec_polys"])]
                     for result in results]
        else:
            results = self._model.predict(bgr, batch_size=self.settings["batch_size"] or max(len(bgr), 1))
            lines = [[(result["rec_text"], result["rec_score"])] for result in results]
        if len(lines) != len(bgr):
            raise RewardError(f"PaddleOCR read {len(lines)} of {counted(len(bgr), 'image')}")
        return lines


class VideoOcrReward(OcrReward):
    """The mean of `ocr` over every `every`-th frame of a video, from the first on; a frame without text counts with its 0."""

    name: ClassVar[str] = "video_ocr"
    video: ClassVar[bool] = True
    description: ClassVar[str] = "ocr, mean over the sampled frames of a video"
    options: ClassVar[dict[str, Option]] = {
        **OcrReward.options, "every": Option(4, "Every how many frames one is read", kind=int, minimum=1)}

    def self_test_case(self) -> SelfTest:
        """The images of `ocr` as videos of one frame."""
        case = super().self_test_case()
        return SelfTest(case.images[:, None], case.prompts)

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """`images`: uint8 [n, T, H, W, 3]. `video_ocr`: the mean; monitor `video_ocr_exact`: share of frames read exactly."""
        n = check_batch(images, prompts, metadata, video=True)
        frames = images[:, :: self.settings["every"]]
        count = frames.shape[1]
        flat = frames.reshape(-1, *frames.shape[2:])
        columns = self._scores(flat, [p for p in prompts for _ in range(count)])
        means = columns.reshape(n, count, 2).mean(axis=1, dtype=np.float64).astype(np.float32)
        return {self.name: means[:, 0].copy(), "video_ocr_exact": means[:, 1].copy()}
