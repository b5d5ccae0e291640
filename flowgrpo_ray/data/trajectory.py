"""What travels between actors: contiguous NumPy arrays (bf16 as a uint16 view), with ids and versions.

Ray shares NumPy arrays between processes without copying and copies torch tensors, so every array on the wire is NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flowgrpo_ray.data.plan import MicroBatch

if TYPE_CHECKING:
    import torch

Arrays = dict[str, np.ndarray]


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous NumPy array on the CPU; bfloat16 becomes a uint16 view (NumPy has no bfloat16)."""
    import torch  # here, as the driver, which needs the types alone, does without it

    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_wire(array: np.ndarray, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor of its own on `device`: arrays from the object store are read-only views that pin the whole object."""
    import torch

    tensor = torch.from_numpy(np.array(array, copy=True, order="C"))
    if tensor.dtype == torch.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.to(device)


@dataclass(frozen=True)
class SampleRequest:
    """One shard to sample: the plan's work, told to whoever runs it.

    `index[j]` is the row of the conditioning (axis 0 = prompt) of sample j: in training, which group of the shard it is of.
    `noise_keys[j]` = (seed, step, group, sample) of sample j; see `plan.noise_seed`.
    """

    run_id: str
    slot: str  # "policy" or "ema"
    version: int
    noise_keys: tuple[tuple[int, int, int, int], ...]
    stream: str  # "train" or "eval": streams of noise never meet
    index: tuple[int, ...]
    height: int
    width: int
    num_steps: int
    guidance_scale: float
    window: tuple[int, int]  # (start, size); size 0 = ODE throughout
    shared_initial_noise: bool = False
    png: tuple[int, ...] = ()  # positions whose image is wanted as PNG bytes for a grid

    @property
    def size(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Trajectory:
    """The window of one shard: what the learner needs to make the ratio again.

    latents: float32 [w + 1, m, ...]; log_probs: float32 [m, w]; sigmas: float32 [n + 1].
    """

    latents: np.ndarray
    log_probs: np.ndarray
    sigmas: np.ndarray
    window: tuple[int, int]
    request: SampleRequest
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without the shared conditioning."""
        return self.latents.nbytes + self.log_probs.nbytes + self.sigmas.nbytes


@dataclass(frozen=True)
class SampleMeta:
    """The small part of a sampling result, which the driver reads."""

    version: int
    digest: str
    seconds: float  # wall time of the call
    cpu_seconds: float  # CPU time of the call
    trajectory_bytes: int = 0
    peak_memory: int = 0  # accelerator bytes
    pngs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class EncodeMeta:
    """The small part of an encoding result: wall time of the call, and the bytes of each prompt's conditioning."""

    seconds: float
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SyncReply:
    """An actor's answer to a weight refresh: what it reads back from the bound parameters. `previous` is the version
    that the slot held before, and `changed` how many tensors differ from it (both -1 where it held none)."""

    slot: str
    version: int
    previous: int
    digest: str
    bound: int
    changed: int


@dataclass(frozen=True)
class GroupScores:
    """Scores of one complete group: per reward float64 [group_size], and which samples are valid (bool [group_size])."""

    rewards: dict[str, np.ndarray]
    valid: np.ndarray


@dataclass(frozen=True)
class ExportInfo:
    """What the learner says of an exported version: the digests and counts that every sync is proven against."""

    version: int
    digest: str
    ema_digest: str
    tensors: int
    changed: int
    ema_changed: int
    norms: dict[str, float] = field(default_factory=dict)  # metrics of the adapter


__all__ = ["Arrays", "EncodeMeta", "ExportInfo", "GroupScores", "SampleMeta", "SampleRequest", "MicroBatch", "SyncReply",
           "Trajectory", "from_wire", "to_wire"]
