"""How many bytes a training step leaves in Ray's object store: what the manifests size it by.

Upper bounds from the configuration alone, without the model's own files: both families have latents of 16 channels and an
eighth of the image's side, and text embeddings of at most 512 tokens of 4,096 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo_ray.config import Config

LATENT_CHANNELS, LATENT_SCALE = 16, 8
TEXT_TOKENS, TEXT_WIDTH, POOLED_WIDTH = 512, 4096, 2048
MIB = 1 << 20
LEAST = 256 * MIB


@dataclass(frozen=True)
class StepBytes:
    """Bytes of all samples of one step: what the learner reads, and the images that the rewards read."""

    trajectories: int  # latents of the window in float32, log-probs, and each group's conditioning once
    images: int  # uint8 [H, W, 3]

    @property
    def total(self) -> int:
        return self.trajectories + self.images


def step_bytes(config: Config) -> StepBytes:
    """The bytes of a step with images of `sampling.height` x `sampling.width` pixels (records may name other sizes)."""
    s, width_bytes = config.sampling, 4 if config.model.dtype == "float32" else 2
    samples = s.groups_per_step * s.group_size
    latent = LATENT_CHANNELS * -(-s.height // LATENT_SCALE) * -(-s.width // LATENT_SCALE) * 4
    window = config.window_size
    tokens = config.model.max_sequence_length or TEXT_TOKENS
    # SD3 puts the 77 tokens of CLIP in front of T5's.
    conditioning = ((tokens + 77) * TEXT_WIDTH + POOLED_WIDTH) * width_bytes
    return StepBytes(samples * ((window + 1) * latent + window * 4) + s.groups_per_step * conditioning,
                     samples * s.height * s.width * 3)


def object_store(size: int, pods: int) -> int:
    """Bytes of object store of each of `pods` that share `size` bytes of a step: twice its part, as what one pod made and
    another fetched is there twice, in units of 256 MiB."""
    return max(LEAST, -(-2 * size // (max(pods, 1) * LEAST)) * LEAST)
