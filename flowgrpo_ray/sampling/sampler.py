"""The sampler: encodes prompts and samples shards without gradients under a named version of the adapter."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import noise_seed
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import Arrays, SampleMeta, SampleRequest, Trajectory, from_wire, to_wire
from flowgrpo_ray.device import Stopwatch, peak_memory_bytes
from flowgrpo_ray.policies.base import Conditioning, Policy
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.sampling.kernels import Kernel, Transition, get_kernel
from flowgrpo_ray.sampling.noise import draw

ODE = get_kernel("ode", noise_level=0.0)


def kernel_of(config: Config) -> Kernel:
    """The transition kernel that the configuration names; sampler and learner build it from the same fields."""
    s = config.sampling
    return get_kernel(s.kernel, noise_level=s.noise_level, log_prob=s.log_prob)


def build_conditioning(
    policy: Policy, request: SampleRequest, negative: Arrays | None, conditionings: Sequence[Arrays]
) -> Conditioning:
    """Rows of the encoded prompts, gathered to the shard's batch; sampler and learner both call this.

    `conditionings` hold [k_i, ...] arrays that are concatenated along axis 0; `request.index` picks the rows.
    """
    index = torch.tensor(request.index)

    def gather(parts: Sequence[Arrays], rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {key: torch.cat([from_wire(part[key]) for part in parts])[rows].to(policy.device) for key in parts[0]}

    positive = gather(conditionings, index)
    if not policy.uses_cfg(request.guidance_scale):
        return Conditioning(positive, None, request.height, request.width)
    if negative is None:
        raise ValueError("classifier-free guidance needs the encoded negative prompt, and the request came without it")
    return Conditioning(positive, gather([negative], torch.zeros_like(index)), request.height, request.width)


def transition_at(
    policy: Policy, kernel: Kernel, x: torch.Tensor, sigmas: torch.Tensor, index: int, conditioning: Conditioning,
    guidance: float,
) -> tuple[torch.Tensor, Transition]:
    """Velocity and transition at one step. The one function behind sampling (draws x'), training (is given x') and
    evaluation (noise 0): equal inputs give equal bits, so the on-policy ratio is exactly 1 on CPU."""
    velocity = policy.velocity(x, float(sigmas[index]), conditioning, guidance)
    return velocity, kernel.transition(x, velocity, sigmas, index)


def step_noise(request: SampleRequest, step_index: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Noise of every sample of a shard at a denoising step (-1: the initial latent), float32 [m, *shape] on the CPU."""
    shared = request.shared_initial_noise and step_index == -1
    return draw(
        [noise_seed(seed, step, group, -1 if shared else sample, request.stream, step_index)
         for seed, step, group, sample in request.noise_keys],
        shape,
    )


class Sampler:
    """Samples shards with a policy; holds the adapter slots that a request may name."""

    def __init__(self, policy: Policy, config: Config, slots: AdapterSlots | None = None) -> None:
        self.policy = policy
        self._decode_batch = config.sampling.decode_batch
        self.kernel = kernel_of(config)
        self.slots = slots or AdapterSlots(policy)

    def encode(self, record: PromptRecord) -> Arrays:
        """Conditioning of one prompt, axis 0 = prompt, length 1."""
        return self.encode_all([record])[0]

    def encode_all(self, records: Sequence[PromptRecord]) -> list[Arrays]:
        """Conditioning of each prompt as `encode` gives it, with one move of offloaded encoders for all."""
        arrays = self.policy.encode(records)
        return [{name: array[row : row + 1] for name, array in arrays.items()} for row in range(len(records))]

    def decode(self, x: torch.Tensor, height: int, width: int) -> np.ndarray:
        """Images of latents x [m, *latent_shape] as a run makes them: uint8 [m, H, W, 3]."""
        return self.policy.decode(x, height, width, self._decode_batch)

    @torch.no_grad()
    def sample(
        self, request: SampleRequest, negative: Arrays | None, *conditionings: Arrays
    ) -> tuple[SampleMeta, np.ndarray, Trajectory]:
        """Sample one shard.

        Returns its metadata, the images uint8 [m, H, W, 3], and the trajectory of the window.

        Raises:
            SyncError: the actor does not hold the version that the request names.
        """
        with Stopwatch(self.policy.device) as watch:
            digest = self.slots.bind(request.slot, request.version)
            x, trajectory = self.denoise(request, digest, negative, *conditionings)
            images = self.decode(x, request.height, request.width)
        pngs = tuple(encode_png(images[i]) for i in request.png)
        meta = SampleMeta(request.version, digest, watch.seconds, watch.cpu_seconds, trajectory.nbytes,
                          peak_memory_bytes(self.policy.device), pngs)
        return meta, images, trajectory

    @torch.inference_mode()
    def denoise(
        self, request: SampleRequest, digest: str, negative: Arrays | None, *conditionings: Arrays
    ) -> tuple[torch.Tensor, Trajectory]:
        """From noise to the final latent [m, ...], keeping the window's latents and log-probs."""
        policy, guidance = self.policy, request.guidance_scale
        shape = policy.latent_shape(request.height, request.width)
        table = policy.sigmas(request.num_steps, request.height, request.width)
        sigmas = torch.from_numpy(table)
        conditioning = build_conditioning(policy, request, negative, conditionings)
        start, size = request.window
        x = step_noise(request, -1, shape).to(policy.device)
        latents, log_probs = [x] if size and start == 0 else [], []
        for index in range(request.num_steps):
            inside = start <= index < start + size
            kernel = self.kernel if inside else ODE
            _, transition = transition_at(policy, kernel, x, sigmas, index, conditioning, guidance)
            if inside:
                x = transition.sample(step_noise(request, index, shape).to(policy.device))
                log_probs.append(transition.log_prob(x))
            else:
                x = transition.mean
            if size and start <= index + 1 <= start + size:
                latents.append(x)
        empty = torch.zeros(0, request.size)
        trajectory = Trajectory(
            latents=to_wire(torch.stack(latents)) if latents else to_wire(empty),
            log_probs=to_wire(torch.stack(log_probs, dim=1)) if log_probs else to_wire(empty.T),
            sigmas=table, window=request.window, request=request, digest=digest,
        )
        return x, trajectory


def encode_png(image: np.ndarray) -> bytes:
    """PNG bytes of a uint8 [H, W, 3] image."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, format="PNG")
    return out.getvalue()
