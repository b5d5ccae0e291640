"""How much of a prompt each family's text encoders read, found out with their tokenizers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowgrpo_ray import waiting
from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.errors import ConfigError, DeadlineError, counted, described
from flowgrpo_ray.policies.source import LONGEST_SEQUENCE, ModelSource, component_config

SEQUENCE_LENGTH = {"sd3": 256, "flux": 512}  # tokens of T5, unless model.max_sequence_length says otherwise


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder: its name for people and its tokenizer's component.

    sequence: it reads model.max_sequence_length tokens; others read as many as the first tokenizer says.
    optional: model.use_t5 can leave it out.
    """

    name: str
    tokenizer: str
    sequence: bool = False
    optional: bool = False


TEXT_ENCODERS = {
    "sd3": (TextEncoder("CLIP", "tokenizer"), TextEncoder("the second CLIP", "tokenizer_2"),
            TextEncoder("T5", "tokenizer_3", sequence=True, optional=True)),
    "flux": (TextEncoder("CLIP", "tokenizer"), TextEncoder("T5", "tokenizer_2", sequence=True)),
}


@dataclass(frozen=True)
class Seen:
    """What the text encoders read of a prompt.

    ends: by encoder, the number of characters that it reads, None for all of them.
    tokens: by encoder, what it is given; prompts of equal tokens are one prompt to the model. None for a
        prompt so short that no encoder was asked.
    """

    ends: tuple[int | None, ...]
    tokens: tuple[tuple[int, ...], ...] | None = None

    @property
    def end(self) -> int | None:
        """Characters that at least one encoder reads, None for all of them: the model as a whole sees these."""
        known = [end for end in self.ends if end is not None]
        return max(known, default=0) if len(known) == len(self.ends) else None


class PromptReader:
    """Reads prompts as a model's text encoders do. Loads their tokenizers if a prompt is long enough to be cut."""

    def __init__(self, source: ModelSource, model: ModelConfig) -> None:
        self._source, self._model = source, model
        self._tokenizers: dict[str, Any] = {}
        self.encoders = tuple(
            encoder for encoder in TEXT_ENCODERS[source.family]
            if source.has(encoder.tokenizer) and (model.use_t5 or not encoder.optional))

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Tokens that each encoder reads at most, its special tokens included."""
        long = self._model.max_sequence_length or SEQUENCE_LENGTH[self._source.family]
        return tuple(long if encoder.sequence else self._clip_limit for encoder in self.encoders)

    @property
    def longest_sequence(self) -> int | None:
        """What model.max_sequence_length could be raised to so that more is read; None if that is no way."""
        now = [limit for encoder, limit in zip(self.encoders, self.limits, strict=True) if encoder.sequence]
        return LONGEST_SEQUENCE if now and now[0] < LONGEST_SEQUENCE else None

    @cached_property
    def _clip_limit(self) -> int:
        try:
            tree = component_config(self._source, self._model, "tokenizer", "tokenizer_config.json")
        except ConfigError:  # the tokenizer itself says what is wrong, if anything is
            tree = {}
        return int(tree.get("model_max_length") or self._tokenizer("tokenizer").model_max_length)

    def described(self) -> str:
        """The limits, for people: "CLIP reads 77 tokens, T5 256"."""
        parts = [f"{encoder.name} {limit}" for encoder, limit in zip(self.encoders, self.limits, strict=True)]
        return ", ".join([f"{self.encoders[0].name} reads {counted(self.limits[0], 'token')}", *parts[1:]])

    def read(self, prompts: Sequence[str]) -> list[Seen]:
        """What is read of each prompt.

        Raises:
            ConfigError: a tokenizer cannot be loaded.
            DeadlineError: the hub gave none in time.
        """
        out = [Seen((None,) * len(self.encoders))] * len(prompts)
        # A tokenizer gives at most a token per ASCII character, and two special ones beside them: of a
        # shorter prompt at least one encoder reads everything.
        longest = max(self.limits)
        long = [i for i, prompt in enumerate(prompts) if not prompt.isascii() or len(prompt) + 2 >= longest]
        if not long:
            return out
        columns = [self._read_by(encoder.tokenizer, limit, [prompts[i] for i in long])
                   for encoder, limit in zip(self.encoders, self.limits, strict=True)]
        for i, parts in zip(long, zip(*columns, strict=True), strict=True):
            out[i] = Seen(tuple(end for end, _ in parts), tuple(tokens for _, tokens in parts))
        return out

    def _read_by(self, component: str, limit: int, texts: list[str]) -> list[tuple[int | None, tuple[int, ...]]]:
        """(characters read, None for all; tokens) of each text."""
        tokenizer = self._tokenizer(component)
        full = tokenizer(texts, add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
        out: list[tuple[int | None, tuple[int, ...]]] = [(None, tuple(ids)) for ids in full]
        cut = [i for i, ids in enumerate(full) if len(ids) > limit]
        if cut:
            found = tokenizer([texts[i] for i in cut], truncation=True, max_length=limit, return_offsets_mapping=True)
            for i, ids, offsets in zip(cut, found["input_ids"], found["offset_mapping"], strict=True):
                out[i] = (max((end for _, end in offsets), default=0), tuple(ids))
        return out

    def _tokenizer(self, component: str) -> Any:
        if component not in self._tokenizers:
            self._tokenizers[component] = _load(self._source, self._model, component)
        return self._tokenizers[component]


def _load(source: ModelSource, model: ModelConfig, component: str) -> Any:
    """A tokenizer of the class that model_index.json names, as diffusers loads it; raises ConfigError."""
    import transformers

    def from_pretrained() -> Any:
        cls = getattr(transformers, source.index[component][1])
        if source.local:
            return cls.from_pretrained(Path(source.location) / component)
        return cls.from_pretrained(source.location, subfolder=component, revision=model.revision)

    try:
        if source.local:
            return from_pretrained()
        return waiting.bounded(from_pretrained, f"the {component} of {model.path} from the Hugging Face Hub",
                               waiting.limits.hub, setting="run.hub_timeout_s")
    except DeadlineError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"model.path {model.path!r}: its {component} cannot be loaded: {described(error)}") from error
