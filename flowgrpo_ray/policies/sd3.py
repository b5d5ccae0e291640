"""Stable Diffusion 3 and 3.5: MMDiT on latents [C, h, w], two CLIP encoders and an optional T5, guidance by CFG."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.policies.base import Conditioning, Policy
from flowgrpo_ray.policies.sigmas import sigma_table
from flowgrpo_ray.policies.source import ModelSource, check_size
from flowgrpo_ray.policies.text import SEQUENCE_LENGTH

T5 = ("text_encoder_3", "tokenizer_3")


class SD3Policy(Policy):
    """StableDiffusion3Pipeline. Conditioning: `prompt_embeds` [m, L, D] and `pooled` [m, P].

    Without T5 the pipeline appends `max_sequence_length` zero tokens in its place.
    """

    family = "sd3"
    pipeline_class = StableDiffusion3Pipeline
    blocks = ("JointTransformerBlock",)
    default_rank = 32
    default_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )
    default_sequence_length = SEQUENCE_LENGTH["sd3"]
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    @classmethod
    def _absent(cls, source: ModelSource, model: ModelConfig, parts: str) -> tuple[str, ...]:
        absent = super()._absent(source, model, parts)
        # diffusers wants an explicit None here even where model_index.json says [null, null].
        without_t5 = parts == "learner" or not model.use_t5 or not all(source.has(name) for name in T5)
        return (*absent, *T5) if without_t5 else absent

    def _encode(self, prompts: list[str]) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts, prompt_2=None, prompt_3=None, device=self.device, do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(channels, height / f, width / f)."""
        config = self.pipeline.transformer.config
        multiple = self.vae_scale_factor * config.patch_size
        check_size(height, width, multiple, largest=config.pos_embed_max_size * multiple)
        return config.in_channels, height // self.vae_scale_factor, width // self.vae_scale_factor

    def sigmas(self, num_steps: int, height: int, width: int) -> np.ndarray:
        _, rows, columns = self.latent_shape(height, width)
        patch = self.pipeline.transformer.config.patch_size
        return sigma_table(self.pipeline.scheduler, num_steps, image_seq_len=(rows // patch) * (columns // patch))

    def velocity(self, x: Tensor, sigma: float, conditioning: Conditioning, guidance: float) -> Tensor:
        """v = u + w (c - u) for w > 1, from one forward over [negative, positive]; v = c otherwise."""
        if not self.uses_cfg(guidance):
            return self._forward(x, sigma, conditioning.positive)
        if conditioning.negative is None:
            raise ValueError(f"guidance {guidance} needs the negative conditioning, and the batch came without it")
        both = {name: torch.cat([conditioning.negative[name], value]) for name, value in conditioning.positive.items()}
        unconditional, conditional = self._forward(torch.cat([x, x]), sigma, both).chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def _forward(self, x: Tensor, sigma: float, tensors: dict[str, Tensor]) -> Tensor:
        return self.modules["transformer"](
            hidden_states=x.to(self.dtype),
            timestep=self.model_time(sigma, x.shape[0]),
            encoder_hidden_states=tensors["prompt_embeds"].to(self.dtype),
            pooled_projections=tensors["pooled"].to(self.dtype),
            return_dict=False,
        )[0].float()
