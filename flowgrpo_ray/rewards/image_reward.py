"""image_reward: ImageReward (arXiv 2304.05977), a model of which of two images people prefer for a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from flowgrpo_ray.rewards import image_reward_package
from flowgrpo_ray.rewards.base import (
    GroupIds,
    HubSource,
    Metadata,
    Option,
    Reward,
    RewardError,
    Scores,
    SelfTest,
    check_batch,
    red_above_blue,
)
from flowgrpo_ray.rewards.clip_models import (
    CACHED_TEXTS,
    LOCAL_OPTIONS,
    PIXEL_MEAN,
    PIXEL_STD,
    device_and_dtype,
    import_transformers,
    load_state_dict,
    local_file,
    refuse_keys,
    unreachable,
)

SIZE = 224  # pixels that the model takes
TOKENS = 35  # a longer prompt is cut there, as published
WIDTH = 768  # features that the head takes


def preprocess(image: Any) -> np.ndarray:
    """The published preprocessing of a PIL image: the shorter side resized to 224 (bicubic), the centre cut out, scaled to
    [0, 1], normalised; float32 [3, 224, 224]."""
    from PIL import Image

    w, h = image.size
    short, long = SIZE, int(SIZE * max(w, h) / min(w, h))
    w, h = (short, long) if w <= h else (long, short)
    left, top = round((w - SIZE) / 2), round((h - SIZE) / 2)
    image = image.resize((w, h), Image.Resampling.BICUBIC).crop((left, top, left + SIZE, top + SIZE)).convert("RGB")
    pixels = np.asarray(image, np.float32) / np.float32(255)
    normalised = (pixels - np.array(PIXEL_MEAN, np.float32)) / np.array(PIXEL_STD, np.float32)
    return np.ascontiguousarray(normalised.transpose(2, 0, 1))


class ImageReward(Reward):
    """The published score: BLIP's text encoder reads the prompt while it looks at the image, a head of five linear layers
    rates what it saw, and the rating is normalised with the mean and standard deviation that the package carries. Unbounded;
    most scores lie between -2 and 2.

    The model is the package's own; its weights, the configuration of its text encoder and the tokenizer can be local. A
    score has the same bits at any batch size: on the CPU an image is a pass, on a GPU passes are filled up. Needs about
    2 GB for the weights in float32, and as much again while they are loaded.
    """

    name: ClassVar[str] = "image_reward"
    range: tuple[float, float] = (-float("inf"), float("inf"))
    device: ClassVar[Literal["cpu", "any"]] = "any"
    packages: ClassVar[tuple[str, ...]] = ("image-reward", "torch", "transformers", "pillow")
    needs: ClassVar[tuple[str, ...]] = ("prompt",)
    licence: ClassVar[str] = "Apache-2.0 (package and weights), BSD-3-Clause (BLIP)"
    batch_invariant: ClassVar[bool] = True
    description: ClassVar[str] = "What people prefer for a prompt (ImageReward v1.0), normalised; about -2 to 2"
    options: ClassVar[dict[str, Option]] = {
        "weights": Option("THUDM/ImageReward/ImageReward.pt", "A .pt or .safetensors file, or OWNER/REPO/FILE on the hub",
                          path=True),
        "med_config": Option(None, "Configuration of the text encoder: a file, or OWNER/REPO/FILE on the hub; default is "
                             "med_config.json beside the weights", path=True),
        "tokenizer": Option("bert-base-uncased", "Folder or hub name of the tokenizer", path=True, weights=False),
        **LOCAL_OPTIONS,
    }

    @classmethod
    def hub_sources(cls, settings: Mapping[str, Any]) -> list[HubSource]:
        """See `Reward.hub_sources`; the published configuration lies beside the weights."""
        found = super().hub_sources(settings)
        if settings["med_config"] is None and not Path(settings["weights"]).expanduser().is_file():
            found.append(HubSource("med_config", f"{settings['weights'].rpartition('/')[0]}/med_config.json"))
        return found

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        transformers = import_transformers(self.name)
        import torch

        s = self.settings
        weights = local_file(self.name, "weights", s["weights"])
        config = self._med_config(weights)
        tokenizer = self._tokenizer(transformers)
        self._device, dtype = device_and_dtype(s["dtype"])
        model = self._build(config, tokenizer)
        self._load(model, weights)
        model.eval().requires_grad_(False).to(self._device)
        model.blip.to(dtype)  # the head stays in float32: the package calls it so
        self._model, self._dtype = model, dtype
        self._tokens = lru_cache(maxsize=CACHED_TEXTS)(self._tokenized)
        self.per_pass = s["batch_size"] if self._device.type == "cuda" else 1
        if not self._places_agree():
            self.notes += (f"on {torch.cuda.get_device_name(self._device)} a score depends on its place in a batch of "
                           f"{self.per_pass}; images are scored one by one",)
            self.per_pass = 1

    # Loading ----------------------------------------------------------------------------------------------------------

    def _med_config(self, weights: Path) -> Path:
        s = self.settings
        if s["med_config"] is not None:
            path = local_file(self.name, "med_config", s["med_config"])
        elif Path(s["weights"]).expanduser().is_file():
            path = weights.parent / "med_config.json"
            if not path.is_file():
                raise RewardError(f"reward {self.name}: there is no med_config.json beside {weights}; name it with option "
                                  "med_config (the published one is THUDM/ImageReward/med_config.json)")
        else:
            path = local_file(self.name, "med_config", f"{s['weights'].rpartition('/')[0]}/med_config.json")
        try:
            tree = json.loads(path.read_text())
            width = tree["hidden_size"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RewardError(f"reward {self.name}: option med_config: {path} is no configuration of BERT "
                              f"({type(error).__name__}: {error})") from error
        if width != WIDTH:
            raise RewardError(f"reward {self.name}: option med_config: {path} has hidden_size {width}; the published head "
                              f"takes {WIDTH}")
        return path

    def _tokenizer(self, transformers: Any) -> Any:
        source = self.settings["tokenizer"]
        try:
            tokenizer = transformers.BertTokenizer.from_pretrained(source)
            # Of a name that nobody knows transformers 5 makes a tokenizer without a vocabulary.
            if tokenizer("red")["input_ids"] == tokenizer("blue")["input_ids"]:
                raise ValueError("it makes all words alike")
        except Exception as error:
            raise unreachable(self.name, "tokenizer", source, "a BERT tokenizer", error) from error
        # The two that BLIP adds: the vocabulary of its text encoder has room for them.
        tokenizer.add_special_tokens({"bos_token": "[DEC]"})
        tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
        return tokenizer

    def _build(self, med_config: Path, tokenizer: Any) -> Any:
        """The package's model with random weights, in float32 on the CPU."""
        import torch

        module, parts = image_reward_package.load(lambda image: torch.from_numpy(preprocess(image)))
        own, parts.init_tokenizer = parts.init_tokenizer, lambda: tokenizer  # it has the hub's name built in
        try:
            model = module.ImageReward(med_config=str(med_config), device=self._device)
        finally:
            parts.init_tokenizer = own
        words = model.blip.text_encoder.config.vocab_size
        if len(tokenizer) > words:
            raise RewardError(f"reward {self.name}: option tokenizer: {self.settings['tokenizer']!r} has {len(tokenizer)} "
                              f"tokens, and the model of {med_config} knows {words}; they do not belong together")
        return model

    def _load(self, model: Any, path: Path) -> None:
        """The package's own loading is not strict: what is missing would stay random."""
        state, own = load_state_dict(self.name, "weights", path), model.state_dict()
        # Positions 0, 1, 2, … are no weights; some savers leave them out.
        missing = [key for key in own.keys() - state.keys() if not key.endswith("position_ids")]
        shapes = [f"{key} {list(state[key].shape)} instead of {list(own[key].shape)}" for key in own.keys() & state.keys()
                  if state[key].shape != own[key].shape]
        refuse_keys(self.name, "weights", str(path), missing, state.keys() - own.keys(), shapes)
        model.load_state_dict(state, strict=False)

    # Scoring ----------------------------------------------------------------------------------------------------------

    def self_test_case(self) -> SelfTest:
        """A red image is more of a plain red image than a blue one."""
        return red_above_blue()

    def score(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Metadata, *, group_ids: GroupIds = None
    ) -> Scores:
        """See `Reward.score`."""
        from PIL import Image

        n, size = check_batch(images, prompts, metadata), self.per_pass
        scores = np.zeros(n, np.float32)
        for start in range(0, n, size):
            some = [preprocess(Image.fromarray(image)) for image in images[start : start + size]]
            tokens = [self._tokens(prompt) for prompt in prompts[start : start + size]]
            fill = size - len(some)
            rows = self._pass(np.stack(some + [np.zeros_like(some[0])] * fill), tokens + [tokens[0]] * fill)
            scores[start : start + len(some)] = rows[: len(some)]
        return {self.name: scores}

    def _tokenized(self, prompt: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids, attention mask) of a prompt, int64 [35] each."""
        out = self._model.blip.tokenizer(prompt, padding="max_length", truncation=True, max_length=TOKENS)
        return np.asarray(out["input_ids"], np.int64), np.asarray(out["attention_mask"], np.int64)

    def _pass(self, pixels: np.ndarray, tokens: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Scores, float32 [n], of pixels float32 [n, 3, 224, 224] and n tokenized prompts."""
        import torch

        model = self._model
        ids, mask = (torch.tensor(np.stack(part), device=self._device) for part in zip(*tokens, strict=True))
        with torch.inference_mode():
            # torch.tensor copies: memory of numpy's is not aligned as torch's is, and bits could depend on it.
            seen = model.blip.visual_encoder(torch.tensor(pixels).to(self._device, self._dtype))
            read = model.blip.text_encoder(
                ids, attention_mask=mask, encoder_hidden_states=seen, return_dict=True,
                encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self._device))
            ratings = model.mlp(read.last_hidden_state[:, 0].float())[:, 0]
            return ((ratings - model.mean) / model.std).cpu().numpy()

    def _places_agree(self) -> bool:
        """Does an image score the same bits at every place of a pass?"""
        noise = np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), np.float32)
        rows = self._pass(np.repeat(noise, self.per_pass, axis=0), [self._tokens("noise")] * self.per_pass)
        return bool((rows == rows[0]).all())
