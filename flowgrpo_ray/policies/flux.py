"""FLUX.1: packed latents [tokens, channels], CLIP and T5 encoders, guidance as an input of the model."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import FluxPipeline
from torch import Tensor

from flowgrpo_ray.policies.base import Conditioning, Policy
from flowgrpo_ray.policies.sigmas import sigma_table
from flowgrpo_ray.policies.source import check_size
from flowgrpo_ray.policies.text import SEQUENCE_LENGTH

PACK = 2  # a token is a 2 x 2 patch of latent cells


class FluxPolicy(Policy):
    """FluxPipeline. Conditioning: `prompt_embeds` [m, L, D] of T5 and `pooled` [m, P] of CLIP.

    Guidance is an input of the distilled transformer (FLUX.1-dev); one without guidance embeddings (schnell) ignores
    it. There is never a CFG pass.
    """

    family = "flux"
    pipeline_class = FluxPipeline
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    default_rank = 64
    default_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
        # The single blocks' feed-forward; proj_out is also their attention's output projection.
        "proj_mlp", "proj_out",
    )
    default_sequence_length = SEQUENCE_LENGTH["flux"]
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    def _encode(self, prompts: list[str]) -> dict[str, Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts, prompt_2=None, device=self.device, max_sequence_length=self.max_sequence_length)
        return {"prompt_embeds": embeds, "pooled": pooled}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(tokens, channels of a packed token)."""
        rows, columns = self._grid(height, width)
        return rows * columns, self.pipeline.transformer.config.in_channels

    def sigmas(self, num_steps: int, height: int, width: int) -> np.ndarray:
        tokens, _ = self.latent_shape(height, width)
        return sigma_table(self.pipeline.scheduler, num_steps, image_seq_len=tokens, sigmas="linear")

    def velocity(self, x: Tensor, sigma: float, conditioning: Conditioning, guidance: float) -> Tensor:
        transformer, tensors = self.modules["transformer"], conditioning.positive
        batch, config = x.shape[0], self.pipeline.transformer.config
        embeds = tensors["prompt_embeds"].to(self.dtype)
        guidance_input = None
        if config.guidance_embeds:
            guidance_input = torch.full((batch,), guidance, dtype=torch.float32, device=self.device)
        return transformer(
            hidden_states=x.to(self.dtype),
            # This transformer multiplies its time input by 1000 itself.
            timestep=self.model_time(sigma, batch) / 1000,
            guidance=guidance_input,
            pooled_projections=tensors["pooled"].to(self.dtype),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, dtype=self.dtype, device=self.device),
            img_ids=self._image_ids(conditioning.height, conditioning.width),
            return_dict=False,
        )[0].float()

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        side = self.vae_scale_factor * PACK
        check_size(height, width, side)
        return height // side, width // side

    def _image_ids(self, height: int, width: int) -> Tensor:
        """Position (0, row, column) of every token: [tokens, 3]."""
        rows, columns = self._grid(height, width)
        ids = torch.zeros(rows, columns, 3, dtype=self.dtype, device=self.device)
        ids[..., 1] += torch.arange(rows, device=self.device)[:, None]
        ids[..., 2] += torch.arange(columns, device=self.device)[None, :]
        return ids.view(rows * columns, 3)

    def _unpack(self, x: Tensor, height: int, width: int) -> Tensor:
        """[m, tokens, 4 C] to [m, C, height / f, width / f]: token (r, c) holds its patch as (channel, row, column)."""
        rows, columns = self._grid(height, width)
        channels = x.shape[-1] // PACK**2
        patches = x.view(x.shape[0], rows, columns, channels, PACK, PACK)
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(x.shape[0], channels, rows * PACK, columns * PACK)
