"""The contract of a policy: a stock diffusers pipeline, taken apart into encode, velocity and decode.

A family fills in what differs (its components, its latent layout, how its transformer is called). Loading, placement
and freezing are the same for all and live here.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flowgrpo_ray import waiting
from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import to_wire
from flowgrpo_ray.errors import ConfigError, DeadlineError
from flowgrpo_ray.policies.source import ModelSource, find, uses_cfg, vae_scale_factor

ATTENTION = "native"  # of diffusers' backends
# One image of 1024 x 1024, four of 512 x 512: about 3 GiB in the VAE of SD3.5 and FLUX.
DECODE_PIXELS = 1 << 20


def decode_batch(height: int, width: int) -> int:
    """Latents that the VAE decodes at a time: as many as make `DECODE_PIXELS`, at least one.

    A function of the image size alone, as bits depend on the shape of a batch.
    """
    return max(1, DECODE_PIXELS // (height * width))


@dataclass
class Conditioning:
    """What a batch of m samples is conditioned on.

    positive, negative: tensors [m, ...] by name, on the policy's device; `negative` None = no CFG pass.
    height, width: image size in pixels.
    """

    positive: dict[str, Tensor]
    negative: dict[str, Tensor] | None
    height: int
    width: int


class Policy(ABC):
    """A flow-matching image model. All weights are frozen and in eval mode; `lora.attach` adds what is trained.

    Attributes:
        modules: the networks that `velocity` runs, by the name that LoRA keys start with.
        pipeline: the stock diffusers pipeline (with parts="learner" its text encoders and VAE are None).
        device, dtype: where the modules are and the dtype of the frozen base.
        vae_scale_factor: pixels per latent cell along each side.
        max_sequence_length: tokens of the T5 sequence.
    """

    family: ClassVar[str]
    pipeline_class: ClassVar[Any]  # of diffusers
    blocks: ClassVar[tuple[str, ...]]  # class names of the repeated blocks: what FSDP wraps, and where LoRA may go
    default_rank: ClassVar[int]
    default_targets: ClassVar[tuple[str, ...]]
    default_sequence_length: ClassVar[int]
    encoders: ClassVar[tuple[str, ...]]  # pipeline components that encode() cannot do without
    optional: ClassVar[tuple[str, ...]] = ("image_encoder", "feature_extractor")  # never loaded

    modules: dict[str, nn.Module]
    device: torch.device
    dtype: torch.dtype
    pipeline: Any

    def __init__(
        self, pipeline: Any, *, device: torch.device, dtype: torch.dtype, vae_scale_factor: int,
        max_sequence_length: int, offload_encoders: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.modules = {"transformer": pipeline.transformer}
        self.device, self.dtype = device, dtype
        self.vae_scale_factor = vae_scale_factor
        self.max_sequence_length = max_sequence_length
        self._offload_hooks: list[Any] = []
        for module in self.modules.values():
            _pin_attention(module)
        self._place(offload_encoders)

    @classmethod
    def load(
        cls, model: ModelConfig, *, device: torch.device | str = "cpu", parts: Literal["all", "learner"] = "all"
    ) -> Policy:
        """Load the pipeline in `model.dtype` (the VAE in float32 where that is float16, whose range it overflows).

        Args:
            model: the `model` section of the configuration.
            device: where the networks go; with `model.offload_encoders` the text encoders stay in CPU memory.
            parts: "learner" loads only what `velocity` needs: no text encoders, no VAE.

        Raises:
            ConfigError: the model cannot be reached or read, or is of another family.
        """
        source = find(model)
        if source.family != cls.family:
            raise ConfigError(f"model.path {model.path!r} is of the family {source.family}, not {cls.family}")
        dtype = getattr(torch, model.dtype)
        vae_dtype = torch.float32 if dtype == torch.float16 else dtype
        _quiet_libraries()
        try:
            pipeline = cls.pipeline_class.from_pretrained(
                source.location, revision=model.revision, variant=model.variant,
                dtype={"default": dtype, "vae": vae_dtype}, low_cpu_mem_usage=True,
                **dict.fromkeys(cls._absent(source, model, parts)),
            )
            vae_config = cls._vae_config(pipeline, source, model)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"model.path {model.path!r} cannot be loaded: {error}") from error
        if pipeline.transformer.dtype != dtype:
            raise ConfigError(f"model.path {model.path!r}: asked for {model.dtype}, and the loader gave "
                              f"{pipeline.transformer.dtype}; diffusers 0.42 or later is needed")
        return cls(
            pipeline, device=torch.device(device), dtype=dtype,
            vae_scale_factor=vae_scale_factor(vae_config),
            max_sequence_length=model.max_sequence_length or cls.default_sequence_length,
            offload_encoders=model.offload_encoders,
        )

    @classmethod
    def fetch(cls, model: ModelConfig) -> None:
        """Bring a model of the hub into its cache, with a deadline; does nothing for a folder.

        Raises:
            ConfigError: as `load`.
            DeadlineError: `run.hub_timeout_s` is over; what was downloaded is kept.
        """
        source = find(model)
        if source.local:
            return
        options = {"revision": model.revision, "variant": model.variant,
                   **dict.fromkeys(cls._absent(source, model, "all"))}
        try:
            waiting.bounded(
                lambda: cls.pipeline_class.download(source.location, **options),
                f"{model.path} from the Hugging Face Hub", waiting.limits.hub,
                setting="run.hub_timeout_s")
        except DeadlineError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"model.path {model.path!r} cannot be loaded: {error}") from error

    @classmethod
    def _absent(cls, source: ModelSource, model: ModelConfig, parts: str) -> tuple[str, ...]:
        """Components that are passed to the loader as None; a missing one that is needed is an error."""
        if parts == "learner":
            return (*cls.encoders, "vae", *cls.optional)
        missing = [name for name in (*cls.encoders, "vae", "transformer", "scheduler") if not source.has(name)]
        if missing:
            raise ConfigError(f"model.path {model.path!r}: the pipeline lacks {', '.join(missing)}")
        return cls.optional

    @staticmethod
    def _vae_config(pipeline: Any, source: ModelSource, model: ModelConfig) -> Any:
        if pipeline.vae is not None:
            return pipeline.vae.config
        from diffusers import AutoencoderKL

        return AutoencoderKL.load_config(source.location, subfolder="vae", revision=model.revision)

    def _place(self, offload_encoders: bool) -> None:
        """Freeze every network and move it to the device, one after the other (moved, not copied)."""
        for name, module in self.pipeline.components.items():
            if not isinstance(module, nn.Module):
                continue
            module.eval().requires_grad_(False)
            if offload_encoders and name.startswith("text_encoder"):
                from accelerate import cpu_offload_with_hook

                _, hook = cpu_offload_with_hook(module, self.device)
                self._offload_hooks.append(hook)
            else:
                module.to(self.device)

    @torch.no_grad()
    def fingerprint(self) -> str:
        """sha256 (hexadecimal) over names, shapes, dtypes and contents of the weights and buffers of `modules`.

        Contents by torch.hash_tensor, which is exact, quick on a GPU, and blind to the order inside a tensor.
        """
        total = hashlib.sha256()
        for name, module in sorted(self.modules.items()):
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                content = torch.hash_tensor(tensor).item()
                total.update(f"{name}.{path} {tuple(tensor.shape)} {tensor.dtype} {content}\n".encode())
        return total.hexdigest()

    @torch.no_grad()
    def encode(self, records: Sequence[PromptRecord]) -> dict[str, np.ndarray]:
        """Encode the prompts of k records, each in a forward of its own, so that its bits do not depend on the others.

        Offloaded encoders go to the device once and back once.

        Only `record.prompt` is read; a negative prompt is encoded as a record of its own.

        Returns:
            arrays [k, ...] in the wire format of `trajectory.to_wire`, in `model.dtype`.
        """
        if any(getattr(self.pipeline, name) is None for name in self.encoders):
            raise RuntimeError("this policy was loaded without its text encoders (parts='learner')")
        try:
            parts = [self._encode([record.prompt]) for record in records]
        finally:
            for hook in self._offload_hooks:
                hook.offload()
        return {name: to_wire(torch.cat([part[name] for part in parts]).to(self.dtype)) for name in parts[0]}

    @abstractmethod
    def _encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Conditioning tensors [k, ...] of k prompts."""

    def uses_cfg(self, guidance: float) -> bool:
        """Whether `velocity` at this guidance needs the negative conditioning."""
        return uses_cfg(self.family, guidance)

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latent, no batch axis, for an image of that many pixels.

        Raises:
            ConfigError: the family cannot make an image of that size; names the nearest that it can.
        """

    @abstractmethod
    def sigmas(self, num_steps: int, height: int, width: int) -> np.ndarray:
        """The stock pipeline's sigma table, float32 [num_steps + 1], from 1 (noise) down to 0 (image)."""

    @abstractmethod
    def velocity(self, x: Tensor, sigma: float, conditioning: Conditioning, guidance: float) -> Tensor:
        """Velocity v = dx/dsigma, guidance included.

        Args:
            x: float32 [m, *latent_shape].
            sigma: the noise level, one number for the batch, an entry of the sigma table.
            conditioning: of the m samples.
            guidance: CFG scale w of v = u + w (c - u), or the guidance input of a distilled model.

        Returns:
            float32 like `x`; gradients flow through every branch.
        """

    def model_time(self, sigma: float, batch: int) -> Tensor:
        """The model's time input, float32 [batch]: sigma times the scheduler's number of training timesteps.

        Sampling and training both take it from here. It stays float32 whatever the dtype of the base: rounded to
        bfloat16 on one side only, the two sides would show the model different times.
        """
        time = torch.full((batch,), sigma, dtype=torch.float32, device=self.device)
        return time * float(self.pipeline.scheduler.config.num_train_timesteps)

    @torch.inference_mode()
    def decode_float(self, x: Tensor, height: int, width: int) -> Tensor:
        """Images of latents x [m, *latent_shape]: float32 [m, 3, H, W] in [0, 1], decoded as the stock does, in one batch."""
        vae = self.pipeline.vae
        if vae is None:
            raise RuntimeError("this policy was loaded without its VAE (parts='learner')")
        latents = self._unpack(x.float(), height, width) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        images = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return (images.float() * 0.5 + 0.5).clamp(0.0, 1.0)

    def decode_parts(
        self, x: Tensor, height: int, width: int, batch: int | None = None
    ) -> Iterator[Tensor]:
        """`decode_float` of `batch` latents at a time (the last of them may be fewer).

        The default is `decode_batch(height, width)`. The bits of an image depend on it.
        """
        for part in x.split(batch or decode_batch(height, width)):
            yield self.decode_float(part, height, width)

    @torch.inference_mode()
    def decode(self, x: Tensor, height: int, width: int, batch: int | None = None) -> np.ndarray:
        """Images of latents x [m, *latent_shape]: uint8 [m, H, W, 3] on the CPU.

        Decoded as `decode_parts` does, and rounded on the device: a quarter of the bytes is copied.
        """
        return np.concatenate([
            (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()
            for images in self.decode_parts(x, height, width, batch)])

    def _unpack(self, x: Tensor, height: int, width: int) -> Tensor:
        """Latents in the VAE's layout [m, C, h, w]."""
        return x


def _pin_attention(module: Any) -> None:
    """Sampler and learner run one attention, torch's own, whatever the environment of each process says to diffusers.

    (torch then picks its kernel by dtype, shape, mask and GPU; the on-policy check measures whether both sides agree.)
    """
    import diffusers

    level = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()  # it warns that the setter is experimental
    try:
        module.set_attention_backend(ATTENTION)
    finally:
        diffusers.utils.logging.set_verbosity(level)


def _quiet_libraries() -> None:
    """No progress bars of the loaders: in an actor they would only clutter its log."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
