"""CLIP for rewards: loading (a folder or a hub name), the published preprocessing, and embeddings of images and prompts.

Only the standard library and numpy at the top: torch and transformers are imported when a model is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from flowgrpo_ray.errors import described
from flowgrpo_ray.rewards.base import Option, Reward, RewardError

VIT_L = "openai/clip-vit-large-patch14"
VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

CACHED_TEXTS = 4096  # embeddings of prompts that are kept: 8 kB each for ViT-H
DTYPES = ("auto", "float32", "float16", "bfloat16")
SHOWN = 5  # names in one message
# Of the pixels of CLIP's training images, in [0, 1].
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

LOCAL_OPTIONS = {
    "dtype": Option("auto", "Dtype of the model; auto: float16 on a GPU, float32 on the CPU", choices=DTYPES),
    "batch_size": Option(16, "Images per forward pass on a GPU (on the CPU it is one)", kind=int, minimum=1),
}


def model_options(model: str, processor: str | None) -> dict[str, Option]:
    """Options of a reward around a CLIPModel in transformers' layout, with these defaults."""
    files = "preprocessor_config.json and the tokenizer"
    return {
        "model": Option(model, "Folder or hub name of a CLIPModel in transformers' layout", path=True),
        "processor": Option(processor, f"Folder or hub name of {files}" + ("" if processor else "; default is the model's"),
                            path=True, weights=False),
        "revision": Option(None, "Hub revision of `model` (branch, tag or commit)"),
        **LOCAL_OPTIONS,
    }


class Clip:
    """A CLIP model with its preprocessing.

    An embedding has the same bits whatever else is embedded with it or was before, as every pass has one shape: an image at
    a time on the CPU (where batches gain nothing), a batch that is filled up with blanks on a GPU. There a row must not
    depend on its place in the batch, which is tried out at the start; where it does, a GPU takes one image at a time too.
    Each prompt is embedded alone, and once. A prompt that is longer than the text tower (77 tokens in the published models,
    start and end included) is cut there, as published.

    Args:
        model: transformers' CLIPModel in float32, on the CPU; it is moved and converted here.
        preprocess: uint8 [H, W, 3] -> float32 [3, S, S], the published preprocessing.
        tokens: a prompt -> token ids, cut and padded to the length of the text tower; None where there are no prompts.
        dtype: one of DTYPES.
        batch_size: images per pass on a GPU.

    Attributes:
        notes: as those of a reward.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self, model: Any, preprocess: Callable[[np.ndarray], np.ndarray], tokens: Callable[[str], list[int]] | None, *,
        dtype: str, batch_size: int,
    ) -> None:
        import torch

        self.device, self.dtype = device_and_dtype(dtype)
        # Read before the conversion: in float16 the published scale of 100 would be off by up to 0.2 %.
        self.logit_scale = math.exp(model.logit_scale.item())
        self.width: int = model.config.projection_dim
        self._model = model.eval().requires_grad_(False).to(self.device, self.dtype)
        for weight in self._model.parameters():
            weight.data = weight.data.clone()  # out of the mapped file, where it lies in memory would decide about bits
        self._preprocess, self._tokens = preprocess, tokens
        self.text = lru_cache(maxsize=CACHED_TEXTS)(self._text)
        self.per_pass = batch_size if self.device.type == "cuda" else 1
        if self.per_pass > 1 and not self.places_agree():
            self.notes += (f"on {torch.cuda.get_device_name(self.device)} an embedding depends on its place in a batch of "
                           f"{batch_size}; images are embedded one by one",)
            self.per_pass = 1

    def images(self, images: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """Embeddings of length 1, float64 [n, width], of images uint8 [H, W, 3] in RGB."""
        out = [np.zeros((0, self.width))]
        for start in range(0, len(images), self.per_pass):
            some = np.stack([self._preprocess(image) for image in images[start : start + self.per_pass]])
            batch = np.zeros((self.per_pass, *some.shape[1:]), np.float32)
            batch[: len(some)] = some
            out.append(_unit(self._pass(batch)[: len(some)]))
        return np.concatenate(out)

    def places_agree(self) -> bool:
        """Does an image have the same bits at every place of a pass?"""
        size = self._model.config.vision_config.image_size
        noise = np.random.default_rng(0).standard_normal((1, 3, size, size), np.float32)
        rows = self._pass(np.repeat(noise, self.per_pass, axis=0))
        return all(row.tobytes() == rows[0].tobytes() for row in rows)

    def _pass(self, pixels: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            # torch.tensor copies: memory of numpy's is not aligned as torch's is, and bits could depend on it.
            values = torch.tensor(pixels).to(self.device, self.dtype)
            pooled = self._model.vision_model(pixel_values=values).pooler_output
            return self._model.visual_projection(pooled).float().cpu().numpy()

    def texts(self, prompts: Sequence[str]) -> np.ndarray:
        """Embeddings of length 1, float64 [n, width]."""
        return np.stack([self.text(prompt) for prompt in prompts]) if prompts else np.zeros((0, self.width))

    def _text(self, prompt: str) -> np.ndarray:
        import torch

        assert self._tokens is not None  # of a reward that reads prompts
        with torch.inference_mode():
            # No attention mask: the tower is causal, so what pads the sequence after its end changes nothing before it.
            ids = torch.tensor([self._tokens(prompt)], device=self.device)
            pooled = self._model.text_model(input_ids=ids).pooler_output
            return _unit(self._model.text_projection(pooled).float().cpu().numpy())[0]


class ClipReward(Reward):
    """What the rewards around CLIP share: a model in transformers' layout, loaded at construction as `self.clip`."""

    device: ClassVar[Literal["cpu", "any"]] = "any"
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers", "pillow")
    batch_invariant: ClassVar[bool] = True  # see `Clip`
    reads_text: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clip = self._load()
        self.notes += self.clip.notes

    def _load(self) -> Clip:
        s = self.settings
        model = load_model(self.name, s["model"], s["revision"])
        source, revision = (s["processor"], None) if s["processor"] else (s["model"], s["revision"])
        option = "processor" if s["processor"] else "model"
        preprocess = published_preprocessing(self.name, option, source, revision, model.config.vision_config.image_size)
        tokens = load_tokens(self.name, option, source, revision, model.config) if self.reads_text else None
        clip = Clip(model, preprocess, tokens, dtype=s["dtype"], batch_size=s["batch_size"])
        if tokens is not None:
            check_texts(self.name, option, source, clip)
        return clip


def device_and_dtype(dtype: str = "float32") -> tuple[Any, Any]:
    """The GPU that the process sees, else the CPU; and the torch dtype of one of DTYPES there."""
    import torch

    on_gpu = torch.cuda.is_available()
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu"), getattr(
        torch, dtype if dtype != "auto" else "float16" if on_gpu else "float32")


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row, of embeddings of length 1: float64 [n]."""
    return np.einsum("nd,nd->n", a, b)


def _unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# Loading --------------------------------------------------------------------------------------------------------------

def load_model(name: str, source: str, revision: str | None) -> Any:
    """transformers' CLIPModel, float32 on the CPU, with all of its weights from the checkpoint and nothing left over.

    Raises:
        RewardError: it cannot be found, reached or read, or keys are missing, unexpected or of another shape; `name` is the
            reward that the message speaks of.
    """
    transformers = import_transformers(name)
    import torch

    try:
        model, info = transformers.CLIPModel.from_pretrained(
            source, revision=revision, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:
        raise unreachable(name, "model", source, "a CLIPModel in transformers' layout", error) from error
    shapes = [f"{key} {list(found)} instead of {list(wanted)}" for key, found, wanted in info["mismatched_keys"]]
    refuse_keys(name, "model", source, info["missing_keys"], info["unexpected_keys"], shapes)
    if info["error_msgs"]:
        raise RewardError(f"reward {name}: option model: {source!r}: {info['error_msgs'][0]}")
    return model


def published_preprocessing(
    name: str, option: str, source: str, revision: str | None, size: int
) -> Callable[[np.ndarray], np.ndarray]:
    """The preprocessing of a preprocessor_config.json, by Pillow: for CLIP the shortest side resized (bicubic), the centre
    cut out, scaled to [0, 1], normalised. uint8 [H, W, 3] -> float32 [3, size, size].

    Raises:
        RewardError: it cannot be found, reached or read, or gives another size than the model takes.
    """
    from PIL import Image

    try:
        processor = _image_processor(name).from_pretrained(source, revision=revision)
    except Exception as error:
        raise unreachable(name, option, source, "a preprocessor_config.json", error) from error

    def preprocess(image: np.ndarray) -> np.ndarray:
        return np.asarray(processor(images=Image.fromarray(image), return_tensors="np")["pixel_values"][0], np.float32)

    shape = preprocess(np.zeros((size, 2 * size, 3), np.uint8)).shape
    if shape != (3, size, size):
        raise RewardError(f"reward {name}: option {option}: the preprocessing of {source!r} gives images of {list(shape)}, and "
                          f"the model takes {[3, size, size]}; they do not belong together")
    return preprocess


def _image_processor(name: str) -> Any:
    """Pillow's, also where torchvision is installed: scores must not depend on that."""
    transformers = import_transformers(name)
    try:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    except ImportError:  # before transformers had two backends, this was the one by Pillow
        return transformers.CLIPImageProcessor
    return CLIPImageProcessorPil


def load_tokens(name: str, option: str, source: str, revision: str | None, config: Any) -> Callable[[str], list[int]]:
    """The tokenizer of a text tower: a prompt -> ids, cut and padded to the tower's length.

    Raises:
        RewardError: it cannot be found, reached or read, or has more tokens than the model.
    """
    try:
        tokenizer = import_transformers(name).CLIPTokenizer.from_pretrained(source, revision=revision)
    except Exception as error:
        raise unreachable(name, option, source, "a CLIP tokenizer", error) from error
    if len(tokenizer) <= 3:  # where transformers finds no file it makes up a tokenizer of start, end and padding
        missing = FileNotFoundError("no tokenizer.json, nor vocab.json and merges.txt")
        raise unreachable(name, option, source, "a CLIP tokenizer", missing)
    length, vocabulary = config.text_config.max_position_embeddings, config.text_config.vocab_size
    if len(tokenizer) > vocabulary:
        raise RewardError(f"reward {name}: option {option}: the tokenizer of {source!r} has {len(tokenizer)} tokens, and the "
                          f"model knows {vocabulary}; they do not belong together")

    def tokens(prompt: str) -> list[int]:
        return tokenizer(prompt, padding="max_length", truncation=True, max_length=length)["input_ids"]

    return tokens


def check_texts(name: str, option: str, source: str, clip: Clip) -> None:
    """A tokenizer that knows no letters, or whose end of text is not the model's, makes all prompts alike.

    Raises:
        RewardError: it is so.
    """
    if np.array_equal(clip.text("a"), clip.text("b")):
        raise RewardError(f"reward {name}: option {option}: with the tokenizer of {source!r} every prompt has the same "
                          "embedding; it does not belong to this model")


def local_file(name: str, option: str, value: str, revision: str | None = None) -> Path:
    """A file from an option: a path, or OWNER/REPO/FILE on the hub.

    Raises:
        RewardError: there is no such file, or the hub does not give it.
    """
    path = Path(value).expanduser()
    if path.is_file():
        return path
    parts = value.split("/")
    if len(parts) < 3 or parts[0] in ("", ".", "..", "~"):
        raise RewardError(f"reward {name}: option {option}: there is no file {value!r}; it is a file of this machine, or "
                          "OWNER/REPO/FILE on the hub")
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download("/".join(parts[:2]), "/".join(parts[2:]), revision=revision))
    except Exception as error:
        raise unreachable(name, option, value, "a file or OWNER/REPO/FILE on the hub", error) from error


def load_state_dict(name: str, option: str, path: Path) -> dict[str, Any]:
    """The tensors of a .safetensors file, or of a torch file (read with weights_only), taken out of its "state_dict".

    Raises:
        RewardError: the file is damaged, or holds something else.
    """
    import torch

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RewardError(f"reward {name}: option {option}: {path} cannot be read ({described(error)}); it is a "
                          ".safetensors file, or a torch file of tensors alone") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise RewardError(f"reward {name}: option {option}: {path} holds no state dict, that is, tensors by name")
    return loaded


def refuse_keys(
    name: str, option: str, source: str, missing: Iterable[str], unexpected: Iterable[str], shapes: Iterable[str] = ()
) -> None:
    """Raises RewardError, with the names, where a checkpoint does not have exactly the wanted keys and shapes."""
    found = {"missing": sorted(missing), "unexpected": sorted(unexpected), "of another shape": sorted(shapes)}
    problems = [f"{what} {_names(keys)}" for what, keys in found.items() if keys]
    if problems:
        raise RewardError(f"reward {name}: option {option}: {source!r} is not the model that it should be: "
                          + "; ".join(problems))


def import_transformers(name: str) -> Any:
    """The package; RewardError, with the command that installs it, where it is absent."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise RewardError(f"reward {name} needs torch and transformers: pip install torch transformers ({error})") from error
    return transformers


def unreachable(name: str, option: str, source: str, wanted: str, error: Exception) -> RewardError:
    """The error for something that could not be loaded."""
    where = "" if os.path.exists(source) else "; nothing of that name is on this machine, and the hub does not give it"
    if where and os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        where += " (HF_HUB_OFFLINE is set)"
    return RewardError(f"reward {name}: option {option}: {source!r} cannot be loaded as {wanted}{where} ({described(error)})")


def _names(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more
