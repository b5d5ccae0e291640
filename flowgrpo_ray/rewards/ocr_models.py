"""PP-OCRv6 for PaddleOCR without a download: model files out of the `rapidocr` wheel, laid out the way PaddleOCR reads
them (inference.onnx beside inference.yml). The wheel is a store of files and is never imported."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from flowgrpo_ray.errors import described
from flowgrpo_ray.rewards.base import RewardError

DETECTION, RECOGNITION = "PP-OCRv6_small_det", "PP-OCRv6_small_rec"
_FILES = {DETECTION: "PP-OCRv6_det_small.onnx", RECOGNITION: "PP-OCRv6_rec_small.onnx"}
_LAYOUT = 1  # raise it when the inference.yml below changes
_WHEEL_HINT = "pip install --no-deps rapidocr==3.10.0"
_EXTRA_HINT = "pip install 'flowgrpo-ray[ocr]'"


def import_paddleocr(engine: str = "onnxruntime") -> types.ModuleType:
    """Import PaddleOCR: quiet, without its network check, and without torch.

    Raises:
        RewardError: paddleocr >= 3.7, or what the engine (onnxruntime or paddle) needs, is not installed.
    """
    if importlib.util.find_spec("paddleocr") is None or (engine == "onnxruntime" and importlib.util.find_spec(engine) is None):
        missing = "paddleocr" if importlib.util.find_spec("paddleocr") is None else engine
        raise RewardError(f"reward ocr needs {missing}, which is not installed; run: {_EXTRA_HINT}")
    if engine == "paddle" and importlib.util.find_spec("paddle") is None:
        raise RewardError("reward ocr with engine: paddle needs paddlepaddle, which is not installed; run: pip install "
                          "paddlepaddle (or paddlepaddle-gpu, from Paddle's own index)")
    version = importlib.metadata.version("paddleocr")
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 7):
        raise RewardError(f"reward ocr needs paddleocr >= 3.7, for its onnxruntime engine, not {version}; "
                          f"run: {_EXTRA_HINT}")
    os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")
    os.environ.setdefault("PADDLE_PDX_CACHE_HOME", str(cache_dir() / "paddlex"))
    with _without_modelscope():
        import paddleocr
    logging.getLogger("paddlex").setLevel(logging.WARNING)
    return paddleocr


@contextlib.contextmanager
def _without_modelscope() -> Iterator[None]:
    """Keep `modelscope` out while PaddleOCR is imported, unless it is loaded already.

    PaddleOCR binds it for downloads, which never happen here; importing it pulls in torch and transformers: four times
    the start-up time and 300 MB more in every reward actor.
    """
    if "modelscope" in sys.modules:
        yield
        return
    absent = types.ModuleType("modelscope", "Left out: models are local files.")
    absent.__spec__ = ModuleSpec("modelscope", None)
    sys.modules["modelscope"] = absent
    try:
        yield
    finally:
        if sys.modules.get("modelscope") is absent:
            del sys.modules["modelscope"]


def cache_dir() -> Path:
    """Per-user folder of the model directories: $XDG_CACHE_HOME/flowgrpo-ray/ocr (default ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "flowgrpo-ray" / "ocr"


def model_dir(name: str) -> Path:
    """Directory that PaddleOCR can load as model `name` (DETECTION or RECOGNITION); made on first use.

    Several processes may call it at once: each builds a private folder and renames it into place, the first one wins.

    Raises:
        RewardError: the wheel is not installed, or the cache folder cannot be written.
    """
    source = _wheel_file(name)
    stat = source.stat()
    key = hashlib.sha256(f"{_LAYOUT}|{source}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    cache = cache_dir()
    final = cache / f"{name}-{key}"
    if _complete(final):
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    except OSError as error:
        raise RewardError(f"cannot write to {cache} ({error}); point XDG_CACHE_HOME at a writable folder") from error
    try:
        (private / "inference.onnx").symlink_to(source)
        _write_yaml(private / "inference.yml", _inference_config(name, source))
        os.rename(private, final)
    except OSError as error:  # a rename onto a full folder: another process was first
        if not _complete(final):
            raise RewardError(f"cannot make the model folder {final} ({error}); delete it if it is damaged") from error
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return final


def gpu_problem(engine: str, model: Path | None) -> str | None:
    """Why an engine cannot work on a GPU in this process, or None where it can. `model` is the folder of one that it is to run,
    None where PaddleOCR downloads it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "the process sees none"
    if engine == "paddle":
        import paddle

        if not paddle.device.is_compiled_with_cuda():
            return "this paddlepaddle is a build for the CPU; paddlepaddle-gpu, from Paddle's own index, is one for GPUs"
        return None if paddle.device.cuda.device_count() > 0 else "paddlepaddle sees none"
    import onnxruntime

    cuda = "CUDAExecutionProvider"
    if cuda not in onnxruntime.get_available_providers():
        return "this onnxruntime is a build for the CPU; in its place run: pip install onnxruntime-gpu"
    if model is None or not (model / "inference.onnx").is_file():
        return None
    # Where CUDA's libraries are missing, onnxruntime says so in its log and takes the CPU: only a session shows it.
    session = onnxruntime.InferenceSession(str(model / "inference.onnx"), providers=[cuda])
    return None if cuda in session.get_providers() else "onnxruntime cannot use CUDA here (its log says why)"


def model_name(directory: Path, engine: str = "onnxruntime") -> str:
    """The model name that a directory's inference.yml states; PaddleOCR wants to be told it.

    Raises:
        RewardError: the directory is not of PaddleOCR's layout, or holds no model of the engine's format.
    """
    import yaml

    for file in ("inference.yml", "inference.onnx" if engine == "onnxruntime" else "inference.pdiparams"):
        if not (directory / file).is_file():
            raise RewardError(f"{directory} is no model directory of PaddleOCR: it holds no {file}")
    config = yaml.safe_load((directory / "inference.yml").read_text(encoding="utf-8"))
    try:
        return config["Global"]["model_name"]
    except (KeyError, TypeError) as error:
        raise RewardError(f"{directory / 'inference.yml'} states no Global.model_name") from error


@lru_cache(maxsize=8)
def characters(directory: str | None = None) -> frozenset[str]:
    """Characters that the recogniser of a model directory can give (None: the shipped one), apart from the space.

    Raises:
        RewardError: there is no such model here, or its inference.yml lists no characters.
    """
    import yaml

    file = (Path(directory) if directory is not None else model_dir(RECOGNITION)) / "inference.yml"
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return frozenset(map(str, tree["PostProcess"]["character_dict"]))
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RewardError(f"{file} lists no characters of a recogniser: {described(error)}") from error


def characters_of(model: Any) -> frozenset[str] | None:
    """Characters that a loaded PaddleOCR pipeline or recogniser can give; None if it does not say."""
    try:
        pipeline = getattr(model, "paddlex_pipeline", None)
        recogniser = model.paddlex_predictor if pipeline is None else pipeline._pipeline.text_rec_model
        return frozenset(recogniser.post_op.character) - {"blank"}
    except AttributeError:
        return None


def _wheel_file(name: str) -> Path:
    spec = importlib.util.find_spec("rapidocr")
    if spec is not None and spec.submodule_search_locations:
        file = Path(spec.submodule_search_locations[0]) / "models" / _FILES[name]
        if file.is_file():
            return file.resolve()
        why = f"the installed rapidocr carries no {_FILES[name]}"
    else:
        why = "the rapidocr wheel, whose model files it reads, is not installed"
    raise RewardError(f"reward ocr needs {name}: {why}; run: {_WHEEL_HINT}")


def _complete(directory: Path) -> bool:
    return (directory / "inference.onnx").exists() and (directory / "inference.yml").is_file()


def _inference_config(name: str, source: Path) -> dict[str, Any]:
    """What PaddleOCR wants to know about the model (Paddle's own models are trained on BGR)."""
    decode = {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}}
    if name == DETECTION:
        normalize = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "scale": 1 / 255, "order": "hwc"}
        transforms = [decode, {"DetResizeForTest": None}, {"NormalizeImage": normalize}, {"ToCHWImage": None},
                      {"KeepKeys": {"keep_keys": ["image", "shape"]}}]
        post = {"name": "DBPostProcess", "thresh": 0.3, "box_thresh": 0.6, "max_candidates": 1000, "unclip_ratio": 1.5}
    else:
        # 48 is the narrowest input: wider lines keep their shape. Paddle's 320 would pad each short line to 320, at
        # three times the cost and no gain in accuracy.
        transforms = [decode, {"RecResizeImg": {"image_shape": [3, 48, 48]}}, {"KeepKeys": {"keep_keys": ["image"]}}]
        post = {"name": "CTCLabelDecode", "character_dict": _characters(source)}
    return {"Global": {"model_name": name}, "PreProcess": {"transform_ops": transforms}, "PostProcess": post}


def _characters(source: Path) -> str | list[str]:
    """The recogniser's alphabet, from the ONNX file's metadata."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map["character"].split("\n")
    # One string is the same sequence to PaddleOCR, and parses in 10 ms where a YAML list of 18,708 takes 400 ms.
    return "".join(characters) if all(len(character) == 1 for character in characters) else characters


def _write_yaml(path: Path, tree: dict[str, Any]) -> None:
    import yaml

    path.write_text(yaml.safe_dump(tree, allow_unicode=True, sort_keys=False, width=10**9), encoding="utf-8")
